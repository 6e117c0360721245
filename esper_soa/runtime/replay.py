"""Which parts of a run are kept as steps of fixed shape and replayed as CUDA graphs."""

import torch

from esper_soa.nets.graphs import Replay
from esper_soa.system.errors import check

REPLAYED_PARTS = (
    "state machine",
    "policy",
    "gradient steps",
)  # parts that compute.cuda_graphs is about
STATE, POLICY, GRADIENTS = REPLAYED_PARTS


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
