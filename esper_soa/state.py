"""Every record of the simulator, one field per line with dtype, shape and unit.

The env state (EnvState and what it holds) is a few kB per env; pure kernels replace it with
`.replace`. Scalars of the env state are float64, as accuracies are compared with exact thresholds;
counters and codes are int64; flags are bool. N envs, S seed slots, R alpha rows, T env-steps.
Accuracies, contributions and interactions are percent points.
"""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from esper_soa.vocabulary import LIVE_STAGES, RUNNING_STAGES, Stage

STATE_FLOAT = torch.float64
Record = TypeVar("Record", bound=TensorClass)
DTYPES = {bool: torch.bool, int: torch.int64, float: STATE_FLOAT}
HISTORY = 10  # env-steps of loss and accuracy kept per env


def filled(
    kind: type[Record],
    shape: tuple[int, ...],
    device: torch.device | str,
    values: Mapping[str, float],
    **given: Tensor,
) -> Record:
    """A record with one value per field, of which the type gives the dtype, and `given` fields."""
    fields = {
        name: torch.full(shape, value, dtype=DTYPES[type(value)], device=device)
        for name, value in values.items()
    }
    return kind.from_tensordict(TensorDict(fields | given, batch_size=shape))


def stage_in(stage: Tensor, stages: tuple[int, ...]) -> Tensor:
    """True where `stage` (any shape) is one of `stages`."""
    found = stage == stages[0]
    for code in stages[1:]:
        found = found | (stage == code)
    return found


def nowhere(where: Tensor) -> bool:
    """Whether `where` (bool) is known to be False throughout, for what is nearly always so and dear
    where it is not.

    Known on a CPU alone, where looking costs nothing, and not in code that is compiled, which is
    the same for all.
    """
    return (
        where.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(where.any())
    )


def select(where: Tensor, one: Record, other: Record) -> Record:
    """`one` in the envs of `where` (bool [N]), `other` in the rest; records [N, ...] of a kind."""
    masks = {dims: where.reshape(-1, *[1] * (dims - 1)) for dims in (1, 2, 3)}
    pairs = {name: (value, other.get(name)) for name, value in one.items()}
    chosen = {
        name: torch.where(masks[mine.ndim], mine, its)
        if isinstance(mine, Tensor)
        else select(where, mine, its)
        for name, (mine, its) in pairs.items()
    }
    return other.replace(**chosen)  # type: ignore[no-any-return]


class Slots(TensorClass["tensor_only", "frozen"]):
    """Seed slots [N, S]: what is in them, how old it is, what it earned."""

    stage: Tensor  # int64, Stage
    stage_age: Tensor  # int64, env-steps recorded in this stage
    seed_age: Tensor  # int64, env-steps recorded since germination
    previous_stage: Tensor  # int64, Stage
    previous_stage_age: Tensor  # int64
    blueprint: Tensor  # int64, Blueprint, -1 when empty
    blend: Tensor  # int64, Blend
    style: Tensor  # int64, Style chosen at germination
    tempo: Tensor  # int64, env-steps of the first ramp
    alpha_goal: Tensor  # float64, target of the first ramp, (0, 1]
    alpha: Tensor  # float64, [0, 1], what the forward pass uses
    newborn: Tensor  # bool, weights are to be initialised before the next training pass
    fresh_momentum: Tensor  # bool, momentum is to be cleared before the next training pass
    accuracy_initial: Tensor  # float64, at the seed's first record
    accuracy_stage_start: Tensor  # float64
    accuracy_current: Tensor  # float64
    accuracy_blending_start: Tensor  # float64
    blending_started: Tensor  # bool
    accuracy_germination: Tensor  # float64, validation accuracy when germinated
    germination_known: Tensor  # bool, accuracy_germination holds
    contribution: Tensor  # float64, accuracy lost without this seed, last measurement
    contribution_known: Tensor  # bool, measured at least once in this seed's life
    contribution_velocity: Tensor  # float64, moving average of its change
    contribution_age: Tensor  # int64, env-steps since the measurement, 0 = this env-step
    interaction_sum: Tensor  # float64, sum of pair interactions at this env-step
    gradient_norm: Tensor  # float64, last measured
    gradient_health: Tensor  # float64, [0, 1]
    gradient_vanishing: Tensor  # bool
    gradient_exploding: Tensor  # bool
    gradient_measured: Tensor  # bool, the four above hold
    gradient_ratio: Tensor  # float64, moving average of the seed-to-host gradient ratio
    gradient_ratio_known: Tensor  # bool
    previous_health: Tensor  # float64, gradient_health one env-step ago
    previous_health_known: Tensor  # bool
    escrow: Tensor  # float64, reward credit held back (ESCROW)
    drip_live: Tensor  # bool, this fossil pays drip (BASIC_PLUS)
    drip_scale: Tensor  # float64
    drip_total: Tensor  # float64, the pool
    drip_paid: Tensor  # float64
    rent_alpha: Tensor  # float64, alpha at the last rent reading
    rent_params: Tensor  # float64, parameters at the last rent reading

    @property
    def empty(self) -> Tensor:  # type: ignore[override]
        """bool [N, S]: a seed can be germinated here."""
        return self.stage == Stage.EMPTY

    @property
    def live(self) -> Tensor:
        """bool [N, S]: a seed module is present (GERMINATED to FOSSILIZED)."""
        return stage_in(self.stage, LIVE_STAGES)

    @property
    def running(self) -> Tensor:
        """bool [N, S]: the seed takes part in the forward pass (TRAINING to FOSSILIZED)."""
        return stage_in(self.stage, RUNNING_STAGES)

    @property
    def improvement(self) -> Tensor:
        """float64 [N, S]: accuracy gained since the start of the stage."""
        return self.accuracy_current - self.accuracy_stage_start

    @property
    def total_improvement(self) -> Tensor:
        """float64 [N, S]: accuracy gained since the seed's first record."""
        return self.accuracy_current - self.accuracy_initial


class Ramp(TensorClass["tensor_only", "frozen"]):
    """Alpha controller of every slot [N, S]."""

    alpha: Tensor  # float64, [0, 1]; INSTANT moves it at once, `Slots.alpha` follows at the tick
    start: Tensor  # float64, alpha when the ramp was set
    target: Tensor  # float64
    length: Tensor  # int64, ticks in total
    done: Tensor  # int64, ticks taken
    curve: Tensor  # int64, Curve
    steepness: Tensor  # float64, of the sigmoid, at least 0.1
    mode: Tensor  # int64, AlphaMode


class Signals(TensorClass["tensor_only", "frozen"]):
    """What an env shows of its host's training [N] (histories [N, HISTORY], newest last)."""

    step: Tensor  # int64, env-steps recorded in this episode, 1-based once recorded
    train_loss: Tensor  # float64
    train_accuracy: Tensor  # float64, percent
    val_loss: Tensor  # float64
    val_accuracy: Tensor  # float64, percent
    loss_delta: Tensor  # float64, previous - current validation loss; 0 at the first env-step
    accuracy_delta: Tensor  # float64, current - previous; the accuracy itself at the first env-step
    loss_history: Tensor  # float64 [N, HISTORY]
    accuracy_history: Tensor  # float64 [N, HISTORY]
    plateau: Tensor  # int64, consecutive env-steps with a small gain
    stable_count: Tensor  # int64
    stabilized: Tensor  # bool, latched
    last_op: Tensor  # int64, Op
    last_success: Tensor  # bool


class Guard(TensorClass["tensor_only", "frozen"]):
    """Loss watch of the governor [N] (window [N, 20], oldest first, newest last)."""

    losses: Tensor  # float64 [N, 20]
    count: Tensor  # int64, valid entries of the window
    anomalies: Tensor  # int64, consecutive divergent losses
    reason: Tensor  # int64, governor.PanicReason of this env-step's loss
    panic: Tensor  # bool, at this env-step the env goes back to its snapshot and takes no action
    snapshot_due: Tensor  # bool, to be taken at the next env-step that is healthy


class Totals(TensorClass["tensor_only", "frozen"]):
    """Counters and pending payments of the episode [N]."""

    germinated: Tensor  # int64, successful germinations
    blended: Tensor  # int64, seeds that entered BLENDING from TRAINING
    fossilized: Tensor  # int64
    contributing: Tensor  # int64, fossils that gained at least 1 point since germination
    pruned: Tensor  # int64, seeds removed
    # Int64 [N, 4], times that the env went back to a snapshot, by governor.PanicReason.
    rollbacks: Tensor
    reward: Tensor  # float64, sum of raw rewards
    pending_penalty: Tensor  # float64, for governor prunes, paid with the next reward
    pending_hindsight: Tensor  # float64, scaffold credit, paid with the next reward


class Ending(TensorClass["tensor_only", "frozen"]):
    """Whether an env's episode ended before its last env-step [N]; see env/early_stop.py."""

    # Float64, percent, the validation accuracy that last counted as a gain; below 0 at first.
    best: Tensor
    since: Tensor  # int64, env-steps since then
    cause: Tensor  # int64, early_stop.Cause; 0 while the episode goes on

    @property
    def over(self) -> Tensor:
        """bool [N]."""
        return self.cause > 0


class EnvState(TensorClass["tensor_only", "frozen"]):
    """The whole state of N envs."""

    slots: Slots
    ramp: Ramp
    signals: Signals
    guard: Guard
    totals: Totals
    ending: Ending
    # Float32 [N, S (S - 1) / 2, T], positive pair interactions by pair of slots and env-step.
    boosts: Tensor


class Action(TensorClass["tensor_only", "frozen"]):
    """One factored action per env: int64 [N] per head, in the order of vocabulary.HEADS."""

    slot: Tensor
    blueprint: Tensor
    style: Tensor
    tempo: Tensor
    alpha_target: Tensor
    alpha_speed: Tensor
    alpha_curve: Tensor
    op: Tensor


class Masks(TensorClass["tensor_only", "frozen"]):
    """Legal choices, bool; `slot` is unconditional, the slot head samples by `slot_by_op`."""

    slot: Tensor  # [N, S]
    blueprint: Tensor  # [N, P], P codes of blueprints
    style: Tensor  # [N, 4]
    tempo: Tensor  # [N, 3]
    alpha_target: Tensor  # [N, 3]
    alpha_speed: Tensor  # [N, 4]
    alpha_curve: Tensor  # [N, 5]
    op: Tensor  # [N, 6]
    slot_by_op: Tensor  # [N, 6, S]


class Observation(TensorClass["tensor_only", "frozen"]):
    """What the policy sees of an env."""

    features: Tensor  # float32 [N, 23 + 31 S]
    blueprints: Tensor  # int64 [N, S], -1 when empty


class View(TensorClass["tensor_only", "frozen"]):
    """Everything that a decision maker may look at, for N envs."""

    state: EnvState
    observation: Observation
    masks: Masks
    noise: Tensor  # float32 [N, 8], uniform in [0, 1), one number per head in HEADS order


class Decision(TensorClass["tensor_only", "frozen"]):
    """One action per env, and what the learner remembers of it (zeros from scripted policies)."""

    action: Action
    log_probs: Tensor  # float32 [N, 8], per head, 0 for heads that the op makes irrelevant
    value: Tensor  # float32 [N], in units of normalised return


class GradientStats(TensorClass["tensor_only", "frozen"]):
    """Gradient telemetry of seeds [N, S], before clipping, on the last strided batch of a pass."""

    l2: Tensor  # float64, L2 norm over the seed
    health: Tensor  # float64, [0, 1]
    vanishing: Tensor  # bool, some parameter tensor has norm below 1e-7
    exploding: Tensor  # bool, some parameter tensor has norm above 10 or not finite
    ratio: Tensor  # float64, seed over host root mean square gradient
    measured: Tensor  # bool


class Measurements(TensorClass["tensor_only", "frozen"]):
    """One env-step of training and validation, as accuracies of subset rows."""

    train_loss: Tensor  # float64 [N], mean of batch means
    train_accuracy: Tensor  # float64 [N], percent
    val_loss: Tensor  # float64 [N], of row 0, mean of batch means
    accuracy: Tensor  # float64 [N, R], percent; row 0 has every seed on
    # Int64 [N, R], bit s set = ablated slot s is on in this row; -1 = row not evaluated.
    subset: Tensor
    ablated: Tensor  # bool [N, S], slots that take part in the subsets
    gradients: GradientStats


class Attribution(TensorClass["tensor_only", "frozen"]):
    """What the subset rows say about each seed."""

    # Float64 [N, S], accuracy - accuracy without this seed; 0 where not measured.
    contribution: Tensor
    measured: Tensor  # bool [N, S]
    interaction_sum: Tensor  # float64 [N, S]
    pair_boost: Tensor  # float64 [N, S, S], positive pair interactions, 0 elsewhere
    # Float64 [N, S], exact for up to 4 ablated seeds; beyond, sampled where asked for, else 0.
    shapley: Tensor
    shapley_error: Tensor  # float64 [N, S], standard error of a sampled value, else 0
    total: Tensor  # float64 [N], accuracy - accuracy with every ablated seed off
    total_known: Tensor  # bool [N], at least one seed was ablated
    committed: Tensor  # float64 [N], accuracy with every non-fossilised ablated seed off


class ActionOutcome(TensorClass["tensor_only", "frozen"]):
    """What became of an action [N]."""

    effective_op: Tensor  # int64, the op, or WAIT where it was not applicable
    success: Tensor  # bool
    germinated: Tensor  # bool
    fossilized: Tensor  # bool


class ParameterCounts(NamedTuple):
    """Trainable parameters of the host and of what can stand in its slots; as of every env."""

    host: int
    seed: Tensor  # float64 [S, P], by slot and blueprint code
    gate: Tensor  # float64 [S], of the gate network that GATE adds
