"""Does growth pay for transformers that read text? The grown hosts of +experiment=text_3seed beside
the same hosts without growth, their final networks trained from scratch, and wider plain hosts.

    python -m benchmarks.text

Random seeds, runs and test were fixed before any result was seen. Each run is a command of its own
with all cores. It lies in the folder of the runs, and one that has ended is not played again.
Prints a table and one JSON line, which is also appended to benchmarks/results/.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.processes import ROOT, command
from benchmarks.records import (
    Line,
    Record,
    Records,
    check_folder,
    command_line,
    finish,
    markdown,
    origin,
    place,
)
from benchmarks.timing import BenchmarkError
from esper_soa.lab.rank_tests import signed_rank
from esper_soa.training.results.statistics import difference_interval, mean_interval

CONFIDENCE = 0.95
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
    own = folder / f"{run}-{seed}"
    if not (own / "summary.json").exists():
        words = ("+experiment=text_3seed", f"seed={seed}", f"run_dir={own}", "resume=auto")
        print(f"{run} seed {seed}", flush=True)
        try:
            command("esper_soa.train", *words, *RUNS[run], *settings, threads=None)
        except subprocess.CalledProcessError as error:
            raise BenchmarkError(f"{own} ended with status {error.returncode}") from error
    return own


def record_of(folders: Mapping[str, Sequence[Path]]) -> Record:
    """FIELDS of grown hosts and of the others, by seed; the commits of the runs."""
    read = {
        run: [json.loads((one / "summary.json").read_text(encoding="utf-8")) for one in own]
        for run, own in folders.items()
    }
    sides = {run: [one["grown"] for one in summaries] for run, summaries in read.items()}
    sides |= {"grown": sides["static_final"]}
    sides |= {"static_final": [one["control"] for one in read["static_final"]]}
    versions = [
        json.loads((one / "versions.json").read_text(encoding="utf-8"))
        for own in folders.values()
        for one in own
    ]
    first = read["static_final"][0]
    return {
        "sides": {
            name: {field: [side[field] for side in sides[name]] for field in FIELDS}
            for name in NAMES
        },
        "run_commits": sorted({one["git"] for one in versions}),
        "hosts": first["envs"],
        "steps": first["steps"],
        "sequences": first["test_images"],
    }


def table(records: Records) -> list[str]:
    """The table of all records."""
    return [line for record in records for line in _lines(record)]


def _lines(record: Mapping) -> list[str]:
    grown = record["sides"]["grown"]
    rows: list[Line] = []
    for name, words in NAMES.items():
        own = record["sides"][name]
        cells = [words]
        for field, form in (("test_loss", ".3f"), ("test_accuracy", ".2f")):
            cells.append(mean_interval(own[field], CONFIDENCE).text(form))
        cells += [f"{own['size'][0]:,.0f}", f"{own['flop'][0] / 1e9:,.0f}"]
        rows.append((*cells, *_against(grown["test_loss"], own["test_loss"], name)))
    count = len(record["seeds"])
    heads = f"{count} random seeds, 95 % t intervals | test loss (nats per token) | accuracy (%)"
    heads += " | parameters | training GFLOP per host | loss of grown minus this | grown ahead | p"
    commits = ", ".join(one[:8] for one in record["run_commits"])
    return [
        *markdown(heads, rows),
        f"Random seeds {record['seeds'][0]} to {record['seeds'][-1]}, {record['hosts']} hosts "
        f"each, {record['steps']} env-steps, {record['sequences']:,} test sequences; p of "
        "Wilcoxon's signed-rank test over the random seeds. Runs of commit "
        f"{commits}; {place(record)}.",
        "",
    ]


def _against(grown: Sequence[float], own: Sequence[float], name: str) -> Line:
    """The last cells of a row: what the loss of grown hosts is over that of the row's."""
    if name == "grown":
        return "", "", ""
    less = [one - other for one, other in zip(grown, own, strict=True)]
    won = sum(one < 0 for one in less)
    interval = difference_interval(grown, own, CONFIDENCE).text("+.3f")
    return interval, f"{won} of {len(less)}", f"{signed_rank(less):.4f}"


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("settings", nargs="*", help="of the experiment, for every run")
    parser.add_argument("--seeds", type=int, help="how many, from the first; default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "text", help="of the runs")
    options = parser.parse_intermixed_args()
    check_folder(options.results)
    seeds = SEEDS[: options.seeds]
    folder = options.folder.resolve()
    folders = {run: [play(run, seed, options.settings, folder) for seed in seeds] for run in RUNS}
    record = origin("text", torch.device("cpu")) | {"seeds": seeds, "settings": options.settings}
    record |= record_of(folders)
    print("\n".join(table([record])))
    finish(record, options.results, "text")


if __name__ == "__main__":
    main()
