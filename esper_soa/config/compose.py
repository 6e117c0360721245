"""Settings of a run from Python; the caller's state of Hydra is restored. Needs no torch."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from esper_soa.config import settings
from esper_soa.config.arguments import check_overrides, expand_slots, options
from esper_soa.config.hydra_versions import INITIALIZE
from esper_soa.config.paths import config_dir
from esper_soa.system.errors import UserError, check, one_line, single_line

# of which Hydra has one per process
HYDRA_SINGLETONS = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)
TURN = threading.Lock()  # one thread at a time, as Hydra's state is the process's


def experiments() -> tuple[str, ...]:
    """Names of the experiments that ship."""
    return tuple(options()["experiment"])


def override_list(overrides: object) -> list[str]:
    """The overrides, or a single one, as a list; SettingError for anything but texts."""
    items = [overrides] if isinstance(overrides, str) else overrides
    texts = isinstance(items, Sequence) and all(isinstance(item, str) for item in items)
    check(texts, "overrides", overrides, allowed='texts, as in ["envs=3", "steps=50"]')
    return [*items]  # type: ignore[misc]


def compose_settings(experiment: str = "", overrides: Sequence[str] = ()) -> settings.TrainConfig:
    """Checked settings of `python -m esper_soa.train +experiment=<experiment> <overrides>`.

    experiment: one of `experiments()`, or "" for the defaults. overrides: in Hydra's words, such as
    "rounds=5" or "task=cifar_impaired". Raises UserError as the command line would.
    """
    is_name = isinstance(experiment, str) and "=" not in experiment
    check(is_name, "experiment", experiment, allowed="a name, without +experiment=")
    given = override_list(overrides)
    all_overrides = [f"+experiment={experiment}", *given] if experiment else given
    check_overrides(all_overrides, settings.TrainConfig)
    try:
        with TURN, _isolated_hydra(), initialize_config_dir(config_dir(), **INITIALIZE):
            composed = compose("train", expand_slots(all_overrides))
            if not composed.tasks:
                return settings.settings_from(composed)
    except (HydraException, OmegaConfBaseException) as error:
        value = str(error.__cause__ or "").split("\n")[0]  # that Hydra could not take
        raise UserError(f"overrides: {one_line(single_line(f'{error} {value}'))}") from error
    return _compose_tasks(composed.tasks, all_overrides)


def job_settings(composed: DictConfig) -> settings.TrainConfig:
    """The checked settings of the job that Hydra has composed and begun; raises UserError."""
    if "tasks" not in composed:
        remedy = "A configuration of yours begins with the lines defaults: [train, _self_]."
        raise UserError(f"settings of esper-train are missing. {remedy}")
    if not composed.tasks:
        return settings.settings_from(composed)
    return _compose_tasks(composed.tasks, list(HydraConfig.get().overrides.task))


def _compose_tasks(entries: Sequence[str], overrides: Sequence[str]) -> settings.TrainConfig:
    """Settings of a run on several tasks; each has what the `overrides` make of its task alone.

    entries: each an option of the group `task` and settings of its own. Raises UserError.
    """
    given = next((override for override in overrides if _key(override) == "task"), "task=")
    check(
        given == "task=", "task", given.partition("=")[2], allowed=f"left out with tasks={entries}"
    )
    worlds: dict[str, settings.TrainConfig] = {}
    for entry in entries:
        check(isinstance(entry, str), "tasks", entries, allowed='texts, as "text_small envs=4"')
        option, *changes = entry.split() or [""]
        for setting in changes:
            allowed = f"without {setting}, which is a setting of the whole run"
            check(
                _key(setting).split(".")[0] in settings.OF_A_TASK, "tasks", entry, allowed=allowed
            )
        # of two overrides of a setting, Hydra takes the later one
        cfg = compose_settings("", [*overrides, f"task={option}", *changes, "tasks=[]"])
        allowed = "tasks of different names"
        remedy = "Give one of them another, as in 'cifar_impaired task.name=other'."
        check(cfg.task.name not in worlds, "tasks", entry, allowed=allowed, remedy=remedy)
        worlds[cfg.task.name] = cfg
    first = next(iter(worlds.values()))
    if len(worlds) == 1:
        return first
    parts = {
        name: settings.WorldConfig(**{field: getattr(cfg, field) for field in settings.OF_A_TASK})
        for name, cfg in worlds.items()
    }
    return replace(first, tasks=list(entries), worlds=parts)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


@contextmanager
def _isolated_hydra() -> Iterator[None]:
    """Context with a fresh Hydra and our schemas; restores the caller's Hydra afterwards."""
    # Hydra 1.3 and OmegaConf 2.3 have public names to clear what a process holds, not to restore it
    Plugins.instance()  # found once per process
    store = copy(ConfigStore.instance())
    store.repo = dict(store.repo)
    instances = Singleton._instances
    resolvers = BaseContainer._resolvers
    others = {kind: part for kind, part in instances.items() if kind not in HYDRA_SINGLETONS}
    Singleton._instances = {**others, ConfigStore: store}  # type: ignore[dict-item]
    BaseContainer._resolvers = dict(resolvers)
    try:
        settings.register_schema()
        yield
    finally:
        Singleton._instances = instances
        BaseContainer._resolvers = resolvers
