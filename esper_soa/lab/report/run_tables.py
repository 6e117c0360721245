"""Rows of a report's tables, of runs and of their rounds and episodes. Needs no torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, zip_longest
from typing import TypeAlias

from esper_soa.lab.report.groups import FinishedGroup
from esper_soa.lab.report.run_files import (
    Cell,
    Record,
    Row,
    RunRecord,
    Table,
    listed,
    mean_of,
    number,
    numbers,
    part,
    round_of,
)
from esper_soa.lab.run_folders import by_value
from esper_soa.system.files import LOGGER
from esper_soa.system.json_lines import Json

Shares: TypeAlias = Mapping[str, float | None]

MAX_PAGE_ROWS = 100_000  # of a table
PAGE_DIGITS = 6  # significant ones of a number in the page
GIGA = 1e9
# Numbers of a line of metrics.jsonl, by column: where they are in it.
ROUND_NUMBERS = {
    **{
        f"{name}{end}": (name, kind)
        for name in ("accuracy", "reward")
        for end, kind in (("", "mean"), ("_min", "min"), ("_max", "max"))
    },
    **{name: (name,) for name in ("val_loss", "parameters", "eps")},
    "explained_variance": ("update", "explained_variance"),
    "kl": ("update", "approx_kl"),
}
SEED_FATES = ("germinated", "fossilized", "pruned")


def table_of(rows: Iterable[Row]) -> Table:
    """The columns of `rows`; a row that lacks a column has None there. Rows beyond MAX_PAGE_ROWS
    are left out, and said.
    """
    rows = iter(rows)
    table: Table = {}
    count = 0
    for count, row in enumerate(islice(rows, MAX_PAGE_ROWS), 1):
        for name, cell in row.items():
            column = table.setdefault(name, [])
            column += [None] * (count - 1 - len(column))
            column.append(_rounded(cell))
    for column in table.values():
        column += [None] * (count - len(column))
    if next(rows, None) is not None:
        LOGGER.warning("report   without all rows of %s beyond %d", ", ".join(table), count)
    return table


def _rounded(value: Cell) -> Cell:
    return float(f"{value:.{PAGE_DIGITS}g}") if isinstance(value, float) else value


def pack_table(table: Table) -> dict[str, Json]:
    """The table as the page holds it: a column of texts as distinct `names` and a code per row."""
    return {name: _packed(column) for name, column in table.items()}


def _packed(column: list[Cell]) -> Json:
    if not column or not all(isinstance(cell, str) for cell in column):
        return column
    names = {name: code for code, name in enumerate(dict.fromkeys(column))}
    return {"names": [str(name) for name in names], "codes": [names[cell] for cell in column]}


def round_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per run and round: accuracy, reward, cost, health of the update, pace."""
    for run in runs:
        for line in run.rounds:
            row: Row = {"group": run.group, "run": run.label, "round": round_of(line)}
            row |= {name: number(line, *names) for name, names in ROUND_NUMBERS.items()}
            yield row | {"train_gflop": _giga(number(line, "train_flop"))}


def _giga(value: float | None) -> float | None:
    return None if value is None else value / GIGA


def mean_rows(table: Table, time: str) -> Iterator[Row]:
    """A row per group and value of `time` (round or step): means over the group's runs."""
    places: dict[tuple[Cell, Cell], list[int]] = {}
    for index, key in enumerate(zip(table.get("group", []), table.get(time, []), strict=True)):
        places.setdefault(key, []).append(index)
    names = [name for name in table if name not in ("group", "run", time)]
    for (group, at), rows in places.items():
        means: Row = {name: mean_of([table[name][row] for row in rows]) for name in names}
        yield {"group": group, time: at, "runs": len(rows)} | means


def part_rows(runs: Sequence[RunRecord], name: str) -> Iterable[Row]:
    """The table `name` of PARTS: a row per run, round and name, without names that stay 0."""
    column, value_name, reader = PART_READERS[name]
    columns = ("run", "round", column, value_name)
    cells = [
        (run.label, round_of(line), name, value)
        for run in runs
        for line in (_shapley(run) if column == "slot" else run.rounds)
        for name, value in reader(line).items()
    ]
    used_names = {name for _, _, name, value in cells if value}
    for row in cells:
        if row[2] in used_names:
            yield dict(zip(columns, row, strict=True))


def _shapley(run: RunRecord) -> Iterator[Record]:
    """A record per round: `shapley` of every slot at the end of an episode, mean over the hosts
    where it is not 0, as episodes.jsonl has it for what was not measured.
    """
    for round_, episodes in groupby(run.episodes, round_of):
        columns = zip_longest(*(numbers(episode, "shapley") for episode in episodes))
        means = {
            name: mean_of([value for value in values if value])
            for name, values in zip(run.slots, columns, strict=False)
        }
        yield {"round": round_, "shapley": means}


def _all_of(name: str, prefix: str = "") -> Callable[[Record], Shares]:
    """Reads the numbers of the record `name` whose names begin with `prefix`, without it."""

    def read(line: Record) -> Shares:
        record = part(line, name)
        keys = (key for key in record if key.startswith(prefix))
        return {key.removeprefix(prefix): number(record, key) for key in keys}

    return read


def _shares_of_ops(line: Record) -> Shares:
    """Percent of all decisions of the round."""
    counts = _all_of("ops")(line)
    total = sum(count or 0.0 for count in counts.values()) or 1.0
    return {name: 100 * (count or 0.0) / total for name, count in counts.items()}


def _rollbacks(line: Record) -> Shares:
    return {name: count for name, count in _all_of("rollbacks")(line).items() if name != "total"}


def _seconds(line: Record) -> Shares:
    return {name: number(line, f"{name}_seconds") for name in ("collect", "update")}


# Named numbers of a run, round by round: the columns of the names and of the numbers, and their
# reader in a line.
PART_READERS: dict[str, tuple[str, str, Callable[[Record], Shares]]] = {
    "shapley": ("slot", "shapley", _all_of("shapley")),
    "ops": ("op", "share", _shares_of_ops),
    "terms": ("term", "term_sum", _all_of("reward_terms")),
    "entropy": ("head", "entropy", _all_of("update", "entropy/")),
    "rollbacks": ("reason", "rollbacks", _rollbacks),
    "times": ("phase", "seconds", _seconds),
}


def blueprint_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per run and blueprint: seeds by fate, and means over those that came to an end."""
    for run in runs:
        records = [part(line, "blueprints") for line in run.rounds]
        for name in sorted({name for record in records for name in record}):
            fates = _fates([part(record, name) for record in records])
            yield {"run": run.label, "blueprint": name, **fates}


# Measures of what the seeds of a blueprint brought: the column of `blueprint_rows`, their fate.
PAID = (
    ("contribution", "fossil_contribution", "fossilized"),
    ("gain, fossilized", "fossil_gain", "fossilized"),
    ("gain, pruned", "churn", "pruned"),
)


def paid_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per run, blueprint and measure of what its seeds brought; most contribution first."""
    rows = sorted(blueprint_rows(runs), key=lambda row: -float(row["fossil_contribution"] or 0.0))
    for row in rows:
        label = f"{row['blueprint']}|{row['fossilized']} of {row['germinated']} fossilized"
        known = {"run": row["run"], "blueprint": row["blueprint"], "label": label}
        for measure, column, fate in PAID:
            if row[column] is not None:
                yield known | {"measure": measure, "points": row[column], "seeds": row[fate]}


def _fates(records: Sequence[Record]) -> Row:
    """Counts summed over rounds; a mean weighs each round by the seeds that it is a mean of."""
    counts = {name: sum(int(number(part, name) or 0) for part in records) for name in SEED_FATES}
    ended = counts["fossilized"] + counts["pruned"]
    return {
        **counts,
        "kept": 100 * counts["fossilized"] / ended if ended else None,
        "fossil_gain": _weighted(records, "mean_gain", "fossilized"),
        "fossil_contribution": _weighted(records, "mean_contribution", "fossilized"),
        "churn": _weighted(records, "mean_churn", "pruned"),
    }


def _weighted(records: Sequence[Record], name: str, weight: str) -> float | None:
    pairs = [(number(record, name), number(record, weight) or 0.0) for record in records]
    known = [(value, count) for value, count in pairs if value is not None and count > 0]
    total = sum(count for _, count in known)
    return sum(value * count for value, count in known) / total if total else None


def _last_episodes(runs: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, str, Record]]:
    """The episodes of last rounds, each with its run and whether its hosts are grown or those of
    the first control.
    """
    for run in runs:
        for kind, score in (("grown", part(run.summary, "grown")), ("control", run.control)):
            episodes = score.get("episodes")
            for episode in episodes if isinstance(episodes, list) else ():
                yield run, kind, episode


def host_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per host: validation accuracy, as the way there has it, test accuracy, cost."""
    names = "validation_accuracies", "test_accuracies", "parameters", "train_flop"
    for run, kind, episode in _last_episodes(runs):
        columns = [numbers(episode, name) for name in names]
        for env, (seen, tested, parameters, flop) in enumerate(zip(*columns, strict=False)):
            row: Row = {"group": run.group, "run": run.label, "hosts": kind, "host": env}
            row |= {"accuracy": seen, "test_accuracy": tested, "parameters": parameters}
            yield row | {"train_gflop": _giga(flop)}


def setting_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per host and setting of which each has its own."""
    for run, kind, episode in _last_episodes(runs):
        results = [numbers(episode, of) for of in ("test_accuracies", "parameters")]
        env_settings = part(episode, "settings")
        for name, values in env_settings.items():
            column = numbers(env_settings, name)
            items = values if isinstance(values, list) else []
            words = list(dict.fromkeys(item for item in items if isinstance(item, str)))
            if words:  # numbered, as the axis has numbers
                column = [1 + words.index(item) if item in words else None for item in items]
                named = (f"{number}: {word}" for number, word in enumerate(words, 1))
                name = f"{name} ({', '.join(named)})"
            for env, (value, accuracy, size) in enumerate(zip(column, *results, strict=False)):
                row: Row = {"run": run.label, "hosts": kind, "setting": name, "host": env}
                yield row | {"value": value, "test_accuracy": accuracy, "parameters": size}


def frontier_rows(study: Record) -> Iterator[Row]:
    """A row per budget and group: cost and results, means over random seeds with their bounds."""
    for budget in listed(study, "budgets"):
        groups = part(budget, "groups")
        for name in groups:
            group = part(groups, name)
            row: Row = {"side": name, "budget": number(budget, "gflop")}
            for column in ("env_steps", "parameters"):
                row[column] = mean_of(numbers(group, column))
            for column, source in (("train_gflop", "train_flop"), ("all_gflop", "all_flop")):
                row[column] = _giga(mean_of(numbers(group, source)))
            for measure, bounds in part(group, "intervals").items():
                row[measure] = number(bounds, "mean")
                row[f"{measure}_low"] = number(bounds, "low")
                row[f"{measure}_high"] = number(bounds, "high")
            yield row


def standing_rows(standings: Sequence[FinishedGroup]) -> Iterator[Row]:
    """A row per group, the best first, or by value where groups differ in numbers alone; a bound
    that is not finite is left out.
    """
    order = by_value(group.label for group in standings)
    for group in sorted(standings, key=lambda group: order.index(group.label)):
        row: Row = {"group": group.label, "runs": group.runs, "left_out": group.left_out}
        for name, interval in (("accuracy", group.accuracy), ("gain", group.gain)):
            for end, bound in zip(("", "_low", "_high"), interval or (None,) * 3, strict=True):
                row[name + end] = number({"": bound}, "")
        flop = _giga(group.train_flop)
        yield row | {"parameters": group.parameters, "train_gflop": flop}


def final_rows(runs: Sequence[RunRecord]) -> Iterator[Row]:
    """A row per run at its end: mean test accuracy of its hosts, and its lead on its control."""
    for run in (run for run in runs if run.accuracy is not None):
        row: Row = {"group": run.group, "run": run.label}
        yield row | {"accuracy": run.accuracy, "gain": run.gain}
