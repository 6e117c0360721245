"""The lifecycle of seeds: effects of actions, and automatic transitions.

env/step.py calls `record_accuracy`, `apply` and `tick` in this order, and the governor `prune_now`.
A seed's weights are frozen exactly while `ramp.mode` is DOWN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa import vocabulary
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.env.alpha import advance_ramp, retarget
from esper_soa.env.env_settings import steps_by_slot
from esper_soa.env.masks import ADVANCES, LEGAL_STAGES, slot_allows, stage_allows
from esper_soa.state import DTYPES, Action, ActionOutcome, Ramp, Slots, initial_values, set_where
from esper_soa.vocabulary import AlphaMode, Op, Stage

ALPHA_TOLERANCE = 1e-6  # alphas closer than this count as equal
EMPTY_SLOT = initial_values(Slots)
SEED_FLAGS = ("germination_known", "gradient_ratio_known", "drip_live", "newborn")
WITHOUT_SEED = {name: EMPTY_SLOT[name] for name in ("escrow", *SEED_FLAGS)}
IDLE_RAMP = initial_values(Ramp)
RESTING_RAMP = {name: IDLE_RAMP[name] for name in ("alpha", "start", "target", "mode")}


class GateResults(NamedTuple):
    """Verdict (bool) of every gate for every slot."""

    g1: Tensor  # GERMINATED -> TRAINING
    g2: Tensor  # TRAINING -> BLENDING
    g3: Tensor  # BLENDING -> HOLDING
    g5: Tensor  # HOLDING -> FOSSILIZED


class Orders(NamedTuple):
    """The orders for every slot: `op` [N, S], everything else [N, S] or [N, 1]."""

    op: Tensor  # int64, Op
    blueprint: Tensor  # int64, of a new seed
    style: Tensor  # int64, of a new seed
    tempo: Tensor  # int64, ticks of a new seed's first ramp
    blend: Tensor  # int64, of a new seed or with a new target
    target: Tensor  # float64, (0, 1], of a new seed's first ramp or of the new ramp
    length: Tensor  # int64, ticks of the new ramp, 0 = at once
    curve: Tensor  # int64, of the new ramp
    steepness: Tensor  # float64, of the new ramp


def is_at_target(ramp: Ramp) -> Tensor:
    """bool: the ramp is at rest at its target."""
    return (ramp.mode == AlphaMode.HOLD) & ((ramp.alpha - ramp.target).abs() <= ALPHA_TOLERANCE)


def check_gates(slots: Slots, ramp: Ramp, cfg: GatesConfig) -> GateResults:
    """Judge the quality gates as if every slot asked for each of them; G0 and G4 do not exist here.

    Permissive gates ask for healthy gradients (G2) and any measured contribution (G5); strict gates
    for improvement and gradient share (G2), time in BLENDING (G3), a positive contribution (G5).
    """
    old_enough = slots.stage_age >= steps_by_slot(cfg.min_blending_steps)
    g3 = (ramp.target >= 1 - ALPHA_TOLERANCE) & is_at_target(ramp)
    g5 = slots.contribution_known
    if cfg.permissive:
        healthy = (slots.gradient_health >= cfg.min_gradient_health) & ~slots.gradient_exploding
        g2 = old_enough & slots.gradient_measured & healthy
    else:
        learning = slots.gradient_ratio_known & (slots.gradient_ratio >= cfg.min_gradient_ratio)
        g2 = old_enough & learning & (slots.improvement >= cfg.min_training_improvement)
        g3 = g3 & old_enough
        g5 = g5 & (slots.contribution >= cfg.min_fossilize_contribution)
    return GateResults(slots.stage == Stage.GERMINATED, g2, g3, g5=g5)


def record_accuracy(slots: Slots, accuracy: Tensor) -> Slots:
    """Write this env-step's validation accuracy [N] (percent) to live seeds and count it.

    The first record of a seed is also its initial accuracy and that of its stage. Cooling slots are
    not counted here: the embargo counts once per env-step, in `tick`.
    """
    accuracy = accuracy.unsqueeze(-1)
    first = slots.seed_age == 0
    starts = ("accuracy_initial", "accuracy_stage_start")
    values = {name: torch.where(first, accuracy, slots.get(name)) for name in starts}
    values |= {"seed_age": slots.seed_age + 1, "stage_age": slots.stage_age + 1}
    return set_where(slots, slots.live, values | {"accuracy_current": accuracy})


def effective_op(slots: Slots, ramp: Ramp, action: Action, cfg: LifecycleConfig) -> Tensor:
    """int64 [N]: the action's op, or WAIT where its slot does not allow it; gates are not asked."""
    num_slots = slots.stage.shape[-1]
    allowed = slot_allows(slots.stage, slots.seed_age, ramp.mode, min_prune_age=cfg.min_prune_age)
    op = action.op.view(-1, 1, 1).expand(-1, 1, num_slots)
    valid = (allowed.gather(1, op).squeeze(1) & target_slot(action, num_slots)).any(-1)
    return torch.where(valid, action.op, Op.WAIT)


def target_slot(action: Action, num_slots: int) -> Tensor:
    """bool [N, num_slots], true at the slot that the action is about."""
    return torch.arange(num_slots, device=action.slot.device) == action.slot.unsqueeze(-1)


def apply(
    slots: Slots, ramp: Ramp, action: Action, op: Tensor, accuracy: Tensor, gates: GatesConfig
) -> tuple[Slots, Ramp, ActionOutcome]:
    """Carry out one action per env; accuracy [N] in percent is remembered as that of a germination.

    op: its `effective_op`. One that is not applicable, or whose gate fails, changes nothing and has
    no success.
    """
    target = target_slot(action, slots.stage.shape[-1])
    orders = decode(action, torch.where(target, op.unsqueeze(-1), Op.WAIT))
    slots, ramp, done = execute_orders(slots, ramp, orders, accuracy=accuracy, cfg=gates)
    success = done.any(-1)
    outcome = ActionOutcome(
        effective_op=op,
        success=(action.op == Op.WAIT) | success,
        germinated=success & (op == Op.GERMINATE),
        fossilized=success & (op == Op.FOSSILIZE),
        batch_size=op.shape,
    )
    return slots, ramp, outcome


def decode(action: Action, op: Tensor) -> Orders:
    """The choices of the action heads [N] as values [N, 1], for the op of every slot [N, S]."""
    style = action.style.unsqueeze(-1)
    curve = action.alpha_curve.unsqueeze(-1)
    return Orders(
        op=op,
        blueprint=action.blueprint.unsqueeze(-1),
        style=style,
        tempo=_pick(action.tempo.unsqueeze(-1), vocabulary.TEMPO_STEPS),
        blend=_pick(style, vocabulary.STYLE_BLEND),
        target=_pick(action.alpha_target.unsqueeze(-1), vocabulary.ALPHA_TARGETS),
        length=_pick(action.alpha_speed.unsqueeze(-1), vocabulary.SPEED_STEPS),
        curve=_pick(curve, vocabulary.CURVE_CHOICES),
        steepness=_pick(curve, vocabulary.CURVE_STEEPNESS),
    )


def _pick(choice: Tensor, table: tuple[int, ...] | tuple[float, ...]) -> Tensor:
    """The entries of a small `table` at `choice` (int64), as int64 or floats of the env state."""
    result = torch.full_like(choice, table[0], dtype=DTYPES[type(table[0])])
    for index, value in enumerate(table):
        result = torch.where(choice == index, value, result)
    return result


def execute_orders(
    slots: Slots, ramp: Ramp, orders: Orders, accuracy: Tensor, cfg: GatesConfig
) -> tuple[Slots, Ramp, Tensor]:
    """Carry out one order per slot where the slot's state allows; bool [N, S]: where done.

    Ages and the ban on pruning under way are rules for actions (masks.py), not asked here.
    """
    stage = slots.stage
    gates = check_gates(slots, ramp, cfg)
    where_op = {op: (orders.op == op) & stage_allows(op, stage) for op in LEGAL_STAGES}
    germinated = where_op[Op.GERMINATE]
    advanced_stage = advance_stage(stage, gates)
    advanced = where_op[Op.ADVANCE] & (advanced_stage != stage)
    fossilized = where_op[Op.FOSSILIZE] & gates.g5
    is_resting = ramp.mode == AlphaMode.HOLD
    aimed = where_op[Op.SET_ALPHA_TARGET] & is_resting
    # a pruned seed goes at once, or first fades out where its stage has ramps
    at_once = (orders.length <= 0) | (slots.alpha <= 0)
    has_ramp = stage_allows(Op.SET_ALPHA_TARGET, stage)
    is_removed = where_op[Op.PRUNE] & (at_once | (is_resting & ~has_ramp))
    fading = where_op[Op.PRUNE] & ~at_once & is_resting & has_ramp

    reopened = fading | (aimed & (stage == Stage.HOLDING) & (orders.target < 1))
    stage = torch.where(advanced, advanced_stage, stage)
    stage = torch.where(fossilized, Stage.FOSSILIZED, stage)
    stage = torch.where(reopened, Stage.BLENDING, stage)
    stage = torch.where(is_removed, Stage.PRUNED, stage)
    slots, ramp = enter(slots, ramp, stage)

    slots = slots.replace(blend=torch.where(aimed, orders.blend, slots.blend))
    target = torch.where(fading, 0.0, orders.target)
    ramp = retarget(
        ramp,
        aimed | fading,
        target,
        length=orders.length,
        curve=orders.curve,
        steepness=orders.steepness,
    )
    slots = germinate(slots, germinated, orders, accuracy=accuracy)
    return slots, ramp, germinated | advanced | fossilized | aimed | is_removed | fading


def advance_stage(stage: Tensor, gates: GateResults) -> Tensor:
    """int64 [N, S]: the next stage of seeds that pass its gate, the present one of all others.

    ADVANCE leads no further than HOLDING: a seed is fossilized by an action of its own.
    """
    following = stage
    for (before, after), gate in zip(ADVANCES, (gates.g1, gates.g2, gates.g3), strict=True):
        following = torch.where((stage == before) & gate, after, following)
    return following


def germinate(slots: Slots, where: Tensor, orders: Orders, accuracy: Tensor) -> Slots:
    """Put a new seed into the empty slots `where`; the tick that emptied them cleared them.

    Style and tempo wait for BLENDING; the style GATED_GATE brings the blend GATE with it.
    """
    values = {name: getattr(orders, name) for name in ("blueprint", "blend", "style", "tempo")}
    values |= {"alpha_goal": orders.target, "accuracy_germination": accuracy.unsqueeze(-1)}
    values |= {"stage": Stage.GERMINATED, "previous_stage": Stage.DORMANT}
    values |= dict.fromkeys(("germination_known", "newborn", "fresh_momentum"), True)
    return set_where(slots, where, values)


def prune_now(slots: Slots, ramp: Ramp, where: Tensor) -> tuple[Slots, Ramp]:
    """Remove the seeds on `where` (bool [N, S]) at once; fossils, cooling and empty slots stay."""
    is_pruned = where & stage_allows(Op.PRUNE, slots.stage)
    return enter(slots, ramp, torch.where(is_pruned, Stage.PRUNED, slots.stage))


def enter(slots: Slots, ramp: Ramp, stage: Tensor) -> tuple[Slots, Ramp]:
    """Put every slot into `stage` int64 [N, S], or leave it in its own, with all that this brings.

    BLENDING from TRAINING starts the first ramp; from HOLDING its ramp is the caller's. HOLDING and
    FOSSILIZED have alpha 1; PRUNED has alpha 0; a fossil starts with fresh momentum.
    """
    moved = stage != slots.stage
    blending = moved & (stage == Stage.BLENDING) & (slots.stage == Stage.TRAINING)
    holding = moved & (stage == Stage.HOLDING)
    fossil = moved & (stage == Stage.FOSSILIZED)
    pruned = moved & (stage == Stage.PRUNED)
    accuracy = slots.accuracy_current
    slots = slots.replace(
        stage=stage,
        stage_age=torch.where(moved, 0, slots.stage_age),
        previous_stage=torch.where(moved, slots.stage, slots.previous_stage),
        previous_stage_age=torch.where(moved, slots.stage_age, slots.previous_stage_age),
        accuracy_stage_start=torch.where(moved, accuracy, slots.accuracy_stage_start),
        accuracy_blending_start=torch.where(blending, accuracy, slots.accuracy_blending_start),
        blending_started=slots.blending_started | blending,
        alpha=torch.where(holding | fossil, 1.0, torch.where(pruned, 0.0, slots.alpha)),
        fresh_momentum=slots.fresh_momentum | fossil,
        germination_known=slots.germination_known & ~fossil,
    )
    steepness = torch.full_like(ramp.steepness, vocabulary.RAMP_STEEPNESS)
    curve = _pick(slots.style, vocabulary.STYLE_CURVE)
    ramp = retarget(
        ramp, blending, slots.alpha_goal, length=slots.tempo, curve=curve, steepness=steepness
    )
    ramp = set_where(ramp, holding, dict.fromkeys(("alpha", "start", "target"), 1.0))
    done = torch.where(holding, ramp.length, ramp.done)
    ramp = ramp.replace(done=done, alpha=torch.where(fossil, 1.0, ramp.alpha))
    return slots, set_where(ramp, pruned, RESTING_RAMP | {"length": 0, "done": 0})


def tick(slots: Slots, ramp: Ramp, cfg: LifecycleConfig, gates: GatesConfig) -> tuple[Slots, Ramp]:
    """The end of an env-step: ramps move, gates forward where set to, pruned slots cool down.

    A slot changes stage at most once, by the stage that it had before the tick. Blueprint and
    telemetry of a pruned seed stay readable until its slot is empty.
    """
    blending = slots.stage == Stage.BLENDING
    embargoed = slots.stage == Stage.EMBARGOED
    ramp, _ = advance_ramp(ramp, blending)
    slots = slots.replace(
        alpha=torch.where(blending, ramp.alpha, slots.alpha),
        stage_age=slots.stage_age + embargoed,
        seed_age=slots.seed_age + embargoed,
    )
    passed = check_gates(slots, ramp, gates)
    slots, ramp = enter(slots, ramp, _stage_after_tick(slots, ramp, cfg, gates=passed))
    slots = set_where(slots, ~slots.live, WITHOUT_SEED)
    return set_where(slots, slots.empty, EMPTY_SLOT), set_where(ramp, slots.empty, IDLE_RAMP)


def _stage_after_tick(slots: Slots, ramp: Ramp, cfg: LifecycleConfig, gates: GateResults) -> Tensor:
    """int64 [N, S]: where the tick leads from the present stage, when the ramps have moved.

    Nothing happens to HOLDING and FOSSILIZED. A seed whose ramp ended at alpha 0 is gone.
    """
    stage_before = slots.stage
    stage = stage_before
    advanced = advance_stage(stage_before, gates)
    by_itself = (cfg.auto_forward_g1, cfg.auto_forward_g2, cfg.auto_forward_g3)
    for (before, _), forwards in zip(ADVANCES, by_itself, strict=True):
        if forwards:
            stage = torch.where(stage_before == before, advanced, stage)
    has_faded = is_at_target(ramp) & (ramp.target <= ALPHA_TOLERANCE)
    stage = torch.where((stage_before == Stage.BLENDING) & has_faded, Stage.PRUNED, stage)
    stage = torch.where(stage_before == Stage.PRUNED, Stage.EMBARGOED, stage)
    has_served = slots.stage_age >= steps_by_slot(cfg.embargo_steps)
    stage = torch.where((stage_before == Stage.EMBARGOED) & has_served, Stage.RESETTING, stage)
    return torch.where(stage_before == Stage.RESETTING, Stage.EMPTY, stage)
