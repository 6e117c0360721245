"""What happened in the slots of every host, env-step by env-step, as tables of a few chosen rounds.

All rounds of a long run would be too much to carry: the first, the best and the last are taken of a
single run, the last of each of several, and env-steps in which a seed stood still are one row.
Given runs by page.py; the tables themselves come through steps.py. Needs no torch.
"""

from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import NamedTuple

from esper_soa.report.run_files import RunRecord, number
from esper_soa.report.run_tables import Cell, Row, Table, table_of
from esper_soa.report.steps import Columns, read_round, rounds_of

MOST_ROWS = 20_000  # of the lanes of all rounds shown together
ROWS_OF_HOSTS = 32  # lanes on a screen
HEAD = 2  # lanes of a host's name and accuracy, above its slots
MOST_RUNS = 16  # of which lanes are shown
LIVE = (
    "germinated",
    "training",
    "blending",
    "holding",
    "fossilized",
)  # stages of a slot that holds a seed
GONE = ("pruned", "embargoed", "resetting")
TOLD = (
    "germinated",
    "blended",
    "fossilized",
    "pruned",
    "rollback",
    "ended_early",
)  # events that a lane marks
GOVERNED = ("diverging", "panic", "rollback")


class Chosen(NamedTuple):
    """A round of a run whose env-steps are shown."""

    run: RunRecord
    round: int
    name: str  # as the reader chooses it
    slots: Columns
    steps: Columns
    events: Columns
    hosts: int  # of the run
    names: list[str]  # of the slots, in their order


def chosen_rounds(runs: Sequence[RunRecord]) -> list[Chosen]:
    """The rounds to be shown, with their tables; of each run the last one first."""
    found = []
    for run in runs[:MOST_RUNS]:
        for number_, name in _wanted(run, len(runs) > 1):
            slots, steps, events = (
                read_round(run.path, table, number_) for table in ("slots", "steps", "events")
            )
            if slots and steps:
                hosts = 1 + max(map(_int, steps["env"]), default=0)
                names = run.slots or sorted(set(map(str, slots["slot"])))
                found.append(Chosen(run, number_, name, slots, steps, events, hosts, names))
    return found


def _wanted(run: RunRecord, last_alone: bool) -> list[tuple[int, str]]:
    """Rounds and their names."""
    there = rounds_of(run.path, "slots")
    if not there:
        return []
    accuracies = {
        int(number(line, "round") or 0): number(line, "accuracy", "mean") for line in run.rounds
    }
    ended = [one for one in there if accuracies.get(one) is not None]
    names = {there[-1]: ["last" if there[-1] in ended or not run.rounds else "in progress"]}
    if ended and not last_alone:
        names.setdefault(max(ended, key=lambda one: accuracies[one] or 0.0), []).append("best")
        names.setdefault(there[0], []).append("first")
    return [(one, f"{one} ({', '.join(words)})") for one, words in names.items()]


def hosts_on_screen(slots: int) -> int:
    """Hosts whose lanes are shown at once; each has a lane per slot below its HEAD."""
    return max(1, min(8, ROWS_OF_HOSTS // (slots + HEAD)))


def lanes_table(rounds: Sequence[Chosen]) -> Table:
    """A row per stretch of env-steps in which a slot kept seed, stage and alpha; `base` is where
    its lane stands.

    Stretches are as short as MOST_ROWS allows, as the contribution is told once for each.
    """
    longest = next(
        limit
        for limit in (1, 2, 5, 10, 25, 100, 10**9)
        if limit > 100 or sum(1 for one in rounds for _ in _stretches(one, limit)) <= MOST_ROWS
    )
    return table_of(row for one in rounds for row in _stretches(one, longest))


def _stretches(one: Chosen, longest: int) -> Iterator[Row]:
    """The rows of one round; stretches of at most `longest` env-steps."""
    columns = one.slots
    places = {name: place for place, name in enumerate(one.names)}
    order = sorted(
        range(len(columns["step"])),
        key=lambda row: (
            _int(columns["env"][row]),
            str(columns["slot"][row]),
            _int(columns["step"][row]),
        ),
    )
    held = [row for row in order if columns["stage"][row] in LIVE + GONE]
    since = count()

    def same(row: int) -> tuple[Cell, ...]:
        step = _int(columns["step"][row])
        # Rows that follow each other in time keep the difference of env-step and place in the list.
        return (
            columns["env"][row],
            columns["slot"][row],
            columns["seed"][row],
            columns["stage"][row],
            columns["alpha"][row],
            step - next(since),
            (step - 1) // longest,
        )

    for _, group in groupby(held, key=same):
        rows = list(group)
        yield _stretch(one, columns, rows, places[str(columns["slot"][rows[0]])])


def _stretch(one: Chosen, columns: Columns, rows: Sequence[int], place: int) -> Row:
    first = rows[0]
    last = rows[-1]
    env = _int(columns["env"][first])
    hosts, base = _place(one, env)
    return {
        "run": one.run.label,
        "round": one.name,
        "hosts": hosts,
        "host": env,
        "slot": columns["slot"][first],
        "from": _int(columns["step"][first]) - 1,
        "to": _int(columns["step"][last]),
        "base": base - place - 1,
        "blueprint": columns["blueprint"][first] or "none",
        "stage": columns["stage"][first],
        "seed": columns["seed"][first],
        "alpha": columns["alpha"][last],
        "contribution": mean_of(columns["contribution"], rows),
        "shapley": mean_of(columns["shapley"], rows),
    }


def accuracies_table(rounds: Sequence[Chosen]) -> Table:
    """A row per host and env-step: its accuracy, and where that lies in the lane above its
    slots.
    """
    rows = sum(len(one.steps["step"]) for one in rounds)
    every = 1 + rows // MOST_ROWS
    return table_of(row for one in rounds for row in _accuracies(one, every))


def _accuracies(one: Chosen, every: int) -> Iterator[Row]:
    values = [value for value in one.steps["accuracy"] if isinstance(value, int | float)]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    # rows are in the order of env-steps
    last = dict(zip(one.steps["env"], one.steps["step"], strict=True))
    for step, env, value in zip(
        *(one.steps[name] for name in ("step", "env", "accuracy")), strict=True
    ):
        if isinstance(value, int | float) and (_int(step) % every == 0 or step == last[env]):
            hosts, base = _place(one, _int(env))
            yield {
                "run": one.run.label,
                "round": one.name,
                "hosts": hosts,
                "host": env,
                "step": step,
                "accuracy": value,
                "y": base + 1.4 * (value - low) / ((high - low) or 1.0),
            }


def names_table(rounds: Sequence[Chosen]) -> Table:
    """A row per host: its name with the accuracy that it ended with, and why its episode ended
    early, if it did.
    """
    rows: list[Row] = []
    for one in rounds:
        # rows are in the order of env-steps
        ended = dict(zip(one.steps["env"], one.steps["accuracy"], strict=True))
        early = {
            row["env"]: row["cause"] for row in rows_of(one.events) if row["kind"] == "ended_early"
        }
        for env, accuracy in ended.items():
            hosts, base = _place(one, _int(env))
            told = f"{accuracy:.1f} %" if isinstance(accuracy, int | float) else "not finite"
            told += f", ended early: {early[env]}" if env in early else ""
            rows.append(
                {
                    "run": one.run.label,
                    "round": one.name,
                    "hosts": hosts,
                    "y": base + 0.95,
                    "words": f"host {env}: {told}",
                }
            )
    return table_of(rows)


def marks_table(rounds: Sequence[Chosen]) -> Table:
    """A row per event of a seed or host that a lane marks."""
    return table_of(
        {
            "run": one.run.label,
            "round": one.name,
            "hosts": _place(one, _int(row["env"]))[0],
            "host": row["env"],
            "step": row["step"],
            "event": row["kind"],
            "slot": row["slot"],
            "blueprint": row["blueprint"],
            "cause": row["cause"],
            "y": _place(one, _int(row["env"]))[1] - _lane(one, row["slot"]),
        }
        for one in rounds
        for row in rows_of(one.events)
        if row["kind"] in TOLD
    )


def _lane(one: Chosen, slot: Cell) -> float:
    """How far below the name of its host a slot's middle is; an event of the whole host stands
    beside the name.
    """
    return one.names.index(str(slot)) + 0.6 if slot in one.names else -0.4


def governor_table(runs: Sequence[RunRecord]) -> Table:
    """A row per event of the governor, of all rounds in which there was one."""
    rows: list[Row] = []
    for run in runs:
        for one in rounds_of(run.path, "events"):
            events = rows_of(read_round(run.path, "events", one))
            rows += [
                {
                    "run": run.label,
                    "round": one,
                    "step": row["step"],
                    "host": row["env"],
                    "event": row["kind"],
                    "cause": row["cause"],
                    "accuracy": row["accuracy"],
                }
                for row in events
                if row["kind"] in GOVERNED
            ]
    return table_of(rows)


def credit_table(rounds: Sequence[Chosen]) -> Table:
    """A row per env-step and slot: contribution, Shapley value and interaction, means over the
    hosts measured there.

    A host whose episode has ended early is measured no more.
    """
    rows: list[Row] = []
    for one in rounds:
        by_place: dict[tuple[int, str], list[int]] = {}
        for place, (step, slot) in enumerate(
            zip(one.slots["step"], one.slots["slot"], strict=True)
        ):
            if one.slots["contribution"][place] is not None:
                by_place.setdefault((_int(step), str(slot)), []).append(place)
        for (step, slot), found in sorted(by_place.items()):
            row: Row = {
                "run": one.run.label,
                "round": one.name,
                "step": step,
                "slot": slot,
                "hosts": len(found),
            }
            worth: Row = {
                name: mean_of(one.slots[name], found)
                for name in ("contribution", "shapley", "interaction")
            }
            rows.append(row | worth)
    return table_of(rows)


def rows_of(columns: Columns) -> Iterator[Row]:
    """The rows of a table."""
    return (dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True))


def mean_of(column: Sequence[Cell], rows: Sequence[int]) -> float | None:
    """The mean of those cells of `rows` that hold a number."""
    known = [value for value in (column[row] for row in rows) if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def _place(one: Chosen, env: int) -> tuple[str, float]:
    """The screen that a host is shown on, and the foot of its HEAD there; lanes are 1 high."""
    slots = len(one.names)
    hosts = hosts_on_screen(slots)
    first = env // hosts * hosts
    return f"{first} to {min(first + hosts, one.hosts) - 1}", -float(
        env % hosts * (slots + HEAD) + HEAD
    )


def _int(cell: Cell) -> int:
    return int(cell) if isinstance(cell, int | float) else 0
