"""Does the policy learn? Trains it with several seeds, then plays it against scripted policies on
fresh seeds.

    python -m benchmarks.learning learn_impaired [--seeds 6 --jobs 2] [setting=value ...]

Every seed is a training run and an evaluation of its own, in processes of one thread; what a folder
already holds is not done again, and a run that was cut off is resumed. Prints a table, and one JSON
line last, which is also appended to benchmarks/results/.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.processes import ROOT, command
from benchmarks.records import Line, check_folder, command_line, finish, markdown, origin
from esper_soa.errors import UserError
from esper_soa.ops.statistics import Interval, interquartile_mean, iqm_interval, mann_whitney

POLICIES = ("ppo", "heuristic", "random", "wait")
CONFIDENCE = 0.95


class Seed(NamedTuple):
    """What one seed came to."""

    seed: int
    net: dict[str, float]  # accuracy minus rent by policy, mean over its episodes
    accuracy: dict[str, float]
    samples: int  # episodes of every policy
    eval_steps: int  # env-steps of every policy
    train_steps: int
    seconds: float  # training and evaluation; 0 where the folder held both
    data: str


def seeds_of(record: Mapping) -> list[Seed]:
    """The seeds of a record."""
    return [Seed(**seed) for seed in record["seeds"]]


def play(seed: int, options: argparse.Namespace) -> Seed:
    """Train and evaluate with `seed`, as far as its folder does not hold the results yet."""
    begun = time.monotonic()
    run = options.folder / f"seed{seed}"
    judged = options.folder / f"seed{seed}-evaluation"
    quiet = ("compute.threads=1", "compute.workers=1")
    if not (run / "summary.json").exists():
        resume = (f"resume={run}",) if run.exists() else ()
        command(
            "esper_soa.train",
            f"+experiment={options.experiment}",
            f"seed={seed}",
            f"run_dir={run}",
            "telemetry.progress=off",
            *quiet,
            *resume,
            *options.settings,
        )
    if not (judged / "evaluation.json").exists():
        command(
            "esper_soa.evaluate",
            f"checkpoint={run}",
            f"run_dir={judged}",
            f"seed={seed}",
            "progress=off",
            f"episodes={options.episodes}",
            f"policies=[{','.join(POLICIES)}]",
            f"deterministic={not options.sampled}",
            *quiet,
        )
    summary = json.loads((run / "summary.json").read_text())
    result = json.loads((judged / "evaluation.json").read_text())
    samples = {name: result["policies"][name]["samples"] for name in POLICIES}
    episodes = result["episodes"] * result["envs"]
    return Seed(
        seed=seed,
        net={name: float(np.mean(samples[name]["net"])) for name in POLICIES},
        accuracy={name: float(np.mean(samples[name]["accuracy"])) for name in POLICIES},
        samples=episodes,
        eval_steps=episodes * result["steps"],
        train_steps=summary["rounds"] * summary["envs"] * summary["steps"],
        seconds=time.monotonic() - begun,
        data=result["data"]["name"],
    )


class Row(NamedTuple):
    """A policy over all seeds."""

    policy: str
    net: Interval  # interquartile mean of accuracy minus rent
    accuracy: float  # interquartile mean
    wins: int  # seeds with which the learned policy is ahead of it
    p: float | None  # Mann-Whitney U of the learned policy against it, two-sided


def judge(seeds: list[Seed]) -> list[Row]:
    """Every policy over the seeds, and the learned one against each other."""
    learned = [seed.net["ppo"] for seed in seeds]
    rows = []
    for name in POLICIES:
        net = [seed.net[name] for seed in seeds]
        p = None if name == "ppo" else mann_whitney(learned, net)
        interval = iqm_interval(net, CONFIDENCE)
        accuracy = interquartile_mean([seed.accuracy[name] for seed in seeds])
        rows.append(
            Row(name, interval, accuracy, sum(a > b for a, b in zip(learned, net, strict=True)), p)
        )
    return rows


def table(rows: list[Row], seeds: list[Seed]) -> list[str]:
    """Lines in markdown."""
    lines: list[Line] = [
        ("policy", "accuracy (%)", "accuracy - rent", "learned ahead", "Mann-Whitney p")
    ]
    for row in rows:
        ahead = "" if row.p is None else f"{row.wins} of {len(seeds)} seeds"
        p = "" if row.p is None else f"{row.p:.4f}"
        name = "learned (ppo)" if row.policy == "ppo" else row.policy
        net = f"{row.net.mean:.2f} [{row.net.low:.2f}, {row.net.high:.2f}]"
        lines.append((name, f"{row.accuracy:.2f}", net, ahead, p))
    return markdown(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("experiment", help="a file of configs/experiment")
    parser.add_argument(
        "settings",
        nargs="*",
        help="settings of training, as on the command line of esper_soa.train",
    )
    parser.add_argument("--seeds", type=int, default=6, help="how many, from 0")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time, each on one thread")
    parser.add_argument(
        "--episodes", type=int, default=2, help="of every env and policy, in the evaluation"
    )
    parser.add_argument(
        "--sampled",
        action="store_true",
        help="evaluate the sampled policy, not its likeliest choice",
    )
    parser.add_argument("--folder", type=Path, help="default: runs/learning/EXPERIMENT")
    options = parser.parse_args()
    if options.seeds < 2 or options.jobs < 1:
        parser.error("--seeds must be at least 2 and --jobs at least 1")
    options.folder = (options.folder or ROOT / "runs" / "learning" / options.experiment).resolve()
    return options


def main() -> None:
    """Train, evaluate, compare."""
    options = parse()
    begun = time.monotonic()
    try:
        check_folder(options.results)
    except UserError as error:
        sys.exit(f"error: {error}")
    options.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        seeds = list(pool.map(lambda seed: play(seed, options), range(options.seeds)))
    rows = judge(seeds)
    wall = time.monotonic() - begun
    one = seeds[0]
    print(
        f"{options.experiment} on {one.data}: {len(seeds)} seeds, {one.train_steps} env-steps of "
        f"training each; {one.samples} episodes ({one.eval_steps} env-steps) of every policy per "
        "seed, on hosts that training never met;\ninterquartile means over seeds with "
        f"{CONFIDENCE:.0%} t intervals; {wall / 60:.1f} minutes, {options.jobs} processes of one "
        f"thread\n\n" + "\n".join(table(rows, seeds))
    )
    record = origin("learning", torch.device("cpu")) | {
        "experiment": options.experiment,
        "settings": options.settings,
        "data": one.data,
        "jobs": options.jobs,
        "wall_seconds": round(wall, 1),
        "deterministic": not options.sampled,
        "seeds": [seed._asdict() for seed in seeds],
        "rows": [row._asdict() | {"net": row.net._asdict()} for row in rows],
    }
    finish(record, options.results, options.experiment)


if __name__ == "__main__":
    main()
