"""Tables of a report: columns by name, all of one length, of runs and of their rounds and episodes.

A figure draws from such a table, and the reader may open the same beside it. Given records of runs
by page.py. Needs no torch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from esper_soa.ops.json_lines import Json
from esper_soa.report.groups import Group
from esper_soa.report.run_files import Record, RunRecord, number, numbers, part

Cell: TypeAlias = None | int | float | str
Row: TypeAlias = dict[str, Cell]
Table: TypeAlias = dict[str, list[Cell]]

DIGITS = 6  # significant ones of a number in the page
GIGA = 1e9


def table_of(rows: Iterable[Row]) -> Table:
    """The columns of `rows`; a row that lacks a column has None there."""
    held = list(rows)
    names = dict.fromkeys(name for row in held for name in row)
    return {name: [_rounded(row.get(name)) for row in held] for name in names}


def _rounded(value: Cell) -> Cell:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def packed(table: Table) -> dict[str, Json]:
    """The table as the page holds it: a column of texts as its distinct `names` and a code per
    row.
    """
    return {name: _packed(column) for name, column in table.items()}


def _packed(column: list[Cell]) -> Json:
    if not column or not all(isinstance(cell, str) for cell in column):
        return column
    names = {name: code for code, name in enumerate(dict.fromkeys(column))}
    return {"names": [str(name) for name in names], "codes": [names[cell] for cell in column]}


def rounds_table(groups: Sequence[Group]) -> Table:
    """A row per run and round: accuracy, reward, cost, time."""
    return table_of(_round_row(group, run, line) for group, run, line in _lines(groups))


def _round_row(group: Group, run: RunRecord, line: Record) -> Row:
    flop = number(line, "train_flop")
    row: Row = {"group": group.label, "run": run.label, "round": _round(line)}
    for name in ("accuracy", "reward"):
        row |= {
            f"{name}{end}": number(line, name, part)
            for end, part in (("", "mean"), ("_min", "min"), ("_max", "max"))
        }
    for name in ("val_loss", "parameters", "eps"):
        row[name] = number(line, name)
    return row | {
        "train_gflop": None if flop is None else flop / GIGA,
        "explained_variance": number(line, "update", "explained_variance"),
        "kl": number(line, "update", "approx_kl"),
    }


def means_table(groups: Sequence[Group], names: Sequence[str]) -> Table:
    """A row per group and round: the mean over its runs of each of the columns `names` of
    `rounds_table`.
    """
    rounds = rounds_table(groups)
    held: dict[tuple[Cell, Cell], list[int]] = {}
    for index, key in enumerate(zip(rounds.get("group", []), rounds.get("round", []), strict=True)):
        held.setdefault(key, []).append(index)
    return table_of(
        {"group": group, "round": number, "runs": len(rows)}
        | {name: _mean(rounds[name], rows) for name in names}
        for (group, number), rows in held.items()
    )


def _mean(column: Sequence[Cell], rows: Sequence[int]) -> Cell:
    known = [value for value in (column[row] for row in rows) if isinstance(value, int | float)]
    return sum(known) / len(known) if known else None


def parts_table(groups: Sequence[Group], column: str, *path: str) -> Table:
    """A row per run, round and number in the record that a round has under `path`, named in
    `column`.
    """
    return table_of(
        {"run": run.label, "round": _round(line), column: name, "value": number(found, name)}
        for _, run, line in _lines(groups)
        for found in [part(line, *path)]
        for name in found
    )


def without_zeros(table: Table, column: str) -> Table:
    """The table without the names in `column` whose values are 0 in every row."""
    names = table.get(column, [])
    values = table.get("value", [])
    used = {name for name, value in zip(names, values, strict=True) if value}
    kept = [row for row, name in enumerate(names) if name in used]
    return {title: [cells[row] for row in kept] for title, cells in table.items()}


def ops_table(groups: Sequence[Group]) -> Table:
    """A row per run, round and op: how often it was played, and the share of all decisions in
    percent.
    """
    table = parts_table(groups, "op", "ops")
    totals: dict[tuple[Cell, Cell], float] = {}
    keys = list(zip(table.get("run", []), table.get("round", []), strict=True))
    for key, value in zip(keys, table.get("value", []), strict=True):
        totals[key] = totals.get(key, 0.0) + float(value or 0)
    shares = [
        100 * float(value or 0) / (totals[key] or 1.0)
        for key, value in zip(keys, table.get("value", []), strict=True)
    ]
    return table | {"share": [_rounded(share) for share in shares]}


def prefixed_table(groups: Sequence[Group], column: str, prefix: str) -> Table:
    """A row per run, round and number of the update whose name begins with `prefix`; the rest of it
    is in `column`.
    """
    return table_of(
        {
            "run": run.label,
            "round": _round(line),
            column: name.removeprefix(prefix),
            "value": number(found, name),
        }
        for _, run, line in _lines(groups)
        for found in [part(line, "update")]
        for name in found
        if name.startswith(prefix)
    )


def times_table(groups: Sequence[Group]) -> Table:
    """A row per run, round and phase: seconds."""
    phases = (("collect", "collect_seconds"), ("update", "update_seconds"))
    return table_of(
        {"run": run.label, "round": _round(line), "phase": phase, "value": number(line, name)}
        for _, run, line in _lines(groups)
        for phase, name in phases
    )


def phases_table(groups: Sequence[Group]) -> Table:
    """A row per run, round and phase: seconds, as a run with profile=phases has told them in its
    log.
    """
    return table_of(
        {"run": run.label, "round": line.round, "phase": phase, "value": seconds}
        for group in groups
        for run in group.runs
        for line in run.phases
        for phase, seconds in line.seconds.items()
    )


def blueprints_table(groups: Sequence[Group]) -> Table:
    """A row per run and blueprint: seeds by fate, and means over those that came to an end."""
    return table_of(
        _fates(run.label, name, [found[name] for found in _blueprints(run) if name in found])
        for group in groups
        for run in group.runs
        for name in sorted({name for found in _blueprints(run) for name in found})
    )


def _blueprints(run: RunRecord) -> list[dict[str, Record]]:
    return [
        {name: part(found, name) for name in found}
        for found in (part(line, "blueprints") for line in run.rounds)
    ]


def _fates(run: str, blueprint: str, records: Sequence[Record]) -> Row:
    """Counts summed over rounds; a mean weighs each round by the seeds that it is a mean of."""
    counts = {
        name: sum(int(number(one, name) or 0) for one in records)
        for name in ("germinated", "fossilized", "pruned")
    }
    ended = counts["fossilized"] + counts["pruned"]
    return {
        "run": run,
        "blueprint": blueprint,
        **counts,
        "kept": 100 * counts["fossilized"] / ended if ended else None,
        "gain": _weighted(records, "mean_gain", "fossilized"),
        "contribution": _weighted(records, "mean_contribution", "fossilized"),
        "churn": _weighted(records, "mean_churn", "pruned"),
    }


def _weighted(records: Sequence[Record], name: str, weight: str) -> float | None:
    pairs = [(number(one, name), number(one, weight) or 0.0) for one in records]
    known = [(value, count) for value, count in pairs if value is not None and count > 0]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None


def shapley_table(groups: Sequence[Group]) -> Table:
    """A row per run, round and slot: the Shapley value at the end of an episode, mean and ends over
    hosts.

    No rows where none was measured, as where all seeds have become permanent before: values are 0
    then.
    """
    rows: list[Row] = []
    for group in groups:
        for run in group.runs:
            by_round: dict[int, list[list[float | None]]] = {}
            for episode in run.episodes:
                by_round.setdefault(_round(episode), []).append(numbers(episode, "shapley"))
            rows += [
                row
                for number_, found in by_round.items()
                for row in _shapley_rows(run, number_, found)
            ]
    return table_of(rows if any(row["low"] or row["high"] for row in rows) else [])


def _shapley_rows(
    run: RunRecord, number_: int, found: Sequence[Sequence[float | None]]
) -> Iterator[Row]:
    for slot, name in enumerate(run.slots):
        values = [one[slot] for one in found if slot < len(one)]
        known = [value for value in values if value is not None]
        if known:
            yield {
                "run": run.label,
                "round": number_,
                "slot": name,
                "value": sum(known) / len(known),
                "low": min(known),
                "high": max(known),
            }


def rollbacks_table(groups: Sequence[Group]) -> Table:
    """A row per run, round and reason: hosts that the governor put back to a snapshot."""
    table = parts_table(groups, "reason", "rollbacks")
    kept = [row for row, name in enumerate(table.get("reason", [])) if name != "total"]
    return {title: [cells[row] for row in kept] for title, cells in table.items()}


def hosts_table(groups: Sequence[Group]) -> Table:
    """A row per host of the last rounds of a run at its end, grown and of the control: accuracy,
    parameters, FLOP.
    """
    rows: list[Row] = []
    for group in groups:
        for run in group.runs:
            for kind in ("grown", "control"):
                rows += _host_rows(group, run, kind)
    return table_of(rows)


def _host_rows(group: Group, run: RunRecord, kind: str) -> Iterator[Row]:
    score = part(run.summary, kind)
    episodes = score.get("episodes")
    for episode in episodes if isinstance(episodes, list) else []:
        columns = [numbers(episode, name) for name in ("accuracies", "parameters", "train_flop")]
        for env, (accuracy, parameters, flop) in enumerate(zip(*columns, strict=True)):
            yield {
                "group": group.label,
                "run": run.label,
                "hosts": kind,
                "host": env,
                "accuracy": accuracy,
                "parameters": parameters,
                "train_gflop": None if flop is None else flop / GIGA,
            }


def _lines(groups: Sequence[Group]) -> Iterator[tuple[Group, RunRecord, Record]]:
    return ((group, run, line) for group in groups for run in group.runs for line in run.rounds)


def _round(line: Mapping[str, object]) -> int:
    return int(number(line, "round") or 0)
