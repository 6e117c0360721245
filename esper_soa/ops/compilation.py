"""Decides whether the kernels of the state machine are compiled for a run, and where what was
compiled is kept.

The decision follows from the settings alone, never from what a cache holds: compiled kernels round
otherwise, and every run of the same settings is to have the same numbers. The log
and versions.json have the words.
"""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from esper_soa.user_cache import FolderError, cache_folder, open_folder

# the variable by which torch.compile is told where to keep things
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# What benchmarks/kernels.py measures on one core of a CPU for both kernels and 3 slots, with an
# empty cache. With a full one a start takes a sixth of it; which of the two a start will be is not
# known from the settings.
COMPILE_SECONDS = 70.0
# saved per env-step of all envs: the calls of operations, however many envs there are
CALL_SECONDS = 0.0055
ENV_SECONDS = 7e-6  # saved per env and env-step: passes over memory that are fused
WORTH = 2.0  # times COMPILE_SECONDS that must be saved, as machines differ


class Length(NamedTuple):
    """What a run will play."""

    envs: int  # N
    env_steps: int  # of all envs together: rounds times env-steps per episode


class Compilation(NamedTuple):
    """Whether the kernels are compiled, and why, in words for logs."""

    wanted: bool
    reason: str


def choose_compilation(setting: str, device: torch.device, length: Length) -> Compilation:
    """What compute.compile (auto, on, off) means for a run of this length on `device`."""
    if setting != "auto":
        return Compilation(setting == "on", f"{_way(setting == 'on')} (compute.compile={setting})")
    if device.type != "cpu":
        return Compilation(
            False, f"{_way(False)}: what compiling saves on {device.type} was never measured"
        )
    saved = length.env_steps * (CALL_SECONDS + ENV_SECONDS * length.envs)
    wanted = saved >= WORTH * COMPILE_SECONDS
    weighed = f"it takes about {COMPILE_SECONDS:.0f} s and saves about {saved:.0f} s"
    return Compilation(
        wanted, f"{_way(wanted)}: {weighed} in {length.env_steps} env-steps of {length.envs} envs"
    )


def _way(wanted: bool) -> str:
    return "compiled" if wanted else "not compiled"


def keep_compiled() -> str:
    """Have torch.compile keep what it makes in the user's cache, so that later runs need not make
    it; says where.

    A folder that the user names stays. Ours holds code that is run, so it must be the user's own
    and closed to others, as that of the native kernels; where it cannot be, torch keeps things in
    its temporary folder.
    """
    named = os.environ.get(FOLDER, "")
    if named and not _is_torchs(Path(named)):
        return f"kept in {named}"
    try:
        folder = _folder()
    except FolderError as error:
        return f"kept for now, {error}"
    os.environ[FOLDER] = str(folder)
    return f"kept in {folder}"


def _is_torchs(folder: Path) -> bool:
    """Whether it is the temporary folder that torch, when imported, names in the variable."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


def _folder() -> Path:
    own = cache_folder()
    open_folder(own)
    open_folder(own / "inductor")
    return own / "inductor"
