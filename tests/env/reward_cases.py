"""Builders for the reward tests: inputs of a few slots from plain numbers, and random but
consistent env states.
"""

import torch
from env_records import empty_state
from tiny_world import CPU

from esper_soa.config.env import RewardConfig
from esper_soa.env.reward_records import RewardInputs, RewardSettings
from esper_soa.env.user_reward import sample_inputs
from esper_soa.state import Action, Attribution, EnvState, ParameterCounts
from esper_soa.vocabulary import HEAD_NAMES, Blend, Op, Stage

SAMPLE = dict(sample_inputs(1, 1, 2, CPU).items())  # of the right shapes and dtypes


def make_inputs(num_slots: int = 1, **given: float | list[float]) -> RewardInputs:
    """One env: per-slot fields as lists of S (or one for all), per-env fields as numbers, or 0.

    The first slot is the target; a number that is given is also known.
    """
    values = {"host_params": 100_000, "max_steps": 150, "step": 1, "drip_left": torch.inf, **given}
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
    """Host of 1000 parameters; seed of slot s and blueprint b has 100 (s + 1) + b, a gate 7."""
    slot = torch.arange(num_slots).unsqueeze(1)
    blueprint = torch.arange(13)
    counts = ParameterCounts(
        1000, (100.0 * (slot + 1) + blueprint).double(), torch.full((num_slots,), 7.0).double()
    )
    return RewardSettings(RewardConfig(**config), counts, max_steps)


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


def random_play(num_envs: int, max_steps: int, seed: int) -> tuple[EnvState, Attribution, Action]:
    """Random env states of 3 slots, attributions, actions; a third at their last env-step."""
    rng = torch.Generator().manual_seed(seed)
    shape = (num_envs, 3)
    state = empty_state(num_envs, 3, max_steps)

    def codes(choices: list[int], *size: int) -> torch.Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), size, generator=rng)]

    def numbers(scale: float, *size: int) -> torch.Tensor:
        return scale * torch.randn(size, generator=rng, dtype=torch.float64)

    stages = [
        Stage.GERMINATED,
        Stage.TRAINING,
        Stage.BLENDING,
        Stage.HOLDING,
        Stage.FOSSILIZED,
        Stage.EMBARGOED,
        Stage.EMPTY,
        Stage.PRUNED,
    ]
    stage = codes(stages, *shape)
    slots = state.slots.replace(
        stage=stage,
        stage_age=codes(list(range(8)), *shape),
        previous_stage=codes(stages, *shape),
        previous_stage_age=codes(list(range(8)), *shape),
        seed_age=codes(list(range(1, 30)), *shape),
        blueprint=codes([1, 2, 3], *shape),
        blend=codes([Blend.ADD, Blend.GATE], *shape),
        alpha=numbers(1.0, *shape).clamp(0, 1),
        accuracy_current=50 + numbers(3.0, *shape),
        accuracy_stage_start=50 + numbers(3.0, *shape),
        accuracy_germination=50 + numbers(3.0, *shape),
        germination_known=codes([0, 1], *shape).bool(),
        escrow=numbers(1.0, *shape).clamp(min=0),
        drip_live=(stage == Stage.FOSSILIZED) & codes([0, 1], *shape).bool(),
        drip_scale=numbers(0.1, *shape).abs(),
        drip_total=numbers(0.1, *shape).abs(),
        rent_alpha=numbers(1.0, *shape).clamp(0, 1),
        rent_params=100 * numbers(1.0, *shape).clamp(0, 1),
    )
    signals = state.signals.replace(
        step=codes([2, 3, max_steps], num_envs),
        val_accuracy=50 + numbers(3.0, num_envs),
        accuracy_delta=numbers(1.0, num_envs),
        val_loss=1 + numbers(1.0, num_envs).abs(),
        loss_delta=numbers(0.05, num_envs),
        accuracy_history=50 + numbers(3.0, num_envs, 10),
    )
    totals = state.totals.replace(
        fossilized=codes([0, 1, 2], num_envs),
        contributing=codes([0, 1], num_envs),
        pending_penalty=numbers(0.1, num_envs),
        pending_hindsight=numbers(0.1, num_envs).abs(),
    )
    measured = slots.running & codes([0, 1, 1], *shape).bool()
    attribution = make_attribution(
        numbers(3.0, *shape),
        measured,
        numbers(3.0, num_envs),
        numbers(1.0, num_envs, 3, 3).clamp(min=0),
    )
    action = make_action(codes([0, 1, 2], num_envs), codes(list(range(Op.ADVANCE + 1)), num_envs))
    return state.replace(slots=slots, signals=signals, totals=totals), attribution, action
