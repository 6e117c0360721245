"""Env-steps per second of a run at several numbers of ranks, against one process with as many
workers.

    python -m benchmarks.ranks                                  2 ranks x 1 worker, work a
    python -m benchmarks.ranks --sides 1x2,2x1,4x1 --turns 3    RANKSxWORKERS; the first is the base

Every side is the program itself, with the learning policy, on the same envs: they play the same
actions, so their work is the same. The sides are timed in turns, in alternating order, each turn in
fresh processes, whose first round is left out; what counts is the ratio of two sides of a turn.
Prints a table and appends a JSON line to the results, but not where files differ from the commit.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import machine
from benchmarks.records import Line, Record, check_folder, command_line, finish, markdown, origin
from benchmarks.timing import BenchmarkError, in_turns
from esper_soa.errors import UserError

# Work a: N=16 B=125 T=500 V=125, here with whatever the policy germinates.
WORK = [
    "+experiment=cifar_3seed",
    "policy.init=none",
    "envs=16",
    "batch_size=125",
    "train_samples=500",
    "val_samples=125",
    "control=none",
    "report=false",
    "telemetry.level=rounds",
    "telemetry.progress=off",
    "checkpoint_every=0",
    "device=cpu",
]
WARM_UP = 1  # rounds of a process that do not count


class Side(NamedTuple):
    """A number of ranks and of workers in each."""

    ranks: int
    workers: int

    @property
    def name(self) -> str:
        """In words."""
        return (
            f"{self.ranks} rank{'s' * (self.ranks > 1)} x {self.workers} "
            f"worker{'s' * (self.workers > 1)}"
        )


class Rates(NamedTuple):
    """What one side of a turn came to."""

    eps: float  # env-steps per second of all rounds that count
    collect_seconds: float  # per round
    update_seconds: float


def side_of(text: str) -> Side:
    """RANKSxWORKERS; raises BenchmarkError for what is none."""
    ranks, cross, workers = text.partition("x")
    if not (cross and ranks.isdigit() and workers.isdigit() and int(ranks) and int(workers)):
        raise BenchmarkError(f"--sides {text}: must be RANKSxWORKERS, as 2x1")
    return Side(int(ranks), int(workers))


def played(side: Side, overrides: Sequence[str], rounds: int) -> Rates:
    """The rates of a run of this side; raises BenchmarkError where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "esper_soa.train",
            *WORK,
            *overrides,
            f"rounds={WARM_UP + rounds}",
            f"ranks={side.ranks}",
            f"compute.workers={side.workers}",
            f"run_dir={folder}/run",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchmarkError(f"{side.name}: {done.stderr.strip()}")
        lines = (
            Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()[WARM_UP:]
        )
    records = [json.loads(line) for line in lines]
    collect, update = (
        sum(one[f"{part}_seconds"] for one in records) for part in ("collect", "update")
    )
    per_round = sum(one["env_steps"] for one in records[-1:]) / (WARM_UP + rounds)
    return Rates(per_round * rounds / (collect + update), collect / rounds, update / rounds)


def benchmark(sides: Sequence[Side], overrides: Sequence[str], turns: int, rounds: int) -> Record:
    """All sides in turns, as one record."""
    record = origin("ranks", torch.device("cpu")) | {"work": [*WORK, *overrides], "rounds": rounds}
    record |= {"load_before": machine.load()}
    found: dict[Side, list[Rates]] = {side: [] for side in sides}
    for side in in_turns(sides, turns):
        found[side].append(played(side, overrides, rounds))
    first = found[sides[0]]
    record |= {
        "load_after": machine.load(),
        "sides": {
            side.name: {
                "eps": [one.eps for one in rates],
                "collect_seconds": [one.collect_seconds for one in rates],
                "update_seconds": [one.update_seconds for one in rates],
                "over_first": [
                    one.eps / other.eps for one, other in zip(rates, first, strict=True)
                ],
            }
            for side, rates in found.items()
        },
    }
    return record


def show(record: Record) -> None:
    """Print the record as a table."""
    rows: list[Line] = [("side", "env-steps/s", "over the first", "round (s)", "update (s)")]
    sides = record["sides"]
    assert isinstance(sides, dict)
    for name, side in sides.items():
        ratios = side["over_first"]
        rows.append(
            (
                name,
                f"{statistics.median(side['eps']):.1f}",
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                f"{statistics.median(side['collect_seconds']):.2f}",
                f"{statistics.median(side['update_seconds']):.3f}",
            )
        )
    print("\n".join(markdown(rows)))


def main() -> None:
    """The command line; ends with status 2 for what cannot be measured."""
    parser = command_line(__doc__)
    parser.add_argument("--sides", default="1x2,2x1", help="RANKSxWORKERS, between commas")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="timed in each process")
    parser.add_argument("--steps", type=int, default=12, help="env-steps per episode")
    parser.add_argument(
        "overrides", nargs="*", help="settings of the runs beside those of the work"
    )
    given = parser.parse_args()
    try:
        check_folder(given.results)
        sides = [side_of(text) for text in given.sides.split(",")]
        record = benchmark(
            sides, [f"steps={given.steps}", *given.overrides], given.turns, given.rounds
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    show(record)
    finish(record, given.results, "ranks")


if __name__ == "__main__":
    main()
