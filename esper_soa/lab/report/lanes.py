"""Events in the slots of every host, env-step by env-step, as rows of a few chosen rounds:
the first, the best and the last of a single run, the last of each of several. Needs no torch.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import NamedTuple

import numpy as np

from esper_soa.lab.report.run_files import (
    Cell,
    Columns,
    Row,
    RunRecord,
    mean_of,
    number,
    read_round,
    rows_of,
)
from esper_soa.lab.telemetry.table_files import MAX_CELLS, table_files
from esper_soa.system.files import LOGGER

MAX_ROWS = 20_000  # of the lanes of all rounds shown together, but for changes of seeds
ROWS_OF_HOSTS = 32  # lanes on a screen
HEAD_LANES = 2  # lanes of a host's name and accuracy, above its slots
MAX_RUNS = 16  # of which lanes are shown
MAX_SLOTS = 256  # of a host
# Events that a lane marks.
MARKED_EVENTS = ("germinated", "blended", "fossilized", "pruned", "rollback", "ended_early")
COLUMNS = {  # by table, those that lanes are drawn from
    "slots": (
        *("env", "step", "slot", "seed", "stage", "alpha"),
        *("blueprint", "contribution", "shapley"),
    ),
    "steps": ("env", "step", "accuracy"),
    "events": ("env", "step", "kind", "slot", "blueprint", "cause"),
}


class LaneRound(NamedTuple):
    """A round of a run whose env-steps are shown."""

    run: RunRecord
    name: str  # as the reader chooses it
    seeds: Columns  # of the table slots, those that hold one
    steps: Columns
    events: Columns  # those that are marked
    hosts: int  # of the run
    names: list[str]  # of the slots, in their order

    @property
    def last_rows(self) -> np.ndarray:
        """The place of each host's last row in the table steps."""
        _, backwards = np.unique(self.steps["env"][::-1], return_index=True)
        return len(self.steps["env"]) - 1 - backwards

    def place(self, env: Cell) -> tuple[Row, float]:
        """How a host's row begins, and the foot of its HEAD on its screen; lanes are 1 high."""
        count = hosts_on_screen(len(self.names))
        first = _int(env) // count * count
        hosts = f"{first} to {min(first + count, self.hosts) - 1}"
        row: Row = {"run": self.run.label, "round": self.name, "hosts": hosts, "host": env}
        return row, -float(_int(env) % count * (len(self.names) + HEAD_LANES) + HEAD_LANES)


def chosen_rounds(runs: Sequence[RunRecord]) -> list[LaneRound]:
    """The rounds to be shown, with their tables; of each run the last one first. Rounds beyond
    MAX_CELLS are left out, and said.
    """
    rounds = []
    left = MAX_CELLS
    for run in runs[:MAX_RUNS]:
        for round_number, name in _named_rounds(run, len(runs) > 1):
            shown = _lane_round(run, round_number, name)
            if shown is None:
                continue
            cells = sum(column.size for table in shown[2:5] for column in table.values())
            if cells <= left:
                left -= cells
                rounds.append(shown)
            else:
                LOGGER.warning("report   without the lanes of round %s: too many env-steps", name)
    return rounds


def _lane_round(run: RunRecord, number: int, name: str) -> LaneRound | None:
    """A round with its tables; None where one is not there, or has no rows."""
    slots, steps, events = (
        read_round(run.path, table, number, names=names) for table, names in COLUMNS.items()
    )
    if not len(slots.get("env", ())) or not len(steps.get("env", ())):
        return None
    names = list(dict.fromkeys([*run.slots, *slots["slot"]]))[:MAX_SLOTS]
    known = set(names)
    seeds = slots["stage"] != "empty"
    seeds &= np.array([slot in known for slot in slots["slot"]])
    marked = np.isin(events.get("kind", np.zeros(0, object)), MARKED_EVENTS)
    return LaneRound(
        run,
        name,
        {column: values[seeds] for column, values in slots.items()},
        steps=steps,
        events={column: values[marked] for column, values in events.items()},
        hosts=1 + int(steps["env"].max()),
        names=names,
    )


def _named_rounds(run: RunRecord, last_alone: bool) -> list[tuple[int, str]]:
    available = list(table_files(run.path, "slots"))
    if not available:
        return []
    accuracies = {number(line, "round"): number(line, "accuracy", "mean") for line in run.rounds}
    ended = [round_number for round_number in available if accuracies.get(round_number) is not None]
    names = {available[-1]: ["last" if available[-1] in ended or not run.rounds else "in progress"]}
    if ended and not last_alone:
        best = max(ended, key=lambda number: accuracies[number] or 0.0)
        names.setdefault(best, []).append("best")
        names.setdefault(available[0], []).append("first")
    return [(place, f"{place} ({', '.join(words)})") for place, words in names.items()]


def hosts_on_screen(slots: int) -> int:
    """Hosts whose lanes are shown at once; each has a lane per slot below its HEAD."""
    return max(1, min(8, ROWS_OF_HOSTS // (slots + HEAD_LANES)))


def lane_rows(rounds: Sequence[LaneRound]) -> Iterator[Row]:
    """A row per stretch of env-steps in which a slot kept seed, stage and alpha; `base` is where
    its lane stands. Stretches are longer where there are many rows: each tells one contribution.
    """
    longest = 1 + sum(len(shown.seeds["env"]) for shown in rounds) // MAX_ROWS
    for shown in rounds:
        yield from _intervals(shown, longest)


def _intervals(shown: LaneRound, longest: int) -> Iterator[Row]:
    """Rows of a round; at most `longest` env-steps each."""
    since = count()

    def same(row: Row) -> tuple[Cell, ...]:
        step = _int(row["step"])
        # Rows that follow each other in time keep the difference of env-step and place in the list.
        values = tuple(row[name] for name in ("env", "slot", "seed", "stage", "alpha"))
        return (*values, step - next(since), (step - 1) // longest)

    ranks = {name: rank for rank, name in enumerate(sorted(shown.names))}
    slots = np.array([ranks[name] for name in shown.seeds["slot"]], int)
    order = np.lexsort((slots, shown.seeds["env"]))
    by_lane = {name: column[order] for name, column in shown.seeds.items()}
    for _, same_rows in groupby(rows_of(by_lane), key=same):
        rows = list(same_rows)
        first = rows[0]
        row, base = shown.place(first["env"])
        row |= {name: first[name] for name in ("slot", "stage", "seed", "alpha")}
        fossil = first["stage"] == "fossilized"  # is not switched off, so that nothing is measured
        yield row | {
            "from": _int(first["step"]) - 1,
            "to": rows[-1]["step"],
            "base": base - shown.names.index(str(first["slot"])) - 1,
            "blueprint": first["blueprint"] or "none",
            "contribution": mean_of([row["contribution"] for row in rows]),
            "shapley": None if fossil else mean_of([row["shapley"] for row in rows]),
        }


def accuracy_rows(rounds: Sequence[LaneRound]) -> Iterator[Row]:
    """A row per host and env-step: its accuracy, and where it lies in the lane above its slots."""
    every = 1 + sum(len(shown.steps["env"]) for shown in rounds) // MAX_ROWS
    for shown in rounds:
        known = np.isfinite(shown.steps["accuracy"])
        values = shown.steps["accuracy"][known]
        low = float(values.min(initial=math.inf))
        span = float(values.max(initial=-math.inf)) - low
        drawn = known & (shown.steps["step"] % every == 0)
        drawn[shown.last_rows] |= known[shown.last_rows]
        for row in rows_of({name: column[drawn] for name, column in shown.steps.items()}):
            start, base = shown.place(row["env"])
            height = base + 1.4 * (_float(row["accuracy"]) - low) / (span or 1.0)
            yield start | {"step": row["step"], "accuracy": row["accuracy"], "y": height}


def name_rows(rounds: Sequence[LaneRound]) -> Iterator[Row]:
    """A row per host: its name with its last accuracy, and why its episode ended early."""
    for shown in rounds:
        events = rows_of(shown.events)
        early = {row["env"]: row["cause"] for row in events if row["kind"] == "ended_early"}
        for last in rows_of(
            {name: column[shown.last_rows] for name, column in shown.steps.items()}
        ):
            env = last["env"]
            accuracy = last["accuracy"]
            row, base = shown.place(env)
            words = f"{accuracy:.1f} %" if isinstance(accuracy, int | float) else "not finite"
            words += f", ended early: {early[env]}" if env in early else ""
            yield row | {"y": base + 0.95, "words": f"host {env}: {words}"}


def mark_rows(rounds: Sequence[LaneRound]) -> Iterator[Row]:
    """A row per event: in the middle of its slot's lane, or of a whole host beside its name."""
    for shown in rounds:
        for event in rows_of(shown.events):
            row, base = shown.place(event["env"])
            slot = event["slot"]
            row |= {name: event[name] for name in ("step", "slot", "blueprint", "cause")}
            y = base - (shown.names.index(str(slot)) + 0.6 if slot in shown.names else -0.4)
            yield row | {"event": event["kind"], "y": y}


def _float(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else math.nan


def _int(cell: Cell) -> int:
    return int(cell) if isinstance(cell, int | float) else 0
