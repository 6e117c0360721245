"""Rows of the env-steps of runs of one round: means over hosts, and the seeds that were born or
came to an end. Of a run that has written several, the newest is read. Needs no torch."""

from collections import Counter
from collections.abc import Iterator, Sequence

from esper_soa.lab.report.run_files import Cell, Row, RunRecord, mean_of, read_round
from esper_soa.lab.report.run_tables import GIGA, SEED_FATES
from esper_soa.lab.telemetry.schema import CONTROL_TABLE
from esper_soa.lab.telemetry.table_files import table_files

MAX_ROWS = 20_000  # of all runs together
# Columns with extremes, and where the table has them.
SPREAD_COLUMNS = {"accuracy": "accuracy", "step_reward": "reward"}
MEAN_COLUMNS = ("parameters", "val_loss", "train_loss")


def step_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per run and env-step: means over the hosts that still play, extremes of accuracy and
    reward, the control's accuracy, and the training FLOP of a host so far. Rows are left out evenly
    where there are many.
    """
    rows = [list(_steps(run)) for run in runs]
    every = 1 + sum(map(len, rows)) // MAX_ROWS
    for env_rows in rows:
        yield from env_rows[(len(env_rows) - 1) % every :: every]


def fate_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per env-step and event of FATES: the number of seeds, of all runs and hosts."""
    counts = Counter(
        (event["step"], event["kind"])
        for run in runs
        for event in _newest(run, "events")
        if event["kind"] in SEED_FATES
    )
    for (step, kind), count in counts.items():
        yield {"step": step, "event": kind, "seeds": count}


def _newest(run: RunRecord, table: str) -> list[Row]:
    """The rows of a table in the newest round that has been written."""
    rounds = list(table_files(run.path, table))
    return read_round(run.path, table, rounds[-1]) if rounds else []


def _steps(run: RunRecord) -> Iterator[Row]:
    by_step: dict[object, list[Row]] = {}
    for host in _newest(run, "steps"):
        by_step.setdefault(host["step"], []).append(host)
    control: dict[object, list[Cell]] = {}
    for host in _newest(run, CONTROL_TABLE):
        control.setdefault(host["step"], []).append(host["accuracy"])
    spent = 0.0
    for hosts in by_step.values():
        spent += mean_of([host["train_flop"] for host in hosts]) or 0.0
        means: Row = {"group": run.group, "run": run.label, "step": hosts[0]["step"]}
        for name, column in SPREAD_COLUMNS.items():
            values = [host[column] for host in hosts]
            known = [value for value in values if isinstance(value, int | float)]
            means |= {name: mean_of(known), f"{name}_min": min(known, default=None)}
            means[f"{name}_max"] = max(known, default=None)
        means |= {name: mean_of([host[name] for host in hosts]) for name in MEAN_COLUMNS}
        others = mean_of(control.get(hosts[0]["step"], []))
        yield means | {"control_accuracy": others, "train_gflop": spent / GIGA}
