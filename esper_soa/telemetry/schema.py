"""The tables that a run writes: every column with its type, unit and meaning, and every kind of
event.

One table in code, from which docs/telemetry.md is made (esper_soa/telemetry/pages.py) and by which
tables are packed, written and read. A schema is stable: a column may be added, and none changes its
name, type, unit or meaning while SCHEMA_VERSION stays. Needs no torch.
"""

from typing import NamedTuple

from esper_soa.vocabulary import HEAD_NAMES

SCHEMA_VERSION = 1
STYLE_NAMES = ("linear_add", "linear_multiply", "sigmoid_add", "gated_gate")  # by Style
CURVE_NAMES = (
    "linear",
    "cosine",
    "sigmoid_6",
    "sigmoid_12",
    "sigmoid_24",
)  # by choice of the head alpha_curve


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: str  # a key of TYPES
    unit: str
    meaning: str
    nullable: bool = False  # a float that may be null is null where it is not a number

    @property
    def is_list(self) -> bool:
        """Whether each value is a list of numbers."""
        return self.type.endswith("[]")


# Types as columns name them: as Parquet calls them and as SQL does.
TYPES = {
    "int": ("INT32", "INTEGER"),
    "float": ("DOUBLE", "DOUBLE"),
    "single": ("FLOAT", "FLOAT"),
    "bool": ("BOOLEAN", "BOOLEAN"),
    "text": ("BYTE_ARRAY, UTF8", "VARCHAR"),
    "single[]": ("LIST of FLOAT", "FLOAT[]"),
    "bool[]": ("LIST of BOOLEAN", "BOOLEAN[]"),
}

# What each row is about; the first columns of every table.
KEYS = (
    Column(
        "round", "int", "", "round of the run, from 1; that of `metrics.jsonl` and `episodes.jsonl`"
    ),
    Column("step", "int", "env-steps", "env-step of the episode, from 1"),
    Column("env", "int", "", "env, from 0; that of `episodes.jsonl`"),
)
SLOT = Column("slot", "text", "", "place in the host, as the setting `slots` names it")

# The reward terms are fields of env/reward_terms.RewardTerms; each is a column named
# reward_<field>.
REWARD_TERMS = (
    (
        "attribution",
        "what the seeds earned by their contributions; in escrow mode, the moves of the escrow",
    ),
    ("ratio_penalty", "contribution that the total does not support"),
    ("blending_warning", "seeds blended in while all seeds together do harm"),
    ("holding_warning", "a useful seed held without deciding about it"),
    ("pbrs_bonus", "potential-based shaping over stages"),
    ("synergy_bonus", "seeds that help each other"),
    ("compute_rent", "rent of the parameters grown"),
    ("alpha_shock", "sudden moves of alpha"),
    ("occupancy_rent", "occupied slots beyond the free ones"),
    ("fossilized_rent", "fossils"),
    ("action_shaping", "costs and bonuses of the op itself"),
    ("fossilize_bonus", "basic modes: paid when a seed is fossilised"),
    ("drip", "basic modes: paid later, from the pools of fossils"),
    ("terminal_bonus", "paid at the last env-step"),
    ("loss_change", "loss mode: change of the validation loss"),
    ("accuracy_change", "net mode: change of the validation accuracy"),
    ("own", "what a reward of your own pays"),
    ("escrow_forfeit", "escrow that is lost"),
    ("clawback", "germination bonuses of seeds that came to nothing"),
    ("auto_prune_penalty", "seeds that a rollback removed"),
    ("hindsight_credit", "seeds that helped a later fossil"),
    ("rollback_penalty", "the only term of an env-step at which the host was rolled back"),
)

STEPS = (
    *KEYS,
    Column(
        "accuracy",
        "float",
        "percent",
        "validation accuracy with every seed on; at a panic, the last one recorded",
    ),
    Column("val_loss", "float", "nats", "validation loss; null at a panic", nullable=True),
    Column(
        "train_loss",
        "float",
        "nats",
        "mean loss of the training pass; null at a panic",
        nullable=True,
    ),
    Column(
        "train_accuracy",
        "float",
        "percent",
        "accuracy on the training pass; null at a panic",
        nullable=True,
    ),
    Column(
        "parameters",
        "float",
        "parameters",
        "host and live seeds with their gates, as trained in this env-step",
    ),
    Column("train_flop", "float", "FLOP", "training of this env-step: host and running seeds"),
    Column(
        "subsets", "int", "", "distinct subsets of seeds that were validated, the whole among them"
    ),
    Column(
        "total_contribution",
        "float",
        "percent points",
        "accuracy lost with every ablated seed off at once; null where none was ablated",
        nullable=True,
    ),
    Column("committed_accuracy", "float", "percent", "accuracy with the fossils alone on"),
    Column("op", "text", "", "lifecycle operation that was chosen"),
    Column(
        "effective_op",
        "text",
        "",
        "the same, or `wait` where its slot did not allow it; rewards go by this",
    ),
    Column(
        "success",
        "bool",
        "",
        "whether it was carried out; false for one that a gate refused; true for `wait`",
    ),
    Column(
        "slot", "text", "", "slot that it was about; null where the op is about none", nullable=True
    ),
    Column(
        "blueprint",
        "text",
        "",
        "chosen blueprint; null where it does not matter, as in the next five",
        nullable=True,
    ),
    Column("style", "text", "", "chosen style of blending", nullable=True),
    Column("tempo", "int", "env-steps", "chosen length of the first ramp", nullable=True),
    Column("alpha_target", "float", "", "chosen alpha that a ramp leads to, (0, 1]", nullable=True),
    Column(
        "alpha_speed",
        "int",
        "env-steps",
        "chosen length of the new ramp, 0 = at once",
        nullable=True,
    ),
    Column(
        "alpha_curve",
        "text",
        "",
        "chosen curve of the new ramp, with the steepness of a sigmoid",
        nullable=True,
    ),
    Column(
        "ops_legal",
        "int",
        "bits",
        "legal ops: bit k is set where op k was legal, in the order of `ops` below",
    ),
    *(
        Column(
            f"{head}_probability",
            "single",
            "",
            f"probability that the policy gave to its choice of {head}, 1 where nothing else was "
            "legal; "
            "null where it does not matter or the policy does not learn",
            nullable=True,
        )
        for head in HEAD_NAMES
    ),
    Column(
        "value",
        "single",
        "normalised return",
        "the critic's value; null where the policy does not learn",
        nullable=True,
    ),
    Column(
        "reward",
        "float",
        "",
        "reward of the env-step as it was paid, before any scaling: the sum of its terms",
    ),
    *(Column(f"reward_{name}", "float", "", f"term: {meaning}") for name, meaning in REWARD_TERMS),
    Column("panic", "bool", "", "whether the host was rolled back at this env-step"),
)

SLOTS = (
    *KEYS,
    SLOT,
    Column(
        "stage", "text", "", "stage in which the slot was trained and measured, before the action"
    ),
    Column("stage_age", "int", "env-steps", "recorded in this stage, this one included"),
    Column(
        "seed",
        "int",
        "",
        "number of the seed in its env's episode, from 1 in order of germination; null when empty",
        nullable=True,
    ),
    Column(
        "seed_age", "int", "env-steps", "recorded since germination; null when empty", nullable=True
    ),
    Column("blueprint", "text", "", "what the seed is; null when empty", nullable=True),
    Column(
        "blend",
        "text",
        "",
        "how the host takes it on: add, multiply or gate; null when empty",
        nullable=True,
    ),
    Column("parameters", "float", "parameters", "of the live seed with its gate, else 0"),
    Column("alpha", "float", "", "how much of it the host took on, [0, 1]"),
    Column("alpha_target", "float", "", "where its ramp leads or rests, [0, 1]"),
    Column(
        "contribution",
        "float",
        "percent points",
        "accuracy lost without this seed; null where not measured",
        nullable=True,
    ),
    Column(
        "contribution_velocity",
        "float",
        "percent points per env-step",
        "moving average of its change",
    ),
    Column(
        "interaction",
        "float",
        "percent points",
        "sum of its interactions with the other seeds; null where its contribution was not measured",  # noqa: E501
        nullable=True,
    ),
    Column(
        "shapley",
        "float",
        "percent points",
        "its share of what all ablated seeds add together; null where not measured",
        nullable=True,
    ),
    Column(
        "shapley_error",
        "float",
        "percent points",
        "standard error of a sampled share, 0 of an exact one; null as the share",
        nullable=True,
    ),
    Column(
        "accuracy_gain",
        "float",
        "percent points",
        "of its host since the seed's first record; null when empty",
        nullable=True,
    ),
    Column(
        "gradient_norm",
        "float",
        "",
        "of the seed, on the last strided batch; null where not measured, as the next four",
        nullable=True,
    ),
    Column(
        "gradient_ratio",
        "float",
        "",
        "moving average of the root mean square gradient, seed over host",
        nullable=True,
    ),
    Column(
        "gradient_health",
        "float",
        "",
        "[0, 1], 1 = no parameter tensor vanishes or explodes",
        nullable=True,
    ),
    Column(
        "gradient_vanishing", "bool", "", "some parameter tensor has norm below 1e-7", nullable=True
    ),
    Column(
        "gradient_exploding",
        "bool",
        "",
        "some parameter tensor has norm above 10 or not finite",
        nullable=True,
    ),
    Column("escrow", "float", "", "reward credit held back (escrow mode)"),
)

EVENTS = (
    *KEYS,
    Column("slot", "text", "", "where; null for what concerns the whole env", nullable=True),
    Column("kind", "text", "", "what happened; see the kinds below"),
    Column(
        "seed",
        "int",
        "",
        "number of the seed, as in `slots`; null for what concerns the whole env",
        nullable=True,
    ),
    Column(
        "blueprint", "text", "", "of the seed; null for what concerns the whole env", nullable=True
    ),
    Column(
        "stage_from",
        "text",
        "",
        "stage before; null for what concerns the whole env",
        nullable=True,
    ),
    Column(
        "stage_to",
        "text",
        "",
        "stage after, the same where it did not change; null likewise",
        nullable=True,
    ),
    Column(
        "gate",
        "text",
        "",
        "gate that was passed, or that refused: G1, G2, G3, G5; else null",
        nullable=True,
    ),
    Column("cause", "text", "", "what brought it about; see the kinds below"),
    Column(
        "seed_age", "int", "env-steps", "of the seed, at the event; null likewise", nullable=True
    ),
    Column(
        "stage_age",
        "int",
        "env-steps",
        "that it had spent in `stage_from`; null likewise",
        nullable=True,
    ),
    Column(
        "alpha",
        "float",
        "",
        "of the seed as it was trained in this env-step; null likewise",
        nullable=True,
    ),
    Column(
        "alpha_target",
        "float",
        "",
        "where its ramp leads after the event; null likewise",
        nullable=True,
    ),
    Column(
        "contribution",
        "float",
        "percent points",
        "of the seed at this env-step; null where not measured",
        nullable=True,
    ),
    Column("accuracy", "float", "percent", "of the host at this env-step, as in `steps`"),
    Column(
        "accuracy_gain",
        "float",
        "percent points",
        "of the host since the seed's first record; null likewise",
        nullable=True,
    ),
)

CHOICES = (
    *KEYS,
    *(
        column
        for head in HEAD_NAMES
        for column in (
            Column(
                f"{head}_legal",
                "bool[]",
                "",
                f"which choices of {head} were legal once the op was chosen",
            ),
            Column(
                f"{head}_probability",
                "single[]",
                "",
                f"probability of every choice of {head}; empty where the policy does not learn",
            ),
        )
    ),
)

SUBSETS = (
    *KEYS,
    Column(
        "subset",
        "int",
        "bits",
        "seeds that were on: bit s is set where that of slot s was, in the order of "
        "`slots`; ablated seeds alone count",
    ),
    Column("accuracy", "float", "percent", "validation accuracy with the other ablated seeds off"),
)


class Table(NamedTuple):
    """A table: a file per round in the folder of its name."""

    name: str
    row: str  # what a row is
    level: str  # of telemetry.level, from which on it is written
    columns: tuple[Column, ...]


TABLES = (
    Table("steps", "an env-step of an env: what was measured, decided and paid", "events", STEPS),
    Table("slots", "a slot at an env-step of an env, empty ones included", "events", SLOTS),
    Table("events", "something that happened to a seed or an env", "events", EVENTS),
    Table(
        "choices", "an env-step of an env: what was legal and how likely, per head", "full", CHOICES
    ),
    Table(
        "subsets", "a subset of seeds that was validated at an env-step of an env", "full", SUBSETS
    ),
)


class Kind(NamedTuple):
    """A kind of event."""

    name: str
    meaning: str
    causes: tuple[str, ...]
    of_seed: bool = True  # False: of the whole env


REASONS = ("not_finite", "collapsed_to_chance", "diverged")  # of a panic, as in env/governor.py
ENDINGS = ("plateau", "diverged")  # why an episode ended early, as in env/early_stop.py
KINDS = (
    Kind("germinated", "a seed was put into an empty slot", ("action",)),
    Kind("advanced", "a seed passed G1 (to training) or G3 (to holding)", ("action", "automatic")),
    Kind("blended", "a seed passed G2 and began to blend in", ("action", "automatic")),
    Kind("fossilized", "a seed passed G5 and is part of the host for good", ("action",)),
    Kind(
        "refused",
        "the gate named did not let a seed pass that was to advance or to be fossilised",
        ("action",),
    ),
    Kind(
        "retargeted",
        "a seed was given a new alpha to go to; a held one is blending again",
        ("action",),
    ),
    Kind(
        "fading",
        "a seed is to be pruned and first fades out; it can no longer be kept",
        ("action",),
    ),
    Kind(
        "pruned",
        "a seed was removed: at once, at the end of its fading, or by a rollback",
        ("action", "faded", "rollback"),
    ),
    Kind("embargoed", "the slot of a removed seed cools down", ("automatic",)),
    Kind(
        "emptied", "the embargo is over: a seed can be germinated in the slot again", ("automatic",)
    ),
    Kind(
        "diverging",
        "a loss diverged, not yet often enough in a row for a panic",
        ("diverged",),
        of_seed=False,
    ),
    Kind(
        "panic",
        "the governor found the host beyond help; the cause says why",
        REASONS,
        of_seed=False,
    ),
    Kind(
        "rollback",
        "the host went back to its snapshot; all seeds but fossils are lost",
        REASONS,
        of_seed=False,
    ),
    Kind(
        "ended_early",
        "the episode of the env was cut off here, before its last env-step (`early_stop`): no "
        "gain in "
        "accuracy for too long, or too many rollbacks",
        ENDINGS,
        of_seed=False,
    ),
)
