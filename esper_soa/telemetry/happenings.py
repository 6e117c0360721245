"""The table of events: what happened to every seed and env between the states before and after an
env-step's actions, as a bool [T, N, S] or [T, N, 1] per kind of event. Needs no torch.
"""

from typing import NamedTuple

import numpy as np

from esper_soa.telemetry.parquet import Texts
from esper_soa.telemetry.rows import Played, Rows, seed_numbers
from esper_soa.telemetry.schema import ENDINGS, KINDS, REASONS
from esper_soa.vocabulary import LIVE_STAGES, STAGE_NAMES, Op, Stage

GATES = ("G1", "G2", "G3", "G5")
# gate k leads from k to k + 1
PATH = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
PASSED = ("advanced", "blended", "advanced", "fossilized")  # what passing each gate is called
CAUSES = tuple(dict.fromkeys(cause for causes in KINDS.values() for cause in causes))
KIND_NAMES = tuple(KINDS)
ACTION = CAUSES.index("action")
AUTOMATIC = CAUSES.index("automatic")


class Event(NamedTuple):
    """A kind of event, and where it happened."""

    kind: str
    where: np.ndarray  # bool [T, N, S], or [T, N, 1] of the whole env
    cause: np.ndarray | int  # a place in CAUSES
    gate: int = -1  # in GATES
    of_seed: bool = True


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
    pruned = asked[Op.PRUNE] & success
    stays = np.isin(after, LIVE_STAGES)
    by = np.where(pruned, ACTION, CAUSES.index("faded"))
    fate = np.where(panic, CAUSES.index("rollback"), by)
    cooling = (after == Stage.EMBARGOED) & (before != Stage.EMBARGOED)
    return [
        Event("germinated", (before == Stage.EMPTY) & (after != Stage.EMPTY), ACTION),
        *(
            Event("refused", asked[Op.ADVANCE] & ~success & (before == PATH[gate]), ACTION, gate)
            for gate in range(3)
        ),
        Event("refused", asked[Op.FOSSILIZE] & ~success, ACTION, 3),
        Event("retargeted", asked[Op.SET_ALPHA_TARGET] & success, ACTION),
        Event("fading", pruned & stays, ACTION),
        *_passages(before, after, asked[Op.ADVANCE] & success),
        Event("pruned", np.isin(before, LIVE_STAGES) & ~stays, fate),
        Event("embargoed", cooling, AUTOMATIC),
        Event("emptied", (after == Stage.EMPTY) & (before != Stage.EMPTY), AUTOMATIC),
    ]


def _passages(before: np.ndarray, after: np.ndarray, advanced: np.ndarray) -> list[Event]:
    """Gates that were passed; by an action the first of them, any further by itself."""
    found = []
    start = np.where(before == Stage.EMPTY, Stage.GERMINATED, before)
    for gate, source in enumerate(PATH[:-1]):
        passed = np.isin(start, PATH[: gate + 1]) & np.isin(after, PATH[gate + 1 :])
        by_action = (advanced & (before == source)) | (PATH[gate + 1] == Stage.FOSSILIZED)
        found.append(Event(PASSED[gate], passed, np.where(by_action, ACTION, AUTOMATIC), gate))
    return found


def governor_events(played: Played) -> list[Event]:
    """What the governor saw and did."""
    reason = played.code("reason")[:, :, None]
    panic = (played.env("panic") > 0)[:, :, None]
    why = np.array([0, *(CAUSES.index(name) for name in REASONS)])[reason]
    return [
        Event("diverging", (reason > 0) & ~panic, why, of_seed=False),
        Event("panic", panic, why, of_seed=False),
        Event("rollback", panic, why, of_seed=False),
    ]


def events_rows(played: Played, round_number: int) -> Rows:
    """The table `events`, sorted by env-step, env and order of happening: the governor first, an
    end last. Nothing happens to an env whose episode is over.
    """
    ending = played.code("ending")[:, :, None]
    why = np.array([0, *(CAUSES.index(name) for name in ENDINGS)])[ending]
    end = Event("ended_early", ending > 0, why, of_seed=False)
    found = [*governor_events(played), *seed_events(played), end]
    places = [np.nonzero(one.where & played.goes_on[:, :, None]) for one in found]
    counts = [len(place[0]) for place in places]
    step, env, slot = (np.concatenate([place[axis] for place in places]) for axis in range(3))
    order = np.lexsort((slot, np.repeat(np.arange(len(found)), counts), env, step))
    causes = [
        np.broadcast_to(one.cause, one.where.shape)[place]
        for one, place in zip(found, places, strict=True)
    ]
    kind = np.repeat([KIND_NAMES.index(one.kind) for one in found], counts)[order]
    gate = np.repeat([one.gate for one in found], counts)[order]
    of_seed = np.repeat([one.of_seed for one in found], counts)[order]
    at = (step[order], env[order], slot[order])
    return _rows(played, round_number, at, of_seed) | {
        "kind": Texts(kind, KIND_NAMES),
        "gate": Texts(gate, GATES),
        "cause": Texts(np.concatenate(causes)[order], CAUSES),
    }


def _rows(
    played: Played, round_number: int, at: tuple[np.ndarray, ...], of_seed: np.ndarray
) -> Rows:
    """What the columns of env-step and slot say at E events; at: int [E] each, env-step, env and
    slot, which is 0 for events of whole envs; of_seed: bool [E].
    """
    legend = played.legend
    number = np.maximum(*seed_numbers(played))
    blueprint = np.maximum(played.slot_code("blueprint"), played.slot_code("blueprint_after"))
    gain = played.slot("accuracy_current") - played.slot("accuracy_initial")
    measured = played.slot("measured")[at] > 0

    def text(codes: np.ndarray, names: tuple[str, ...]) -> Texts:
        return Texts(np.where(of_seed, codes, -1), names)

    def seeds(values: np.ndarray) -> np.ndarray:
        return np.where(of_seed, values[at], np.nan)

    return {
        "round": np.full(len(of_seed), round_number),
        "step": played.steps[at[0]],
        "env": at[1],
        "slot": text(at[2], legend.slots),
        "seed": seeds(number),
        "blueprint": text(blueprint[at], legend.blueprints),
        "stage_from": text(played.slot_code("stage")[at], STAGE_NAMES),
        "stage_to": text(played.slot_code("stage_after")[at], STAGE_NAMES),
        "seed_age": seeds(played.slot("seed_age")),
        "stage_age": seeds(played.slot("stage_age")),
        "alpha": seeds(played.slot("alpha")),
        "alpha_target": seeds(played.slot("alpha_target_after")),
        "contribution": np.where(measured, seeds(played.slot("contribution")), np.nan),
        "accuracy": played.env("accuracy")[at[:2]],
        "accuracy_gain": seeds(gain),
    }
