"""The table of events: what happened to every seed and env between the states before and after an
env-step's actions.

Given the env-steps of a round by rows.py's caller. A kind of event is a bool [T, N, S] or [T, N]
that says where it happened; none asks for a loop over envs. Needs no torch.
"""

from typing import NamedTuple

import numpy as np

from esper_soa.telemetry.parquet import Known, Texts
from esper_soa.telemetry.rows import Played, Rows, seed_numbers
from esper_soa.telemetry.schema import ENDINGS, KINDS, REASONS
from esper_soa.vocabulary import LIVE_STAGES, STAGE_NAMES, Op, Stage

GATES = ("G1", "G2", "G3", "G5")
PATH = (
    Stage.GERMINATED,
    Stage.TRAINING,
    Stage.BLENDING,
    Stage.HOLDING,
    Stage.FOSSILIZED,
)  # gate k leads from k to k + 1
CAUSES = tuple(dict.fromkeys(cause for causes in KINDS.values() for cause in causes))
KIND_NAMES = tuple(KINDS)
PASSED = ("advanced", "blended", "advanced", "fossilized")  # what passing each gate is called


class Event(NamedTuple):
    """A kind of event, and where it happened."""

    kind: str
    where: np.ndarray  # bool [T, N, S], or [T, N] of the whole env
    cause: np.ndarray | str  # a place in CAUSES, in the shape of `where`
    gate: int = -1  # in GATES


def cause(action: np.ndarray) -> np.ndarray:
    """Places in CAUSES: by an action where `action` (bool), else by itself."""
    return np.where(action, CAUSES.index("action"), CAUSES.index("automatic"))


def seed_events(played: Played) -> list[Event]:
    """What happened to seeds, in the order in which it happens within an env-step."""
    before = played.slot_code("stage")
    after = played.slot_code("stage_after")
    panic = (played.env("panic") > 0)[:, :, None]
    target = played.code("slot")[:, :, None] == np.arange(played.num_slots)
    op = played.code("effective_op")[:, :, None]
    success = (played.env("success") > 0)[:, :, None]
    asked = {
        code: target & (op == code) & ~panic
        for code in (Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE)
    }
    live = np.isin(before, LIVE_STAGES)
    stays = np.isin(after, LIVE_STAGES)
    removed = live & ~stays
    automatic = np.full(before.shape, CAUSES.index("automatic"))
    fate = np.where(
        panic,
        CAUSES.index("rollback"),
        np.where(asked[Op.PRUNE] & success, CAUSES.index("action"), CAUSES.index("faded")),
    )
    action = np.full(before.shape, CAUSES.index("action"))
    born = (before == Stage.EMPTY) & (after != Stage.EMPTY)
    cooling = (after == Stage.EMBARGOED) & (before != Stage.EMBARGOED)
    return [
        Event("germinated", born, action),
        *_refusals(before, asked[Op.ADVANCE] & ~success, asked[Op.FOSSILIZE] & ~success, action),
        Event("retargeted", asked[Op.SET_ALPHA_TARGET] & success, action),
        Event("fading", asked[Op.PRUNE] & success & stays, action),
        *_passages(before, after, asked[Op.ADVANCE] & success),
        Event("pruned", removed, fate),
        Event("embargoed", cooling, automatic),
        Event("emptied", (after == Stage.EMPTY) & (before != Stage.EMPTY), automatic),
    ]


def _refusals(
    before: np.ndarray, advance: np.ndarray, fossilize: np.ndarray, action: np.ndarray
) -> list[Event]:
    """Gates that did not let a seed pass."""
    found = [Event("refused", advance & (before == PATH[gate]), action, gate) for gate in range(3)]
    return [*found, Event("refused", fossilize, action, 3)]


def _passages(before: np.ndarray, after: np.ndarray, advanced: np.ndarray) -> list[Event]:
    """Gates that were passed; by an action the first of them, any further by itself."""
    found = []
    start = np.where(before == Stage.EMPTY, Stage.GERMINATED, before)
    for gate, (source, goal) in enumerate(zip(PATH, PATH[1:], strict=False)):
        at_or_before = np.isin(start, PATH[: gate + 1])
        beyond = np.isin(after, PATH[gate + 1 :])
        by_action = advanced & (before == source)
        why = (
            np.full(before.shape, CAUSES.index("action"))
            if goal == Stage.FOSSILIZED
            else cause(by_action)
        )
        found.append(Event(PASSED[gate], at_or_before & beyond, why, gate))
    return found


def env_events(played: Played) -> list[Event]:
    """What the governor saw and did."""
    reason = played.code("reason")
    panic = played.env("panic") > 0
    why = np.array([0, *(CAUSES.index(name) for name in REASONS)])[reason]
    return [
        Event("diverging", (reason > 0) & ~panic, why),
        Event("panic", panic, why),
        Event("rollback", panic, why),
    ]


def ends(played: Played) -> Event:
    """Episodes that ended early."""
    ending = played.code("ending")
    why = np.array([0, *(CAUSES.index(name) for name in ENDINGS)])[ending]
    return Event("ended_early", ending > 0, why)


def events_rows(played: Played, round_number: int) -> Rows:
    """The table `events`, sorted by env-step, env and order of happening; the governor comes first,
    an end last.

    Nothing happens to an env whose episode is over.
    """
    found = [
        one._replace(
            where=one.where
            & (played.goes_on if one.where.ndim == 2 else played.goes_on[:, :, None])
        )
        for one in (*env_events(played), *seed_events(played), ends(played))
    ]
    places = [
        np.nonzero(one.where if one.where.ndim == 3 else one.where[:, :, None]) for one in found
    ]
    counts = [len(place[0]) for place in places]
    kind = np.repeat([KIND_NAMES.index(one.kind) for one in found], counts)
    of_seed = np.repeat([one.where.ndim == 3 for one in found], counts)
    gate = np.repeat([one.gate for one in found], counts)
    why = np.concatenate(
        [one.cause[one.where] for one in found if isinstance(one.cause, np.ndarray)]
    )
    step, env, slot = (np.concatenate([place[axis] for place in places]) for axis in range(3))
    order = np.lexsort((slot, np.repeat(np.arange(len(found)), counts), env, step))
    at = Places(step[order], env[order], slot[order], of_seed[order])
    return _rows(played, round_number, at) | {
        "kind": Texts(kind[order], KIND_NAMES),
        "gate": Texts(gate[order], GATES),
        "cause": Texts(why[order], CAUSES),
    }


class Places(NamedTuple):
    """Where the events are: int [E] each; slot is 0 for those of whole envs."""

    step: np.ndarray  # place in the env-steps played, from 0
    env: np.ndarray
    slot: np.ndarray
    of_seed: np.ndarray  # bool


def _rows(played: Played, round_number: int, at: Places) -> Rows:
    """What the columns of env-step and slot say at each event."""
    place = (at.step, at.env, at.slot)
    legend = played.legend
    of_seed = at.of_seed
    before = played.slot_code("stage")[place]
    after = played.slot_code("stage_after")[place]
    number, number_after = (numbers[place] for numbers in seed_numbers(played))
    blueprint = played.slot_code("blueprint")[place]
    blueprint_after = played.slot_code("blueprint_after")[place]
    gain = (played.slot("accuracy_current") - played.slot("accuracy_initial"))[place]
    measured = played.slot("measured")[place] > 0
    return {
        "round": np.full(len(of_seed), round_number),
        "step": played.steps[at.step],
        "env": at.env,
        "slot": Texts(np.where(of_seed, at.slot, -1), legend.slots),
        "seed": Known(np.maximum(number, number_after), of_seed),
        "blueprint": Texts(
            np.where(of_seed, np.maximum(blueprint, blueprint_after), -1), legend.blueprints
        ),
        "stage_from": Texts(np.where(of_seed, before, -1), STAGE_NAMES),
        "stage_to": Texts(np.where(of_seed, after, -1), STAGE_NAMES),
        "seed_age": Known(played.slot_code("seed_age")[place], of_seed),
        "stage_age": Known(played.slot_code("stage_age")[place], of_seed),
        "alpha": np.where(of_seed, played.slot("alpha")[place], np.nan),
        "alpha_target": np.where(of_seed, played.slot("alpha_target_after")[place], np.nan),
        "contribution": np.where(of_seed & measured, played.slot("contribution")[place], np.nan),
        "accuracy": played.env("accuracy")[at.step, at.env],
        "accuracy_gain": np.where(of_seed, gain, np.nan),
    }
