"""Every record of the simulator, one field per line with dtype, shape and unit.

The env state (EnvState and what it holds) is a few kB per env; pure kernels replace it with
`.replace`. A field that is annotated with a value begins at it, in the dtype of its type: float64,
as accuracies are compared with exact thresholds, int64 for counters and codes, bool for flags.
N envs, S seed slots, R alpha rows, T env-steps. Accuracies are percent.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, TypeVar

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from esper_soa import vocabulary

STATE_FLOAT = torch.float64
Record = TypeVar("Record", bound=TensorClass)
DTYPES = {bool: torch.bool, int: torch.int64, float: STATE_FLOAT}
HISTORY = 10  # env-steps of loss and accuracy kept per env
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def initial_values(kind: type[Record]) -> dict[str, float]:
    """Values that the fields of a record begin at, by name."""
    hints = kind.__annotations__.items()
    return {name: hint.__metadata__[0] for name, hint in hints if hint is not Tensor}


def initial(
    kind: type[Record], shape: tuple[int, ...], device: torch.device | str, **values: Tensor
) -> Record:
    """A record of this shape as it begins, but for `values`: fields of shapes of their own."""
    fields = {}
    for name, value in initial_values(kind).items():
        fields[name] = torch.full(shape, value, dtype=DTYPES[type(value)], device=device)
    return kind.from_tensordict(TensorDict(fields | values, batch_size=shape))


def unchecked(
    kind: type[Record], fields: dict[str, Tensor | TensorClass], size: torch.Size
) -> Record:
    """A record of fields of this batch size, at a fifth of the cost of constructors, which look."""
    return kind._new_unsafe(fields, batch_size=size)  # type: ignore[attr-defined,no-any-return]


def with_fields(record: Record, **fields: Tensor | TensorClass) -> Record:
    """`record` with these fields in the place of its own, like its method `replace`, but unchecked
    and without copies of the records in it: one call instead of some dozens.
    """
    present: dict[str, Tensor | TensorClass] = dict(record.items())
    return unchecked(type(record), present | fields, record.batch_size)


def stage_in(stage: Tensor, stages: tuple[int, ...]) -> Tensor:
    """True where `stage` (any shape) is one of `stages`."""
    result = stage == stages[0]
    for code in stages[1:]:
        result = result | (stage == code)
    return result


def known_false(where: Tensor) -> bool:
    """Whether `where` (bool) is known to be False throughout: on a CPU alone, where looking costs
    nothing, and not in code that is compiled, which is the same for all.
    """
    if where.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not bool(where.any())


def select(where: Tensor, inside: Record, outside: Record) -> Record:
    """Record of `inside` in the envs of `where` (bool [N]) and `outside` in the rest.

    inside, outside: records [N, ...] of the same class.
    """
    masks = {dims: where.reshape(-1, *[1] * (dims - 1)) for dims in (1, 2, 3)}
    selected = {}
    for name, value in inside.items():
        default = outside.get(name)
        if isinstance(value, Tensor):
            selected[name] = torch.where(masks[value.ndim], value, default)
        else:
            selected[name] = select(where, value, default)
    return outside.replace(**selected)  # type: ignore[no-any-return]


def set_where(record: Record, where: Tensor, values: Mapping[str, Tensor | float]) -> Record:
    """`record` with `values` by name of their fields, where `where` (bool, of its shape) is set."""
    fields = {name: torch.where(where, value, record.get(name)) for name, value in values.items()}
    return with_fields(record, **fields)


def chosen(values: Tensor, choice: Tensor) -> Tensor:
    """The entry [...] of values [..., C] that choice int64 [...] tells."""
    return values.gather(-1, choice.unsqueeze(-1)).squeeze(-1)


def same_bits(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are equal to the bit, in dtype and shape too; so NaN may equal NaN."""
    for left, right in zip(mine, theirs, strict=True):
        bits = INTEGERS[left.element_size()]
        if left.dtype != right.dtype or not torch.equal(left.view(bits), right.view(bits)):
            return False
    return True


class Slots(TensorClass["tensor_only", "frozen"]):
    """Seed slots [N, S]: what is in them, how old it is, what it earned.

    Contributions, interactions and differences of accuracy are percent points.
    """

    stage: Annotated[Tensor, vocabulary.Stage.EMPTY]  # Stage
    stage_age: Annotated[Tensor, 0]  # env-steps recorded in this stage
    seed_age: Annotated[Tensor, 0]  # env-steps recorded since germination
    previous_stage: Annotated[Tensor, vocabulary.Stage.UNKNOWN]  # Stage before this one
    previous_stage_age: Annotated[Tensor, 0]  # env-steps that it lasted
    blueprint: Annotated[Tensor, vocabulary.Blueprint.NONE]  # Blueprint, -1 when empty
    blend: Annotated[Tensor, vocabulary.Blend.ADD]  # Blend, how the host takes the seed on
    style: Annotated[Tensor, vocabulary.Style.SIGMOID_ADD]  # Style chosen at germination
    tempo: Annotated[Tensor, 5]  # env-steps of the first ramp
    alpha_goal: Annotated[Tensor, 1.0]  # target of the first ramp, (0, 1]
    alpha: Annotated[Tensor, 0.0]  # [0, 1], how much of the seed the host takes on
    newborn: Annotated[Tensor, False]  # weights are due before the next training pass
    fresh_momentum: Annotated[Tensor, False]  # momentum is to be cleared before that pass
    accuracy_initial: Annotated[Tensor, 0.0]  # percent, at the seed's first record
    accuracy_stage_start: Annotated[Tensor, 0.0]  # percent, when the stage began
    accuracy_current: Annotated[Tensor, 0.0]  # percent, at the last record
    accuracy_blending_start: Annotated[Tensor, 0.0]  # percent, when blending began
    blending_started: Annotated[Tensor, False]  # accuracy_blending_start holds
    accuracy_germination: Annotated[Tensor, 0.0]  # percent, validation, when germinated
    germination_known: Annotated[Tensor, False]  # accuracy_germination holds
    contribution: Annotated[Tensor, 0.0]  # accuracy lost without this seed, last measurement
    contribution_known: Annotated[Tensor, False]  # measured at least once in this seed's life
    contribution_velocity: Annotated[Tensor, 0.0]  # moving average of its change
    contribution_age: Annotated[Tensor, 0]  # env-steps since the measurement, 0 = this env-step
    interaction_sum: Annotated[Tensor, 0.0]  # sum of pair interactions at this env-step
    gradient_norm: Annotated[Tensor, 0.0]  # L2 norm over the seed, last measured
    gradient_health: Annotated[Tensor, 0.0]  # [0, 1], 1 = sound
    gradient_vanishing: Annotated[Tensor, False]  # some parameter has a norm below 1e-7
    gradient_exploding: Annotated[Tensor, False]  # or above 10, or not finite
    gradient_measured: Annotated[Tensor, False]  # the four above hold
    gradient_ratio: Annotated[Tensor, 0.0]  # moving average of the seed-to-host gradient ratio
    gradient_ratio_known: Annotated[Tensor, False]  # gradient_ratio holds
    previous_health: Annotated[Tensor, 0.0]  # gradient_health one env-step ago
    previous_health_known: Annotated[Tensor, False]  # previous_health holds
    escrow: Annotated[Tensor, 0.0]  # reward credit held back (ESCROW)
    drip_live: Annotated[Tensor, False]  # this fossil pays drip (BASIC_PLUS)
    drip_scale: Annotated[Tensor, 0.0]  # reward per point of contribution
    drip_total: Annotated[Tensor, 0.0]  # reward that the fossil may pay in all
    drip_paid: Annotated[Tensor, 0.0]  # reward that it has paid
    rent_alpha: Annotated[Tensor, 0.0]  # alpha at the last rent reading
    rent_params: Annotated[Tensor, 0.0]  # parameters at the last rent reading

    @property
    def empty(self) -> Tensor:  # type: ignore[override]
        """bool [N, S]: a seed can be germinated here."""
        return self.stage == vocabulary.Stage.EMPTY

    @property
    def live(self) -> Tensor:
        """bool [N, S]: a seed module is present (GERMINATED to FOSSILIZED)."""
        return stage_in(self.stage, vocabulary.LIVE_STAGES)

    @property
    def running(self) -> Tensor:
        """bool [N, S]: the seed takes part in the forward pass (TRAINING to FOSSILIZED)."""
        return stage_in(self.stage, vocabulary.RUNNING_STAGES)

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

    alpha: Annotated[Tensor, 0.0]  # [0, 1]; may jump, `Slots.alpha` follows at the tick
    start: Annotated[Tensor, 0.0]  # alpha when the ramp was set
    target: Annotated[Tensor, 0.0]  # alpha that it leads to
    length: Annotated[Tensor, 0]  # env-steps in total
    done: Annotated[Tensor, 0]  # env-steps taken
    curve: Annotated[Tensor, vocabulary.Curve.LINEAR]  # Curve
    steepness: Annotated[Tensor, vocabulary.RAMP_STEEPNESS]  # of the sigmoid, at least 0.1
    mode: Annotated[Tensor, vocabulary.AlphaMode.HOLD]  # AlphaMode: up, down or at rest


class Signals(TensorClass["tensor_only", "frozen"]):
    """Training signals of an env [N] (histories [N, HISTORY], newest last)."""

    step: Annotated[Tensor, 0]  # env-steps recorded in this episode, 1-based once recorded
    train_loss: Annotated[Tensor, 0.0]  # nats, mean of the training pass
    train_accuracy: Annotated[Tensor, 0.0]  # percent, on the training pass
    val_loss: Annotated[Tensor, 0.0]  # nats, validation
    val_accuracy: Annotated[Tensor, 0.0]  # percent, validation
    loss_delta: Annotated[Tensor, 0.0]  # nats, previous - current validation loss; 0 at first
    accuracy_delta: Annotated[Tensor, 0.0]  # points, current - previous; at first the accuracy
    loss_history: Tensor  # float64 [N, HISTORY], nats, validation
    accuracy_history: Tensor  # float64 [N, HISTORY], percent, validation
    plateau: Annotated[Tensor, 0]  # consecutive env-steps with a small gain
    stable_count: Annotated[Tensor, 0]  # consecutive env-steps with a steady loss
    stabilized: Annotated[Tensor, False]  # there were enough of these once; stays
    last_op: Annotated[Tensor, vocabulary.Op.WAIT]  # Op of the last action
    last_success: Annotated[Tensor, True]  # whether it was carried out


class Guard(TensorClass["tensor_only", "frozen"]):
    """Loss watch of the governor [N] (window [N, 20], oldest first, newest last)."""

    losses: Tensor  # float64 [N, 20], nats, validation
    count: Annotated[Tensor, 0]  # valid entries of the window
    anomalies: Annotated[Tensor, 0]  # consecutive divergent losses
    reason: Annotated[Tensor, 0]  # governor.PanicReason of this env-step's loss
    panic: Annotated[Tensor, False]  # the env goes back to its snapshot, takes no action
    snapshot_due: Annotated[Tensor, False]  # to be taken at the next env-step that is healthy


class Totals(TensorClass["tensor_only", "frozen"]):
    """Counters and pending payments of the episode [N]."""

    germinated: Annotated[Tensor, 0]  # successful germinations
    blended: Annotated[Tensor, 0]  # seeds that entered BLENDING from TRAINING
    fossilized: Annotated[Tensor, 0]  # seeds that were made permanent
    contributing: Annotated[Tensor, 0]  # fossils that gained at least 1 point since germination
    pruned: Annotated[Tensor, 0]  # seeds removed
    # Int64 [N, 4], times that the env went back to a snapshot, by governor.PanicReason.
    rollbacks: Tensor
    reward: Annotated[Tensor, 0.0]  # sum of raw rewards
    train_flop: Annotated[Tensor, 0.0]  # of training on an image per env-step, sum
    pending_penalty: Annotated[Tensor, 0.0]  # for governor prunes, paid with the next reward
    pending_hindsight: Annotated[Tensor, 0.0]  # scaffold credit, paid with the next reward


class Ending(TensorClass["tensor_only", "frozen"]):
    """Whether an env's episode ended before its last env-step [N]; see env/early_stop.py."""

    # Percent, the accuracy that last counted as a gain; any is a gain at first.
    best: Annotated[Tensor, -200.0]
    since: Annotated[Tensor, 0]  # env-steps since `best` was reached
    cause: Annotated[Tensor, 0]  # early_stop.Cause, NONE while the episode goes on

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
    """Observation of the policy."""

    features: Tensor  # float32 [N, 23 + 31 S]
    blueprints: Tensor  # int64 [N, S], -1 when empty


class View(TensorClass["tensor_only", "frozen"]):
    """Everything that an agent may read, for N envs."""

    state: EnvState
    observation: Observation
    masks: Masks
    noise: Tensor  # float32 [N, 8], uniform in [0, 1), one number per head in HEADS order


class Decision(TensorClass["tensor_only", "frozen"]):
    """One action per env, and the learner's memories of it (zeros from scripted policies)."""

    action: Action
    log_probs: Tensor  # float32 [N, 8], per head, 0 for heads that the op makes irrelevant
    value: Tensor  # float32 [N], in units of normalised return


class GradientStats(TensorClass["tensor_only", "frozen"]):
    """Gradient telemetry of seeds [N, S], before clipping, on the last strided batch of a pass."""

    l2: Annotated[Tensor, 0.0]  # L2 norm over the seed
    health: Annotated[Tensor, 0.0]  # [0, 1]
    vanishing: Annotated[Tensor, False]  # some parameter tensor has norm below 1e-7
    exploding: Annotated[Tensor, False]  # some parameter tensor has norm above 10 or not finite
    ratio: Annotated[Tensor, 0.0]  # seed over host root mean square gradient
    measured: Annotated[Tensor, False]


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
    """Attribution of accuracy to each seed, from subset rows."""

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
    committed: Tensor  # float64 [N], accuracy with every non-fossilized ablated seed off


class ActionOutcome(TensorClass["tensor_only", "frozen"]):
    """Result of an action [N]."""

    effective_op: Tensor  # int64, the op, or WAIT where it was not applicable
    success: Tensor  # bool
    germinated: Tensor  # bool
    fossilized: Tensor  # bool


class Costs(NamedTuple):
    """Trainable parameters of a host and of what can stand in its slots, or the FLOP of training
    them on one image; the same for every env.
    """

    host: float
    seed: Tensor  # float64 [S, P], by slot and blueprint code; 0 where no blueprint has the code
    gate: Tensor  # float64 [S], of the gate network that GATE adds
