"""The tables of a round, made of what the device handed over: numbers [T, N, C] of T env-steps and
N envs. An env makes no rows once its episode has ended early. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from esper_soa.config.env import REWARD_TERMS
from esper_soa.lab.telemetry.table_files import Texts, Values
from esper_soa.vocabulary import (
    BLEND_NAMES,
    HEAD_NAMES,
    HEADS,
    LIVE_STAGES,
    OP_NAMES,
    RUNNING_STAGES,
    STAGE_NAMES,
    Blend,
    Stage,
    head_sizes,
)

# in which a blend has a gate network, if it is GATE
GATE_STAGES = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
EXACT_SEEDS = 4  # up to which Shapley values are known without sampling
Rows = dict[str, Values]


class Cost(NamedTuple):
    """Cost of a host and of its possible seeds: parameters, or FLOP of an env-step."""

    host: float
    seed: np.ndarray  # float64 [S, P]
    gate: np.ndarray  # float64 [S]


@dataclass(frozen=True)
class Legend:
    """Constants of a run that are needed to read its tables."""

    slots: tuple[str, ...]
    blueprints: tuple[str, ...]  # by code
    parameters: Cost
    train_flop: Cost
    learns: bool  # whether probabilities and values are a policy's own
    sampled_shapley: bool  # whether there are Shapley values of more than EXACT_SEEDS seeds

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of choices of every head."""
        return head_sizes(len(self.slots), len(self.blueprints))


class RoundRecord(NamedTuple):
    """Env-steps of a round, taken apart."""

    legend: Legend
    round: int
    steps: np.ndarray  # int [T], from 1, in order
    numbers: np.ndarray  # float64 [T, N, C]
    # what the columns C hold: one of an env, or K of its slots (`slot.*`) or of other things
    places: Mapping[str, int | slice]

    @property
    def full(self) -> bool:
        """Whether it was recorded at level full."""
        return "masks" in self.places

    def read(self, name: str) -> np.ndarray:
        """float64 [T, N] or [T, N, K]."""
        return self.numbers[:, :, self.places[name]]

    def code(self, name: str) -> np.ndarray:
        """int64 [T, N] or [T, N, K]."""
        return self.read(name).astype(np.int64)

    def flag(self, name: str) -> np.ndarray:
        """bool [T, N] or [T, N, K]."""
        return self.read(name) > 0

    def rows(self, columns: Mapping[str, Values], where: np.ndarray | None = None) -> Rows:
        """A table of `columns` of all env-steps that were record ([T, N, ...]), or of the places
        `where` (bool [T, N, K]) in them ([T, N, K]).
        """
        present = ~self.flag("over")
        at = np.nonzero(present if where is None else where & present[:, :, None])
        return self.keys(*at[:2]) | {name: values[at] for name, values in columns.items()}

    def keys(self, step: np.ndarray, env: np.ndarray) -> Rows:
        """The columns that every table begins with, of R rows; step: int [R], places in `steps`."""
        return {"round": np.full(len(env), self.round), "step": self.steps[step], "env": env}


def residents(record: RoundRecord, cost: Cost, stages: tuple[int, ...]) -> np.ndarray:
    """float64 [T, N, S]: what the seed in each slot costs with its gate; 0 outside `stages`."""
    stage = record.code("slot.stage")
    seed_cost = cost.seed[np.arange(len(cost.seed)), record.code("slot.blueprint")]
    gated = (record.code("slot.blend") == Blend.GATE) & np.isin(stage, GATE_STAGES)
    return np.where(np.isin(stage, stages), seed_cost + np.where(gated, cost.gate, 0.0), 0.0)


def seed_numbers(record: RoundRecord) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T, N, S] twice: the number of the seed in each slot, before and after the actions.

    By env, from 1 in order of germination; 0 for an empty slot. Env-steps that are missing cost no
    more than the order of the seeds that were born in them.
    """
    occupied = record.code("slot.stage") != Stage.EMPTY
    after = record.code("slot.stage_after") != Stage.EMPTY
    age = record.code("slot.seed_age")
    born = after & ~occupied
    earlier = np.zeros_like(occupied)
    earlier[1:] = after[:-1]
    is_new = np.zeros_like(occupied)
    is_new[1:] = occupied[:-1] & occupied[1:] & (age[1:] < age[:-1])
    # [T, 2, N, S]: before the actions of an env-step, and by them
    births = np.stack((occupied & (~earlier | is_new), born), 1)
    by_slot = births.transpose(0, 1, 3, 2)  # in the order in which seeds are numbered
    numbers = np.cumsum(by_slot.reshape(-1, by_slot.shape[3]), 0).reshape(by_slot.shape)
    born_last = np.where(births, numbers.transpose(0, 1, 3, 2), 0)
    latest = np.maximum.accumulate(born_last.reshape(-1, *born_last.shape[2:]), 0)
    latest = latest.reshape(born_last.shape)
    return np.where(occupied, latest[:, 0], 0), np.where(after, latest[:, 1], 0)


def _text(codes: np.ndarray, names: tuple[str, ...], known: np.ndarray) -> Texts:
    return Texts(np.where(known, codes, -1), names)


def _number(values: np.ndarray, known: np.ndarray | bool) -> np.ndarray:
    """float64: NaN where nothing is known."""
    return np.where(known, values, np.nan)


def steps_rows(record: RoundRecord) -> Rows:
    measured = ("accuracy", "val_loss", "train_loss", "train_accuracy", "committed_accuracy")
    reward_columns = ("reward", *(f"reward_{name}" for name in REWARD_TERMS))
    parameters = record.legend.parameters
    flop = record.legend.train_flop
    bits = 1 << np.arange(len(OP_NAMES))
    contribution = _number(record.read("total_contribution"), record.flag("total_known"))
    columns = {name: record.read(name) for name in (*measured, *reward_columns)} | {
        "parameters": parameters.host + residents(record, parameters, LIVE_STAGES).sum(2),
        "train_flop": flop.host + residents(record, flop, RUNNING_STAGES).sum(2),
        "subsets": record.code("subsets"),
        "total_contribution": contribution,
        "effective_op": Texts(record.code("effective_op"), OP_NAMES),
        "success": record.flag("success"),
        "ops_legal": record.code("legal") @ bits,
        "panic": record.flag("panic"),
    }
    return record.rows(columns | _choice_columns(record))


def _choice_columns(record: RoundRecord) -> dict[str, Values]:
    """The choices and their probabilities; null of heads that do not matter for the op."""
    legend = record.legend
    op = record.code("op")
    names = {"slot": legend.slots, "blueprint": legend.blueprints}
    columns: dict[str, Values] = {"value": _number(record.read("value"), legend.learns)}
    probability = np.exp(record.read("log_probs").astype(np.float32))
    for place, head in enumerate(HEADS):
        codes = record.code(head.name)
        matters = np.isin(op, head.ops)
        values = names.get(head.name, head.values or head.names)
        if isinstance(values[0], str):
            columns[head.name] = _text(codes, values, matters)
        else:
            columns[head.name] = _number(np.asarray(values)[codes], matters)
        likely = _number(probability[:, :, place], matters & legend.learns)
        columns[f"{head.name}_probability"] = likely
    return columns


def slots_rows(record: RoundRecord) -> Rows:
    legend = record.legend
    stage = record.code("slot.stage")
    occupied = stage != Stage.EMPTY
    measured = record.flag("slot.measured")
    few = measured.sum(2, keepdims=True) <= EXACT_SEEDS
    shared = measured & (few | legend.sampled_shapley)
    gradient = record.flag("slot.gradient_measured")
    always = ("stage_age", "alpha", "alpha_target", "contribution_velocity", "escrow")
    gradients = ("norm", "health", "vanishing", "exploding")
    known = dict.fromkeys(("contribution", "interaction"), measured)
    known |= dict.fromkeys(("shapley", "shapley_error"), shared) | {"seed_age": occupied}
    known |= {f"gradient_{name}": gradient for name in gradients}
    known["gradient_ratio"] = gradient & record.flag("slot.gradient_ratio_known")
    columns: dict[str, Values] = {name: record.read(f"slot.{name}") for name in always}
    columns |= {name: _number(record.read(f"slot.{name}"), known[name]) for name in known}
    gain = record.read("slot.accuracy_current") - record.read("slot.accuracy_initial")
    columns |= {
        "slot": Texts(np.broadcast_to(np.arange(stage.shape[2]), stage.shape), legend.slots),
        "stage": Texts(stage, STAGE_NAMES),
        "seed": _number(seed_numbers(record)[0], occupied),
        "blueprint": _text(record.code("slot.blueprint"), legend.blueprints, occupied),
        "blend": _text(record.code("slot.blend"), BLEND_NAMES, occupied),
        "parameters": residents(record, legend.parameters, LIVE_STAGES),
        "accuracy_gain": _number(gain, occupied),
    }
    return record.rows(columns, stage >= 0)


def choices_rows(record: RoundRecord) -> Rows:
    ends = np.cumsum(record.legend.choices)[:-1]
    legal = np.split(record.flag("masks"), ends, 2)
    probabilities = np.split(record.read("probabilities"), ends, 2)
    known = None if record.legend.learns else 0  # of a policy that does not learn, none
    columns: dict[str, Values] = {}
    for name, masks, shares in zip(HEAD_NAMES, legal, probabilities, strict=True):
        columns[f"{name}_legal"] = masks
        columns[f"{name}_probability"] = shares[:, :, :known]
    return record.rows(columns)


def subsets_rows(record: RoundRecord) -> Rows:
    subset = record.code("subset")
    columns = {"subset": subset, "accuracy": record.read("subset_accuracy")}
    return record.rows(columns, subset >= 0)
