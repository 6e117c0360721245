"""What Hydra calls: where a run or sweep goes, and what a job of it does; and what `--plan` asks.

A job checks its settings, opens a session in its folder, which is Hydra's, and hands over to the
trainer or the evaluation; of a sweep it has a process of its own (lab/sweep/jobs.py).
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.console import Console

from esper_soa.config.compose import compose_settings
from esper_soa.config.errors import OutOfRoomError, RankLostError, UserError, check
from esper_soa.config.paths import user_path
from esper_soa.config.settings import (
    EvaluateConfig,
    TrainConfig,
    evaluation_from,
    settings_from,
    settings_yaml,
)
from esper_soa.lab.sweep.jobs import DONE, PRUNED, JobRecord, Work, play_job, this_job
from esper_soa.lab.sweep.plugins import (
    check_slurm,
    in_sweep,
    is_search,
    refused,
    take_our_launchers,
)
from esper_soa.runtime.files import IncompleteError, write_text
from esper_soa.runtime.signals import importing
from esper_soa.training.run_folder import (
    RunFolder,
    find_checkpoint,
    open_run_folder,
    open_sweep_folder,
    write_config,
)
from esper_soa.training.session import Session, quiet_warnings, session
from esper_soa.training.start import find_start, finished_accuracy, folder_for, goes_on_in, place

HYDRA_FOLDER = ".hydra"  # what Hydra keeps of a job, under the names that its tools expect


class Folders(Callback):
    """Decides, before Hydra makes any folder, where a run goes; ends the program for nowhere, as
    Hydra drops exceptions.

    A run goes to hydra.run.dir, which is run_dir unless set otherwise, a sweep to hydra.sweep.dir
    likewise; where neither is set, to a folder of its name and the time. A run that goes on stays
    in the folder of its checkpoint.
    """

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Set hydra.run.dir to the folder of the run, which is made."""
        HydraConfig.instance().set_config(config)
        with refused(), read_write(config.hydra):
            config.hydra.run.dir = str(_run_folder(config))

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Set hydra.sweep.dir, for the sweep and its jobs' configurations, to a new folder."""
        HydraConfig.instance().set_config(config)
        with refused():
            folder = str(_sweep_folder(config))
        with read_write(config.hydra):
            config.hydra.sweep.dir = folder
            take_our_launchers(config.hydra)
            config.hydra.overrides.hydra.append(
                f"hydra.sweep.dir={QuotedString(folder, Quote.single).with_quotes()}"
            )
        HydraConfig.instance().set_config(config)  # for the end of the sweep


def look(flag: str, overrides: list[str]) -> None:
    """Print what a flag asks of a run with these overrides."""
    settings = compose_settings(overrides=overrides)
    with loading():
        from esper_soa.lab.check_device import check_device
        from esper_soa.lab.plan.plan import show_plan

    if flag == "--check-device":
        check_device(settings, Console())
    else:
        show_plan(settings, Console(), as_json=flag == "--plan=json")


@contextmanager
def loading() -> Iterator[None]:
    """Import torch in the context, and what needs it; UserError where there is no room for that."""
    try:
        with importing():
            yield
    except OSError as error:
        raise UserError(
            f"torch cannot be loaded ({error}). TMPDIR=<folder> names one for its files"
        ) from error


def run_job(composed: DictConfig) -> float | None:
    """Run one job, of a sweep or by itself; returns what sweepers maximise."""
    work = WORK[OmegaConf.get_type(composed)]
    if in_sweep():
        return play_job(work, composed)
    try:
        with quiet_warnings():
            return work.play(composed)
    except (UserError, IncompleteError, OutOfRoomError, RankLostError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


def play_training(composed: DictConfig) -> float:
    """Train in the folder that Hydra has made; returns the final validation accuracy (percent)."""
    settings = settings_from(composed)
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir))
    here = place()
    if here is not None and not here.first:
        with loading():
            from esper_soa.training.launch import play_beside
        return play_beside(settings, here)
    with session(folder) as within:
        start = find_start(settings, folder)
        # else the trainer writes it, once the checkpoint is found to fit
        if start.checkpoint is None:
            keep_settings(within, settings_yaml(settings), composed)
        with loading():
            from esper_soa.training.launch import train_within
        if in_sweep() and is_search(HydraConfig.get()) and settings.ranks == 1:
            from esper_soa.lab.sweep.search import judge_of

            within.hopeless = judge_of(HydraConfig.get(), settings.rounds)
        return train_within(within, settings, start.checkpoint)


def settled_training(composed: DictConfig, before: JobRecord | None) -> JobRecord | None:
    """The record of a sweep's job that an earlier call has ended; None for one to be played.

    before: what that call noted. Raises UserError for what a job of a sweep cannot have.
    """
    settings = settings_from(composed)
    job = this_job()
    check_job(settings)
    folder = RunFolder(Path(job.folder))
    accuracy = finished_accuracy(folder, settings)
    if accuracy is not None:
        print(f"job {job.number} is done already: {folder.path}")
        return job.ended(DONE, accuracy)
    if before is not None and before.status == PRUNED and goes_on_in(folder, settings):
        print(f"job {job.number} was {before.message}: {folder.path}")
        return before
    return None


def settled_evaluation(composed: DictConfig, before: JobRecord | None) -> JobRecord | None:
    """None: every evaluation is played. Raises UserError for settings that cannot be."""
    evaluation_from(composed)
    return None


def play_evaluation(composed: DictConfig) -> None:
    """Evaluate in the folder that Hydra has made for the job."""
    settings = evaluation_from(composed)
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir))
    with session(folder) as within:
        open_run_folder(str(folder.path), settings.name)
        keep_settings(within, OmegaConf.to_yaml(composed, resolve=True), composed)
        with loading():
            from esper_soa.training.evaluation import evaluate_within

        evaluate_within(within, settings)


def keep_settings(within: Session, resolved_yaml: str, composed: DictConfig) -> None:
    """Write config.yaml, overrides.txt, and the records Hydra would have written too early."""
    context = HydraConfig.get()
    folder = within.folder.path / HYDRA_FOLDER
    records = {
        "config.yaml": OmegaConf.to_yaml(composed),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": context})),
        "overrides.yaml": OmegaConf.to_yaml(context.overrides.task),
    }
    with within.unwritten.attempt("config.yaml"):
        write_config(within.folder, resolved_yaml, list(context.overrides.task))
    with within.unwritten.attempt(HYDRA_FOLDER):
        folder.mkdir(exist_ok=True)
        for name, text in records.items():
            write_text(folder / name, text)


def check_job(settings: TrainConfig) -> None:
    """Raise UserError for what a job of a sweep cannot have."""
    sweep = Path(HydraConfig.get().sweep.dir)
    _check_sweep(settings.resume)
    if settings.run_dir and user_path("run_dir", settings.run_dir).resolve() != sweep.resolve():
        raise UserError(
            f"run_dir={settings.run_dir}: the folders of this sweep are in {sweep}. Give run_dir "
            "one value, or set hydra.sweep.dir and hydra.sweep.subdir"
        )
    if is_search(HydraConfig.get()) and settings.ranks > 1:
        pruner = HydraConfig.get().sweeper["pruner"]
        remedy = "The processes of a run cannot be ended by what one of them is told."
        allowed = f"none with ranks={settings.ranks}"
        check(pruner == "none", "hydra.sweeper.pruner", pruner, allowed, remedy)


def _check_sweep(resume: str) -> None:
    """Raise UserError for ranks of torchrun, and a checkpoint that all jobs would go on from."""
    if place() is not None:
        raise UserError(
            "a sweep cannot be started by torchrun, each process of which would start it. Give "
            "ranks=K"
        )
    if resume not in ("", "auto"):
        raise UserError(
            f"resume={resume}: the jobs of a sweep cannot share a checkpoint; take resume=auto"
        )


def _run_folder(config: DictConfig) -> Path:
    """The folder of a run with these settings, which are checked first."""
    composed = copy.deepcopy(config)
    with open_dict(composed):
        del composed["hydra"]
    asked = _asked_folder(config, "hydra.run.dir")
    if OmegaConf.get_type(config) is EvaluateConfig:
        evaluation = evaluation_from(composed)
        # refuses what leads nowhere before a folder is made
        find_checkpoint(evaluation.checkpoint, "checkpoint")
        return open_run_folder(asked, evaluation.name).path
    return folder_for(settings_from(composed), asked).path


def _sweep_folder(config: DictConfig) -> Path:
    """The folder of a sweep; with resume=auto that of the newest sweep of the name."""
    resume = "" if OmegaConf.get_type(config) is EvaluateConfig else config.resume
    _check_sweep(resume)
    asked = _asked_folder(config, "hydra.sweep.dir")
    check_slurm(config.hydra, bool(asked), resume)
    return open_sweep_folder(asked, config.name, resume == "auto")


def _asked_folder(config: DictConfig, key: str) -> str:
    """The folder that run_dir asks for, or Hydra's `key` where that is set; empty for neither."""
    asked = str(OmegaConf.select(config, key))
    if config.run_dir and asked != config.run_dir:
        raise UserError(
            f"run_dir={config.run_dir}, {key}={asked}: both name the folder. Give one of them"
        )
    return asked


WORK: dict[type | None, Work] = {
    TrainConfig: Work(settled_training, play_training),
    EvaluateConfig: Work(settled_evaluation, play_evaluation),
}
