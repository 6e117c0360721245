"""Settings of a run from Python, composed as on the command line; a Hydra that the caller uses stays as it is.

Used by the simulator and by whoever trains from a program. Needs no torch.
"""

import difflib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase

from esper_soa.arguments import check_overrides, groups_in
from esper_soa.config import TrainConfig, register_schema, settings_from
from esper_soa.errors import SettingError, UserError, one_line
from esper_soa.train import config_dir

ONE_AT_A_TIME = threading.Lock()  # Hydra keeps what it composes with in globals

register_schema()


def experiments() -> tuple[str, ...]:
    """Names of the experiments that ship."""
    return tuple(sorted(path.stem for path in Path(config_dir(), "experiment").glob("*.yaml")))


def compose_settings(experiment: str = "", overrides: Sequence[str] = ()) -> TrainConfig:
    """Checked settings of `python -m esper_soa.train +experiment=<experiment> <overrides>`.

    experiment: one of `experiments()`, or "" for the defaults. overrides: in Hydra's words, such as "rounds=5" or
    "task=cifar_impaired". Raises UserError for what the command line would refuse.
    """
    names = experiments()
    if experiment and experiment not in names:
        near = difflib.get_close_matches(experiment, names, 1)
        hint = f"Did you mean {near[0]}?" if near else ""
        raise SettingError("experiment", experiment, ", ".join(names), hint)
    given = [f"+experiment={experiment}", *overrides] if experiment else list(overrides)
    check_overrides(overrides, TrainConfig, groups_in(config_dir()))
    with _own_hydra():
        try:
            composed = compose("train", given)
        except HydraException as error:
            raise UserError(f"overrides: {_reason(error)}") from error
    return settings_from(composed)


def _reason(error: HydraException) -> str:
    """What Hydra says, with the value that it could not take."""
    cause = str(error.__cause__ or "").split("\n")[0]
    return one_line(" ".join(f"{error} {cause}".split()))


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Hydra with our configuration files in the context; what was set up before is there again behind it."""
    with ONE_AT_A_TIME:
        holder, base, job = GlobalHydra.instance(), VersionBase.instance(), JobRuntime.instance()
        theirs = holder.hydra, base.getbase(), job.get("name")
        holder.hydra = None
        try:
            with initialize_config_dir(config_dir(), job_name="train", version_base="1.3"):
                yield
        finally:
            GlobalHydra.instance().hydra = theirs[0]
            VersionBase.instance().version_base = theirs[1]
            job.set("name", theirs[2])
