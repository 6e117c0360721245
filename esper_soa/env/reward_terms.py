"""The formulas of the terms of the reward, over slots [N, S] or over envs [N].

Formulas and constants are the reference's (contribution family), without branches, in float64.
"""

import torch
from torch import Tensor

from esper_soa.config.env import PBRS_GAMMA, RewardConfig
from esper_soa.env.env_settings import amount
from esper_soa.env.reward_records import RewardInputs
from esper_soa.state import STATE_FLOAT
from esper_soa.vocabulary import Op, Stage

STAGE_POTENTIALS = (  # potentials of stages, in reward units; others have 0
    (Stage.GERMINATED, 1.0),
    (Stage.TRAINING, 2.0),
    (Stage.BLENDING, 3.5),
    (Stage.HOLDING, 5.5),
    (Stage.FOSSILIZED, 6.0),
)
MIN_CONTRIBUTION = 1.0  # percent points that make a fossil worth a bonus
FULL_HOLDING_STEPS = 5  # env-steps in HOLDING that earn the whole bonus
SMALLEST_DIVISOR = 1e-8  # percent points: quotients of gains near 0 stay finite
LOWEST_EXPONENT = -700.0  # e to it is a float64 above 0, so that a discount keeps its sign
HARMLESS_DISCOUNT = 0.5  # that of a total of 0: below it all seeds together do harm
UNKNOWN_START_SHARE = 0.5  # of a contribution, where the accuracy at germination is not known
# Contributions that the total does not support: smaller ones may be noise of validation.
SUSPECT_CONTRIBUTION = 1.0  # percent points
EXCESS_WEIGHT = 0.1  # reward units for a ratio of twice the threshold
WHOLE_PENALTY_CONTRIBUTION = 10.0  # percent points without a total that cost the whole penalty
# Warnings grow so that to wait costs ever more, and stay below what a decision may cost.
FIRST_WARNING = 0.1  # reward units
WARNING_GROWTH = 0.05  # reward units per env-step
MAX_WARNING_GROWTH = 0.3  # reward units, in BLENDING
MAX_HOLDING_WARNING = 0.3  # reward units, in all
HOLDING_GRACE_STEPS = 2  # env-steps in HOLDING that measure a seed, before a decision is due
# A bonus that saturates: interactions are sums over pairs, and noisy.
MAX_SYNERGY_BONUS = 0.1  # reward units
SYNERGY_STEEPNESS = 0.5  # per percent point of interaction
# Fossils of hosts whose seeds do harm together: they stay, so that the damage does.
FOSSIL_DAMAGE = -0.5  # reward units
FOSSIL_DAMAGE_WEIGHT = 0.2  # reward units per percent point of harm
MAX_FOSSIL_DAMAGE = 1.0  # reward units of the latter
# A seed that looks useful while the total falls takes from the others.
SELFISH_CONTRIBUTION = 0.1  # percent points, above
SELFISH_TOTAL = -0.2  # percent points, below
SELFISH_PENALTY = 0.3  # reward units
# Prunes: a seed shall have time to learn, and one that helps is worth keeping.
MIN_PRUNE_AGE = 5  # env-steps of a seed
YOUNG_PRUNE_PENALTY = -0.3  # reward units per env-step that lacks
HASTY_PRUNE_PENALTY = -0.1  # reward units: of a harmful seed too young to be judged by that
PRUNE_WEIGHT = 0.05  # reward units per percent point of a useful seed's contribution
MAX_PRUNE_PENALTIES = 3  # times prune_good_seed_penalty
# Rewards of ops that are not legal, which no env carries out.
GERMINATE_IN_TAKEN_SLOT = -0.3
FOSSILIZE_BEFORE_HOLDING = -1.0
PRUNE_OF_FOSSIL = -1.0
PRUNE_OF_NOTHING = -0.2


def column(per_env: Tensor) -> Tensor:
    """[N] as [N, 1], to stand beside slots."""
    return per_env.unsqueeze(1)


def slot_op(inputs: RewardInputs) -> Tensor:
    """The op as each slot sees it, int64 [N, S]: WAIT everywhere but on the target."""
    return torch.where(inputs.target, column(inputs.op), Op.WAIT)


def is_fossil(inputs: RewardInputs) -> Tensor:
    """bool [N, S]: a live seed that is FOSSILIZED."""
    return inputs.has_seed & (inputs.stage == Stage.FOSSILIZED)


def stage_potential(stage: Tensor) -> Tensor:
    """Potential of the stage itself, float64, any shape."""
    potential = torch.zeros_like(stage, dtype=STATE_FLOAT)
    for code, value in STAGE_POTENTIALS:
        potential = torch.where(stage == code, value, potential)
    return potential


def seed_potential(stage: Tensor, age: Tensor, cfg: RewardConfig) -> Tensor:
    """Potential of a seed after `age` env-steps in `stage`: a capped bonus within the stage."""
    progress = age.to(STATE_FLOAT) * cfg.step_progress_bonus
    return stage_potential(stage) + progress.clamp(max=cfg.max_progress_bonus)


def shaping(before: Tensor, after: Tensor) -> Tensor:
    """Potential-based shaping (Ng, Harada and Russell 1999): gamma * after - before."""
    return PBRS_GAMMA * after - before


def seed_shaping(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Shaping of the last env-step of every live seed, [N, S]; a new stage goes on from the old."""
    is_new = inputs.stage_age == 0
    stage_before = torch.where(is_new, inputs.previous_stage, inputs.stage)
    age_before = torch.where(is_new, inputs.previous_stage_age, inputs.stage_age - 1)
    after = seed_potential(inputs.stage, inputs.stage_age, cfg)
    bonus = cfg.pbrs_weight * shaping(seed_potential(stage_before, age_before, cfg), after)
    return torch.where(inputs.has_seed, bonus, 0.0)


def timing_discount(age: Tensor, cfg: RewardConfig) -> Tensor:
    """Share of a reward that a germination at env-step `age` earns: from the floor up to 1."""
    if cfg.disable_timing_discount:
        return torch.ones_like(age, dtype=STATE_FLOAT)
    warmup = cfg.germination_warmup_steps
    share = age.to(STATE_FLOAT) / warmup
    floor = cfg.germination_discount_floor
    return (floor + (1 - floor) * share).where((age < warmup) & (warmup > 0), 1.0)


def joint_gain(progress: Tensor, contribution: Tensor, cfg: RewardConfig) -> Tensor:
    """Harmonic mean or minimum of two readings of a gain, 0 unless both are positive."""
    if cfg.attribution_formula == "minimum":
        joint = torch.minimum(progress, contribution)
    else:
        joint = 2 * progress * contribution / (progress + contribution).clamp(min=SMALLEST_DIVISOR)
    return torch.where((progress > 0) & (contribution > 0), joint, 0.0)


def attribution_discount(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """1, or a sigmoid below 0.5 for measured seeds where all seeds together do harm, [N, S].

    It never quite reaches 0, so that an attribution keeps its sign.
    """
    harmful = inputs.contribution_known & inputs.has_seed & column(inputs.total < 0)
    exponent = cfg.attribution_sigmoid_steepness * inputs.total
    discount = torch.sigmoid(exponent.clamp(min=LOWEST_EXPONENT))
    return torch.where(harmful, column(discount), 1.0)


def ratio_penalty(inputs: RewardInputs, discount: Tensor, cfg: RewardConfig) -> Tensor:
    """Penalty for a contribution that the total improvement does not support, [N, S], at most 0."""
    if cfg.disable_anti_gaming:
        return torch.zeros_like(inputs.contribution)
    threshold = cfg.hacking_ratio_threshold
    total = column(inputs.total)
    supported = (total > cfg.improvement_safe_threshold) & (total > SMALLEST_DIVISOR)
    ratio = inputs.contribution / torch.where(supported, total, 1.0)
    most = -cfg.prune_good_seed_penalty
    excess = -(EXCESS_WEIGHT * (ratio - threshold) / threshold).clamp(min=0.0).clamp(max=most)
    share = (inputs.contribution / WHOLE_PENALTY_CONTRIBUTION).clamp(max=1.0)
    unsupported = cfg.prune_good_seed_penalty * share
    unsupported = torch.where(total <= cfg.improvement_safe_threshold, unsupported, 0.0)
    is_suspect = inputs.has_seed & (inputs.contribution > SUSPECT_CONTRIBUTION)
    penalty = torch.where(supported, excess, unsupported)
    return torch.where(is_suspect & (discount >= HARMLESS_DISCOUNT), penalty, 0.0)


def credible_gain(inputs: RewardInputs, progress: Tensor, joint: Tensor) -> Tensor:
    """The part of a contribution >= 0 that progress since germination makes credible, [N, S]."""
    gain = torch.where(inputs.contribution >= progress, joint, inputs.contribution)
    gain = torch.where(progress <= 0, 0.0, gain)
    return torch.where(inputs.germination_known, gain, UNKNOWN_START_SHARE * inputs.contribution)


def blending_warning(inputs: RewardInputs) -> Tensor:
    """Growing penalty for blending seeds where all seeds together do harm, [N, S]."""
    blending = inputs.has_seed & (inputs.stage == Stage.BLENDING)
    harmful = blending & column(inputs.total < 0)
    growth = WARNING_GROWTH * inputs.stage_age.to(STATE_FLOAT)
    return torch.where(harmful, -FIRST_WARNING - growth.clamp(max=MAX_WARNING_GROWTH), 0.0)


def holding_warning(inputs: RewardInputs, attribution: Tensor) -> Tensor:
    """Growing penalty for holding a useful seed without deciding about it, [N, S]."""
    op = slot_op(inputs)
    holding = inputs.has_seed & (inputs.stage == Stage.HOLDING)
    is_undecided = holding & (op != Op.FOSSILIZE) & (op != Op.PRUNE)
    late = inputs.stage_age - HOLDING_GRACE_STEPS
    is_undecided = is_undecided & (late >= 0) & (attribution > 0)
    growth = WARNING_GROWTH * late.clamp(min=0).to(STATE_FLOAT)
    warning = (FIRST_WARNING + growth).clamp(max=MAX_HOLDING_WARNING)
    return torch.where(is_undecided, -warning, 0.0)


def synergy_bonus(inputs: RewardInputs, discount: Tensor, attribution: Tensor) -> Tensor:
    """Bonus for seeds that help each other, [N, S], from 0."""
    harmless = inputs.has_seed & (discount >= HARMLESS_DISCOUNT)
    helpful = harmless & (attribution > 0) & (inputs.interaction_sum > 0)
    bonus = MAX_SYNERGY_BONUS * torch.tanh(SYNERGY_STEEPNESS * inputs.interaction_sum)
    return torch.where(helpful, bonus, 0.0)


def growth_rent(growth: Tensor, weight: float | Tensor, most: float | Tensor) -> Tensor:
    """Rent of hosts that grew by `growth` times their size: logarithmic, from 0 to `most`."""
    return (weight * torch.log1p(growth.clamp(min=0))).clamp(max=most)


def size_rent(parameters: Tensor, host: Tensor, cfg: RewardConfig) -> Tensor:
    """Rent in percent points of hosts of `parameters` at the end and `host` at first, both [N]."""
    growth = (parameters - host) / host.clamp(min=cfg.rent_host_params_floor)
    return growth_rent(growth, amount(cfg.rent_weight), amount(cfg.max_rent))


def flop_rent(flop: Tensor, host: Tensor, cfg: RewardConfig) -> Tensor:
    """Rent in percent points of trainings of `flop`, where hosts alone take `host`, both [N]."""
    growth = (flop - host) / host
    return growth_rent(growth, amount(cfg.flop_weight), amount(cfg.max_rent))


def compute_rent(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Rent of one env-step for the parameters that pay it, [N], at most 0; 0 without a host."""
    floored = inputs.host_params.clamp(min=cfg.rent_host_params_floor)
    has_params = (inputs.host_params > 0) & (inputs.effective_params > 0)
    growth = torch.where(has_params, inputs.effective_params / floored, 0.0)
    return -growth_rent(growth, amount(cfg.rent_weight), amount(cfg.max_rent))


def alpha_shock(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Penalty for sudden alpha moves of large seeds, [N], at most 0."""
    if cfg.disable_anti_gaming:
        return torch.zeros_like(inputs.alpha_delta_sq)
    shock = (-cfg.alpha_shock_coef * inputs.alpha_delta_sq).clamp(min=-cfg.alpha_shock_cap)
    return torch.where((inputs.alpha_delta_sq > 0) & (cfg.alpha_shock_coef > 0), shock, 0.0)


def occupancy_rent(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Rent for every occupied slot beyond the free ones, [N], at most 0."""
    occupied = inputs.num_active + inputs.num_fossilized - cfg.free_slots
    return -amount(cfg.seed_occupancy_cost) * occupied.clamp(min=0).to(STATE_FLOAT)


def holding_share(inputs: RewardInputs) -> Tensor:
    """Share of the fossilization bonus that the time in HOLDING has earned, [N, S] in [0, 1]."""
    return (inputs.stage_age.to(STATE_FLOAT) / FULL_HOLDING_STEPS).clamp(max=1.0)


def germinate_shaping(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Payment for GERMINATE on each slot [N, S]: the shaping of the stage to come, and its cost."""
    penalty = GERMINATE_IN_TAKEN_SLOT + cfg.germinate_cost
    bonus = torch.zeros_like(inputs.val_accuracy)
    if not cfg.disable_pbrs:
        potential = cfg.pbrs_weight * PBRS_GAMMA * STAGE_POTENTIALS[0][1]
        newborn = potential * timing_discount(inputs.step, cfg)
        bonus = torch.where(inputs.step < inputs.max_steps, newborn, bonus)
    return torch.where(inputs.has_seed, penalty, column(bonus + cfg.germinate_cost))


def fossilize_shaping(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Payment for FOSSILIZE per slot [N, S]: a proven seed's bonus by contribution and time, or a
    penalty.
    """
    contribution = inputs.contribution
    total = column(inputs.total)
    eligible = inputs.has_seed & (inputs.stage == Stage.HOLDING) & column(inputs.total_known)
    is_proven = contribution >= MIN_CONTRIBUTION
    bonus = cfg.fossilize_base_bonus + cfg.fossilize_contribution_scale * contribution
    if not cfg.disable_terminal_reward:
        bonus = bonus + cfg.fossilize_terminal_scale * cfg.fossilize_quality
    is_selfish = (contribution > SELFISH_CONTRIBUTION) & (total < SELFISH_TOTAL)
    penalty = torch.where(is_selfish, SELFISH_PENALTY, torch.zeros_like(contribution))
    harm = (FOSSIL_DAMAGE_WEIGHT * total.abs()).clamp(max=MAX_FOSSIL_DAMAGE)
    damage = FOSSIL_DAMAGE - harm - penalty
    bonus = bonus * holding_share(inputs)
    shaped = torch.where(is_proven, bonus, cfg.fossilize_noncontributing_penalty)
    shaped = torch.where(total < 0, damage, shaped)
    return torch.where(eligible, shaped, FOSSILIZE_BEFORE_HOLDING) + cfg.fossilize_cost


def prune_judgement(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Pruning term of each slot [N, S]: a bonus for harmful seeds, a penalty for others."""
    contribution = inputs.contribution
    age = inputs.seed_age
    zero = torch.zeros_like(contribution)
    is_hasty = age < cfg.min_prune_bonus_age
    hurting = torch.where(is_hasty, HASTY_PRUNE_PENALTY, zero + cfg.prune_hurting_bonus)
    least = MAX_PRUNE_PENALTIES * cfg.prune_good_seed_penalty
    penalty = (cfg.prune_good_seed_penalty - PRUNE_WEIGHT * contribution).clamp(min=least)
    value = torch.where(contribution < 0, cfg.prune_acceptable_bonus, penalty)
    value = torch.where(contribution < cfg.prune_hurting_threshold, hurting, value)
    unmeasured = torch.where(age < cfg.early_prune_threshold, cfg.early_prune_penalty, zero)
    value = torch.where(inputs.contribution_known, value, unmeasured)
    lacking = (MIN_PRUNE_AGE - age).to(STATE_FLOAT)
    value = torch.where(lacking > 0, YOUNG_PRUNE_PENALTY * lacking, value)
    value = torch.where(inputs.stage == Stage.FOSSILIZED, PRUNE_OF_FOSSIL, value)
    return torch.where(inputs.has_seed, value, PRUNE_OF_NOTHING)


def forfeited_potential(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """The shaping that a pruned seed gives back, [N, S], at most 0."""
    potential = cfg.pbrs_weight * seed_potential(inputs.stage, inputs.stage_age, cfg)
    return torch.where(inputs.has_seed, -potential, 0.0)


def action_shaping(inputs: RewardInputs, cfg: RewardConfig) -> Tensor:
    """Costs and bonuses of the op on its target slot, [N]."""
    op = slot_op(inputs)
    prune = prune_judgement(inputs, cfg) + cfg.prune_cost
    if not cfg.disable_pbrs:
        prune = prune + forfeited_potential(inputs, cfg)
    advance = inputs.has_seed & (inputs.stage == Stage.TRAINING) & (op == Op.ADVANCE)
    shaped = torch.where(advance, cfg.advance_from_training_penalty, torch.zeros_like(prune))
    shaped = torch.where(op == Op.SET_ALPHA_TARGET, cfg.set_alpha_target_cost, shaped)
    shaped = torch.where(op == Op.GERMINATE, germinate_shaping(inputs, cfg), shaped)
    shaped = torch.where(op == Op.FOSSILIZE, fossilize_shaping(inputs, cfg), shaped)
    return torch.where(op == Op.PRUNE, prune, shaped).sum(1)
