"""A run as a job of Hydra: a callback that chooses its folder, and the job.

A job checks its settings, opens a session in its folder, and calls the trainer or the evaluation.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from esper_soa.config.compose import job_settings
from esper_soa.config.settings import EvaluateConfig, evaluation_from
from esper_soa.system.console import exit_with
from esper_soa.system.errors import UserError
from esper_soa.system.files import write_text
from esper_soa.system.plain_files import make_folder
from esper_soa.system.signals import torch_import_guard
from esper_soa.training.files.run_folder import (
    RunFolder,
    find_checkpoint,
    open_run_folder,
    write_config,
)
from esper_soa.training.files.session import Session, quiet_warnings, session
from esper_soa.training.start.begin import (
    begin_run,
    launched_rank,
    make_run_folder,
    requested_folder,
)

if TYPE_CHECKING:
    from esper_soa.training.loop.callbacks import Callback as TrainCallback


class RunCallback(Callback):
    """Chooses the folder of a single run.

    A run goes to hydra.run.dir, which is run_dir unless set otherwise; where neither is set, to a
    folder named by the run and the time. A resumed run stays in the folder of its checkpoint.
    """

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Set hydra.run.dir to the folder of the run, which is made."""
        HydraConfig.instance().set_config(config)
        composed = copy.deepcopy(config)
        with open_dict(composed):
            del composed["hydra"]
        try:  # settings are checked before a folder is made
            requested = requested_folder(config, "hydra.run.dir")
            if OmegaConf.get_type(config) is EvaluateConfig:
                evaluation = evaluation_from(composed)
                find_checkpoint(evaluation.checkpoint, "checkpoint")
                folder = open_run_folder(requested, evaluation.name)
            else:
                folder = make_run_folder(job_settings(composed), requested)
        except UserError as error:  # Hydra drops exceptions of callbacks
            exit_with(error)
        with read_write(config.hydra):
            config.hydra.run.dir = str(folder.path)
            config.hydra.job.chdir = False  # paths count from where the command was given


@quiet_warnings()
def run_job(composed: DictConfig, callbacks: Sequence["TrainCallback"]) -> float | None:
    """Train or evaluate in the folder of the job that Hydra has begun.

    callbacks: of a training. Returns its final validation accuracy (percent). Raises KNOWN_ERRORS.
    """
    folder = job_folder()
    overrides = list(HydraConfig.get().overrides.task)
    if OmegaConf.get_type(composed) is EvaluateConfig:
        evaluation = evaluation_from(composed)
        with session(folder) as opened:
            open_run_folder(str(folder.path), evaluation.name)
            with opened.write_errors.attempt("config.yaml"):
                write_config(folder, OmegaConf.to_yaml(composed, resolve=True), overrides)
            _keep_hydra_records(opened, composed, overrides)
            with torch_import_guard():
                from esper_soa.training.loop.evaluation import evaluate_in_session
            evaluate_in_session(opened, evaluation)
        return None
    settings = job_settings(composed)
    launched = launched_rank()
    if launched is not None and launched.rank > 0:
        with torch_import_guard():
            from esper_soa.training.start.launch import run_silent_rank
        return run_silent_rank(settings, launched)
    with session(folder) as opened:
        checkpoint = begin_run(opened, settings, overrides)
        if checkpoint is None:
            _keep_hydra_records(opened, composed, overrides)
        with torch_import_guard():
            from esper_soa.training.start.launch import train_in_session
        return train_in_session(opened, settings, checkpoint, callbacks=callbacks)


def job_folder() -> RunFolder:
    """The folder of the job that Hydra has begun. In a sweep's, no link leads to it."""
    hydra = HydraConfig.get()
    place = Path(hydra.runtime.output_dir)
    sweep = Path(hydra.sweep.dir)
    if place.is_relative_to(sweep):
        return RunFolder(sweep.resolve() / place.relative_to(sweep))
    return RunFolder(place.resolve())


def _keep_hydra_records(session: Session, composed: DictConfig, overrides: Sequence[str]) -> None:
    """Write the records that Hydra would have written before the folder is claimed."""
    folder = session.folder.hydra
    records = {
        "config.yaml": composed,
        "hydra.yaml": OmegaConf.create({"hydra": HydraConfig.get()}),
        "overrides.yaml": OmegaConf.create(list(overrides)),
    }
    with session.write_errors.attempt(folder.name):
        make_folder(folder)
        for name, record in records.items():
            write_text(folder / name, OmegaConf.to_yaml(record))
