"""Whether torch.compile compiles the kernels of the state machine for a run, and where those are
kept: for runs that cannot have those of step_cache.py.

The decision follows from the settings alone, never from what a cache holds: compiled kernels round
otherwise, and every run of the same settings is to have the same numbers.
"""

import os
import tempfile

import torch

from esper_soa.system.caches import FolderError, open_cache

# the variable by which torch.compile is told where to keep things
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# benchmarks/kernels.py measures this on one core of a CPU for both kernels and 3 slots, with an
# empty cache. With a full one a start takes a sixth of it; which of the two a start will be is not
# known from the settings.
COMPILE_SECONDS = 70.0
# saved per env-step of all envs: the calls of operations, however many envs there are
CALL_SECONDS = 0.0055
ENV_SECONDS = 7e-6  # saved per env and env-step: passes over memory that are fused
MIN_SAVING = 2.0  # times COMPILE_SECONDS that must be saved, as machines differ


def choose_compilation(
    setting: str, device: torch.device, envs: int, env_steps: int
) -> tuple[bool, str]:
    """Whether kernels are compiled on `device` by compute.compile (auto, on, off), and why.

    env_steps: of each env, rounds times env-steps per episode.
    """
    saving = env_steps * (CALL_SECONDS + ENV_SECONDS * envs)
    if setting != "auto":
        compile_on = setting == "on"
        reason = f" (compute.compile={setting})"
    elif device.type != "cpu":
        compile_on = False
        reason = f": what compiling saves on {device.type} was never measured"
    else:
        compile_on = saving >= MIN_SAVING * COMPILE_SECONDS
        length_text = f"{env_steps} env-steps of {envs} envs"
        gain = f"saves {f'about {saving:.0f}' if saving >= 1 else 'less than 1'} s in {length_text}"
        reason = f": compiling takes about {COMPILE_SECONDS:.0f} s and {gain}"
    return compile_on, f"{'compiled' if compile_on else 'not compiled'}{reason}"


def keep_compiled() -> str:
    """Have torch.compile keep what it makes for later runs in the user's cache; says where.

    A folder that the user names stays. Ours holds code that is run, so it must be the user's own
    and closed to others, as that of the native kernels; where it cannot be, torch keeps things in
    its temporary folder.
    """
    named = os.environ.get(INDUCTOR_FOLDER, "")
    parent, name = os.path.split(named)
    # torch, when imported, names its temporary folder there
    torchs = parent == tempfile.gettempdir() and name.startswith("torchinductor_")
    if named and not torchs:
        return f"kept in {named}"
    try:
        folder = open_cache("inductor")
    except FolderError as error:
        return f"kept for now, {error}"
    os.environ[INDUCTOR_FOLDER] = str(folder)
    return f"kept in {folder}"
