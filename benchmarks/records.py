"""Records of measurements: what every one of them says about its origin, where they are kept, which
ones count, and tables of them.

A record is one JSON line. benchmarks/results/ takes none whose code differs from its commit, and
benchmarks/table.py shows none: nobody could repeat it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from operator import gt
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.intervals import difference_interval
from benchmarks.rank_tests import signed_rank
from benchmarks.timing import BenchmarkError
from esper_soa.system.errors import UserError
from esper_soa.training.results.statistics import Interval

RESULTS = Path(__file__).parent / "results"
# of measuring; one more where opponents or what is timed change, so that no table mixes two
METHOD = 2
CHANGED = "+"  # ends the commit of a tree that differs from it
CONFIDENCE = 0.95  # of every interval of a table

Record = dict[str, object]
Line = tuple[str, ...]
Records = Sequence[Mapping]


def origin(benchmark: str, device: torch.device) -> Record:
    """The head of a record: when, of which code, on what."""
    return {
        "benchmark": benchmark,
        "method": METHOD,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": machine.git_commit(),
        "machine": machine.describe(device),
    }


def command_line(words: str | None) -> argparse.ArgumentParser:
    """A parser whose help is `words`, with --results."""
    parser = argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", default=str(RESULTS), help="folder of the results; '' = only print them"
    )
    return parser


def check_folder(folder: str | Path) -> None:
    """Raise BenchmarkError where `folder` ("" = none) may not keep a record made now."""
    commit = machine.git_commit()
    if folder and Path(folder).resolve() == RESULTS.resolve() and not clean(commit):
        raise BenchmarkError(
            f"results={folder}: takes only records of a commit, and the files differ from "
            f"{commit.rstrip(CHANGED)}. "
            "Commit them, or give another folder, or an empty one to keep no record."
        )


def clean(commit: str) -> bool:
    """The code was that of the commit."""
    return not commit.endswith(CHANGED) and commit != "unknown"


def keep(record: Mapping, folder: str | Path, name: str) -> Path:
    """Append the record to the results of its name; returns the file."""
    check_folder(folder)
    path = Path(folder, f"{name}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return path


def finish(record: Mapping, folder: str | Path, name: str) -> None:
    """Keep the record where there is a folder for it, then print it as one line."""
    if folder:
        keep(record, folder, name)
    print(json.dumps(record))


def report(
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Record],
    table: Callable[[Record], Sequence[str]],
) -> None:
    """Measure, print the table, keep the record; status 2 for what cannot be measured."""
    try:
        check_folder(options.results)
        record = measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(table(record)))
    finish(record, options.results, str(record.get("name", record["benchmark"])))


def kept(folder: Path) -> dict[str, list[Mapping]]:
    """All records by the name of their file, each file's in the order in which they were made."""
    paths = sorted(folder.glob("*.jsonl"))
    return {path.stem: [*map(json.loads, path.read_text().splitlines())] for path in paths}


def newest(folder: Path, benchmark: str) -> tuple[list[Mapping], list[str]]:
    """The newest record by this method of a commit, per file, and what newer ones lack."""
    found = []
    refused = []
    for name, records in kept(folder).items():
        for record in reversed(records):
            if (record.get("benchmark"), record.get("method")) != (benchmark, METHOD):
                continue
            if clean(record["commit"]):
                found.append(record)
                break
            refused.append(
                f"{name}: the record of {record['time']} is of no commit ({record['commit']})"
            )
    return found, refused


def markdown(heads: str, rows: Sequence[Line]) -> list[str]:
    """A table under `heads`, its first line, and an empty line; nothing without rows."""
    if not rows:
        return []
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [f"| {heads} |", "|" + "---|" * len(heads.split(" | ")), *lines, ""]


def place(record: Mapping) -> str:
    """Date, commit and machine of a record."""
    facts = record["machine"]
    gpu = f"{facts['gpu']}, " if "gpu" in facts else ""
    return (
        f"{record['time'][:10]}, commit {record['commit']}, {gpu}{facts['cpu']}, {facts['cores']} "
        f"cores, torch {facts['torch']}"
    )


def bounds(interval: Interval, form: str = ".2f") -> str:
    """Mean and bounds."""
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def paired_cells(
    ours: Sequence[float],
    others: Sequence[float],
    form: str = "+.2f",
    ahead: Callable[[float, float], bool] = gt,
) -> Line:
    """Of values paired by random seed: the mean of ours minus others with its t interval, how many
    of ours are ahead, and the p of Wilcoxon's signed-rank test.
    """
    pairs = list(zip(ours, others, strict=True))
    interval = bounds(difference_interval(ours, others, CONFIDENCE), form)
    won = sum(ahead(mine, theirs) for mine, theirs in pairs)
    p = signed_rank([mine - theirs for mine, theirs in pairs])
    return interval, f"{won} of {len(pairs)}", f"{p:.4f}"
