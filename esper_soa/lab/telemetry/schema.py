"""The tables that a run writes: their columns and types, and the kinds of events.

docs/telemetry.md says what each column is, with its unit; a test holds the page and this file
equal. A schema is stable: a column may be added, and none changes its name, type, unit or meaning
while SCHEMA_VERSION stays. Needs no torch.
"""

import pyarrow

from esper_soa.config.env import REWARD_TERMS
from esper_soa.vocabulary import HEAD_NAMES, HEADS

SCHEMA_VERSION = 1
COLUMN_TYPES = {
    "int": pyarrow.int32(),
    "float": pyarrow.float64(),
    "single": pyarrow.float32(),
    "bool": pyarrow.bool_(),
    "text": pyarrow.string(),
}
# The elements of a list are never null.
COLUMN_TYPES |= {
    f"{name}[]": pyarrow.list_(pyarrow.field("element", COLUMN_TYPES[name], nullable=False))
    for name in ("single", "bool")
}

KEY_COLUMNS = "round int, step int, env int"  # the first columns of every table


def schema_of(columns: str) -> pyarrow.Schema:
    """Columns as `name type, name type`, with a key of TYPES; a type with `?` may be null."""
    words = [column.split() for column in columns.split(",")]
    return pyarrow.schema(
        pyarrow.field(name, COLUMN_TYPES[of.rstrip("?")], of.endswith("?")) for name, of in words
    )


KINDS_OF_VALUES = {str: "text", int: "int", float: "float"}
_CHOSEN = ", ".join(
    f"{head.name} {KINDS_OF_VALUES[type(head.values[0]) if head.values else str]}?"
    for head in HEADS
    if head.name != "op"
)
_LIKELY = ", ".join(f"{head}_probability single?" for head in HEAD_NAMES)
_PAID = ", ".join(f"reward_{term} float" for term in REWARD_TERMS)
_CHOICES = ", ".join(f"{head}_legal bool[], {head}_probability single[]" for head in HEAD_NAMES)
TABLES = {
    name: schema_of(f"{KEY_COLUMNS}, {columns}")
    for name, columns in {
        "steps": f"""
            accuracy float, val_loss float?, train_loss float?, train_accuracy float?,
            parameters float, train_flop float, subsets int, total_contribution float?,
            committed_accuracy float, op text, effective_op text, success bool, {_CHOSEN},
            ops_legal int, {_LIKELY}, value single?, reward float, {_PAID},
            panic bool
            """,
        "slots": """
            slot text, stage text, stage_age int, seed int?, seed_age int?, blueprint text?,
            blend text?, parameters float, alpha float, alpha_target float, contribution float?,
            contribution_velocity float, interaction float?, shapley float?, shapley_error float?,
            accuracy_gain float?, gradient_norm float?, gradient_ratio float?,
            gradient_health float?, gradient_vanishing bool?, gradient_exploding bool?, escrow float
            """,
        "events": """
            slot text?, kind text, seed int?, blueprint text?, stage_from text?, stage_to text?,
            gate text?, cause text, seed_age int?, stage_age int?, alpha float?,
            alpha_target float?, contribution float?, accuracy float, accuracy_gain float?
            """,
        "choices": _CHOICES,
        "subsets": "subset int, accuracy float",
    }.items()
}
FULL_LEVEL_TABLES = ("choices", "subsets")  # telemetry.level=events writes the others
# A table of actions whose effects were measured: a row per horizon of each.
TABLES["effects"] = schema_of(
    f"""
    {KEY_COLUMNS}, op text, slot text, blueprint text, alpha float, seed_age int, placebo bool,
    horizon text, after int, accuracy float?, loss float?, train_flop float, parameters float,
    test_accuracy float?, test_loss float?
    """
)
# The env-steps of the control, in a table of its own: no question about the hosts that grow finds
# them by mistake.
CONTROL_TABLE = "control_steps"
TABLES[CONTROL_TABLE] = TABLES["steps"]

PANIC_REASONS = ("not_finite", "collapsed_to_chance", "diverged")  # as in env/governor.py
EARLY_ENDINGS = ("plateau", "diverged", "length")  # of episodes, as in env/early_stop.py
# Kinds of events, with what may bring each about.
EVENT_KINDS = {
    "germinated": ("action",),
    "advanced": ("action", "automatic"),
    "blended": ("action", "automatic"),
    "fossilized": ("action",),
    "refused": ("action",),
    "retargeted": ("action",),
    "fading": ("action",),
    "pruned": ("action", "faded", "rollback"),
    "embargoed": ("automatic",),
    "emptied": ("automatic",),
    "diverging": ("diverged",),
    "panic": PANIC_REASONS,
    "rollback": PANIC_REASONS,
    "ended_early": EARLY_ENDINGS,
}
