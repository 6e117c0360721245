"""The reward of an env-step: inputs, terms of the mode, pending payments, hindsight credit.

`reward` is called with what was measured, before the action takes effect, `settle_fossils` after.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor

from esper_soa.config.env import ENV_NUMBERS, EPISODE_LENGTH, PBRS_GAMMA, RewardConfig
from esper_soa.config.ranges import NO_SETTINGS, EnvSettings
from esper_soa.env.env_settings import at_least, config_of_envs, known_zero
from esper_soa.env.lifecycle import target_slot
from esper_soa.env.parameters import fossilized_params, occupied_params, total_params
from esper_soa.env.reward_modes import RewardTerms, add_terms, score
from esper_soa.env.reward_records import RewardInputs, RewardSettings, SlotReadings
from esper_soa.env.reward_terms import MIN_CONTRIBUTION, flop_rent, size_rent, slot_op
from esper_soa.env.signals import stable_accuracy
from esper_soa.state import (
    STATE_FLOAT,
    Action,
    ActionOutcome,
    Attribution,
    EnvState,
    Slots,
    Totals,
    select,
    stage_in,
)
from esper_soa.vocabulary import Op, Stage

RENT_STAGES = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
UNPROVEN_STAGES = (Stage.GERMINATED, Stage.TRAINING)
ACTIVE_STAGES = (*UNPROVEN_STAGES, Stage.BLENDING, Stage.HOLDING, Stage.EMBARGOED, Stage.RESETTING)
HINDSIGHT_WEIGHT = 0.1
HINDSIGHT_CAP = 0.2  # per fossilization
HINDSIGHT_SLOPE = 0.1
# what the reward reads of slots as it is
AGES = ("stage", "stage_age", "previous_stage", "previous_stage_age", "seed_age")
SAME = (*AGES, "germination_known", "escrow", "drip_live", "drip_scale")


def reward(
    state: EnvState,
    attribution: Attribution,
    action: Action,
    op: Tensor,
    settings: RewardSettings,
    mode: Tensor | None = None,
) -> tuple[RewardTerms, EnvState]:
    """Terms of this env-step's reward [N], and the state with what rewards keep in it.

    op: int64 [N], the effective op: WAIT where the chosen one was not applicable. The caller
    keeps the old state of an env that is about to be rolled back. A user's reward is paid as it is,
    beside it only the penalty for seeds that a rollback has removed. Where modes differ by env,
    every env is paid as it would be if all envs had its mode.

    mode: float64 [N], the place of each env's mode in settings.by_mode; None where all have one.
    """
    if mode is None:
        return _pay(state, attribution, action, op=op, settings=settings)
    terms, paid = _pay(state, attribution, action, op=op, settings=settings.by_mode[0])
    for place, part in enumerate(settings.by_mode[1:], 1):
        mode_terms, mode_paid = _pay(state, attribution, action, op=op, settings=part)
        terms = select(mode == place, mode_terms, terms)
        paid = select(mode == place, mode_paid, paid)
    return terms, paid


def _pay(
    state: EnvState, attribution: Attribution, action: Action, op: Tensor, settings: RewardSettings
) -> tuple[RewardTerms, EnvState]:
    inputs = reward_inputs(state, attribution, action, op=op, settings=settings)
    terms, slot_readings = score(inputs, settings.config, settings.user_reward)
    zeros = torch.zeros_like(terms.total)
    due = state.totals
    if settings.user_reward is not None:
        due = due.replace(pending_hindsight=zeros)
    terms = adjust(terms, inputs, slot_readings, due=due, cfg=settings.config)
    slots = _next_slots(state.slots, inputs, slot_readings, settings=settings)
    total = state.totals.reward + terms.total
    paid = state.totals.replace(reward=total, pending_penalty=zeros, pending_hindsight=zeros)
    return terms, state.replace(slots=slots, totals=paid)


def settings_of_envs(settings: RewardSettings, values: Mapping[str, Tensor]) -> RewardSettings:
    """The settings with numbers float64 [N] where they differ by env; values: by dotted name."""
    most = settings.max_steps
    if EPISODE_LENGTH in values:
        most = episode_lengths(values[EPISODE_LENGTH], most)
    return settings._replace(
        config=config_of_envs(settings.config, values),
        max_steps=most,
        by_mode=tuple(settings_of_envs(part, values) for part in settings.by_mode),
    )


def episode_lengths(length: Tensor, most: int | Tensor) -> Tensor:
    """Env-steps of episodes, int64 [N], where the setting early_stop.length is `length` [N]."""
    length = length.long()
    return torch.where(length > 0, length.clamp(max=most), most)


def reward_inputs(
    state: EnvState, attribution: Attribution, action: Action, op: Tensor, settings: RewardSettings
) -> RewardInputs:
    """Reward inputs from the env state and this env-step's attribution."""
    slots = state.slots
    signals = state.signals
    effective, shock = rent_and_shock(slots, settings)
    germinated = torch.where(slots.germination_known, slots.accuracy_germination, 0.0)
    return RewardInputs(
        **{name: slots.get(name) for name in SAME},  # type: ignore[arg-type]
        has_seed=slots.live,
        target=target_slot(action, slots.stage.shape[1]),
        improvement=slots.improvement,
        improvement_known=slots.live,
        contribution=attribution.contribution,
        contribution_known=attribution.measured,
        interaction_sum=attribution.interaction_sum,
        accuracy_germination=germinated,
        drip_left=slots.drip_total - slots.drip_paid,
        drip_contribution=attribution.contribution,
        op=op,
        val_accuracy=signals.val_accuracy,
        stable_accuracy=stable_accuracy(signals, settings.config.escrow_stable_window),
        accuracy_delta=signals.accuracy_delta,
        val_loss=signals.val_loss,
        loss_delta=-signals.loss_delta,
        total=attribution.total,
        total_known=attribution.total_known,
        committed_accuracy=attribution.committed,
        effective_params=effective,
        alpha_delta_sq=shock,
        total_params=total_params(slots, settings.counts),
        host_params=torch.zeros_like(signals.val_accuracy) + settings.counts.host,
        fossilized_params=fossilized_params(slots, settings.counts),
        num_active=stage_in(slots.stage, ACTIVE_STAGES).sum(1),
        num_fossilized=state.totals.fossilized,
        num_contributing=state.totals.contributing,
        step=signals.step,
        max_steps=torch.zeros_like(signals.step) + settings.max_steps,
        train_flop=state.totals.train_flop,
        host_flop=signals.step.to(STATE_FLOAT) * at_least(settings.flop.host, 1.0),
        batch_size=state.batch_size,
    )


def rent_and_shock(slots: Slots, settings: RewardSettings) -> tuple[Tensor, Tensor]:
    """Parameters that pay rent, from BLENDING on a base for the slot and those of the seed weighted
    with alpha; and squared alpha moves since the last reading by relative size; both [N].
    """
    cfg = settings.config
    host = settings.counts.host
    params = occupied_params(slots, settings.counts)
    pays_rent = stage_in(slots.stage, RENT_STAGES)
    effective = torch.where(pays_rent, cfg.base_slot_rent_ratio * host + slots.alpha * params, 0.0)
    weight = slots.rent_params / at_least(host, cfg.rent_host_params_floor)
    return effective.sum(1), ((slots.alpha - slots.rent_alpha).square() * weight).sum(1)


def adjust(
    terms: RewardTerms, inputs: RewardInputs, readings: SlotReadings, due: Totals, cfg: RewardConfig
) -> RewardTerms:
    """Add what does not depend on the mode: payments at the last env-step, those pending in `due`.

    A seed that is fossilized by the last action keeps its escrow.
    """
    last = inputs.step == inputs.max_steps
    parts = {}
    if cfg.mode == "escrow":
        fossilizes = (slot_op(inputs) == Op.FOSSILIZE) & (inputs.stage == Stage.HOLDING)
        loses_escrow = inputs.has_seed & (inputs.stage != Stage.FOSSILIZED) & ~fossilizes
        escrow = torch.where(loses_escrow, readings.escrow_next, 0.0).sum(1)
        parts["escrow_forfeit"] = torch.where(last, -escrow, 0.0)
    if cfg.mode in ("shaped", "escrow") and not cfg.disable_pbrs:
        unproven = inputs.has_seed & stage_in(inputs.stage, UNPROVEN_STAGES)
        refund = cfg.pbrs_weight * germination_refund(inputs.seed_age)
        parts["clawback"] = torch.where(last, -torch.where(unproven, refund, 0.0).sum(1), 0.0)
    parts |= {"auto_prune_penalty": due.pending_penalty, "hindsight_credit": due.pending_hindsight}
    return add_terms(terms, parts)


def germination_refund(seed_age: Tensor) -> Tensor:
    """Worth of the shaping of a germination `seed_age` env-steps later, at weight 1."""
    return torch.pow(PBRS_GAMMA, 1 - seed_age.to(STATE_FLOAT))


def _next_slots(
    slots: Slots, inputs: RewardInputs, slot_readings: SlotReadings, settings: RewardSettings
) -> Slots:
    """The slots with escrow, drip and rent readings; a new pool waits for `settle_fossils`."""
    slots = slots.replace(
        escrow=slot_readings.escrow_next,
        rent_alpha=slots.alpha,
        rent_params=occupied_params(slots, settings.counts),
    )
    if known_zero(settings.config.drip_fraction):
        return slots
    opened = slot_op(inputs) == Op.FOSSILIZE
    return slots.replace(
        drip_scale=torch.where(opened, slot_readings.drip_scale, slots.drip_scale),
        drip_total=torch.where(opened, slot_readings.drip_total, slots.drip_total),
        drip_paid=torch.where(opened, 0.0, slots.drip_paid + slot_readings.drip_payment),
    )


def settle_fossils(state: EnvState, action: Action, outcome: ActionOutcome) -> EnvState:
    """Count fossils that this env-step's actions made, credit scaffolds, open their drip pools.

    state: after the actions were applied. The credit is paid with the next reward. A fossil counts
    as contributing if accuracy rose by at least 1 point since its seed's first record.
    """
    slots = state.slots
    totals = state.totals
    fresh = outcome.fossilized.unsqueeze(1) & target_slot(action, slots.stage.shape[1])
    improvement = torch.where(fresh, slots.total_improvement, 0.0).sum(1)
    credit = hindsight_credit(state.boosts, fresh, improvement, step=state.signals.step)
    totals = totals.replace(
        fossilized=totals.fossilized + outcome.fossilized,
        contributing=totals.contributing + (outcome.fossilized & (improvement >= MIN_CONTRIBUTION)),
        pending_hindsight=credit,
    )
    drip_live = slots.drip_live | (fresh & (slots.drip_total > 0))
    return state.replace(slots=slots.replace(drip_live=drip_live), totals=totals)


def pairs(num_slots: int) -> list[tuple[int, int]]:
    """The P = S (S - 1) / 2 pairs of slots, in the order of the boosts."""
    return [*combinations(range(num_slots), 2)]


def record_boosts(state: EnvState, attribution: Attribution) -> EnvState:
    """Write this env-step's positive pair interactions."""
    num_slots = attribution.pair_boost.shape[2]
    if num_slots < 2:
        return state
    boost = torch.stack([attribution.pair_boost[:, low, high] for low, high in pairs(num_slots)], 1)
    boost = boost.to(state.boosts.dtype).unsqueeze(2)
    place = (state.signals.step - 1).view(-1, 1, 1)
    return state.replace(boosts=state.boosts.scatter(2, place.expand_as(boost), boost))


def hindsight_credit(boosts: Tensor, fossil: Tensor, improvement: Tensor, step: Tensor) -> Tensor:
    """Credit float64 [N] for boosts to the seeds `fossil` (bool [N, S]), fossilized at `step` [N].

    A positive boost at env-step t to a seed that went on to gain `improvement` [N] points, if that
    is positive, counts HINDSIGHT_WEIGHT * tanh(HINDSIGHT_SLOPE * boost * improvement) * PBRS_GAMMA
    ** (step - t); the sum is capped. Pairs without the fossil are masked: that is one pass.
    """
    num_slots = fossil.shape[1]
    if num_slots < 2:
        return torch.zeros_like(improvement)
    is_helped = torch.stack([fossil[:, low] | fossil[:, high] for low, high in pairs(num_slots)], 1)
    gain = (HINDSIGHT_SLOPE * improvement.clamp(min=0)).unsqueeze(1)
    scale = torch.where(is_helped, gain, 0.0).to(boosts.dtype).unsqueeze(2)
    # a running product is computed once; a power would be fused into the pass over the boosts
    growth = torch.full(boosts.shape[2:], 1 / PBRS_GAMMA, dtype=STATE_FLOAT, device=boosts.device)
    weight = (HINDSIGHT_WEIGHT * growth.cumprod(0)).to(boosts.dtype)
    # tanh(x) by the logistic function: a third of the time, exact at 0, else off by rounding.
    credit = ((2 * torch.sigmoid(boosts * (2 * scale)) - 1) * weight).sum((1, 2)).to(STATE_FLOAT)
    return (credit * torch.pow(PBRS_GAMMA, step.to(STATE_FLOAT))).clamp(max=HINDSIGHT_CAP)


def final_rents(
    parameters: Sequence[float],
    host: float,
    cfg: RewardConfig,
    settings: EnvSettings = NO_SETTINGS,
    flop: Tensor | None = None,
) -> list[float]:
    """Rent of grown hosts in percent points: what mode `net` takes at the end.

    parameters: final sizes. settings: those that differ by env. flop: of training, over those of
    the host alone; None: without price.
    """
    sizes = torch.tensor(parameters, dtype=STATE_FLOAT)
    prices = [name for name in settings if name in ENV_NUMBERS and name.startswith(cfg.path)]
    values = {name: torch.tensor(settings[name], dtype=STATE_FLOAT) for name in prices}
    cfg = config_of_envs(cfg, values)
    rents = size_rent(sizes, torch.full_like(sizes, host), cfg)
    if flop is not None:
        rents = rents + flop_rent(flop, torch.ones_like(flop), cfg)
    return rents.tolist()
