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
    """Lifecycle operation: the last head, and the one that decides which other heads matter."""

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
# Names that actions may use for choices, by head; slots and blueprints are those of the run.
CHOICE_NAMES = {
    "style": STYLE_NAMES,
    "tempo": ("fast", "standard", "slow"),
    "alpha_target": ("half", "seventy", "full"),
    "alpha_speed": ("instant", "fast", "medium", "slow"),
    "alpha_curve": CURVE_NAMES,
    "op": OP_NAMES,
}


class Head(NamedTuple):
    """One action head: a row of HEADS."""

    name: str
    choices: int  # 0 = one per seed slot; those of a blueprint are more where users bring their own
    # Its choice where it does not matter (log-prob 0, entropy 0); not so for slot and op.
    placeholder: int
    ops: tuple[int, ...]  # for which it matters
    # Masked down to its placeholder where none of these ops is legal; others keep all choices.
    fixed: bool = False
    # What each choice stands for, in tables; slots and blueprints are those of the run.
    values: tuple[str, ...] | tuple[float, ...] = ()


# The one table of action heads, in the order of actions, masks and log-probabilities. Where the
# slot does not matter it is the first legal one; the op always matters.
HEADS = (
    Head("slot", 0, 0, (Op.GERMINATE, Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE)),
    Head("blueprint", NUM_BLUEPRINTS, Blueprint.NOOP, (Op.GERMINATE,)),
    Head(
        "style",
        len(STYLE_BLEND),
        Style.SIGMOID_ADD,
        (Op.GERMINATE, Op.SET_ALPHA_TARGET),
        fixed=True,
        values=STYLE_NAMES,
    ),
    Head("tempo", len(TEMPO_STEPS), 1, (Op.GERMINATE,), values=TEMPO_STEPS),
    Head(
        "alpha_target",
        len(ALPHA_TARGETS),
        2,
        (Op.GERMINATE, Op.SET_ALPHA_TARGET),
        fixed=True,
        values=ALPHA_TARGETS,
    ),
    Head("alpha_speed", len(SPEED_STEPS), 0, (Op.SET_ALPHA_TARGET, Op.PRUNE), values=SPEED_STEPS),
    Head("alpha_curve", len(CURVE_CHOICES), 0, (Op.SET_ALPHA_TARGET, Op.PRUNE), values=CURVE_NAMES),
    Head("op", len(OP_NAMES), Op.WAIT, tuple(range(len(OP_NAMES))), values=OP_NAMES),
)
DETAIL_HEADS = HEADS[1:-1]  # what is chosen once op and slot are
HEAD_NAMES = tuple(head.name for head in HEADS)


def head_sizes(num_slots: int, num_blueprints: int = NUM_BLUEPRINTS) -> tuple[int, ...]:
    """Number of choices of every head, in HEADS order, for hosts with `num_slots` seed slots.

    num_blueprints: P, codes of the package's blueprints and of users'.
    """
    follows = {"slot": num_slots, "blueprint": num_blueprints}
    return tuple(follows.get(head.name, head.choices) for head in HEADS)
