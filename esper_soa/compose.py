"""Settings from the configuration files of the package, for a process that may be using Hydra for something else.

What Hydra holds for the process (its configuration, version and schemas) is set aside while ours is composed, and is
then again as it was. Called by library.py; the command line is Hydra's own process and has no need of it.
"""

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

from esper_soa.config import TrainConfig, register_schema, settings_from
from esper_soa.errors import UserError
from esper_soa.paths import config_dir

ASIDE = (GlobalHydra, HydraConfig, JobRuntime, VersionBase)  # of which Hydra has one per process
TURN = threading.Lock()  # one thread at a time, as Hydra's state is the process's


def train_settings(overrides: Sequence[str]) -> TrainConfig:
    """The checked settings of a run, from what one would give on the command line.

    Raises UserError for what cannot be composed or cannot work.
    """
    try:
        with TURN, _hydra_aside(), initialize_config_dir(config_dir(), job_name="train", version_base="1.3"):
            return settings_from(compose("train", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(" ".join(str(error).split())) from error


@contextmanager
def _hydra_aside() -> Iterator[None]:
    """Hydra as in a new process, with our schemas; at the end it is as it was."""
    instances, store = Singleton._instances, ConfigStore.instance()
    held: dict[type, Singleton] = {kind: instances.pop(kind) for kind in ASIDE if kind in instances}
    schemas, facts, resolvers = dict(store.repo), dict(vars(store)), dict(BaseContainer._resolvers)
    try:
        register_schema()
        yield
    finally:
        for kind in ASIDE:
            instances.pop(kind, None)
        instances.update(held)
        _back(store.repo, schemas)
        _back(vars(store), facts)
        BaseContainer._resolvers = resolvers


def _back(now: dict, before: dict) -> None:
    """Undo what `register_schema` has put in or replaced; what Hydra has added meanwhile for itself stays."""
    for name in ("train_schema.yaml", "evaluate_schema.yaml", "__deepcopy__"):
        if name in before:
            now[name] = before[name]
        else:
            now.pop(name, None)
