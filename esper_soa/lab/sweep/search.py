"""A search by Optuna: its trials are a sweep's jobs, by any launcher; the study lies in its folder.

Trial i is job i, which tells the study its validation accuracy after every round (never that on
test images, which are for the reader of the result), and ends early if the pruner decides so. A
trial whose job did not come to its end stays open, so that a sweep that goes on (resume=auto) plays
it from its checkpoint on. Needs the extra `sweep`, and no torch.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf
from optuna import distributions
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from esper_soa.config.settings import TrainConfig
from esper_soa.lab.sweep.records import Status, read_records
from esper_soa.system.errors import UserError, check, check_choice, reading
from esper_soa.system.plain_files import remove

# Optuna's journal, in the folder of the sweep; it stands files of a network, which SQLite does not
STUDY_FILE = "study.log"
SAMPLERS = ("tpe", "random")
PRUNERS = ("median", "halving", "none")
# The least of whole numbers among the settings of the search.
MINIMA = {"n_trials": 1, "n_jobs": 1, "startup_trials": 1, "warmup_rounds": 0, "seed": 0}
# Overrides that may be others when a search goes on.
MAY_CHANGE = ("run_dir=", "resume=", "hydra.")


class Space(NamedTuple):
    """Settings of a search."""

    searched: dict[str, distributions.BaseDistribution]  # by the key of the setting
    fixed: list[str]  # overrides of all trials

    def record(self) -> dict[str, object]:
        """The fields that the study keeps of it."""
        overrides = (item for item in self.fixed if not item.startswith(MAY_CHANGE))
        searched = {name: str(item) for name, item in self.searched.items()}
        return {"searched": searched, "fixed": sorted(overrides)}


def search(config: DictConfig, arguments: Sequence[str], launcher: Launcher) -> float | None:
    """Run what is left of a study, made where there is none; returns the best accuracy (percent).

    arguments: the overrides of the command line. Raises UserError for what cannot be searched.
    """
    settings = config.hydra.sweeper
    sweep = Path(config.hydra.sweep.dir)
    if OmegaConf.get_type(config) is not TrainConfig:
        remedy = "Use it with esper-train"
        raise UserError(f"hydra/sweeper=optuna_search: searches over trainings. {remedy}")
    params = [f"{key}={value}" for key, value in settings.params.items()]
    space = space_of([*params, *arguments])
    study = open_study(settings, sweep, space, resume=config.resume == "auto")
    OmegaConf.save(config, sweep / "multirun.yaml")
    running = [trial.number for trial in study.trials if trial.state == TrialState.RUNNING]
    while running or len(study.trials) < settings.n_trials:
        count = min(settings.n_jobs, settings.n_trials - len(study.trials))
        running = running or [study.ask(space.searched).number for _ in range(count)]
        batch = first_batch(running, settings.n_jobs)
        run_trials(study, space, launcher, numbers=batch, sweep=sweep)
        running = running[len(batch) :]
    ended = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if not ended:
        return None
    best = max(ended, key=lambda trial: trial.value or 0.0)
    sentence = f"{len(study.trials)} trials, best is job {best.number}: {best.value:.2f} %"
    print(f"search   {sentence} validation accuracy with", *overrides_of(best.params))
    return best.value


def space_of(arguments: Sequence[str]) -> Space:
    """The space of overrides in Hydra's words; UserError where there is nothing to search for."""
    overrides = OverridesParser.create().parse_overrides(list(arguments))
    last = {override.get_key_element(): override for override in overrides}
    sweeps = {key: override for key, override in last.items() if override.is_sweep_override()}
    if not sweeps:
        raise UserError(
            "hydra/sweeper=optuna_search: there is no setting to search for. Give one or more, "
            "such as policy.ppo.lr=tag(log,interval(1e-5,1e-2)), task.base_channels=range(4,17,4) "
            "or reward=shaped,escrow"
        )
    searched = {key: distribution_of(override) for key, override in sweeps.items()}
    fixed = {key: last[key].get_value_element_as_str() for key in last if key not in sweeps}
    return Space(searched, overrides_of(fixed))


def distribution_of(override: Override) -> distributions.BaseDistribution:
    """The values of a setting: interval(a,b), by tag(log,...); range(a,b,step); or a choice."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        kind: Callable[..., distributions.BaseDistribution] = distributions.FloatDistribution
        if isinstance(value.start, int):  # and so is the end, as of int(interval(1,8))
            kind = distributions.IntDistribution
        try:
            return kind(value.start, value.end, log="log" in value.tags)
        except ValueError as error:
            raise UserError(f"{override.input_line}: is no interval to search ({error})") from error
    if isinstance(value, RangeSweep):
        numbers = list(value.range())
        integral = all(isinstance(number, int) for number in numbers)
        if len(numbers) > 1 and integral and numbers[1] > numbers[0]:
            step = numbers[1] - numbers[0]
            return distributions.IntDistribution(numbers[0], numbers[-1], step=step)
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))


def open_study(settings: DictConfig, sweep: Path, space: Space, resume: bool) -> optuna.Study:
    """The study in the sweep's folder; UserError for another search's, or one not resumed."""
    check_choice("hydra.sweeper.sampler", settings.sampler, SAMPLERS)
    check_choice("hydra.sweeper.pruner", settings.pruner, PRUNERS)
    for name, least in MINIMA.items():
        valid = isinstance(settings[name], int) and settings[name] >= least
        check(
            valid,
            f"hydra.sweeper.{name}",
            settings[name],
            allowed=f"a whole number of at least {least}",
        )
    if (sweep / STUDY_FILE).exists() and not resume:
        raise UserError(
            f"run_dir={sweep}: already holds a search. Choose another folder, or go on with "
            "resume=auto"
        )
    with suppress(OSError):  # the lock of a search that was killed, which Optuna would wait for
        remove(sweep.resolve() / f"{STUDY_FILE}.lock")
    study = load_study(settings, sweep)
    record = space.record()
    before = study.user_attrs.get("space", record)
    if before != record:
        other = f"holds a search of something else: {before}, and not {record}"
        raise UserError(f"run_dir={sweep}: {other}")
    study.set_user_attr("space", record)
    return study


def load_study(settings: DictConfig, sweep: Path) -> optuna.Study:
    """The study in the folder of the sweep, made where there is none."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warmup = settings.warmup_rounds
    pruners: dict[str, BasePruner] = {
        "median": MedianPruner(settings.startup_trials, warmup),
        "halving": SuccessiveHalvingPruner(min_resource=max(1, warmup)),
        "none": NopPruner(),
    }
    with reading(sweep / STUDY_FILE, UserError, "a study of Optuna"):
        study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(sweep / STUDY_FILE))),
            study_name="search",
            direction="maximize",
            load_if_exists=True,
            pruner=pruners[settings.pruner],
        )
    study.sampler = make_sampler(settings, len(study.trials))
    return study


def make_sampler(settings: DictConfig, done: int) -> BaseSampler:
    """The sampler of trials after the `done` first; another seed for each call to go on."""
    seed = settings.seed + done
    if settings.sampler == "random":
        return RandomSampler(seed)
    with warnings.catch_warnings():
        # said of constant_liar
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return TPESampler(
            n_startup_trials=settings.startup_trials, seed=seed, constant_liar=settings.n_jobs > 1
        )


def first_batch(numbers: Sequence[int], largest: int) -> list[int]:
    """The consecutive numbers that rising `numbers` begin with: launchers count up from one."""
    job_numbers = enumerate(numbers[:largest], numbers[0])
    return [number for expected, number in job_numbers if number == expected]


def run_trials(
    study: optuna.Study, space: Space, launcher: Launcher, numbers: Sequence[int], sweep: Path
) -> None:
    """Run trials with consecutive numbers, and tell the study of those that came to their end."""
    trials = {trial.number: trial for trial in study.trials}
    jobs = [[*space.fixed, *overrides_of(trials[number].params)] for number in numbers]
    launcher.launch(jobs, initial_job_idx=numbers[0])
    records = read_records(sweep)
    for record in (records[number] for number in numbers if number in records):
        if record.status == Status.DONE:
            study.tell(record.number, record.value)
        elif record.status == Status.PRUNED:
            study.tell(record.number, state=TrialState.PRUNED)


def overrides_of(params: Mapping[str, object]) -> list[str]:
    return [f"{name}={value}" for name, value in params.items()]
