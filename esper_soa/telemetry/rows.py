"""The tables of a round, made of what the device handed over: numbers [T, N, C] of T env-steps and
N envs.

Called by recorder.py in its own thread; everything is worked out for all envs and env-steps at
once. Events follow from the states before and after each env-step's actions. What an env is said to
be once its episode has ended early makes no rows. Needs no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from esper_soa.telemetry.parquet import Known, Texts, Values, num_rows, values_at
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

GATE_STAGES = (
    Stage.BLENDING,
    Stage.HOLDING,
    Stage.FOSSILIZED,
)  # in which a blend has a gate network, if it is GATE
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
        """steps int [T], from 1, in order; numbers float64 [T, N, C]; places: which columns hold
        what.
        """
        self.legend = legend
        self.steps = steps
        self._numbers = numbers
        self._places = places
        self.size = numbers.shape[:2]
        self.num_slots = len(legend.slots)

    def env(self, name: str) -> np.ndarray:
        """float64 [T, N]."""
        return self._numbers[:, :, self._places[name].start]

    def several(self, name: str) -> np.ndarray:
        """float64 [T, N, K]; [T, N, S] of what is said per slot."""
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

    def kept(self, rows: Rows) -> Rows:
        """The rows of env-steps that were played; rows: as many of every env-step of an env, in
        their order.
        """
        played = self.goes_on.ravel()
        if played.all():
            return rows
        return {
            name: values_at(values, np.repeat(played, num_rows(values) // len(played)))
            for name, values in rows.items()
        }

    def keys(self, round_number: int, per_env: int = 1) -> Rows:
        """The first columns of a table with `per_env` rows per env and env-step."""
        steps, envs = self.size
        return {
            "round": np.full(steps * envs * per_env, round_number),
            "step": np.repeat(self.steps, envs * per_env),
            "env": np.tile(np.repeat(np.arange(envs), per_env), steps),
        }


def residents(played: Played, cost: Cost, stages: tuple[int, ...]) -> np.ndarray:
    """float64 [T, N, S]: what the seed in each slot costs with its gate; 0 outside `stages`."""
    stage = played.slot_code("stage")
    blueprint = played.slot_code("blueprint")
    own = cost.seed[np.arange(played.num_slots), np.maximum(blueprint, 0)]
    gated = (played.slot_code("blend") == Blend.GATE) & np.isin(stage, GATE_STAGES)
    return np.where(np.isin(stage, stages), own + np.where(gated, cost.gate, 0.0), 0.0)


def seed_numbers(played: Played) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T, N, S] twice: the number of the seed in each slot of its env's episode, before and
    after the actions.

    From 1 in order of germination; 0 for an empty slot. Env-steps that are missing cost no more
    than the order of the seeds that were born in them.
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
    steps, envs, slots = occupied.shape
    order = (
        births.reshape(2 * steps, envs, slots).transpose(0, 2, 1).reshape(2 * steps * slots, envs)
    )
    counted = np.cumsum(order, 0).reshape(2 * steps, slots, envs).transpose(0, 2, 1)
    latest = np.maximum.accumulate(np.where(births.reshape(2 * steps, envs, slots), counted, 0), 0)
    latest = latest.reshape(steps, 2, envs, slots)
    return np.where(occupied, latest[:, 0], 0), np.where(after, latest[:, 1], 0)


def _text(codes: np.ndarray, names: tuple[str, ...], where: np.ndarray | None = None) -> Texts:
    return Texts((codes if where is None else np.where(where, codes, -1)).ravel(), names)


def _where(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """float64 [R]: NaN where nothing is known."""
    return np.where(known, values, np.nan).ravel()


def _picked(table: tuple[float, ...], codes: np.ndarray) -> np.ndarray:
    return np.asarray(table)[codes]


def relevant(op: np.ndarray) -> dict[str, np.ndarray]:
    """bool, in the shape of `op`, by head: whether it matters for the op."""
    return {head.name: np.isin(op, head.ops) for head in HEADS}


def steps_rows(played: Played, round_number: int) -> Rows:
    """The table `steps`."""
    legend = played.legend
    keys = played.keys(round_number)
    parameters = legend.parameters
    flop = legend.train_flop
    numbers = (
        "accuracy",
        "val_loss",
        "train_loss",
        "train_accuracy",
        "committed_accuracy",
        "reward",
    )
    rows: Rows = {name: played.env(name).ravel() for name in numbers}
    rows |= {f"reward_{name}": played.env(f"reward_{name}").ravel() for name in REWARD_TERMS}
    bits = 1 << np.arange(len(OP_NAMES))
    return played.kept(
        keys
        | rows
        | _choice_rows(played)
        | {
            "parameters": (
                parameters.host + residents(played, parameters, LIVE_STAGES).sum(2)
            ).ravel(),
            "train_flop": (flop.host + residents(played, flop, RUNNING_STAGES).sum(2)).ravel(),
            "subsets": played.code("subsets").ravel(),
            "total_contribution": _where(
                played.env("total_contribution"), played.env("total_known") > 0
            ),
            "effective_op": _text(played.code("effective_op"), OP_NAMES),
            "success": played.env("success").ravel() > 0,
            "ops_legal": (played.several("legal").astype(np.int64) @ bits).ravel(),
            "panic": played.env("panic").ravel() > 0,
        }
    )


def _choice_rows(played: Played) -> Rows:
    """What was chosen, and how likely it was."""
    legend = played.legend
    op = played.code("op")
    matters = relevant(op)
    choice = {name: played.code(name) for name in HEAD_NAMES}
    probability = np.exp(played.several("log_probs").astype(np.float32))
    rows: Rows = {
        "op": _text(op, OP_NAMES),
        "slot": _text(choice["slot"], legend.slots, matters["slot"]),
        "blueprint": _text(choice["blueprint"], legend.blueprints, matters["blueprint"]),
        "style": _text(choice["style"], STYLE_NAMES, matters["style"]),
        "tempo": Known(_picked(TEMPO_STEPS, choice["tempo"]).ravel(), matters["tempo"].ravel()),
        "alpha_target": _where(
            _picked(ALPHA_TARGETS, choice["alpha_target"]), matters["alpha_target"]
        ),
        "alpha_speed": Known(
            _picked(SPEED_STEPS, choice["alpha_speed"]).ravel(), matters["alpha_speed"].ravel()
        ),
        "alpha_curve": _text(choice["alpha_curve"], CURVE_NAMES, matters["alpha_curve"]),
        "value": _where(played.env("value"), np.full(played.size, legend.learns)),
    }
    for place, name in enumerate(HEAD_NAMES):
        rows[f"{name}_probability"] = _where(
            probability[:, :, place], matters[name] & legend.learns
        )
    return rows


def shapley_known(played: Played) -> np.ndarray:
    """bool [T, N, S]: where a slot has a Shapley value."""
    measured = played.slot("measured") > 0
    few = measured.sum(2, keepdims=True) <= EXACT_SEEDS
    return measured & (few | played.legend.sampled_shapley)


def slots_rows(played: Played, round_number: int) -> Rows:
    """The table `slots`."""
    legend = played.legend
    slots = played.num_slots
    stage = played.slot_code("stage")
    blueprint = played.slot_code("blueprint")
    taken = stage != Stage.EMPTY
    measured = played.slot("measured") > 0
    shared = shapley_known(played)
    gradient = played.slot("gradient_measured") > 0
    rows: Rows = {
        name: played.slot(name).ravel()
        for name in ("alpha", "alpha_target", "contribution_velocity", "escrow")
    }
    rows |= {name: _where(played.slot(name), measured) for name in ("contribution", "interaction")}
    rows |= {name: _where(played.slot(name), shared) for name in ("shapley", "shapley_error")}
    rows |= {
        name: _where(played.slot(name), gradient) for name in ("gradient_norm", "gradient_health")
    }
    rows |= {
        name: Known(played.slot(name).ravel() > 0, gradient.ravel())
        for name in ("gradient_vanishing", "gradient_exploding")
    }
    gain = played.slot("accuracy_current") - played.slot("accuracy_initial")
    return played.kept(
        played.keys(round_number, slots)
        | rows
        | {
            "slot": _text(np.broadcast_to(np.arange(slots), stage.shape), legend.slots),
            "stage": _text(stage, STAGE_NAMES),
            "stage_age": played.slot_code("stage_age").ravel(),
            "seed": Known(seed_numbers(played)[0].ravel(), taken.ravel()),
            "seed_age": Known(played.slot_code("seed_age").ravel(), taken.ravel()),
            "blueprint": _text(blueprint, legend.blueprints, taken),
            "blend": _text(played.slot_code("blend"), BLEND_NAMES, taken),
            "parameters": residents(played, legend.parameters, LIVE_STAGES).ravel(),
            "accuracy_gain": _where(gain, taken),
            "gradient_ratio": _where(
                played.slot("gradient_ratio"), gradient & (played.slot("gradient_ratio_known") > 0)
            ),
        }
    )


def choices_rows(played: Played, round_number: int) -> Rows:
    """The table `choices`."""
    rows: Rows = played.keys(round_number)
    masks = played.several("masks")
    likely = played.several("probabilities")
    last = 0
    for name, size in zip(HEAD_NAMES, played.legend.choices, strict=True):
        legal, share = (
            part[:, :, last : last + size].reshape(-1, size) for part in (masks, likely)
        )
        rows[f"{name}_legal"] = legal > 0
        rows[f"{name}_probability"] = share if played.legend.learns else share[:, :0]
        last += size
    return played.kept(rows)


def subsets_rows(played: Played, round_number: int) -> Rows:
    """The table `subsets`."""
    subset = played.several("subset").astype(np.int64)
    accuracy = played.several("subset_accuracy")
    there = (subset >= 0).ravel() & np.repeat(played.goes_on.ravel(), subset.shape[2])
    keys = played.keys(round_number, subset.shape[2])
    rows: Rows = {name: np.asarray(values)[there] for name, values in keys.items()}
    return rows | {"subset": subset.ravel()[there], "accuracy": accuracy.ravel()[there]}


Maker = Callable[[Played, int], Rows]
