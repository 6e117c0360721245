"""The reward of a user's own: found by the setting reward.mode, looked at while a run is built, and
called as a mode.

`own_parts` runs in compiled kernels too. conformance.py looks closer, on the same made-up inputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from esper_soa.env.reward_records import OwnReward, RewardInputs
from esper_soa.env.reward_terms import OWN_TERM, TERM_NAMES
from esper_soa.errors import SettingError, one_line
from esper_soa.nets import streams
from esper_soa.registry import RAISED, REWARD, Part, find, is_reference, name_in, num_required
from esper_soa.state import STATE_FLOAT, stage_in
from esper_soa.vocabulary import LIVE_STAGES, OP_NAMES, STAGE_NAMES

SETTING = "reward.mode"
PROBED_ENVS = 5
STAGES = tuple(
    code for code, name in enumerate(STAGE_NAMES) if name not in ("unknown", "dormant", "retired")
)
MOST_PARAMETERS = 10_000.0
# Fields that are 0 where the flag is not set.
KNOWN = {
    "improvement": "improvement_known",
    "contribution": "contribution_known",
    "interaction_sum": "contribution_known",
    "accuracy_germination": "germination_known",
    "total": "total_known",
}
PERCENT = ("val_accuracy", "stable_accuracy", "committed_accuracy", "accuracy_germination")
POSITIVE = ("val_loss", "alpha_delta_sq", "drip_scale", "drip_left", "escrow")
PARAMETERS = ("effective_params", "total_params", "host_params", "fossilized_params")


def own_reward(
    mode: str, num_slots: int, max_steps: int, device: torch.device, setting: str = SETTING
) -> OwnReward | None:
    """The reward that `mode` in `setting` names as module:name; None for a mode of the package.

    Raises SettingError, which says what is wrong with it.
    """
    if not is_reference(mode):
        return None
    part = find(REWARD, mode, setting)
    name = name_in(mode)
    if name in TERM_NAMES:
        allowed = "of another name than the terms of the package"
        raise SettingError(setting, mode, allowed, "Records tell both by name.")
    own = OwnReward(name, part)  # type: ignore[arg-type]
    faults = reward_findings(part, sample_inputs(PROBED_ENVS, num_slots, max_steps, device))
    if faults:
        raise SettingError(setting, mode, "a reward", "; ".join(faults) + ".")
    return own


def own_parts(own: OwnReward, inputs: RewardInputs) -> dict[str, Tensor]:
    """The terms [N] that a user's reward pays, by the names of RewardTerms; one that has no name
    there is `own`.
    """
    given = own.function(inputs)
    parts = given if isinstance(given, Mapping) else {OWN_TERM: given}
    return {name: part.to(STATE_FLOAT) for name, part in parts.items()}


def reward_findings(part: Part, inputs: RewardInputs) -> list[str]:
    """What keeps `part` from being a reward, in words; inputs: of N envs, on the run's device."""
    if num_required(part) != 1:
        return ["it is not called with the inputs alone"]
    try:
        given = part(inputs)
    except RAISED as error:
        return [f"it raises {type(error).__name__}: {one_line(error)}"]
    parts = given if isinstance(given, Mapping) else {OWN_TERM: given}
    strangers = [str(name) for name in parts if name not in (*TERM_NAMES, OWN_TERM)]
    if strangers:
        return [f"it gives the terms {', '.join(strangers)}, which RewardTerms lacks"]
    return [fault for name, value in parts.items() for fault in _term_findings(name, value, inputs)]


def _term_findings(name: str, value: object, inputs: RewardInputs) -> list[str]:
    what = "it gives" if name == OWN_TERM else f"its term {name} is"
    if not isinstance(value, Tensor):
        return [f"{what} a {type(value).__name__}, not a tensor"]
    what += " a tensor"
    found = []
    if value.shape != inputs.op.shape:
        shape = f"{list(value.shape)} for {inputs.op.shape[0]} envs"
        found.append(f"{what} of shape {shape}, not one number per env")
    if not value.is_floating_point():
        found.append(f"{what} of {value.dtype}, not of floating-point numbers")
    if value.device != inputs.op.device:
        found.append(f"{what} on {value.device} for inputs on {inputs.op.device}")
    if value.requires_grad:
        found.append(f"{what} with a gradient: nothing is differentiated through rewards")
    return found


def sample_inputs(
    num_envs: int, num_slots: int, max_steps: int, device: torch.device, seed: int = 0
) -> RewardInputs:
    """Made-up inputs of N envs: random, but possible; the last env is at its last env-step."""
    slots = torch.empty(num_envs, num_slots)
    draws = _Draws(seed)
    stage = torch.tensor(STAGES)[draws.whole(slots, len(STAGES))]
    fields = {
        "has_seed": stage_in(stage, LIVE_STAGES),
        "target": torch.arange(num_slots) == draws.whole(slots[:, :1], num_slots),
        "stage": stage,
        "previous_stage": torch.tensor(STAGES)[draws.whole(slots, len(STAGES))],
        "op": draws.whole(slots[:, 0], len(OP_NAMES)),
        "step": 1
        + draws.whole(slots[:, 0], max_steps).index_fill(
            0, torch.tensor([num_envs - 1]), max_steps - 1
        ),
        "max_steps": torch.full((num_envs,), max_steps),
    }
    per_env = list(RewardInputs.__annotations__).index("op")
    for place, name in enumerate(RewardInputs.__annotations__):
        if name not in fields:
            fields[name] = draws.field(name, slots if place < per_env else slots[:, 0], max_steps)
    for name, known in KNOWN.items():
        fields[name] = torch.where(fields[known], fields[name], 0.0)
    return RewardInputs.from_dict(fields, batch_size=[num_envs]).to(device)


class _Draws:
    """Random fields, a function of the seed and of the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.asked = 0

    def share(self, like: Tensor) -> Tensor:
        """float64 in [0, 1) in the shape of `like`."""
        self.asked += 1
        keys = streams.stream_keys(self.seed, streams.REWARD_PROBE, (self.asked,), torch.tensor(0))
        return streams.uniform(keys, torch.arange(like.numel()), STATE_FLOAT).view(like.shape)

    def whole(self, like: Tensor, high: int) -> Tensor:
        """int64 in [0, high)."""
        return (self.share(like) * high).to(torch.int64)

    def field(self, name: str, like: Tensor, max_steps: int) -> Tensor:
        """A field of RewardInputs that is called so."""
        share = self.share(like)
        if name.endswith("_known") or name == "drip_live":
            return share < 0.7
        if name.endswith("_age"):
            return (share * max_steps).to(torch.int64)
        if name.startswith("num_"):
            return (share * like.shape[-1]).to(torch.int64)
        if name in PERCENT:
            return 100 * share
        if name in PARAMETERS:
            return 1 + MOST_PARAMETERS * share
        return 5 * share if name in POSITIVE else 10 * share - 5
