"""The terms of a reward, the modes that pay them (MODES), and which slots are scored.

Given RewardInputs and the settings, returns the named terms and the readings behind them.
Every mode is the reference's reward function of that name, per scored slot, but ours, `net`.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from tensordict import TensorClass
from torch import Tensor

from esper_soa.config.env import REWARD_TERMS, RewardConfig
from esper_soa.env import reward_terms as term
from esper_soa.env.env_settings import amount
from esper_soa.env.reward_records import RewardInputs, SlotReadings, UserReward
from esper_soa.env.reward_terms import column
from esper_soa.env.user_reward import user_terms
from esper_soa.state import STATE_FLOAT
from esper_soa.vocabulary import Op, Stage

MAX_LOSS_CHANGE = 10.0  # nats that count in NET, as the loss of a host that breaks down
SIMPLIFIED_ACTION_COST = 0.01
SIMPLIFIED_ACCURACY_WEIGHT = 3.0  # at 100 percent
SIMPLIFIED_FOSSIL_BONUS = 2.0  # per contributing fossil
Parts: TypeAlias = dict[str, Tensor]  # terms [N] by name
Paid: TypeAlias = tuple[Parts, Parts]  # terms, and those of SlotReadings that the mode works out
# percent points; more than this without a total gain is a seed that holds its host to ransom
RANSOM_CONTRIBUTION = 0.1


class RewardTerms(TensorClass["tensor_only", "frozen"]):
    """The parts of the reward [N], float64 and signed: `total` is the sum of all the others."""

    attribution: Tensor  # what seeds earned by their contributions; escrow: moves of the escrow
    ratio_penalty: Tensor  # contribution that the total does not support
    blending_warning: Tensor
    holding_warning: Tensor
    pbrs_bonus: Tensor  # shaping over stages
    synergy_bonus: Tensor
    compute_rent: Tensor
    flop_rent: Tensor  # net mode: what training cost
    alpha_shock: Tensor
    occupancy_rent: Tensor
    fossilized_rent: Tensor
    action_shaping: Tensor  # costs and bonuses of the op itself
    fossilize_bonus: Tensor  # basic modes: paid when a seed is fossilized
    drip: Tensor  # basic modes: paid later, from the pools of fossils
    terminal_bonus: Tensor
    loss_change: Tensor  # loss mode
    accuracy_change: Tensor  # net mode, percent points
    own: Tensor  # what a reward of a user's pays; records call it by the name of that reward
    escrow_forfeit: Tensor
    clawback: Tensor  # germination bonuses of seeds that came to nothing
    auto_prune_penalty: Tensor
    hindsight_credit: Tensor
    rollback_penalty: Tensor  # the only term of an env-step at which the host was rolled back
    total: Tensor


def add_terms(terms: RewardTerms, parts: Mapping[str, Tensor]) -> RewardTerms:
    """`terms` with `parts` [N] by name in place of what stood there, and their sum in the total.

    Raises ValueError for a name that RewardTerms lacks.
    """
    unknown = ", ".join(sorted(set(parts).difference(REWARD_TERMS)))
    if unknown:
        raise ValueError(f"RewardTerms has no {unknown}: the total would pay what no table shows")
    return terms.replace(**parts, total=sum(parts.values(), start=terms.total))  # type: ignore[no-any-return]


def no_terms(like: Tensor) -> RewardTerms:
    """Nothing is paid: every term and the total are 0, in the shape [N] of `like`."""
    zeros = dict.fromkeys((*REWARD_TERMS, "total"), torch.zeros_like(like))
    return RewardTerms.from_dict(zeros, batch_size=like.shape)


def score(
    inputs: RewardInputs, cfg: RewardConfig, user_reward: UserReward | None = None
) -> tuple[RewardTerms, SlotReadings]:
    """Terms [N] of mode `cfg.mode`, without what `reward.py` adds at the end; readings [N, S].

    user_reward: the mode where it is a user's; settings of the package's modes do not touch it.
    With `cfg.scored_slots` "all" every live seed earns its per-seed terms, as under WAIT where it
    is not the target; with "target" the target alone does. Terms of the op are always the target's.
    """
    if user_reward is None:
        parts, readings = MODES[cfg.mode](inputs, cfg)
    else:
        parts = user_terms(user_reward, inputs)
        readings = {}
    zero = torch.zeros_like(inputs.contribution)
    unread = SlotReadings(inputs.escrow, zero, zero, drip_payment=zero)
    return add_terms(no_terms(inputs.val_accuracy), parts), unread._replace(**readings)


def is_scored(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """bool [N, S]: slots whose per-seed terms are paid."""
    return inputs.target if cfg.scored_slots == "target" else inputs.target | inputs.has_seed


def sum_scored(per_slot: Tensor, inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Sum [N] of a per-seed term [N, S] over the scored slots."""
    return torch.where(is_scored(inputs, cfg), per_slot, 0.0).sum(1)


def _shaped(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """SHAPED: seeds earn their contribution of this env-step, where unmeasured their progress."""
    contribution = inputs.contribution
    fossil = term.is_fossil(inputs)
    discount = term.attribution_discount(inputs, cfg)
    progress = column(inputs.val_accuracy) - inputs.accuracy_germination
    gain = term.credible_gain(inputs, progress, term.joint_gain(progress, contribution, cfg))
    gain = cfg.contribution_weight * gain * discount
    useful = inputs.contribution_known & (contribution >= 0)
    timing = term.timing_discount(column(inputs.step) - inputs.seed_age, cfg)
    timing = torch.where(useful & inputs.has_seed, timing, 1.0)
    measured = torch.where(contribution < 0, cfg.contribution_weight * contribution, gain * timing)
    proxy = inputs.has_seed & (inputs.stage >= Stage.BLENDING) & (inputs.improvement > 0)
    weight = cfg.contribution_weight * cfg.proxy_confidence_factor
    attribution = torch.where(proxy, weight * inputs.improvement, 0.0)
    attribution = torch.where(inputs.contribution_known, measured, attribution)
    attribution = torch.where(_is_refused(inputs) | fossil, 0.0, attribution)
    attribution = torch.where(term.slot_op(inputs) == Op.PRUNE, -attribution, attribution)
    penalty = torch.where(fossil, 0.0, term.ratio_penalty(inputs, discount, cfg))
    return _contribution(inputs, cfg, attribution, penalty=penalty, discount=discount), {}


def _escrow(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """ESCROW: attribution as moves of a credit that follows what the stable accuracy confirms."""
    contribution = inputs.contribution
    known = inputs.contribution_known
    fossil = term.is_fossil(inputs)
    progress = column(inputs.stable_accuracy) - inputs.accuracy_germination
    undiscounted = torch.ones_like(contribution)
    penalty = term.ratio_penalty(inputs, undiscounted, cfg)
    gain = term.credible_gain(inputs, progress, torch.sqrt((progress * contribution).clamp(min=0)))
    useful = known & (contribution >= 0)
    harmful = known & (contribution < 0)
    goal = torch.where(useful, (cfg.contribution_weight * gain + penalty).clamp(min=0.0), 0.0)
    move = goal - inputs.escrow
    most = cfg.escrow_delta_clip
    move = torch.where(useful & (most > 0), move.clamp(-most, most), move)
    move = torch.where(useful, move, torch.where(harmful, -inputs.escrow, 0.0))
    pruned = term.slot_op(inputs) == Op.PRUNE
    move = torch.where(pruned, -inputs.escrow, torch.where(fossil, 0.0, move))
    weighted = cfg.contribution_weight * contribution
    weighted = torch.where(harmful & ~pruned & ~fossil, weighted, 0.0)
    credit = torch.where(is_scored(inputs, cfg), inputs.escrow + move, inputs.escrow)
    attribution = torch.where(_is_refused(inputs), 0.0, move + weighted)
    zeros = torch.zeros_like(attribution)
    return _contribution(inputs, cfg, attribution, penalty=zeros, discount=undiscounted), {
        "escrow_next": credit
    }


def _is_refused(inputs: RewardInputs) -> Tensor:
    """bool [N, S]: a seed earns nothing if it is fossilized while all seeds together do harm."""
    harmful = column(inputs.total < 0)
    return (term.slot_op(inputs) == Op.FOSSILIZE) & inputs.has_seed & harmful


def _contribution(
    inputs: RewardInputs, cfg: RewardConfig, attribution: Tensor, penalty: Tensor, discount: Tensor
) -> Parts:
    """Terms shared by SHAPED and ESCROW: shaping, rents, warnings; all [N, S]."""
    bounded = attribution + penalty
    per_seed = {
        "attribution": attribution,
        "ratio_penalty": penalty,
        "blending_warning": term.blending_warning(inputs),
        "holding_warning": term.holding_warning(inputs, bounded),
        "synergy_bonus": term.synergy_bonus(inputs, discount, bounded),
    }
    if not cfg.disable_pbrs:
        per_seed["pbrs_bonus"] = term.seed_shaping(inputs, cfg)
    parts = {name: sum_scored(value, inputs, cfg) for name, value in per_seed.items()}
    fossils = inputs.num_fossilized.to(STATE_FLOAT)
    parts |= {
        "compute_rent": term.compute_rent(inputs, cfg),
        "alpha_shock": term.alpha_shock(inputs, cfg),
        "occupancy_rent": term.occupancy_rent(inputs, cfg),
        "fossilized_rent": -amount(cfg.fossilized_maintenance_cost) * fossils,
        "action_shaping": term.action_shaping(inputs, cfg),
    }
    if not cfg.disable_terminal_reward:
        final = amount(cfg.terminal_accuracy_weight) * inputs.val_accuracy
        parts["terminal_bonus"] = _at_end(inputs, final)
    return parts


def _basic(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """BASIC and BASIC_PLUS: shaping, linear rent, a bonus for good fossils, partly as drip."""
    op = term.slot_op(inputs)
    bonus, pool = _fossilize_bonus(inputs, cfg)
    rent = amount(cfg.param_penalty_weight) * inputs.effective_params / cfg.param_budget
    # every fossil's pool pays [N, D], capped, never more than it holds
    raw = inputs.drip_scale * inputs.drip_contribution
    payment = raw.clamp(-cfg.negative_drip_ratio * cfg.max_drip_per_step, cfg.max_drip_per_step)
    payment = torch.where(inputs.drip_live, torch.minimum(payment, inputs.drip_left), 0.0)
    gain = cfg.basic_accuracy_delta_weight * (inputs.accuracy_delta / 100)
    parts = {
        "compute_rent": -rent,
        "fossilize_bonus": torch.where(op == Op.FOSSILIZE, bonus, 0.0).sum(1),
        "drip": payment.sum(1),
        "terminal_bonus": _at_end(inputs, gain),
    }
    if not cfg.disable_pbrs:
        pruned = term.forfeited_potential(inputs, cfg)
        shaping = torch.where(op == Op.PRUNE, pruned, term.seed_shaping(inputs, cfg))
        parts["pbrs_bonus"] = sum_scored(shaping, inputs, cfg)
    pool = torch.where(op == Op.FOSSILIZE, pool, 0.0)
    scale = pool / column((inputs.max_steps - inputs.step).clamp(min=cfg.min_drip_steps))
    return parts, {"drip_total": pool, "drip_scale": scale, "drip_payment": payment}


def _fossilize_bonus(inputs: RewardInputs, cfg: RewardConfig) -> tuple[Tensor, Tensor]:
    """Bonus for fossilizing each slot's seed, and the drip pool it leaves, both [N, S]."""
    contribution = inputs.contribution
    total = column(inputs.total).expand_as(contribution)
    joint = term.joint_gain(total, contribution, cfg)
    full = cfg.basic_fossilize_base_bonus + cfg.basic_contribution_scale * joint
    full = full * term.holding_share(inputs)
    holding = inputs.has_seed & (inputs.stage == Stage.HOLDING)
    is_proven = holding & (total > 0) & (contribution >= term.MIN_CONTRIBUTION)
    ransom = (total <= 0) & (contribution > RANSOM_CONTRIBUTION)
    invalid = torch.zeros_like(contribution) + cfg.basic_fossilize_invalid_penalty
    failed = torch.where(ransom | ~holding, invalid, cfg.basic_fossilize_noncontributing_penalty)
    bonus = torch.where(is_proven, full * (1 - cfg.drip_fraction), failed)
    pool = torch.where(is_proven, full * cfg.drip_fraction, 0.0)
    return torch.where(inputs.has_seed, bonus, 0.0), pool


def _sparse(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """SPARSE: at the end, the accuracy of the fossils alone, less their parameters."""
    cost = amount(cfg.param_penalty_weight) * inputs.fossilized_params / cfg.param_budget
    outcome = (inputs.committed_accuracy / 100 - cost).clamp(-1, 1)
    return {"terminal_bonus": _at_end(inputs, cfg.sparse_reward_scale * outcome)}, {}


def _minimal(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """MINIMAL: SPARSE, and a penalty for pruning a young seed."""
    is_young = inputs.has_seed & (inputs.seed_age < cfg.early_prune_threshold)
    prunes_early = (is_young & (term.slot_op(inputs) == Op.PRUNE)).any(1)
    nothing = torch.zeros_like(inputs.val_accuracy)
    penalty = torch.where(prunes_early, cfg.early_prune_penalty, nothing)
    return {**_sparse(inputs, cfg)[0], "action_shaping": penalty}, {}


def _simplified(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """SIMPLIFIED: shaping, a small cost of acting, final accuracy, a bonus per good fossil."""
    zero = torch.zeros_like(inputs.val_accuracy)
    parts = {"action_shaping": torch.where(inputs.op == Op.WAIT, zero, -SIMPLIFIED_ACTION_COST)}
    if not cfg.disable_pbrs:
        parts["pbrs_bonus"] = sum_scored(term.seed_shaping(inputs, cfg), inputs, cfg)
    if not cfg.disable_terminal_reward:
        final = SIMPLIFIED_ACCURACY_WEIGHT * (inputs.val_accuracy / 100)
        final = final + SIMPLIFIED_FOSSIL_BONUS * inputs.num_contributing
        parts["terminal_bonus"] = _at_end(inputs, final)
    return parts, {}


def _loss(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """LOSS: the fall of the validation loss, less rent, with stage shaping and the final loss.

    No rent is due while a scored seed is in its grace period.
    """
    loss = cfg.loss
    change = inputs.loss_delta / loss.typical_loss_delta_std
    change = change.clamp(-loss.max_loss_delta, loss.max_loss_delta)
    change = torch.where(change > 0, change * loss.regression_penalty_scale, change)
    growth = (inputs.total_params - inputs.host_params) / inputs.host_params.clamp(min=1)
    rent = term.growth_rent(growth, amount(loss.compute_rent_weight), loss.max_rent_penalty)
    grace = (is_scored(inputs, cfg) & inputs.has_seed & (inputs.seed_age < loss.grace_steps)).any(1)
    shaping = term.shaping(*map(term.stage_potential, (inputs.previous_stage, inputs.stage)))
    shaping = torch.where(inputs.has_seed, loss.stage_potential_weight * shaping, 0.0)
    progress = (loss.baseline_loss - inputs.val_loss) / (loss.baseline_loss - loss.target_loss)
    return {
        "loss_change": -loss.loss_delta_weight * change,
        "compute_rent": torch.where((inputs.host_params > 0) & ~grace, -rent, 0.0),
        "pbrs_bonus": sum_scored(shaping, inputs, cfg),
        "terminal_bonus": _at_end(inputs, loss.terminal_loss_weight * progress.clamp(0, 1)),
    }, {}


def _net(inputs: RewardInputs, cfg: RewardConfig) -> Paid:
    """NET: every change of accuracy, in percent points, or every fall of the loss, in hundredths of
    a nat; and at the end the rents of the final size and of the training.

    Without discount an episode sums to its final accuracy minus rent, as the evaluation reports it,
    less the accuracy of the first env-step, which no action could change; so does it with losses.
    """
    rent = term.size_rent(inputs.total_params, inputs.host_params, cfg)
    by_loss = cfg.net_measure == "loss"
    fall = -100 * inputs.loss_delta.clamp(-MAX_LOSS_CHANGE, MAX_LOSS_CHANGE)
    gain = fall if by_loss else inputs.accuracy_delta
    return {
        "loss_change" if by_loss else "accuracy_change": torch.where(inputs.step > 1, gain, 0.0),
        "compute_rent": _at_end(inputs, -rent),
        "flop_rent": _at_end(inputs, -term.flop_rent(inputs.train_flop, inputs.host_flop, cfg)),
    }, {}


def _at_end(inputs: RewardInputs, bonus: Tensor) -> Tensor:
    """`bonus` [N] at the last env-step of the episode, else 0."""
    return torch.where(inputs.step == inputs.max_steps, bonus, 0.0)


MODES = {
    "shaped": _shaped,
    "escrow": _escrow,
    "basic": _basic,
    "basic_plus": _basic,
    "sparse": _sparse,
    "minimal": _minimal,
    "simplified": _simplified,
    "loss": _loss,
    "net": _net,
}
