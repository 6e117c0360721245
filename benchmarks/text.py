"""Does growth pay for transformers that read text? The grown hosts of +experiment=text_3seed beside
the same hosts without growth, their final networks trained from scratch, and wider plain hosts.

    python -m benchmarks.text

Random seeds, runs and test were fixed before any result was seen. Each run is a command of its own
with all cores. It lies in the folder of the runs, and one that has ended is not played again.
Prints a table and one JSON line, which is also appended to benchmarks/results/.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from operator import lt
from pathlib import Path

import torch

from benchmarks.intervals import mean_interval
from benchmarks.processes import ROOT, train
from benchmarks.records import (
    CONFIDENCE,
    Line,
    Record,
    command_line,
    markdown,
    origin,
    paired_cells,
    place,
    report,
)

SEEDS = tuple(range(301, 311))
# Settings of the runs. The first one's control takes the final networks of its grown hosts. The
# others train plain hosts: those of the task, and with the width by which their size is nearest to
# the grown ones (control=static_large takes the same).
RUNS = {
    "static_final": ("control=static_final",),
    "wait": ("policy=wait", "control=none"),
    "static_large": ("policy=wait", "control=none", "task.transformer.width=40"),
}
NAMES = {
    "grown": "grown by a fixed schedule",
    "wait": "the same hosts, without growth",
    "static_large": "plain hosts of the grown size",
    "static_final": "the final grown networks, trained from scratch",
}
FIELDS = ("test_loss", "test_accuracy", "size", "flop")  # of a side of summary.json


def play(run: str, seed: int, settings: Sequence[str], folder: Path) -> Path:
    """The folder of a run, which is played where it has not ended."""
    place = folder / f"{run}-{seed}"
    if not (place / "summary.json").exists():
        words = ("+experiment=text_3seed", f"seed={seed}", f"run_dir={place}", "resume=auto")
        print(f"{run} seed {seed}", flush=True)
        train(*words, *RUNS[run], *settings)
    return place


def record_of(folders: Mapping[str, Sequence[Path]]) -> Record:
    """FIELDS of grown hosts and of the others, by seed; the commits of the runs."""
    read = {
        run: [json.loads((place / "summary.json").read_text()) for place in places]
        for run, places in folders.items()
    }
    sides = {run: [summary["grown"] for summary in found] for run, found in read.items()}
    sides |= {"grown": sides["static_final"]}
    sides |= {"static_final": [summary["controls"][0] for summary in read["static_final"]]}
    commits = {
        json.loads((place / "versions.json").read_text())["git"]
        for places in folders.values()
        for place in places
    }
    first = read["static_final"][0]
    return {
        "sides": {
            name: {field: [side[field] for side in sides[name]] for field in FIELDS}
            for name in NAMES
        },
        "run_commits": sorted(commits),
        "hosts": first["envs"],
        "steps": first["steps"],
        "sequences": first["test_images"],
    }


def table(record: Mapping) -> list[str]:
    """The table of a record."""
    grown = record["sides"]["grown"]["test_loss"]
    rows: list[Line] = []
    for name, words in NAMES.items():
        side = record["sides"][name]
        cells = [words]
        for field, form in (("test_loss", ".3f"), ("test_accuracy", ".2f")):
            cells.append(mean_interval(side[field], CONFIDENCE).text(form))
        cells += [f"{side['size'][0]:,.0f}", f"{side['flop'][0] / 1e9:,.0f}"]
        paired = paired_cells(grown, side["test_loss"], "+.3f", ahead=lt)
        rows.append((*cells, *(("", "", "") if name == "grown" else paired)))
    count = len(record["seeds"])
    heads = f"{count} random seeds, 95 % t intervals | test loss (nats per token) | accuracy (%)"
    heads += " | parameters | training GFLOP per host | loss of grown minus this | grown ahead | p"
    commits = ", ".join(commit[:8] for commit in record["run_commits"])
    return [
        *markdown(heads, rows),
        f"Random seeds {record['seeds'][0]} to {record['seeds'][-1]}, {record['hosts']} hosts "
        f"each, {record['steps']} env-steps, {record['sequences']:,} test sequences; p of "
        "Wilcoxon's signed-rank test over the random seeds. Runs of commit "
        f"{commits}; {place(record)}.",
        "",
    ]


def measure(options: argparse.Namespace) -> Record:
    """Play what is missing; returns the record."""
    seeds = SEEDS[: options.seeds]
    folder = options.folder.resolve()
    folders = {run: [play(run, seed, options.settings, folder) for seed in seeds] for run in RUNS}
    record = origin("text", torch.device("cpu")) | {"seeds": seeds, "settings": options.settings}
    return record | record_of(folders)


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("settings", nargs="*", help="of the experiment, for every run")
    parser.add_argument("--seeds", type=int, help="how many, from the first; default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "text", help="of the runs")
    report(parser.parse_intermixed_args(), measure, table)


if __name__ == "__main__":
    main()
