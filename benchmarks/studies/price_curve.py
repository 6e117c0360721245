"""Accuracy against size and training FLOP on growth_family, as the price of parameters moves: one
policy, schedules, plain hosts of several widths, and the policy's final networks from scratch.

At commit 93f040c2: `python -m benchmarks.price_curve`.

Plays the held-out draws of family.py. The policy sees a price, the same for all envs of an episode;
the other settings of the envs are those that were drawn. Schedules are those that were best on
training draws in some region of the family's record. Prices, widths and the measure, which is in
benchmarks/price_tables.py, were fixed before any result was seen. Prints tables and one JSON line,
which is also appended to benchmarks/results/.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from benchmarks.machine import git_commit
from benchmarks.price_tables import COSTS, FINAL, LEARNED, SCHEDULE, SETS, WIDTH, table
from benchmarks.processes import ROOT, in_processes
from benchmarks.records import (
    RESULTS,
    Record,
    check_folder,
    command_line,
    finish,
    newest,
    origin,
)
from benchmarks.studies.family import HELD_OUT, settings_of
from benchmarks.studies.schedules import SCHEDULES, Plan
from benchmarks.units import Key, Units, opened
from esper_soa.agent.scripted import WaitPolicy
from esper_soa.runtime.device import apply_threads, usable_cores
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.controls import play_control
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.final_test import with_test
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.progress import Progress

PRICES = ("1", "3", "6", "12")  # in between the policy grows all and next to nothing
WIDTHS = (1, 2, 3, 4, 5)  # base channels of plain hosts


class Job(NamedTuple):
    """All networks on the envs of one random seed, for one process."""

    seed: int
    schedules: tuple[int, ...]
    folder: Path
    overrides: tuple[str, ...]  # settings of the experiment

    @property
    def keys(self) -> list[Key]:
        """Of its units: a set, what sets its networks apart, and the random seed."""
        numbers = {SCHEDULE: self.schedules, WIDTH: WIDTHS}
        by_price: list[Key] = [
            (name, one, self.seed) for name in (LEARNED, FINAL) for one in PRICES
        ]
        return by_price + [(name, one, self.seed) for name in numbers for one in numbers[name]]


def region_schedules(folder: Path = RESULTS) -> tuple[int, ...]:
    """The schedules that the record of the family names as best in a region, by their number."""
    (record,), _ = newest(folder, "family")
    best = {region["best"] for region in record["regions"]}
    return tuple(number for number, one in enumerate(SCHEDULES) if str(one) in best)


def play_job(job: Job) -> None:
    """Play what is missing, and write a unit for each network."""
    apply_threads(1)
    units = Units(job.folder)
    missing = [key for key in job.keys if key not in units.held(job.keys)]
    for price in PRICES:
        if (FINAL, price, job.seed) in missing:
            play_price(units, price, job)
    for name, number, _ in missing:
        if name == SCHEDULE:
            cfg = settings_of("held_out", job.seed, job.overrides)
            world = build_world(cfg, torch.device("cpu"))
            player = Player(Plan([int(number)] * cfg.envs), None)
        elif name == WIDTH:
            own = (*job.overrides, f"task.base_channels={number}", "slots=[r0c0]", "max_seeds=1")
            cfg = settings_of("held_out", job.seed, own)
            world = build_world(cfg, torch.device("cpu"))
            player = Player(WaitPolicy(), None)
        else:
            continue
        write(
            units, (name, number, job.seed), with_test(world, play_round(world, player, one())[0])
        )


def play_price(units: Units, price: str, job: Job) -> None:
    """The policy where all envs have this price, and its final networks from scratch."""
    cfg = settings_of(price, job.seed, job.overrides)
    world = build_world(cfg, torch.device("cpu"))
    agent = build_player(cfg, world).agent
    result = with_test(world, play_round(world, Player(agent, None), one())[0])
    write(units, (LEARNED, price, job.seed), result)
    write(units, (FINAL, price, job.seed), play_control(FINAL, cfg, world, result, one()))


def one() -> Round:
    """The request of an episode that shows nothing."""
    return Round(0, Progress(0, Console(), "off"))


def write(units: Units, key: Key, result: RoundResult) -> None:
    """Keep the means over envs of a network: test accuracy in percent, parameters, FLOP."""
    means = {
        "accuracy": result.test_accuracies,
        "size": result.parameters,
        "flop": result.train_flop,
    }
    unit = {name: float(np.mean(values)) for name, values in means.items()}
    units.write(key, unit | {"commit": git_commit()})


def record_of(units: Units, jobs: Sequence[Job]) -> Record:
    """Accuracy and costs by set, network and random seed."""
    sets: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in SETS}
    for name, number, _ in jobs[0].keys:
        found = [units.read((name, number, job.seed)) for job in jobs]
        text = str(SCHEDULES[int(number)]) if name == SCHEDULE else str(number)
        sets[str(name)][text] = {
            field: [one[field] for one in found] for field in ("accuracy", *COSTS)
        }
    commits = {units.read(key)["commit"] for job in jobs for key in job.keys}
    return {"sets": sets, "seeds": [job.seed for job in jobs], "unit_commits": sorted(commits)}


def main() -> None:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("settings", nargs="*", help="of the experiment, for every network")
    parser.add_argument("--seeds", type=int, help="how many, from the first; default: all")
    folder = ROOT / "runs" / "price_curve"
    parser.add_argument("--folder", type=Path, default=folder, help="of the units")
    options = parser.parse_intermixed_args()
    check_folder(options.results)
    given = tuple(options.settings)
    with opened(options.folder.resolve(), {"settings": given}) as units:
        schedules = region_schedules()
        jobs = [Job(seed, schedules, units.folder, given) for seed in HELD_OUT[: options.seeds]]
        keys = [key for job in jobs for key in job.keys]
        work = {f"seed {job.seed}": job for job in jobs}

        count = -1

        def look() -> None:
            nonlocal count
            before, count = count, len(units.held(keys))
            if count != before:
                print(f"{count} of {len(keys)} networks", flush=True)

        in_processes(play_job, work, usable_cores(), look)
        record = origin("price_curve", torch.device("cpu")) | {"settings": given}
        record |= record_of(units, jobs)
    print("\n".join(table([record])))
    finish(record, options.results, "price_curve")


if __name__ == "__main__":
    main()
