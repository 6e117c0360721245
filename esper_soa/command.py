"""The command lines behind esper-train and esper-evaluate: what Hydra calls before a run or sweep, and for each job.

A job composes and checks the settings, opens a session in its folder, which is Hydra's, and hands over to the trainer
or to the evaluation. Exit status: 0 done, 1 a failure while running or a mistake that Hydra found, 2 a mistake that we
found, 130 interrupted, 143 terminated; of a sweep 1 where any job failed.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import CompactHydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from rich.console import Console

from esper_soa.arguments import groups_in, prepared, version_line
from esper_soa.compose import compose_settings
from esper_soa.config import (
    EvaluateConfig,
    TrainConfig,
    evaluation_from,
    register_schema,
    settings_from,
    settings_yaml,
)
from esper_soa.errors import OutOfRoomError, UserError
from esper_soa.ops.files import IncompleteError, write_text
from esper_soa.ops.interrupt import Interrupted, importing
from esper_soa.ops.rundir import RunFolder, find_checkpoint, open_run_folder, open_sweep_folder, write_config
from esper_soa.ops.session import Session, session, unheard
from esper_soa.ops.start import find_start, finished_accuracy, folder_for
from esper_soa.paths import user_path

CHECK_DEVICE, PLAN, PLAN_JSON = LOOKS = ("--check-device", "--plan", "--plan=json")  # that train nothing
HYDRA_FOLDER = ".hydra"  # what Hydra keeps of a job, under the names that its tools expect

register_schema()


class JobFailedError(CompactHydraException):
    """A job of a sweep failed with a message of ours: sweepers may go on, and Hydra shows no traceback."""


class Command:
    """What Hydra calls for each job, and the jobs of a sweep that failed in this process."""

    def __init__(self, play: Callable[[DictConfig], float | None], settings: type) -> None:
        """settings: the dataclass of a job's settings."""
        self.play, self.settings = play, settings
        self.failed: list[str] = []

    def job(self, composed: DictConfig) -> float | None:
        """Run one job; returns what sweepers maximise."""
        done = False
        try:
            with unheard():
                value = self.play(composed)
            done = True
        except (UserError, IncompleteError, OutOfRoomError) as error:
            print(f"error: {error}", file=sys.stderr)
            if not in_sweep():
                sys.exit(2 if isinstance(error, UserError) else 1)
            raise JobFailedError(str(error)) from None
        finally:
            if not done and in_sweep():
                self.failed.append(f"{_job_words()}: {_failure_words(sys.exception())}")
        return value

    def run(self, folder: str, name: str) -> None:
        """Run the command line with the configuration `name` in `folder`; a sweep ends with the jobs that failed."""
        if "--version" in sys.argv[1:]:
            print(version_line())
            return
        try:
            looks = [one for one in sys.argv[1:] if one in LOOKS and self.settings is TrainConfig]
            if looks:
                look(looks[0], [one for one in sys.argv[1:] if one not in LOOKS])
                return
            sys.argv[1:] = prepared(sys.argv[1:], self.settings, groups_in(folder))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        try:
            hydra.main(version_base="1.3", config_path=folder, config_name=name)(self.job)()
        finally:
            if self.failed:
                print("failed jobs:", *self.failed, sep="\n  ", file=sys.stderr)


class Folders(Callback):
    """Decides, before Hydra makes any folder, where a run or sweep goes; ends the program where it can go nowhere.

    A run goes to hydra.run.dir, which is run_dir unless set otherwise, a sweep to hydra.sweep.dir likewise; where
    neither is set, to a folder of its name and the time. A run that goes on stays in the folder of its checkpoint.
    """

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        """Set hydra.run.dir to the folder of the run, which is made."""
        folder = str(_or_exit(_run_folder, config))
        with read_write(config.hydra):
            config.hydra.run.dir = folder

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        """Set hydra.sweep.dir, for the sweep and for the configurations of its jobs, to a folder, which is made."""
        folder = str(_or_exit(_sweep_folder, config))
        with read_write(config.hydra):
            config.hydra.sweep.dir = folder
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir={QuotedString(folder, Quote.single).with_quotes()}")


def look(flag: str, overrides: list[str]) -> None:
    """Print what the flag, one of LOOKS, asks for about a run with these overrides: its engines, or its plan."""
    settings = compose_settings(overrides=overrides)
    with loading():
        from esper_soa.check_device import check_device
        from esper_soa.plan import show_plan

    if flag == CHECK_DEVICE:
        check_device(settings, Console())
    else:
        show_plan(settings, Console(), as_json=flag == PLAN_JSON)


def play_training(composed: DictConfig) -> float:
    """Train in the folder that Hydra has made for the job; returns the final validation accuracy (percent)."""
    settings = settings_from(composed)
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir))
    if in_sweep():
        check_job(settings)
        accuracy = finished_accuracy(folder, settings)
        if accuracy is not None:
            print(f"job {HydraConfig.get().job.num} is done already: {folder.path}")
            return accuracy
    with session(folder) as within:
        start = find_start(settings, folder)
        if start.checkpoint is None:  # else the trainer writes it, once the checkpoint is found to fit
            keep_settings(within, settings_yaml(settings), composed)
        # torch takes seconds to import: nothing before this line may need it, so that --help and --cfg stay quick.
        with loading():
            from esper_soa.trainer import run_within

        return run_within(within, settings, start.checkpoint).accuracy


def play_evaluation(composed: DictConfig) -> None:
    """Evaluate in the folder that Hydra has made for the job."""
    settings = evaluation_from(composed)
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir))
    with session(folder) as within:
        open_run_folder(str(folder.path), settings.name)
        keep_settings(within, OmegaConf.to_yaml(composed, resolve=True), composed)
        with loading():
            from esper_soa.evaluation import evaluate_within

        evaluate_within(within, settings)


@contextmanager
def loading() -> Iterator[None]:
    """Import torch in the context, and what needs it; raises UserError where the machine has no room for that."""
    try:
        with importing():
            yield
    except OSError as error:
        raise UserError(f"torch cannot be loaded ({error}). TMPDIR=<folder> names one for its files") from error


def keep_settings(within: Session, resolved_yaml: str, composed: DictConfig) -> None:
    """Write config.yaml and overrides.txt, and the records that Hydra would have written before the folder was ours."""
    context = HydraConfig.get()
    folder = within.folder.path / HYDRA_FOLDER
    records = {
        "config.yaml": OmegaConf.to_yaml(composed),
        "hydra.yaml": OmegaConf.to_yaml(OmegaConf.create({"hydra": context})),
        "overrides.yaml": OmegaConf.to_yaml(context.overrides.task),
    }
    with within.unwritten.noting("config.yaml"):
        write_config(within.folder, resolved_yaml, list(context.overrides.task))
    with within.unwritten.noting(HYDRA_FOLDER):
        folder.mkdir(exist_ok=True)
        for name, text in records.items():
            write_text(folder / name, text)


def check_job(settings: TrainConfig) -> None:
    """Raise UserError for what a job of a sweep cannot have."""
    sweep = Path(HydraConfig.get().sweep.dir)
    if settings.resume not in ("", "auto"):
        raise UserError(f"resume={settings.resume}: the jobs of a sweep cannot share a checkpoint; take resume=auto")
    if settings.run_dir and user_path("run_dir", settings.run_dir).resolve() != sweep.resolve():
        raise UserError(
            f"run_dir={settings.run_dir}: the folders of this sweep are in {sweep}. Give run_dir one value, "
            "or set hydra.sweep.dir and hydra.sweep.subdir"
        )


def in_sweep() -> bool:
    """Whether the job in progress is one of a sweep."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _or_exit(decide: Callable[[DictConfig], Path], config: DictConfig) -> Path:
    """The folder that `decide` finds; ends the program where there is none, as Hydra drops what callbacks raise."""
    HydraConfig.instance().set_config(config)
    try:
        return decide(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _run_folder(config: DictConfig) -> Path:
    """The folder of a run with these settings, which are checked first."""
    composed = copy.deepcopy(config)
    with open_dict(composed):
        del composed["hydra"]
    asked = _asked_folder(config, "hydra.run.dir")
    if OmegaConf.get_type(config) is EvaluateConfig:
        evaluation = evaluation_from(composed)
        find_checkpoint(evaluation.checkpoint, "checkpoint")  # refuses what leads nowhere before a folder is made
        return open_run_folder(asked, evaluation.name).path
    settings = settings_from(composed)
    return folder_for(settings, asked).path


def _sweep_folder(config: DictConfig) -> Path:
    """The folder of a sweep; with resume=auto that of the newest sweep of the name."""
    resume = "" if OmegaConf.get_type(config) is EvaluateConfig else config.resume
    if resume not in ("", "auto"):
        raise UserError(f"resume={resume}: the jobs of a sweep cannot share a checkpoint; take resume=auto")
    return open_sweep_folder(_asked_folder(config, "hydra.sweep.dir"), config.name, resume == "auto")


def _asked_folder(config: DictConfig, key: str) -> str:
    """The folder that run_dir asks for, or Hydra's `key`, which is run_dir unless set; empty where nothing does."""
    asked = str(OmegaConf.select(config, key))
    if config.run_dir and asked != config.run_dir:
        raise UserError(f"run_dir={config.run_dir}, {key}={asked}: both name the folder. Give one of them")
    return asked


def _job_words() -> str:
    """The job in progress by number and overrides."""
    context = HydraConfig.get()
    return " ".join([f"#{context.job.num}", *context.overrides.task])


def _failure_words(error: BaseException | None) -> str:
    """What ended a job, in one line."""
    kind = "" if isinstance(error, JobFailedError | Interrupted) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())
