"""User rewards: loaded by the setting reward.mode, checked when a run is built, called as a mode.

`user_terms` runs in compiled kernels too. conformance.py has more checks, on the same inputs.
"""

from collections.abc import Mapping
from itertools import count

import torch
from torch import Tensor

from esper_soa.config import registry
from esper_soa.config.env import REWARD_MODE, TERM_NAMES, USER_TERM
from esper_soa.env.reward_records import RewardInputs, UserReward
from esper_soa.nets.model.user_parts import tensor_findings
from esper_soa.state import STATE_FLOAT, stage_in
from esper_soa.system import streams
from esper_soa.system.errors import UserError, check
from esper_soa.system.transfers import move_leaves, move_records
from esper_soa.vocabulary import LIVE_STAGES, OP_NAMES, STAGE_NAMES

PROBED_ENVS = 5
PROBED_SAMPLES = 3
UNUSED = ("unknown", "dormant", "retired")
STAGES = tuple(code for code, name in enumerate(STAGE_NAMES) if name not in UNUSED)
MAX_PARAMETERS = 10_000.0
KNOWN = {  # fields that are 0 where the flag is not set
    "improvement": "improvement_known",
    "contribution": "contribution_known",
    "interaction_sum": "contribution_known",
    "accuracy_germination": "germination_known",
    "total": "total_known",
}
PERCENT = ("val_accuracy", "stable_accuracy", "committed_accuracy", "accuracy_germination")
POSITIVE = ("val_loss", "alpha_delta_sq", "drip_scale", "drip_left", "escrow")


def user_reward(
    mode: str, num_slots: int, max_steps: int, device: torch.device
) -> UserReward | None:
    """The reward that `mode` names as module:name; None for a mode of the package.

    Raises SettingError, which says what is wrong with it.
    """
    if not registry.is_reference(mode):
        return None
    part = registry.find(registry.REWARD, mode, REWARD_MODE)
    name = registry.name_in(mode)
    allowed = "of another name than the terms of the package"
    remedy = "Records tell both by name."
    check(name not in TERM_NAMES, REWARD_MODE, mode, allowed=allowed, remedy=remedy)
    samples = [
        sample_inputs(PROBED_ENVS, num_slots, max_steps, device=device, seed=seed)
        for seed in range(PROBED_SAMPLES)
    ]
    with registry.raise_faults(REWARD_MODE, mode, "a reward") as faults:
        for inputs in samples:
            faults += reward_findings(part, inputs)
    return UserReward(name, part)  # type: ignore[arg-type]


def user_terms(reward: UserReward, inputs: RewardInputs) -> dict[str, Tensor]:
    """The terms [N] that a user's reward pays, by the names of RewardTerms, or all as `own`.

    Each is a copy, as the user's code may keep what it gives. Raises UserError where it has written
    into the inputs, which are the state of the envs.
    """
    before = _versions(inputs)
    result = reward.function(inputs)
    if _versions(inputs) != before:
        problem = "changes its inputs in place: take x.clone() first"
        raise UserError(f"{REWARD_MODE}: the reward {reward.name} {problem}")
    parts = result if isinstance(result, Mapping) else {USER_TERM: result}
    return {name: part.to(STATE_FLOAT, copy=True) for name, part in parts.items()}


def _versions(inputs: RewardInputs) -> list[int]:
    """How often each input was written to; unknown where kernels are compiled."""
    return [] if torch.compiler.is_compiling() else [part._version for part in inputs.values()]


def changed_inputs(given: RewardInputs, inputs: RewardInputs) -> list[str]:
    """Messages on what a reward has written into a copy `given` of its `inputs`."""
    records = list(given.values()), list(inputs.values())
    found, wanted = move_records(records, torch.device("cpu"))
    parts = zip(given.keys(), records[0], found, wanted, strict=True)
    return [
        f"it changes its input {name} in place"
        for name, part, *values in parts
        if part._version or not torch.equal(*values)
    ]


def reward_findings(part: registry.Part, inputs: RewardInputs) -> list[str]:
    """Messages on why `part` is no reward; inputs: of N envs, on the run's device."""
    if registry.num_required(part) != 1:
        return ["it is not called with the inputs alone"]
    findings = list[str]()
    with registry.collect_faults(findings):
        given = inputs.clone()
        result = part(given)
        findings += changed_inputs(given, inputs)
        parts = result if isinstance(result, Mapping) else {USER_TERM: result}
        unknown = ", ".join(str(name) for name in parts if name not in (*TERM_NAMES, USER_TERM))
        if unknown:
            return [f"it gives the terms {unknown}, which RewardTerms lacks"]
        for name, value in parts.items():
            what = "the reward" if name == USER_TERM else f"its term {name}"
            findings += tensor_findings(
                what, value, inputs.op.shape, dtype=None, device=inputs.op.device
            )
    return findings


def sample_inputs(
    num_envs: int, num_slots: int, max_steps: int, device: torch.device, seed: int = 0
) -> RewardInputs:
    """Random but consistent inputs of N envs; the last env is at its last env-step."""
    slots = torch.empty(num_envs, num_slots)
    turn = count(1)

    def share(like: Tensor) -> Tensor:
        """float64 in [0, 1) in the shape of `like`, a function of the seed and of the turn."""
        keys = streams.stream_keys(seed, streams.REWARD_PROBE, (next(turn),), envs=torch.tensor(0))
        return streams.uniform(keys, torch.arange(like.numel()), STATE_FLOAT).view(like.shape)

    def whole(like: Tensor, high: int) -> Tensor:
        return (share(like) * high).to(torch.int64)

    stage = torch.tensor(STAGES)[whole(slots, len(STAGES))]
    last = torch.tensor([num_envs - 1])
    fields = {
        "has_seed": stage_in(stage, LIVE_STAGES),
        "target": torch.arange(num_slots) == whole(slots[:, :1], num_slots),
        "stage": stage,
        "previous_stage": torch.tensor(STAGES)[whole(slots, len(STAGES))],
        "op": whole(slots[:, 0], len(OP_NAMES)),
        "step": 1 + whole(slots[:, 0], max_steps).index_fill(0, last, max_steps - 1),
        "max_steps": torch.full((num_envs,), max_steps),
    }
    per_env = list(RewardInputs.__annotations__).index("op")
    for place, name in enumerate(RewardInputs.__annotations__):
        if name not in fields:
            like = slots if place < per_env else slots[:, 0]
            fields[name] = _field(name, share(like), max_steps)
    for name, known in KNOWN.items():
        fields[name] = torch.where(fields[known], fields[name], 0.0)
    return RewardInputs.from_dict(move_leaves(fields, device), batch_size=[num_envs])


def _field(name: str, share: Tensor, max_steps: int) -> Tensor:
    """Values of the field of RewardInputs of this name, from random numbers in [0, 1)."""
    if name.endswith("_known") or name == "drip_live":
        return share < 0.7
    if name.endswith("_age"):
        return (share * max_steps).to(torch.int64)
    if name.startswith("num_"):
        return (share * share.shape[-1]).to(torch.int64)
    if name in PERCENT:
        return 100 * share
    if name.endswith(("_params", "_flop")):
        return 1 + MAX_PARAMETERS * share
    return 5 * share if name in POSITIVE else 10 * share - 5
