"""Rows of the env-steps of runs of one round: means over hosts, and the seeds that were born or
came to an end. The newest written round of a run is read. Needs no torch."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from esper_soa.lab.report.run_files import Columns, Row, RunRecord, read_round, rows_of
from esper_soa.lab.report.run_tables import GIGA, SEED_FATES
from esper_soa.lab.telemetry.schema import CONTROL_TABLE
from esper_soa.lab.telemetry.table_files import table_files

MAX_ROWS = 20_000  # of all runs together
# Columns with extremes, and where the table has them.
SPREAD_COLUMNS = {"accuracy": "accuracy", "step_reward": "reward"}
MEAN_COLUMNS = ("parameters", "val_loss", "train_loss")
STEP_COLUMNS = ("step", "train_flop", *SPREAD_COLUMNS.values(), *MEAN_COLUMNS)


def step_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per run and env-step: means over the hosts that still play, extremes of accuracy and
    reward, the control's accuracy, and the training FLOP of a host so far. Rows are left out evenly
    where there are many.
    """
    courses = [_course(run) for run in runs]
    every = 1 + sum(len(course.get("step", ())) for course in courses) // MAX_ROWS
    for run, course in zip(runs, courses, strict=True):
        for row in rows_of(_thinned(course, every)):
            yield {"group": run.group, "run": run.label, **row}


def fate_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per env-step and event of FATES: the number of seeds, of all runs and hosts."""
    seeds = Counter[tuple[int, str]]()
    for run in runs:
        events = _newest(run, "events", ("step", "kind"))
        for kind in SEED_FATES if events else ():
            steps, counts = np.unique(events["step"][events["kind"] == kind], return_counts=True)
            pairs = zip(steps[:MAX_ROWS].tolist(), counts.tolist(), strict=False)
            seeds.update({(step, kind): count for step, count in pairs})
    for (step, kind), count in seeds.items():
        yield {"step": step, "event": kind, "seeds": count}


def _thinned(columns: Columns, every: int) -> Columns:
    """A row of so many, the last one among them."""
    return {name: column[(len(column) - 1) % every :: every] for name, column in columns.items()}


def _newest(run: RunRecord, table: str, names: Sequence[str]) -> Columns:
    """Columns of a table in the newest round that has been written."""
    rounds = list(table_files(run.path, table))
    return read_round(run.path, table, rounds[-1], names=names) if rounds else {}


def _course(run: RunRecord) -> Columns:
    """The env-steps of a run's newest round, in order; nothing where there are none."""
    hosts = _newest(run, "steps", STEP_COLUMNS)
    if not hosts:
        return {}
    steps, places = np.unique(hosts["step"], return_inverse=True)
    course: Columns = {"step": steps}
    for name, column in SPREAD_COLUMNS.items():
        values = np.where(np.isfinite(hosts[column]), hosts[column], np.nan)
        low, high = np.full((2, len(steps)), np.nan)
        np.fmin.at(low, places, values)
        np.fmax.at(high, places, values)
        course |= {name: _means(values, places, len(steps)), f"{name}_min": low}
        course[f"{name}_max"] = high
    course |= {name: _means(hosts[name], places, len(steps)) for name in MEAN_COLUMNS}
    control = _newest(run, CONTROL_TABLE, ("step", "accuracy"))
    known = np.isin(control.get("step", steps[:0]), steps)
    others = np.searchsorted(steps, control.get("step", steps[:0])[known])
    accuracies = control.get("accuracy", np.zeros(0))[known]
    spent = np.nancumsum(_means(hosts["train_flop"], places, len(steps)))
    control_accuracy = _means(accuracies, others, len(steps))
    course |= {"control_accuracy": control_accuracy, "train_gflop": spent / GIGA}
    return _thinned(course, 1 + len(steps) // MAX_ROWS)


def _means(values: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """The mean of the finite `values` at each of `count` places; NaN where there are none."""
    known = np.isfinite(values)
    sums = np.bincount(places[known], values[known], count)
    numbers = np.bincount(places[known], minlength=count)
    return np.divide(sums, numbers, out=np.full(count, np.nan), where=numbers > 0)
