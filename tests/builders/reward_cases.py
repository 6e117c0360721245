"""Builders for the reward tests: inputs, actions and attributions from plain numbers."""

import torch

from esper_soa.config.env import RewardConfig
from esper_soa.env.reward_records import RewardInputs, RewardSettings
from esper_soa.env.user_reward import sample_inputs
from esper_soa.state import Action, Attribution, Costs
from esper_soa.vocabulary import HEAD_NAMES
from tests.builders.tiny_world import CPU

SAMPLE = dict(sample_inputs(1, 1, 2, CPU).items())  # of the right shapes and dtypes


def make_inputs(num_slots: int = 1, **given: float | list[float]) -> RewardInputs:
    """One env: per-slot fields as lists of S (or one for all), per-env fields as numbers, or 0.

    The first slot is the target; a number that is given is also known.
    """
    values = {"host_params": 100_000, "host_flop": 1, "max_steps": 150, "step": 1}
    values |= {"drip_left": torch.inf, **given}
    values.setdefault("target", [1.0] + [0.0] * (num_slots - 1))
    known = {
        "contribution": "contribution_known",
        "total": "total_known",
        "improvement": "improvement_known",
        "accuracy_germination": "germination_known",
        "stage": "has_seed",
    }
    for name, flag in known.items():
        values.setdefault(flag, float(name in given))
    fields = {}
    for name, sample in SAMPLE.items():
        value = torch.tensor(values.get(name, 0.0), dtype=torch.float64).to(sample.dtype)
        fields[name] = value.expand(1) if sample.ndim == 1 else value.expand(1, num_slots).clone()
    return RewardInputs(**fields, batch_size=[1])


def make_settings(max_steps: int = 6, num_slots: int = 3, **config: object) -> RewardSettings:
    """Host of 1000 parameters; seed of slot s and blueprint b has 100 (s + 1) + b, a gate 7.

    Training the host on an image takes 5000 FLOP, a seed or a gate 1000 for each of its parameters.
    """
    slot = torch.arange(num_slots).unsqueeze(1)
    blueprint = torch.arange(13)
    counts = Costs(
        1000, (100.0 * (slot + 1) + blueprint).double(), torch.full((num_slots,), 7.0).double()
    )
    flop = Costs(5000.0, 1000 * counts.seed, 1000 * counts.gate)
    return RewardSettings(RewardConfig(**config), counts, flop, max_steps)


def make_action(slot: torch.Tensor, op: torch.Tensor) -> Action:
    """An action of the given slots and ops, other heads 0."""
    heads = {name: torch.zeros_like(op) for name in HEAD_NAMES}
    return Action(**{**heads, "slot": slot, "op": op}, batch_size=op.shape)


def make_attribution(
    contribution: torch.Tensor,
    measured: torch.Tensor,
    total: torch.Tensor,
    boost: torch.Tensor | None = None,
) -> Attribution:
    """An attribution with these contributions [N, S], totals [N] and pair boosts [N, S, S]."""
    num_envs, num_slots = contribution.shape
    pair_boost = torch.zeros(num_envs, num_slots, num_slots).double() if boost is None else boost
    zero = torch.zeros_like(contribution)
    return Attribution(
        contribution=contribution,
        measured=measured,
        interaction_sum=pair_boost.sum(2),
        pair_boost=pair_boost,
        shapley=zero,
        shapley_error=zero,
        total=total,
        total_known=measured.any(1),
        committed=torch.full_like(total, 60.0),
        batch_size=[num_envs],
    )
