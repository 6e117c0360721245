"""The launcher of hydra-joblib-launcher, whose jobs end with the sweep and lose no other.

Without that package there is none; lab/sweep/plugins.py of esper_soa says so before Hydra looks for
it.
"""

from collections.abc import Sequence
from importlib.util import find_spec

if find_spec("hydra_plugins.hydra_joblib_launcher") is not None:
    from hydra.core.utils import JobReturn
    from hydra_plugins.hydra_joblib_launcher.joblib_launcher import JoblibLauncher

    class JoblibJobs(JoblibLauncher):
        """Plays n_jobs jobs at a time, each in a process that this one has started."""

        def launch(
            self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
        ) -> Sequence[JobReturn]:
            """Play the jobs."""
            from esper_soa.lab.sweep.side_by_side import launch

            return launch(self, job_overrides, initial_job_idx)
