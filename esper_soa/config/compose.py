"""Settings of a run from Python; Hydra is then again as a caller had it. Needs no torch."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException

from esper_soa.config.arguments import check_overrides, expand_slots, options
from esper_soa.config.errors import UserError, check, did_you_mean, joined, one_line
from esper_soa.config.paths import config_dir
from esper_soa.config.settings import TrainConfig, register_schema, settings_from

ASIDE = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)  # of which Hydra has one per process
TURN = threading.Lock()  # one thread at a time, as Hydra's state is the process's


def experiments() -> tuple[str, ...]:
    """Names of the experiments that ship."""
    return tuple(options()["experiment"])


def compose_settings(experiment: str = "", overrides: Sequence[str] = ()) -> TrainConfig:
    """Checked settings of `python -m esper_soa.train +experiment=<experiment> <overrides>`.

    experiment: one of `experiments()`, or "" for the defaults. overrides: in Hydra's words, such as
    "rounds=5" or "task=cifar_impaired". Raises UserError for what the command line would refuse.
    """
    names = experiments()
    hint = did_you_mean(experiment, names)
    check(experiment in ("", *names), "experiment", experiment, ", ".join(names), hint)
    given = [f"+experiment={experiment}", *overrides] if experiment else list(overrides)
    check_overrides(overrides, TrainConfig)
    try:
        with (
            TURN,
            _hydra_aside(),
            initialize_config_dir(config_dir(), job_name="train", version_base="1.3"),
        ):
            return settings_from(compose("train", expand_slots(given)))
    except (HydraException, OmegaConfBaseException) as error:
        value = str(error.__cause__ or "").split("\n")[0]  # that Hydra could not take
        raise UserError(f"overrides: {one_line(joined(f'{error} {value}'))}") from error


@contextmanager
def _hydra_aside() -> Iterator[None]:
    """Hydra as in a new process with our schemas; then as it was, but for what Hydra has stored."""
    # Hydra and OmegaConf have public names to clear what a process holds, and none to put it back
    # (1.3, 2.3).
    instances = Singleton._instances
    store = ConfigStore.instance()
    saved: dict[type, Singleton] = {
        kind: instances.pop(kind) for kind in ASIDE if kind in instances
    }
    places = (store.repo, vars(store))  # into which `register_schema` puts things
    before = [dict(place) for place in places]
    resolvers = dict(BaseContainer._resolvers)
    try:
        register_schema()
        yield
    finally:
        for kind in ASIDE:
            instances.pop(kind, None)
        instances.update(saved)
        for place, kept in zip(places, before, strict=True):
            for name in ("train_schema.yaml", "evaluate_schema.yaml", "__deepcopy__"):
                place.pop(name, None)
            place.update(kept)
        BaseContainer._resolvers = resolvers
