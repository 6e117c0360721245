"""Does growth pay? The shipped learned policy against every control, on seeds that no tuning has
seen.

    python -m benchmarks.proof [--cifar ROOT] [setting=value ...]          all players
    python -m benchmarks.proof --main [--cifar ROOT] [setting=value ...]   the main run itself

Declared here before the first look: seeds, players, experiment, hosts per seed, and how the learned
policy is played (its likeliest choices, without learning). A unit is one player on the hosts of one
seed and data set: an episode of each host; all players of a seed meet the same hosts, data order
and images. Units are played in processes of one thread
and kept as files: begun again, the command goes on where it was. Says before it starts how long it
will take. Prints tables, and one JSON line last, which is also appended to benchmarks/results/;
benchmarks/table.py makes tables and figure of it.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import machine, proof_main
from benchmarks.eps_config import cores
from benchmarks.processes import ROOT, in_processes, why
from benchmarks.proof_play import (
    EXPERIMENT,
    LEARNED,
    Data,
    Facts,
    Job,
    check_given,
    data_settings,
    find_data,
    of_seed,
    plain_settings,
    play_job,
    sample,
)
from benchmarks.proof_tables import MAIN, main_lines, proof_lines
from benchmarks.records import Record, check_folder, command_line, finish, origin
from benchmarks.timing import BenchmarkError
from benchmarks.units import Key, Units, code_stamp, opened
from esper_soa.config import TrainConfig
from esper_soa.controls import CONTROLS
from esper_soa.errors import UserError, check
from esper_soa.ops.progress import duration

SEEDS = tuple(range(20260101, 20260111))  # no policy was trained, tuned or looked at with these
PLAYERS = (LEARNED, *CONTROLS)


class Watch:
    """Says of every unit that is done what came out and how much time is left."""

    def __init__(self, units: Units, keys: Sequence[Key], at_once: int) -> None:
        self.units = units
        self.keys = keys
        self.at_once = at_once
        self.seconds: list[float] = []  # of every unit that is done
        self.guess = 0.0  # seconds of a unit, while none is done
        self.done: set[Key] = set()
        self.weights: set[str] = set()  # of the learned policy, which is one
        for key in units.held(keys):
            self.count(key)

    def count(self, key: Key) -> Mapping:
        """Take a unit in, which is checked."""
        unit = self.units.read(key)
        self.weights.add(unit["weights"])
        if len(self.weights) > 1:
            raise BenchmarkError(
                f"{self.units.folder} holds units of several policies. Give another folder with "
                "--folder, or delete what it holds with --fresh"
            )
        self.done.add(key)
        self.seconds.append(unit["seconds"])
        return unit

    def left(self) -> float:
        """Seconds until all units are done, if the others are like those so far."""
        each = sum(self.seconds) / len(self.seconds) if self.seconds else self.guess
        return each * (len(self.keys) - len(self.done)) / self.at_once

    def look(self) -> None:
        """Say what is new."""
        for key in self.units.held([key for key in self.keys if key not in self.done]):
            unit = self.count(key)
            accuracy, size = (
                sum(unit[name]) / len(unit[name]) for name in ("accuracies", "parameters")
            )
            print(
                f"{key[0]} seed {key[1]} {key[2]:<12} {accuracy:.2f} %, {size:,.0f} parameters, "
                f"{duration(unit['seconds'])}; {len(self.done)} of {len(self.keys)} units, "
                f"left {duration(self.left())}",
                flush=True,
            )


def jobs_left(
    units: Units, sets: Sequence[Data], facts: Facts, options: argparse.Namespace
) -> list[Job]:
    """A job per seed and data set of which a unit is missing."""
    jobs = []
    for data in sets:
        for seed in options.seeds:
            done = units.held([(data.name, seed, player) for player in PLAYERS])
            missing = tuple(player for player in PLAYERS if (data.name, seed, player) not in done)
            if missing:
                jobs.append(
                    Job(
                        data,
                        seed,
                        tuple(options.settings),
                        missing,
                        units.folder,
                        units.stamp,
                        str(facts["code"]),
                        str(facts["commit"]),
                    )
                )
    return jobs


def facts_of(kind: str, cfg: TrainConfig, given: Sequence[str]) -> Facts:
    """What results depend on, but for data set and seed."""
    return {
        "kind": kind,
        "commit": machine.git_commit(),
        "code": code_stamp(),
        "torch": torch.__version__,
        "experiment": EXPERIMENT,
        "settings_given": list(given),
        "settings": plain_settings(cfg),
    }


def play(sets: Sequence[Data], options: argparse.Namespace) -> Record:
    """Play what is missing; returns the record. Ends the program where a job failed."""
    cfg = of_seed(sets[0], SEEDS[0], options.settings)
    check(
        cfg.policy.name == "ppo",
        "policy.name",
        cfg.policy.name,
        "ppo: the proof is about the learned policy",
    )
    check(
        cfg.policy.init != "none",
        "policy.init",
        "none",
        "a policy that has learned: the proof is about it",
    )
    facts = facts_of("proof", cfg, options.settings)
    with opened(options.folder, facts, options.fresh) as units:
        keys: list[Key] = [
            (data.name, seed, player)
            for data in sets
            for seed in options.seeds
            for player in PLAYERS
        ]
        jobs = jobs_left(units, sets, facts, options)
        watch = Watch(units, keys, options.jobs)
        check_images(units, watch.done, sets)
        print(
            f"{' '.join([EXPERIMENT, *options.settings])} on "
            f"{', '.join(one.name for one in sets)}: {', '.join(PLAYERS)}; seeds "
            f"{', '.join(map(str, options.seeds))}, {cfg.envs} hosts of {cfg.steps} env-steps "
            f"each; {len(keys) - len(watch.done)} of {len(keys)} units are left",
            flush=True,
        )
        if jobs:
            measure_or_exit(watch, cfg)
            print(
                f"this will take about {duration(watch.left())} in {options.jobs} "
                f"processes of one thread; what is done stays in {options.folder}",
                flush=True,
            )
        results = in_processes(play_job, jobs, options.jobs, watch.look)
        exit_if_failed(
            {
                f"{job.data.name} seed {job.seed}": result
                for job, result in zip(jobs, results, strict=True)
            }
        )
        return record_of(units, sets, cfg, facts, options)


def measure_or_exit(watch: Watch, cfg: TrainConfig) -> None:
    """Where no unit is known yet, time some env-steps in as many processes as will play."""
    if watch.seconds:
        return
    times = in_processes(sample, [cfg] * watch.at_once, watch.at_once)
    exit_if_failed({f"sample {number}": one for number, one in enumerate(times, 1)})
    watch.guess = max(one for one in times if isinstance(one, float)) * cfg.steps


def check_images(units: Units, done: set[Key], sets: Sequence[Data]) -> None:
    """Raise BenchmarkError where a unit was played on other images."""
    for data in sets:
        for key in (
            key for key in done if key[0] == data.name and units.read(key)["images"] != data.images
        ):
            raise BenchmarkError(
                f"{units.path(key)} was played on other images of {data.name}. Give another folder "
                "with --folder, or delete what it holds with --fresh"
            )


def exit_if_failed(results: Mapping[str, object]) -> None:
    """Say what failed and end the program, with 2 where it is a mistake in what was given."""
    failed = {name: result for name, result in results.items() if isinstance(result, Exception)}
    for name, error in failed.items():
        print(f"error: {name}: {why(error)}", file=sys.stderr)
    if failed:
        print("what was done stays: begin again to go on", file=sys.stderr)
        sys.exit(2 if any(isinstance(error, UserError) for error in failed.values()) else 1)


def record_of(
    units: Units, sets: Sequence[Data], cfg: TrainConfig, facts: Facts, options: argparse.Namespace
) -> Record:
    """All units as one record, numbers by player, seed and host."""
    found = []
    seconds = 0.0
    weights = ""
    for data in sets:
        players = {}
        for player in PLAYERS:
            of_player = [units.read((data.name, seed, player)) for seed in options.seeds]
            weights = of_player[0]["weights"]
            seconds += sum(unit["seconds"] for unit in of_player)
            players[player] = {
                "accuracy": [rounded(unit["accuracies"]) for unit in of_player],
                "net": [rounded(unit["net"]) for unit in of_player],
                "parameters": [unit["parameters"] for unit in of_player],
                "train_flop": [unit["train_flop"] for unit in of_player],
            }
        found.append(
            {
                "name": data.name,
                "images": data.images,
                "train": data.train,
                "test": data.test,
                "val_images": min(cfg.val_samples, data.test),
                "players": players,
            }
        )
    return (
        origin("proof", torch.device("cpu"))
        | facts
        | {
            "name": options.name,
            "seeds": list(options.seeds),
            "weights": weights,
            "jobs": options.jobs,
            "unit_seconds": round(seconds, 1),
            "train_images": cfg.steps * cfg.train_samples,
            "data": found,
        }
    )


def rounded(values: Sequence[float]) -> list[float]:
    """Finer than one image of a million counts."""
    return [round(value, 4) for value in values]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "settings", nargs="*", help="settings of the experiment, as of esper_soa.train; recorded"
    )
    parser.add_argument(
        "--main", action="store_true", help="play the main run with the seeds declared for it"
    )
    parser.add_argument(
        "--cifar", default="", metavar="ROOT", help="also on CIFAR-10 from this folder or archive"
    )
    parser.add_argument(
        "--jobs", type=int, default=cores(), help="processes at a time; default: the usable cores"
    )
    parser.add_argument(
        "--seeds", type=int, help="how many of the declared seeds, from the first; default: all"
    )
    parser.add_argument(
        "--name", help=f"of the record; default: {MAIN}, and of main runs {proof_main.NAME}"
    )
    parser.add_argument("--folder", type=Path, help="of the units; default: runs/proof/NAME")
    parser.add_argument(
        "--fresh", action="store_true", help="delete what the folder holds, and play all again"
    )
    options = parser.parse_intermixed_args(arguments)
    declared = proof_main.SEEDS if options.main else SEEDS
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.seeds is not None and not 2 <= options.seeds <= len(declared):
        parser.error(
            f"--seeds must be 2 to {len(declared)}: intervals need two, and no more are declared"
        )
    options.seeds = declared[: options.seeds]
    own = proof_main.NAME if options.main else MAIN
    options.name = options.name or own
    if options.results and options.name == own and (options.settings or options.seeds != declared):
        parser.error(
            "settings or fewer seeds make another proof than the declared one: give it a --name "
            f"of its own, not {own}, or --results '' to keep no record"
        )
    options.folder = (options.folder or ROOT / "runs" / "proof" / options.name).resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Play, compare, keep."""
    options = parse(arguments)
    try:
        check_folder(options.results)
        check_given(options.settings)
        roots = ("", options.cifar) if options.cifar else ("",)
        sets = [find_data(data_settings(root), options.settings) for root in roots]
        if options.main:
            cfg = proof_main.settings_given(sets[0], options.settings)
            record = proof_main.play(
                sets, facts_of("proof_main", cfg, options.settings), cfg, options
            )
            lines = main_lines(record)
        else:
            record = play(sets, options)
            lines = proof_lines(record)
        print("\n" + "\n".join(lines))
        finish(record, options.results, options.name)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as error:
        print(
            f"error: the main run ended with status {error.returncode}: {' '.join(error.cmd[1:])}",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        print("stopped: what is done stays; begin again to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
