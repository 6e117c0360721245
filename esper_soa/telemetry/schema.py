"""The tables that a run writes: their columns and types, and the kinds of events.

docs/telemetry.md says what each column is, with its unit; a test holds the page and this file
equal. A schema is stable: a column may be added, and none changes its name, type, unit or meaning
while SCHEMA_VERSION stays. Needs no torch.
"""

from typing import NamedTuple

from esper_soa.vocabulary import HEAD_NAMES

SCHEMA_VERSION = 1
STYLE_NAMES = ("linear_add", "linear_multiply", "sigmoid_add", "gated_gate")  # by Style
# by choice of the head alpha_curve
CURVE_NAMES = ("linear", "cosine", "sigmoid_6", "sigmoid_12", "sigmoid_24")
# Types as columns name them, and as SQL does.
TYPES = {
    "int": "INTEGER",
    "float": "DOUBLE",
    "single": "FLOAT",
    "bool": "BOOLEAN",
    "text": "VARCHAR",
    "single[]": "FLOAT[]",
    "bool[]": "BOOLEAN[]",
}
# The reward terms are fields of env/reward_terms.RewardTerms; each is a column reward_<field>.
_TERMS = """
    attribution ratio_penalty blending_warning holding_warning pbrs_bonus synergy_bonus compute_rent
    alpha_shock occupancy_rent fossilized_rent action_shaping fossilize_bonus drip terminal_bonus
    loss_change accuracy_change own escrow_forfeit clawback auto_prune_penalty hindsight_credit
    rollback_penalty
"""
REWARD_TERMS = tuple(_TERMS.split())


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: str  # a key of TYPES
    nullable: bool = False  # a float that may be null is null where it is not a number

    @property
    def is_list(self) -> bool:
        """Whether each value is a list of numbers."""
        return self.type.endswith("[]")


class Table(NamedTuple):
    """A table: a file per round in the folder of its name."""

    name: str
    level: str  # of telemetry.level, from which on it is written
    columns: tuple[Column, ...]


KEYS = "round int, step int, env int"  # what each row is about: the first columns of every table


def _table(name: str, level: str, columns: str) -> Table:
    """columns: after KEYS, each as `name type`; a type with `?` may be null."""
    words = [one.split() for one in f"{KEYS}, {columns}".split(",")]
    return Table(
        name, level, tuple(Column(name, kind.rstrip("?"), kind[-1] == "?") for name, kind in words)
    )


_LIKELY = ", ".join(f"{head}_probability single?" for head in HEAD_NAMES)
_PAID = ", ".join(f"reward_{term} float" for term in REWARD_TERMS)
_CHOICES = ", ".join(f"{head}_legal bool[], {head}_probability single[]" for head in HEAD_NAMES)
TABLES = (
    _table(
        "steps",
        "events",
        f"""
        accuracy float, val_loss float?, train_loss float?, train_accuracy float?, parameters float,
        train_flop float, subsets int, total_contribution float?, committed_accuracy float,
        op text, effective_op text, success bool, slot text?, blueprint text?, style text?,
        tempo int?, alpha_target float?, alpha_speed int?, alpha_curve text?, ops_legal int,
        {_LIKELY}, value single?, reward float, {_PAID}, panic bool
        """,
    ),
    _table(
        "slots",
        "events",
        """
        slot text, stage text, stage_age int, seed int?, seed_age int?, blueprint text?,
        blend text?, parameters float, alpha float, alpha_target float, contribution float?,
        contribution_velocity float, interaction float?, shapley float?, shapley_error float?,
        accuracy_gain float?, gradient_norm float?, gradient_ratio float?, gradient_health float?,
        gradient_vanishing bool?, gradient_exploding bool?, escrow float
        """,
    ),
    _table(
        "events",
        "events",
        """
        slot text?, kind text, seed int?, blueprint text?, stage_from text?, stage_to text?,
        gate text?, cause text, seed_age int?, stage_age int?, alpha float?, alpha_target float?,
        contribution float?, accuracy float, accuracy_gain float?
        """,
    ),
    _table("choices", "full", _CHOICES),
    _table("subsets", "full", "subset int, accuracy float"),
)
BY_NAME = {table.name: table for table in TABLES}

REASONS = ("not_finite", "collapsed_to_chance", "diverged")  # of a panic, as in env/governor.py
ENDINGS = ("plateau", "diverged")  # why an episode ended early, as in env/early_stop.py
# Kinds of events, with what may bring each about.
KINDS = {
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
    "panic": REASONS,
    "rollback": REASONS,
    "ended_early": ENDINGS,
}
