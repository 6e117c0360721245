"""Whether torch.compile compiles the kernels of the state machine for a run, and where those are
kept: for runs that cannot have those of step_cache.py; and which parts of a run are kept as steps
of fixed shape and replayed as CUDA graphs.

The decision follows from the settings alone, never from what a cache holds: compiled kernels round
otherwise, and every run of the same settings is to have the same numbers.
"""

import os
import tempfile

import torch

from esper_soa.nets.graphs import Replay
from esper_soa.system.caches import FolderError, open_cache
from esper_soa.system.errors import check

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
REPLAYED_PARTS = (
    "state machine",
    "policy",
    "gradient steps",
)  # parts that compute.cuda_graphs is about
STATE, POLICY, GRADIENTS = REPLAYED_PARTS


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


def choose_replay(setting: str, device: torch.device, own_reward: bool, num_ranks: int) -> Replay:
    """The parts that compute.cuda_graphs replays on `device`: `auto` replays on a GPU what can be
    repeated, and goes on without where a capture fails; SettingError for `on` without CUDA.
    """
    if setting == "off" or (setting == "auto" and device.type != "cuda"):
        on = "" if setting == "off" else f" on {device.type}"
        return Replay((), f"no CUDA graphs (compute.cuda_graphs={setting}{on})")
    words = "CUDA graphs need an NVIDIA GPU."
    allowed = f"auto or off on device={device.type}"
    check(device.type == "cuda", "compute.cuda_graphs", setting, allowed=allowed, remedy=words)
    if setting == "on":
        return Replay(REPLAYED_PARTS, "all are replayed (compute.cuda_graphs=on)")
    obstacles = {
        STATE: "a reward of your own may do what a graph does not do again" if own_reward else "",
        GRADIENTS: "ranks take them together" if num_ranks > 1 else "",
    }
    reasons = {part: reason for part, reason in obstacles.items() if reason}
    parts = tuple(part for part in REPLAYED_PARTS if part not in reasons)
    left_out = tuple(f"{part}: left out, as {reason}" for part, reason in reasons.items())
    return Replay(parts, f"{', '.join(parts)} (compute.cuda_graphs=auto)", left_out, insists=False)
