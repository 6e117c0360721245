"""The words that every other module shares, as plain ints in namespace classes.

Plain ints, never Enum: `tensor == IntEnum.X` inside torch.compile silently gives False. NAMES
tables turn codes back into the words that people read. Imports nothing of the package.
"""

from typing import NamedTuple


def names_of(words: type) -> tuple[str, ...]:
    """The names of the codes 0, 1, 2 and so on of a namespace class, in small letters."""
    codes = {code: name.lower() for name, code in vars(words).items() if name.isupper()}
    return tuple(codes[code] for code in sorted(codes) if code >= 0)


class Stage:
    """Lifecycle stage of a seed slot; EMPTY: a seed can be germinated there."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    RETIRED = 5
    HOLDING = 6
    FOSSILIZED = 7
    PRUNED = 8
    EMBARGOED = 9
    RESETTING = 10
    EMPTY = 11


STAGE_NAMES = names_of(Stage)
LIVE_STAGES = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
RUNNING_STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)


class Op:
    """Lifecycle operation: the choice that decides which other heads matter."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


OP_NAMES = names_of(Op)


class Blueprint:
    """Architecture of a seed; NONE marks an empty slot."""

    NONE = -1
    NOOP = 0
    CONV_LIGHT = 1
    ATTENTION = 2
    NORM = 3
    DEPTHWISE = 4
    BOTTLENECK = 5
    CONV_SMALL = 6
    CONV_HEAVY = 7
    LORA = 8
    LORA_LARGE = 9
    MLP_SMALL = 10
    MLP = 11
    FLEX_ATTENTION = 12


BLUEPRINT_NAMES = names_of(Blueprint)
NUM_BLUEPRINTS = len(BLUEPRINT_NAMES)  # of the package: codes from here on are those of users
CNN_BLUEPRINTS = (1, 2, 3, 4, 5, 6, 7)
SEQUENCE_BLUEPRINTS = (2, 3, 8, 9, 10, 11, 12)


class AlphaMode:
    """Direction in which the alpha ramp of a slot moves."""

    HOLD = 0
    UP = 1
    DOWN = 2


class Curve:
    """Shape of an alpha ramp."""

    LINEAR = 1
    COSINE = 2
    SIGMOID = 3


class Blend:
    """How the host's activations take on the seed's."""

    ADD = 1
    MULTIPLY = 2
    GATE = 3


BLEND_NAMES = ("none", "add", "multiply", "gate")


class Style:
    """Germination style: the curve of the first ramp together with the blend."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


# Values behind the action heads, indexed by the head's choice.
STYLE_BLEND = (Blend.ADD, Blend.MULTIPLY, Blend.ADD, Blend.GATE)
STYLE_CURVE = (Curve.LINEAR, Curve.LINEAR, Curve.SIGMOID, Curve.LINEAR)
STYLE_NAMES = names_of(Style)
TEMPO_STEPS = (3, 5, 8)
ALPHA_TARGETS = (0.5, 0.7, 1.0)
SPEED_STEPS = (0, 3, 5, 8)
CURVE_CHOICES = (Curve.LINEAR, Curve.COSINE, Curve.SIGMOID, Curve.SIGMOID, Curve.SIGMOID)
CURVE_STEEPNESS = (12.0, 12.0, 6.0, 12.0, 24.0)
CURVE_NAMES = ("linear", "cosine", "sigmoid_6", "sigmoid_12", "sigmoid_24")
RAMP_STEEPNESS = 12.0


class Head(NamedTuple):
    """One action head: a row of HEADS."""

    name: str
    # Its choice where it does not matter (log-prob 0, entropy 0); not so for slot and op.
    placeholder: int
    ops: tuple[int, ...]  # for which it matters
    # Names of its choices, which actions may use; slots and blueprints are those of the run.
    names: tuple[str, ...] = ()
    # Values of the choices, in tables; their names stand for them where there are none.
    values: tuple[int, ...] | tuple[float, ...] = ()
    # Masked down to its placeholder where none of these ops is legal; others keep all choices.
    fixed: bool = False


AIMING = (Op.GERMINATE, Op.SET_ALPHA_TARGET)
MOVING = (Op.SET_ALPHA_TARGET, Op.PRUNE)
# The one table of action heads, in the order of actions, masks and log-probabilities: a new head
# goes to the end, so that no column moves. Where the slot does not matter it is the first legal
# one; the op always matters.
HEADS = (
    Head("slot", 0, (Op.GERMINATE, Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE)),
    Head("blueprint", Blueprint.NOOP, (Op.GERMINATE,)),
    Head("style", Style.SIGMOID_ADD, AIMING, names=STYLE_NAMES, fixed=True),
    Head("tempo", 1, (Op.GERMINATE,), names=("fast", "standard", "slow"), values=TEMPO_STEPS),
    Head(
        "alpha_target",
        2,
        AIMING,
        names=("half", "seventy", "full"),
        values=ALPHA_TARGETS,
        fixed=True,
    ),
    Head("alpha_speed", 0, MOVING, names=("instant", "fast", "medium", "slow"), values=SPEED_STEPS),
    Head("alpha_curve", 0, MOVING, names=CURVE_NAMES),
    Head("op", Op.WAIT, tuple(range(len(OP_NAMES))), names=OP_NAMES),
)
DETAIL_HEADS = tuple(head for head in HEADS if head.name not in ("slot", "op"))
HEAD_NAMES = tuple(head.name for head in HEADS)


def head_sizes(num_slots: int, num_blueprints: int = NUM_BLUEPRINTS) -> tuple[int, ...]:
    """Number of choices of every head, in HEADS order, for hosts with `num_slots` seed slots.

    num_blueprints: P, codes of the package's blueprints and of users'.
    """
    follows = {"slot": num_slots, "blueprint": num_blueprints}
    return tuple(follows.get(head.name, len(head.names)) for head in HEADS)
