"""The table of events: what happened to every seed and env between the states before and after an
env-step's actions, as a bool [T, N, S] or [T, N, 1] per kind of event. Needs no torch.
"""

from typing import NamedTuple

import numpy as np

from esper_soa.lab.telemetry.rows import RoundRecord, Rows, seed_numbers
from esper_soa.lab.telemetry.schema import EARLY_ENDINGS, EVENT_KINDS, PANIC_REASONS
from esper_soa.lab.telemetry.table_files import Texts
from esper_soa.vocabulary import LIVE_STAGES, STAGE_NAMES, Op, Stage

GATE_NAMES = ("G1", "G2", "G3", "G5")
# gate k leads from k to k + 1
STAGE_PATH = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
# Kinds of event that passing each gate is.
PASSAGE_KINDS = ("advanced", "blended", "advanced", "fossilized")
CAUSE_NAMES = tuple(dict.fromkeys(cause for causes in EVENT_KINDS.values() for cause in causes))
KIND_NAMES = tuple(EVENT_KINDS)
ACTION_CAUSE = CAUSE_NAMES.index("action")
AUTOMATIC_CAUSE = CAUSE_NAMES.index("automatic")


class Event(NamedTuple):
    """A kind of event, and where it happened."""

    kind: str
    where: np.ndarray  # bool [T, N, S], or [T, N, 1] of the whole env
    cause: np.ndarray | int  # a place in CAUSES
    gate: int = -1  # in GATES
    of_seed: bool = True


def seed_events(record: RoundRecord) -> list[Event]:
    """Events of seeds, in order within an env-step."""
    before = record.code("slot.stage")
    after = record.code("slot.stage_after")
    panic = record.flag("panic")[:, :, None]
    target = record.code("slot")[:, :, None] == np.arange(before.shape[2])
    op = record.code("effective_op")[:, :, None]
    success = record.flag("success")[:, :, None]
    by_op = {
        code: target & (op == code)
        for code in (Op.SET_ALPHA_TARGET, Op.PRUNE, Op.FOSSILIZE, Op.ADVANCE)
    }
    pruned = by_op[Op.PRUNE] & success
    survives = np.isin(after, LIVE_STAGES)
    by = np.where(pruned, ACTION_CAUSE, CAUSE_NAMES.index("faded"))
    ending = np.where(panic, CAUSE_NAMES.index("rollback"), by)
    cooling = (after == Stage.EMBARGOED) & (before != Stage.EMBARGOED)
    return [
        Event("germinated", (before == Stage.EMPTY) & (after != Stage.EMPTY), ACTION_CAUSE),
        *(
            Event(
                "refused",
                by_op[Op.ADVANCE] & ~success & (before == STAGE_PATH[gate]),
                ACTION_CAUSE,
                gate=gate,
            )
            for gate in range(3)
        ),
        Event("refused", by_op[Op.FOSSILIZE] & ~success, ACTION_CAUSE, gate=3),
        Event("retargeted", by_op[Op.SET_ALPHA_TARGET] & success, ACTION_CAUSE),
        Event("fading", pruned & survives, ACTION_CAUSE),
        *_passages(before, after, by_op[Op.ADVANCE] & success),
        Event("pruned", np.isin(before, LIVE_STAGES) & ~survives, ending),
        Event("embargoed", cooling, AUTOMATIC_CAUSE),
        Event("emptied", (after == Stage.EMPTY) & (before != Stage.EMPTY), AUTOMATIC_CAUSE),
    ]


def _passages(before: np.ndarray, after: np.ndarray, advanced: np.ndarray) -> list[Event]:
    """Gates that were passed; by an action the first of them, any further by itself."""
    rows = []
    start = np.where(before == Stage.EMPTY, Stage.GERMINATED, before)
    for gate, source in enumerate(STAGE_PATH[:-1]):
        crosses = np.isin(start, STAGE_PATH[: gate + 1]) & np.isin(after, STAGE_PATH[gate + 1 :])
        by_action = (advanced & (before == source)) | (STAGE_PATH[gate + 1] == Stage.FOSSILIZED)
        cause = np.where(by_action, ACTION_CAUSE, AUTOMATIC_CAUSE)
        rows.append(Event(PASSAGE_KINDS[gate], crosses, cause, gate=gate))
    return rows


def events_rows(record: RoundRecord) -> Rows:
    """The table `events`, sorted by env-step, env and order of happening: the governor first, an
    end last. Nothing happens to an env whose episode is over.
    """
    reason, ending, panic, over = (
        record.code(name)[:, :, None] for name in ("reason", "ending", "panic", "over")
    )
    reason_codes = np.array([0, *map(CAUSE_NAMES.index, PANIC_REASONS)])[reason]
    last = np.array([0, *map(CAUSE_NAMES.index, EARLY_ENDINGS)])[ending]
    columns = [
        Event("diverging", (reason > 0) & (panic == 0), reason_codes, of_seed=False),
        Event("panic", panic > 0, reason_codes, of_seed=False),
        Event("rollback", panic > 0, reason_codes, of_seed=False),
        *seed_events(record),
        Event("ended_early", ending > 0, last, of_seed=False),
    ]
    places = [np.nonzero(event.where & (over == 0)) for event in columns]
    counts = [len(place[0]) for place in places]
    step, env, slot = (np.concatenate([place[axis] for place in places]) for axis in range(3))
    order = np.lexsort((slot, np.repeat(np.arange(len(columns)), counts), env, step))
    causes = [
        np.broadcast_to(event.cause, event.where.shape)[place]
        for event, place in zip(columns, places, strict=True)
    ]
    kind = np.repeat([KIND_NAMES.index(event.kind) for event in columns], counts)[order]
    gate = np.repeat([event.gate for event in columns], counts)[order]
    of_seed = np.repeat([event.of_seed for event in columns], counts)[order]
    return _rows(record, (step[order], env[order], slot[order]), of_seed) | {
        "kind": Texts(kind, KIND_NAMES),
        "gate": Texts(gate, GATE_NAMES),
        "cause": Texts(np.concatenate(causes)[order], CAUSE_NAMES),
    }


def _rows(record: RoundRecord, at: tuple[np.ndarray, ...], of_seed: np.ndarray) -> Rows:
    """The columns of env-step and slot at E events; at: int [E] each, env-step, env and
    slot, which is 0 for events of whole envs; of_seed: bool [E].
    """
    legend = record.legend
    blueprint = np.maximum(record.code("slot.blueprint"), record.code("slot.blueprint_after"))
    gain = record.read("slot.accuracy_current") - record.read("slot.accuracy_initial")
    measured = record.flag("slot.measured")[at]

    def text(codes: np.ndarray, names: tuple[str, ...]) -> Texts:
        return Texts(np.where(of_seed, codes, -1), names)

    def seeds(values: np.ndarray) -> np.ndarray:
        return np.where(of_seed, values[at], np.nan)

    return record.keys(*at[:2]) | {
        "slot": text(at[2], legend.slots),
        "seed": seeds(np.maximum(*seed_numbers(record))),
        "blueprint": text(blueprint[at], legend.blueprints),
        "stage_from": text(record.code("slot.stage")[at], STAGE_NAMES),
        "stage_to": text(record.code("slot.stage_after")[at], STAGE_NAMES),
        "seed_age": seeds(record.read("slot.seed_age")),
        "stage_age": seeds(record.read("slot.stage_age")),
        "alpha": seeds(record.read("slot.alpha")),
        "alpha_target": seeds(record.read("slot.alpha_target_after")),
        "contribution": np.where(measured, seeds(record.read("slot.contribution")), np.nan),
        "accuracy": record.read("accuracy")[at[:2]],
        "accuracy_gain": seeds(gain),
    }
