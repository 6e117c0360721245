"""Submitit's launchers of hydra-submitit-launcher, which lose no job to another: all are waited
for, however each ends.

Without that package there are none; lab/sweep/plugins.py of esper_soa says so before Hydra looks
for them.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("hydra_plugins.hydra_submitit_launcher") is not None:
    from hydra.core.utils import JobReturn
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import LocalLauncher, SlurmLauncher

    class LocalJobs(LocalLauncher):
        """Every job is a process on this machine, which ends with the sweep; all start at once."""

        process = 0  # of the sweep

        def launch(
            self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
        ) -> Sequence[JobReturn]:
            """Play the jobs."""
            from esper_soa.lab.sweep.submitit import launch

            self.process = os.getpid()
            return launch(self, job_overrides, initial_job_idx)

        def __call__(self, *job: object) -> JobReturn:
            """Play a job in its process."""
            from esper_soa.lab.sweep.submitit import stop_with

            stop_with(self.process)
            return super().__call__(*job)

    class SlurmJobs(SlurmLauncher):
        """Every job is one of an array that is given to Slurm."""

        launch = LocalJobs.launch
