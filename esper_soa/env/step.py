"""An env-step: train, evaluate, guard, attribute, record, observe; then reward, apply, tick.

`measure_` and `guard_` change weights in place; `record_and_observe` and `apply_action` are pure
kernels over the state. env.py calls them in this order.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.config import env
from esper_soa.env import lifecycle
from esper_soa.env.attribution import attribute
from esper_soa.env.early_stop import advance
from esper_soa.env.env_settings import config_of_envs
from esper_soa.env.governor import PanicReason, allow_only_wait, discard_panicked, roll_back, watch
from esper_soa.env.masks import action_masks
from esper_soa.env.observation import observe
from esper_soa.env.parameters import flop_per_image
from esper_soa.env.reward import pairs, record_boosts, reward, settings_of_envs, settle_fossils
from esper_soa.env.reward_modes import RewardTerms, no_terms
from esper_soa.env.reward_records import RewardSettings
from esper_soa.env.signals import age_memories, record_attribution, record_gradients, record_signals
from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.engine import Engine
from esper_soa.nets.graphs import Replay, StepCache, captured_call
from esper_soa.nets.seeds.pools import slot_seeds
from esper_soa.nets.seeds.snapshot import restore_where_, snapshot_where_
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import Rules
from esper_soa.state import (
    HISTORY,
    STATE_FLOAT,
    Action,
    ActionOutcome,
    Attribution,
    Ending,
    EnvState,
    Guard,
    Masks,
    Measurements,
    Observation,
    Ramp,
    Signals,
    Slots,
    Totals,
    View,
    initial,
    known_false,
    select,
    with_fields,
)
from esper_soa.vocabulary import Op, Stage

Result = TypeVar("Result")
SETTINGS = ("lifecycle", "gates", "signals", "governor", "early_stop")  # fields of EnvRules


class EnvRules(NamedTuple):
    """Everything that stays the same during a run."""

    setup: Setup
    engine: Engine  # what runs the networks
    lifecycle: env.LifecycleConfig
    gates: env.GatesConfig
    signals: env.SignalsConfig
    governor: env.GovernorConfig
    reward: RewardSettings
    blueprints: Tensor  # bool [P], by code, what may be germinated
    max_seeds: int | Tensor  # 0 = as many as slots
    shapley_orders: Tensor | None = None  # int64 [P, S], of arrival, for sampled Shapley values
    early_stop: env.EarlyStopConfig = env.EarlyStopConfig()
    # Dotted names of settings: those of which each env has its own; of them and others, those that
    # the policy sees; those whose values the kernels are given.
    differing: tuple[str, ...] = ()
    observed: tuple[str, ...] = ()
    kernel_settings: tuple[str, ...] = ()

    @property
    def max_steps(self) -> int:
        """Env-steps per episode."""
        return int(self.reward.max_steps)

    def ended(self, state: EnvState) -> Tensor | None:
        """bool [N], envs whose episode has ended early; None where none can, at no cost.

        The one mask that says so. What follows keeps these envs as they are with `keep`.
        """
        return state.ending.over if self.early_stop.enabled else None


class StepData(NamedTuple):
    """The data of one env-step and the streams that newborn seeds draw from."""

    training: TrainingFeed
    num_batches: int
    validation: ValidationFeed
    seed_keys: Tensor  # int64 [N]
    rules: Rules | None = None  # how hosts and seeds move; None: as the task says


class EnvView(NamedTuple):
    """Observation of N envs in an env-step, before their actions."""

    view: View  # what a policy gets
    attribution: Attribution
    measured: Measurements  # without those of envs that are rolled back
    restarted: Tensor  # bool [N]: rolled back an env-step ago, so a new trajectory begins here
    ended: Tensor | None = None  # bool [N], see `EnvRules.ended`


class StepResult(NamedTuple):
    """Result of the actions."""

    state: EnvState
    terms: RewardTerms
    outcome: ActionOutcome


# Float64 [N] each, of the settings EnvRules.kernel_settings; (): the numbers of the rules.
Values = tuple[Tensor, ...]
Recorded = tuple[EnvState, Attribution, Masks, Observation]  # of `record_and_observe`


def initial_state(rules: EnvRules, num_envs: int, device: torch.device) -> EnvState:
    """The env state of N fresh envs."""
    envs = (num_envs,)
    num_slots = len(rules.setup.shape.slots)
    history = torch.zeros(num_envs, HISTORY, dtype=STATE_FLOAT, device=device)
    losses = torch.zeros(num_envs, env.GUARD_WINDOW, dtype=STATE_FLOAT, device=device)
    rollbacks = torch.zeros(num_envs, env.NUM_REASONS, dtype=torch.int64, device=device)
    # float32, as this is by far the largest part of the env state, copied at every env-step
    boosts = torch.zeros(num_envs, len(pairs(num_slots)), rules.max_steps, device=device)
    return EnvState(
        slots=initial(Slots, (num_envs, num_slots), device),
        ramp=initial(Ramp, (num_envs, num_slots), device),
        signals=initial(Signals, envs, device, loss_history=history, accuracy_history=history),
        guard=initial(Guard, envs, device, losses=losses),
        totals=initial(Totals, envs, device, rollbacks=rollbacks),
        ending=initial(Ending, envs, device),
        boosts=boosts,
        batch_size=[num_envs],
    ).clone()


def measure_(
    rules: EnvRules,
    weights: TensorDict,
    state: EnvState,
    data: StepData,
    on_phase_end: Callable[[str], None] = lambda phase: None,
) -> tuple[EnvState, Measurements]:
    """Initialise newborn seeds, train every network, validate under every subset row needed.

    on_phase_end: called with the name of each phase.
    """
    slots = state.slots
    setup = rules.setup
    engine = rules.engine
    ablate_fossils = rules.reward.config.drip_fraction > 0
    seeds = slot_seeds(slots, state.ramp, ablate_fossils, over=rules.ended(state))
    active_seeds = engine.claim_(setup, weights, seeds, keys=data.seed_keys)
    none = torch.zeros_like(slots.newborn)
    state = with_fields(state, slots=slots.replace(newborn=none, fresh_momentum=none))
    on_phase_end("state")
    trained = engine.train_(
        setup,
        weights,
        slots.alpha,
        active_seeds=active_seeds,
        feed=data.training,
        num_batches=data.num_batches,
        rules=data.rules,
    )
    on_phase_end("training")
    validation = engine.validate(setup, weights, slots.alpha, active_seeds, data.validation)
    on_phase_end("validation")
    return state, Measurements(
        train_loss=trained.loss,
        train_accuracy=trained.accuracy,
        val_loss=validation.loss,
        accuracy=validation.accuracy,
        subset=validation.subset,
        ablated=validation.ablated,
        gradients=trained.gradients,
        batch_size=state.batch_size,
    )


def guard_(
    rules: EnvRules, weights: TensorDict, state: EnvState, measured: Measurements
) -> tuple[EnvState, Measurements]:
    """Snapshot healthy hosts, and put those that diverge back to their snapshots.

    Returns the state with verdicts in `guard`, measurements without those of panicking envs.
    """
    if not rules.governor.enabled:
        return state, measured
    shape = rules.setup.shape
    stage = state.slots.stage
    fossil = stage == Stage.FOSSILIZED
    ended = rules.ended(state)
    before = state
    state, due = watch(state, measured.val_loss, shape.num_classes, cfg=rules.governor)
    if ended is not None:
        state = select(ended, before, state)
        rest = {name: state.guard.get(name) * ~ended for name in ("panic", "reason")}
        state = state.replace(guard=state.guard.replace(**rest))
    guard = state.guard
    snapshot_where_(weights, shape, due, fossil=fossil, rising=stage == Stage.HOLDING)
    restore_where_(
        weights, shape, guard.panic, fossil=fossil, broken=guard.reason == PanicReason.NOT_FINITE
    )
    return state, discard_panicked(measured, state)


def record_and_observe(
    rules: EnvRules, state: EnvState, measured: Measurements, values: Values = ()
) -> Recorded:
    """Attribute, record and observe: the state on which the next actions are decided and paid."""
    ended = rules.ended(state)
    before = state
    idle = state.guard.panic
    attribution = attribute(measured, state.slots, rules.shapley_orders)
    signals = record_signals(state.signals, measured, rules.signals)
    slots = record_attribution(state.slots, attribution)
    slots = lifecycle.record_accuracy(slots, signals.val_accuracy)
    slots = record_gradients(slots, measured.gradients)
    flop = state.totals.train_flop + flop_per_image(before.slots, rules.reward.flop)
    totals = state.totals.replace(train_flop=flop)
    state = state.replace(slots=slots, signals=signals, totals=totals)
    state = record_boosts(state, attribution)
    if ended is not None:
        state = select(ended, before, state)
        idle = idle | ended
    masks, observation = look(rules, state, values)
    return state, attribution, allow_only_wait(masks, idle), observation


def look(rules: EnvRules, state: EnvState, values: Values = ()) -> tuple[Masks, Observation]:
    """Legal choices and observation of a recorded state."""
    numbers = dict(zip(rules.kernel_settings, values, strict=bool(values)))
    limits = config_of_envs(rules.lifecycle, numbers)
    masks = action_masks(
        state.slots, state.ramp, rules.blueprints, max_seeds=rules.max_seeds, lifecycle=limits
    )
    settings = [numbers[name] for name in rules.observed]
    return masks, observe(state, rules.reward.max_steps, settings)


def rules_given(rules: EnvRules, values: Mapping[str, Tensor]) -> EnvRules:
    """The rules with tensors, by dotted name, in place of numbers of settings."""
    parts = {name: config_of_envs(getattr(rules, name), values) for name in SETTINGS}
    return rules._replace(reward=settings_of_envs(rules.reward, values), **parts)


def apply_action(
    rules: EnvRules, before: EnvState, attribution: Attribution, action: Action, values: Values = ()
) -> StepResult:
    """Pay for the state the actions were taken in, carry them out, pass time; roll back who panics.

    Nothing happens to an env whose episode has ended early, and it is paid nothing.
    """
    numbers = dict(zip(rules.kernel_settings, values, strict=bool(values)))
    mode = numbers.pop(env.REWARD_MODE, None)
    given = rules_given(rules, numbers)
    result = _apply_in_all_envs(given, before, attribution, action=action, mode=mode)
    ended = rules.ended(before)
    if ended is None:
        return result
    most = rules.reward.max_steps
    after = advance(result.state, rules.early_stop, most, length=given.reward.max_steps)
    return StepResult(
        select(ended, before, after),
        select(ended, no_terms(result.terms.total), result.terms),
        select(ended, _no_outcome(result.outcome), result.outcome),
    )


def _apply_in_all_envs(
    rules: EnvRules,
    before: EnvState,
    attribution: Attribution,
    action: Action,
    mode: Tensor | None,
) -> StepResult:
    """`apply_action` in every env, those that have ended early too."""
    panic = before.guard.panic
    op = lifecycle.effective_op(before.slots, before.ramp, action, cfg=rules.lifecycle)
    terms, state = reward(before, attribution, action, op=op, settings=rules.reward, mode=mode)
    chosen = action, op, state.signals.val_accuracy
    slots, ramp, outcome = lifecycle.apply(state.slots, state.ramp, *chosen, rules.gates)
    state = settle_fossils(state.replace(slots=slots, ramp=ramp), action, outcome)
    aged = age_memories(state.slots)
    slots, ramp = lifecycle.tick(aged, state.ramp, rules.lifecycle, gates=rules.gates)
    signals = state.signals.replace(last_op=action.op, last_success=outcome.success)
    guard = state.guard.replace(snapshot_due=state.guard.snapshot_due | outcome.fossilized)
    state = state.replace(slots=slots, ramp=ramp, signals=signals, guard=guard)
    if not known_false(panic):
        price = rules.reward.config.auto_prune_penalty
        restored, penalty = roll_back(before, rules.governor, price)
        changed = ("slots", "ramp", "signals", "totals")
        both = {name: (getattr(restored, name), getattr(state, name)) for name in changed}
        state = state.replace(**{name: select(panic, *pair) for name, pair in both.items()})
        outcome = select(panic, _no_outcome(outcome), outcome)
        terms = select(panic, penalty, terms)
    return StepResult(_count(before, state, outcome), terms, outcome)


def _no_outcome(outcome: ActionOutcome) -> ActionOutcome:
    """The outcome of no action: WAIT, without success."""
    zeros = torch.zeros_like(outcome.success)
    wait = torch.full_like(outcome.effective_op, Op.WAIT)
    return outcome.replace(effective_op=wait, success=zeros, germinated=zeros, fossilized=zeros)


def _count(before: EnvState, after: EnvState, outcome: ActionOutcome) -> EnvState:
    """Totals of seeds that were born, began to blend, or were removed at this env-step."""
    starts_blending = after.slots.blending_started & ~before.slots.blending_started
    is_removed = before.slots.live & ~after.slots.live & (before.slots.stage != Stage.FOSSILIZED)
    totals = after.totals.replace(
        germinated=after.totals.germinated + outcome.germinated,
        blended=after.totals.blended + starts_blending.sum(1),
        pruned=after.totals.pruned + is_removed.sum(1),
    )
    return after.replace(totals=totals)


class StepKernels(NamedTuple):
    """The kernels of an env-step; env.py calls `guard_and_observe_` and `respond`."""

    record_and_observe: Callable[[EnvRules, EnvState, Measurements, Values], Recorded]
    apply_action: Callable[[EnvRules, EnvState, Attribution, Action, Values], StepResult]
    reason: str = "not compiled"  # why it is these, in words for logs
    # Gives better ones as soon as they are compiled; None: these stay.
    awaited: "Callable[[], StepKernels | None] | None" = None
    # Keeps calls on static buffers and replays them as CUDA graphs; None: as they are.
    steps: StepCache | None = None
    replay: Replay = Replay()  # what else of the run is replayed, and why

    def guard_and_observe_(
        self,
        rules: EnvRules,
        weights: TensorDict,
        state: EnvState,
        measured: Measurements,
        values: Values = (),
    ) -> tuple[Measurements, Recorded]:
        """`guard_` and `record_and_observe` as one step, for the rules of the first call."""

        def guard_and_record(
            state: EnvState, measured: Measurements, values: Values
        ) -> tuple[Measurements, Recorded]:
            state, measured = guard_(rules, weights, state, measured=measured)
            return measured, self.record_and_observe(rules, state, measured, values)

        name = "observe", weights["host", "params"].data_ptr()
        return self.call(name, guard_and_record, state, measured, values)

    def respond(
        self, rules: EnvRules, observed: EnvView, action: Action, values: Values = ()
    ) -> StepResult:
        """`apply_action` as one step, for the rules of the first call."""
        before = observed.view.state
        kernel = partial(self.apply_action, rules)
        return self.call("respond", kernel, before, observed.attribution, action, values)

    def call(self, name: Hashable, function: Callable[..., Result], *arguments: object) -> Result:
        """function(*arguments), kept where steps are; `name` says what is not in the arguments."""
        if self.steps is None:
            return function(*arguments)
        return captured_call(self.steps, name, function, *arguments)


EAGER = StepKernels(record_and_observe, apply_action)


def compiled() -> StepKernels:
    """The kernels as one compiled graph each, made at the first call (compute.compile); equal to
    EAGER up to rounding. Another number of envs or slots compiles again.
    """
    compile_whole = partial(torch.compile, fullgraph=True, dynamic=False)
    return StepKernels(compile_whole(record_and_observe), compile_whole(apply_action))
