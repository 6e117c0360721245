"""Env-steps per second of a run at several numbers of ranks, against one process with as many
workers.

At commit bb536803:

    python -m benchmarks.ranks                                  2 ranks x 1 worker, work a
    python -m benchmarks.ranks --sides 1x2,2x1,4x1 --turns 3    RANKSxWORKERS; the first is the base

Every side is the program itself, with the learning policy, on the same envs and actions. They are
timed in turns, in fresh processes, whose first round is left out; what counts is the ratio of two
sides of a turn. Prints a table and appends a JSON line to the results.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.records import Line, Record, check_folder, command_line, finish, markdown, origin
from benchmarks.timing import BenchmarkError, in_turns
from esper_soa.system.errors import UserError

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


def played(side: str, overrides: Sequence[str], rounds: int) -> dict[str, float]:
    """EPS of a run, and the seconds of rounds and updates; BenchmarkError where it failed."""
    ranks, _, workers = side.partition("x")
    with tempfile.TemporaryDirectory() as folder:
        own = [f"rounds={WARM_UP + rounds}", f"run_dir={folder}/run"]
        own += [f"ranks={ranks}", f"compute.workers={workers}"]
        words = [sys.executable, "-m", "esper_soa.train", *WORK, *overrides, *own]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchmarkError(f"--sides {side}, RANKSxWORKERS: {done.stderr.strip()}")
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    collect, update = (
        sum(one[f"{part}_seconds"] for one in records[WARM_UP:]) for part in ("collect", "update")
    )
    env_steps = records[-1]["env_steps"] / (WARM_UP + rounds) * rounds
    eps = env_steps / (collect + update)
    return {"eps": eps, "collect_seconds": collect / rounds, "update_seconds": update / rounds}


def benchmark(sides: Sequence[str], overrides: Sequence[str], turns: int, rounds: int) -> Record:
    """All sides in turns, as one record."""
    record = origin("ranks", torch.device("cpu")) | {"work": [*WORK, *overrides], "rounds": rounds}
    record |= {"load_before": machine.load()}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for side in in_turns(sides, turns):
        found[side].append(played(side, overrides, rounds))
    told: dict[str, dict[str, list[float]]] = {}
    for side, rates in found.items():
        told[side] = {name: [one[name] for one in rates] for name in rates[0]}
        base = told[sides[0]]["eps"]
        told[side]["over_first"] = [a / b for a, b in zip(told[side]["eps"], base, strict=True)]
    return record | {"load_after": machine.load(), "sides": told}


def table(record: Mapping) -> list[str]:
    """The record in markdown."""
    rows: list[Line] = []
    for name, side in record["sides"].items():
        ratios = side["over_first"]
        eps, collect, update = (
            statistics.median(side[part]) for part in ("eps", "collect_seconds", "update_seconds")
        )
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append((name, f"{eps:.1f}", ratio, f"{collect:.2f}", f"{update:.3f}"))
    heads = "ranks x workers | env-steps/s | over the first | round (s) | update (s)"
    return markdown(heads, rows)


def main() -> None:
    """The command line; ends with status 2 for what cannot be measured."""
    parser = command_line(__doc__)
    parser.add_argument("--sides", default="1x2,2x1", help="RANKSxWORKERS, between commas")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2, help="timed in each process")
    parser.add_argument("--steps", type=int, default=12, help="env-steps per episode")
    parser.add_argument("overrides", nargs="*", help="settings beside those of the work")
    given = parser.parse_args()
    overrides = [f"steps={given.steps}", *given.overrides]
    try:
        check_folder(given.results)
        record = benchmark(given.sides.split(","), overrides, given.turns, given.rounds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(table(record)))
    finish(record, given.results, "ranks")


if __name__ == "__main__":
    main()
