"""The tables of a round, made of what the device handed over: numbers [T, N, C] of T env-steps and
N envs. An env makes no rows once its episode has ended early. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from esper_soa.telemetry.parquet import Texts, Values
from esper_soa.telemetry.schema import CURVE_NAMES, REWARD_TERMS, STYLE_NAMES
from esper_soa.vocabulary import (
    ALPHA_TARGETS,
    BLEND_NAMES,
    HEAD_NAMES,
    HEADS,
    LIVE_STAGES,
    OP_NAMES,
    RUNNING_STAGES,
    SPEED_STEPS,
    STAGE_NAMES,
    TEMPO_STEPS,
    Blend,
    Stage,
    head_sizes,
)

# in which a blend has a gate network, if it is GATE
GATE_STAGES = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
EXACT_SEEDS = 4  # up to which Shapley values are known without sampling
Rows = dict[str, Values]


class Cost(NamedTuple):
    """What a host and what can stand in its slots costs: parameters, or FLOP of an env-step."""

    host: float
    seed: np.ndarray  # float64 [S, P]
    gate: np.ndarray  # float64 [S]


@dataclass(frozen=True)
class Legend:
    """What is the same for all env-steps of a run, and needed to read their numbers."""

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


class Played:
    """Env-steps of a round, taken apart."""

    def __init__(
        self, legend: Legend, steps: np.ndarray, numbers: np.ndarray, places: Mapping[str, slice]
    ) -> None:
        """steps int [T], from 1, in order; numbers float64 [T, N, C]; places: what columns hold."""
        self.legend = legend
        self.steps = steps
        self._numbers = numbers
        self._places = places
        self.num_slots = len(legend.slots)

    def env(self, name: str) -> np.ndarray:
        """float64 [T, N]."""
        return self._numbers[:, :, self._places[name].start]

    def several(self, name: str) -> np.ndarray:
        """float64 [T, N, K]."""
        return self._numbers[:, :, self._places[name]]

    def code(self, name: str) -> np.ndarray:
        """int64 [T, N]."""
        return self.env(name).astype(np.int64)

    def slot(self, name: str) -> np.ndarray:
        """float64 [T, N, S]."""
        return self.several(f"slot.{name}")

    def slot_code(self, name: str) -> np.ndarray:
        """int64 [T, N, S]."""
        return self.slot(name).astype(np.int64)

    @property
    def goes_on(self) -> np.ndarray:
        """bool [T, N]: the episode of the env was not over before the env-step."""
        return self.env("over") == 0

    def rows(self, round_number: int, where: np.ndarray, columns: Mapping[str, Values]) -> Rows:
        """A table of the places in `where` (bool [T, N] or [T, N, K]), of `columns` everywhere."""
        at = np.nonzero(where)
        keys: Rows = {
            "round": np.full(len(at[0]), round_number),
            "step": self.steps[at[0]],
            "env": at[1],
        }
        return keys | {name: values[at] for name, values in columns.items()}


def residents(played: Played, cost: Cost, stages: tuple[int, ...]) -> np.ndarray:
    """float64 [T, N, S]: what the seed in each slot costs with its gate; 0 outside `stages`."""
    stage = played.slot_code("stage")
    blueprint = played.slot_code("blueprint")
    own = cost.seed[np.arange(played.num_slots), np.maximum(blueprint, 0)]
    gated = (played.slot_code("blend") == Blend.GATE) & np.isin(stage, GATE_STAGES)
    return np.where(np.isin(stage, stages), own + np.where(gated, cost.gate, 0.0), 0.0)


def seed_numbers(played: Played) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T, N, S] twice: the number of the seed in each slot, before and after the actions.

    By env, from 1 in order of germination; 0 for an empty slot. Env-steps that are missing cost no
    more than the order of the seeds that were born in them.
    """
    occupied = played.slot_code("stage") != Stage.EMPTY
    after = played.slot_code("stage_after") != Stage.EMPTY
    age = played.slot_code("seed_age")
    born = after & ~occupied
    earlier = np.zeros_like(occupied)
    earlier[1:] = after[:-1]
    younger = np.zeros_like(occupied)
    younger[1:] = occupied[:-1] & occupied[1:] & (age[1:] < age[:-1])
    unseen = occupied & (~earlier | younger)
    # [T, 2, N, S]: before the actions of an env-step, and by them
    births = np.stack((unseen, born), 1)
    by_slot = births.transpose(0, 1, 3, 2)  # in the order in which seeds are numbered
    counted = np.cumsum(by_slot.reshape(-1, by_slot.shape[3]), 0).reshape(by_slot.shape)
    born_last = np.where(births, counted.transpose(0, 1, 3, 2), 0)
    latest = np.maximum.accumulate(born_last.reshape(-1, *born_last.shape[2:]), 0)
    latest = latest.reshape(born_last.shape)
    return np.where(occupied, latest[:, 0], 0), np.where(after, latest[:, 1], 0)


def _text(codes: np.ndarray, names: tuple[str, ...], known: np.ndarray) -> Texts:
    return Texts(np.where(known, codes, -1), names)


def _number(values: np.ndarray, known: np.ndarray | bool) -> np.ndarray:
    """float64: NaN where nothing is known."""
    return np.where(known, values, np.nan)


def steps_rows(played: Played, round_number: int) -> Rows:
    """The table `steps`."""
    measured = ("accuracy", "val_loss", "train_loss", "train_accuracy", "committed_accuracy")
    paid = ("reward", *(f"reward_{name}" for name in REWARD_TERMS))
    parameters = played.legend.parameters
    flop = played.legend.train_flop
    bits = 1 << np.arange(len(OP_NAMES))
    columns = {name: played.env(name) for name in (*measured, *paid)} | {
        "parameters": parameters.host + residents(played, parameters, LIVE_STAGES).sum(2),
        "train_flop": flop.host + residents(played, flop, RUNNING_STAGES).sum(2),
        "subsets": played.code("subsets"),
        "total_contribution": _number(
            played.env("total_contribution"), played.env("total_known") > 0
        ),
        "effective_op": Texts(played.code("effective_op"), OP_NAMES),
        "success": played.env("success") > 0,
        "ops_legal": played.several("legal").astype(np.int64) @ bits,
        "panic": played.env("panic") > 0,
    }
    return played.rows(round_number, played.goes_on, columns | _choice_columns(played))


def _choice_columns(played: Played) -> dict[str, Values]:
    """What was chosen, and how likely it was."""
    legend = played.legend
    op = played.code("op")
    matters = {head.name: np.isin(op, head.ops) for head in HEADS}
    names = {
        "slot": legend.slots,
        "blueprint": legend.blueprints,
        "style": STYLE_NAMES,
        "alpha_curve": CURVE_NAMES,
    }
    numbers = {"tempo": TEMPO_STEPS, "alpha_target": ALPHA_TARGETS, "alpha_speed": SPEED_STEPS}
    columns: dict[str, Values] = {
        "op": Texts(op, OP_NAMES),
        "value": _number(played.env("value"), legend.learns),
    }
    for name, words in names.items():
        columns[name] = _text(played.code(name), words, matters[name])
    for name, values in numbers.items():
        columns[name] = _number(np.asarray(values)[played.code(name)], matters[name])
    probability = np.exp(played.several("log_probs").astype(np.float32))
    for place, name in enumerate(HEAD_NAMES):
        columns[f"{name}_probability"] = _number(
            probability[:, :, place], matters[name] & legend.learns
        )
    return columns


def slots_rows(played: Played, round_number: int) -> Rows:
    """The table `slots`."""
    legend = played.legend
    stage = played.slot_code("stage")
    taken = stage != Stage.EMPTY
    measured = played.slot("measured") > 0
    few = measured.sum(2, keepdims=True) <= EXACT_SEEDS
    shared = measured & (few | legend.sampled_shapley)
    gradient = played.slot("gradient_measured") > 0
    known = {
        "contribution": measured,
        "interaction": measured,
        "shapley": shared,
        "shapley_error": shared,
        "seed_age": taken,
        "gradient_norm": gradient,
        "gradient_health": gradient,
        "gradient_vanishing": gradient,
        "gradient_exploding": gradient,
        "gradient_ratio": gradient & (played.slot("gradient_ratio_known") > 0),
    }
    always = ("stage_age", "alpha", "alpha_target", "contribution_velocity", "escrow")
    columns: dict[str, Values] = {name: played.slot(name) for name in always}
    columns |= {name: _number(played.slot(name), where) for name, where in known.items()}
    gain = played.slot("accuracy_current") - played.slot("accuracy_initial")
    columns |= {
        "slot": Texts(np.broadcast_to(np.arange(played.num_slots), stage.shape), legend.slots),
        "stage": Texts(stage, STAGE_NAMES),
        "seed": _number(seed_numbers(played)[0], taken),
        "blueprint": _text(played.slot_code("blueprint"), legend.blueprints, taken),
        "blend": _text(played.slot_code("blend"), BLEND_NAMES, taken),
        "parameters": residents(played, legend.parameters, LIVE_STAGES),
        "accuracy_gain": _number(gain, taken),
    }
    everywhere = np.broadcast_to(played.goes_on[:, :, None], stage.shape)
    return played.rows(round_number, everywhere, columns)


def choices_rows(played: Played, round_number: int) -> Rows:
    """The table `choices`."""
    ends = np.cumsum(played.legend.choices)[:-1]
    legal = np.split(played.several("masks") > 0, ends, 2)
    likely = np.split(played.several("probabilities"), ends, 2)
    known = None if played.legend.learns else 0  # of a policy that does not learn, none
    columns: dict[str, Values] = {}
    for name, masks, shares in zip(HEAD_NAMES, legal, likely, strict=True):
        columns[f"{name}_legal"] = masks
        columns[f"{name}_probability"] = shares[:, :, :known]
    return played.rows(round_number, played.goes_on, columns)


def subsets_rows(played: Played, round_number: int) -> Rows:
    """The table `subsets`."""
    subset = played.several("subset").astype(np.int64)
    there = (subset >= 0) & played.goes_on[:, :, None]
    columns = {"subset": subset, "accuracy": played.several("subset_accuracy")}
    return played.rows(round_number, there, columns)
