"""How sweeps enter Hydra: a callback, which configs/train.yaml and evaluate.yaml name, puts
JobSweeper around the sweeper that is chosen. What a sweep does is in esper_soa/lab/sweep.
"""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, read_write

from esper_soa.system.console import exit_with
from esper_soa.system.errors import UserError
from esper_soa.system.signals import import_guard

with suppress(ModuleNotFoundError):  # esper_soa.lab.sweep may not be installed
    from esper_soa.lab.sweep.resolvers import register_resolvers

    register_resolvers()  # single runs may use them, too


class SweepCallback(Callback):
    """Prepares a sweep before Hydra makes any folder; ends the program where it cannot be, as Hydra
    drops exceptions of callbacks.
    """

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Set hydra.sweep.dir, for the sweep and its jobs' configurations, and hydra.sweeper.

        A sweep goes to hydra.sweep.dir, which is run_dir unless set otherwise; where neither is
        set, to a folder of its name and the time.
        """
        HydraConfig.instance().set_config(config)
        try:
            from esper_soa.lab.sweep.plugins import LAUNCHERS, sweep_folder

            folder = str(sweep_folder(config))
        except ModuleNotFoundError as error:
            exit_with(UserError(f"a sweep needs {error.name}, which is not installed"))
        except UserError as error:
            exit_with(error)
        quoted = QuotedString(folder, Quote.single).with_quotes()
        with read_write(config.hydra):
            config.hydra.sweep.dir = folder
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={quoted}")
            # paths of jobs count from where the command was given
            config.hydra.overrides.hydra.append("hydra.job.chdir=false")
            # those that end with the first job that is lost, however they were asked for
            launcher = config.hydra.launcher["_target_"]
            config.hydra.launcher["_target_"] = LAUNCHERS.get(launcher, launcher)
            around = {"_target_": f"{__name__}.JobSweeper", "_recursive_": False}
            config.hydra.sweeper = around | {"sweeper": config.hydra.sweeper}
        HydraConfig.instance().set_config(config)


class JobSweeper(Sweeper):
    """Another sweeper whose jobs leave records, with a table of all of them at the end."""

    def __init__(self, sweeper: DictConfig) -> None:
        """sweeper: the settings of the other one; `setup` takes them from the configuration."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Set up the other sweeper, with a task that keeps records."""
        from esper_soa.lab.sweep.jobs import run_job

        with read_write(config.hydra):
            config.hydra.sweeper = config.hydra.sweeper.sweeper
        self.hydra = config.hydra
        self.sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=hydra_context,
            task_function=partial(run_job, task_function),
            config=config,
        )

    def sweep(self, arguments: list[str]) -> object:
        """Run the jobs, then print their table, also where the sweep is interrupted.

        Ends the interpreter with status 1 where a job did not come to its end, with 2 for a
        mistake of the user's.
        """
        with import_guard():
            from esper_soa.lab.sweep.summary import Console, end_sweep
            from esper_soa.training.files.claims import Claim
        folder = Path(self.hydra.sweep.dir).resolve()
        try:
            self.claim = Claim(folder)  # until this process ends
        except BlockingIOError:
            exit_with(UserError(f"run_dir={folder}: another process is playing this sweep"))
        except UserError as error:
            exit_with(error)
        try:
            found = self.sweeper.sweep(arguments)
        except UserError as error:
            exit_with(error)
        except BaseException:
            end_sweep(self.hydra, Console())
            raise
        if not end_sweep(self.hydra, Console()):
            sys.exit(1)
        return found
