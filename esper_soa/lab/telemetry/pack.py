"""One env-step of N envs as one table of numbers [N, C], on the device; rows.py takes it apart on
the host. Which numbers there are is said here alone. Nothing here waits for the device.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from esper_soa.env.legal import head_masks
from esper_soa.env.world import World
from esper_soa.lab.telemetry.rows import Cost, Legend, RoundRecord
from esper_soa.lab.telemetry.schema import REWARD_TERMS
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.state import STATE_FLOAT, Costs
from esper_soa.training.loop.recorder import Facts
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES

Part = Mapping[str, Callable[[Facts], Tensor]]


def _at(path: str, names: str) -> Part:
    """Readers of the fields `names` of the record at `path` in Facts."""
    return {name: attrgetter(f"{path}.{name}") for name in names.split()}


# [N] each; numbers of one table have one dtype.
ENV_CODES: Part = {
    **_at("decision.action", " ".join(HEAD_NAMES)),
    **_at("result.outcome", "effective_op"),
    **_at("observed.view.state.guard", "reason"),
    "ending": lambda facts: facts.result.state.ending.cause,
}
ENV_FLAGS: Part = {
    **_at("observed.view.state.ending", "over"),
    **_at("result.outcome", "success"),
    **_at("observed.view.state.guard", "panic"),
    **_at("observed.attribution", "total_known"),
}
ENV_NUMBERS: Part = {
    "accuracy": lambda facts: facts.observed.view.state.signals.val_accuracy,
    **_at("observed.measured", "val_loss train_loss train_accuracy"),
    "total_contribution": lambda facts: facts.observed.attribution.total,
    "committed_accuracy": lambda facts: facts.observed.attribution.committed,
}
OVER_COLUMN = len(ENV_CODES) + list(ENV_FLAGS).index("over")  # column of `pack`
# [N, S] each.
SLOT_RECORDS = "observed.view.state.slots"  # before the action
SLOT_CODES: Part = {
    **_at(SLOT_RECORDS, "stage stage_age seed_age blueprint blend"),
    "stage_after": lambda facts: facts.result.state.slots.stage,
    "blueprint_after": lambda facts: facts.result.state.slots.blueprint,
}
SLOT_FLAGS: Part = {
    **_at("observed.attribution", "measured"),
    "gradient_measured": lambda facts: facts.observed.measured.gradients.measured,
    **_at(SLOT_RECORDS, "gradient_ratio_known gradient_vanishing gradient_exploding"),
}
SLOT_NUMBERS: Part = {
    "alpha_target": lambda facts: facts.observed.view.state.ramp.target,
    "alpha_target_after": lambda facts: facts.result.state.ramp.target,
    **_at("observed.attribution", "contribution shapley shapley_error"),
    "interaction": lambda facts: facts.observed.attribution.interaction_sum,
    **_at(SLOT_RECORDS, "alpha contribution_velocity accuracy_initial accuracy_current"),
    **_at(SLOT_RECORDS, "gradient_norm gradient_ratio gradient_health escrow"),
}
ENV_PARTS: tuple[Part, ...] = (ENV_CODES, ENV_FLAGS, ENV_NUMBERS)
SLOT_PARTS: tuple[Part, ...] = (SLOT_CODES, SLOT_FLAGS, SLOT_NUMBERS)


def pack(facts: Facts, full: bool) -> Tensor:
    """float64 [N, C]: all that the tables of a level say of an env-step; full: at that level."""

    def stack(part: Part) -> Tensor:
        return torch.stack([read_field(facts) for read_field in part.values()], 1)

    parts = [
        *map(stack, ENV_PARTS),
        torch.stack([facts.result.terms.get(name) for name in (*REWARD_TERMS, "total")], 1),
        facts.decision.log_probs,
        facts.decision.value.unsqueeze(1),
        facts.observed.view.masks.op,
        (facts.observed.measured.subset >= 0).sum(1, keepdim=True),
        *map(stack, SLOT_PARTS),
    ]
    if full:  # choices with their masks, and the subsets that were validated
        legal = head_masks(facts.observed.view.masks, facts.decision.action.op)
        masks = torch.cat(list(legal.values()), 1)
        unknown = torch.full_like(masks, torch.nan, dtype=torch.float32)
        probabilities = facts.probabilities if facts.probabilities is not None else unknown
        measured = facts.observed.measured
        parts += [masks, probabilities, measured.subset, measured.accuracy]
    return torch.cat([part.flatten(1).to(STATE_FLOAT) for part in parts], 1)


def is_playing(numbers: np.ndarray) -> np.ndarray:
    """bool [..., N], of numbers [..., N, C] of `pack`: envs not over before the env-step."""
    return numbers[..., OVER_COLUMN] == 0


def ended(numbers: np.ndarray) -> np.ndarray:
    """Numbers [N, C] of `pack` of envs whose episodes are all over."""
    numbers = numbers.copy()
    numbers[:, OVER_COLUMN] = 1
    return numbers


def legend_of(world: World, learns: bool) -> Legend:
    """The legend of the tables of a world's runs; learns: whether its policy does."""
    shape = world.setup.shape
    return Legend(
        slots=tuple(spec.name for spec in shape.slots),
        blueprints=names_by_code(shape.blueprints),
        parameters=_cost(world.rules.reward.counts, 1),
        train_flop=_cost(world.flop, world.setup.train_samples),
        learns=learns,
        sampled_shapley=world.rules.shapley_orders is not None,
    )


def _cost(costs: Costs, times: int) -> Cost:
    """The cost of `times` as much."""
    seed = np.asarray(costs.seed.cpu().numpy(), np.float64)
    gate = np.asarray(costs.gate.cpu().numpy(), np.float64)
    return Cost(float(costs.host) * times, seed * times, gate * times)


def unpack(legend: Legend, number: int, steps: np.ndarray, numbers: np.ndarray) -> RoundRecord:
    """Numbers [T, N, C] of `pack` of env-steps `steps` (int [T], from 1) of round `number`."""
    sizes = dict.fromkeys([name for part in ENV_PARTS for name in part], 0)  # 0 = one, and no list
    sizes |= dict.fromkeys([*(f"reward_{name}" for name in REWARD_TERMS), "reward"], 0)
    sizes |= {"log_probs": len(HEAD_NAMES), "value": 0, "legal": len(OP_NAMES), "subsets": 0}
    sizes |= {f"slot.{name}": len(legend.slots) for part in SLOT_PARTS for name in part}
    left = numbers.shape[2] - sum(size or 1 for size in sizes.values())
    if left > 0:  # of the level `full`
        num_choices = sum(legend.choices)
        num_subsets = left // 2 - num_choices
        sizes |= {"masks": num_choices, "probabilities": num_choices}
        sizes |= {"subset": num_subsets, "subset_accuracy": num_subsets}
    places: dict[str, int | slice] = {}
    begin = 0
    for name, size in sizes.items():
        places[name] = slice(begin, begin + size) if size else begin
        begin += size or 1
    return RoundRecord(legend, number, steps, numbers=numbers, places=places)
