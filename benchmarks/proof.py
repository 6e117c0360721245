"""Does growth pay? The shipped learned policy against every control, on seeds that no tuning has
seen.

    python -m benchmarks.proof [--cifar ROOT] [setting=value ...]          all players
    python -m benchmarks.proof --main [--cifar ROOT] [setting=value ...]   the main run itself

Declared here before the first look: seeds, players, experiment, hosts per seed, and how the learned
policy is played (its likeliest choices, without learning). A unit is one player on the hosts of one
seed and data set: an episode of each host; all players of a seed meet the same hosts, data order
and images. Accuracy is that on all test images, which nothing has seen before the episodes are
over; that on the validation images, which rewards and gates see, stands beside it. Units are played
in processes of one thread, main runs one after the other with all cores, and kept as files: begun
again, the command goes on where it was. Prints tables, and one JSON line last, which is also
appended to benchmarks/results/.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import machine, proof_play
from benchmarks.processes import ROOT, in_processes
from benchmarks.proof_play import EXPERIMENT, LEARNED, MAIN, Data, Facts, Job
from benchmarks.proof_tables import DECLARED, main_lines, proof_lines
from benchmarks.records import Record, command_line, origin, report
from benchmarks.units import Units, code_stamp, opened
from esper_soa.config.settings import CONTROLS, TrainConfig
from esper_soa.runtime.device import resolve_device
from esper_soa.system.cores import usable_cores
from esper_soa.system.errors import check
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.progress import duration

# No policy was trained, tuned or looked at with these.
SEEDS = tuple(range(20260101, 20260111))
MAIN_SEEDS = tuple(range(101, 111))
MAIN_NAME = "proof_main"
PLAYERS = (LEARNED, *CONTROLS)
# Of a player's host; accuracy is on the test images.
MEASURED = ("accuracy", "validation_accuracy", "net", "parameters", "train_flop")


def facts_of(cfg: TrainConfig, options: argparse.Namespace) -> Facts:
    """What results depend on, but for data set and seed."""
    facts: Facts = {
        "kind": MAIN_NAME if options.main else "proof",
        "commit": machine.git_commit(),
        "code": code_stamp(),
        "torch": torch.__version__,
        "experiment": EXPERIMENT,
        "settings_given": list(options.settings),
        "settings": proof_play.plain_settings(cfg),
    }
    if options.main:
        return facts
    init, remedy = cfg.policy.init, "a policy that has learned: the proof is about it"
    check(cfg.policy.name == "ppo" and init != "none", "policy.init", init, remedy)
    world = build_world(cfg, resolve_device(cfg.device))
    return facts | {"weights": proof_play.weights_stamp(build_player(cfg.policy, world))}


def play(options: argparse.Namespace) -> Record:
    """Play what is missing; returns the record."""
    given = tuple(options.settings)
    proof_play.check_given(given)
    sets = [proof_play.find_data(root, given) for root in dict.fromkeys(("", options.cifar))]
    if options.main:
        cfg = proof_play.settings_of((*given, *sets[0].settings))
    else:
        cfg = proof_play.of_seed(sets[0], SEEDS[0], given)
    facts = facts_of(cfg, options)
    with opened(options.folder, facts) as units:
        jobs = [
            Job(data, seed, given, options.players, units.folder, str(facts["code"]))
            for data in sets
            for seed in options.seeds
        ]
        print(
            f"{' '.join([EXPERIMENT, *given])} on {', '.join(data.name for data in sets)}: "
            f"{', '.join(options.players)}; seeds {', '.join(map(str, options.seeds))}, {cfg.envs} "
            f"hosts of {cfg.steps} env-steps each; what is done stays in {units.folder}",
            flush=True,
        )
        play_left(jobs, units, options)
        record = origin(str(facts["kind"]), torch.device("cpu")) | facts
        record |= {"name": options.name, "seeds": list(options.seeds)}
        if options.main:
            words = ["python -m esper_soa.train", f"+experiment={EXPERIMENT}", *given]
            record |= {"command": " ".join(words)}
        else:
            record |= {"jobs": options.jobs, "train_images": cfg.steps * cfg.train_samples}
        return record | {"data": [data_record(units, data, cfg, options) for data in sets]}


def play_left(jobs: Sequence[Job], units: Units, options: argparse.Namespace) -> None:
    """Play the jobs of which a unit is missing, in processes; says how far they are."""
    keys = [key for job in jobs for key in job.keys]
    first = left = len(units.missing(keys))
    begun = time.monotonic()
    print(f"{left} of {len(keys)} units are left, in {options.jobs} processes", flush=True)

    def look() -> None:
        nonlocal left
        before, left = left, len(units.missing(keys))
        if left < before:
            seconds = (time.monotonic() - begun) / (first - left) * left
            print(f"{left} of {len(keys)} units are left, some {duration(seconds)}", flush=True)

    work = proof_play.play_main if options.main else proof_play.play_job
    undone = {job.name: job for job in jobs if units.missing(job.keys)}
    in_processes(work, undone, options.jobs, look)


def data_record(units: Units, data: Data, cfg: TrainConfig, options: argparse.Namespace) -> Record:
    """All units of a data set: numbers by player, seed and host, or the main runs by seed."""
    played = {
        player: [units.read((data.stem, seed, player)) for seed in options.seeds]
        for player in options.players
    }
    facts = {"name": data.name, "images": data.images, "train": data.train}
    facts |= {"validation": data.validation, "test": data.test}
    if options.main:
        return {**facts, "runs": played[MAIN]}
    players = {
        player: {name: [unit[name] for unit in found] for name in MEASURED}
        for player, found in played.items()
    }
    return {**facts, "val_images": min(cfg.val_samples, data.validation), "players": players}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    add = parser.add_argument
    add("settings", nargs="*", help="settings of the experiment, as of esper_soa.train; recorded")
    add("--main", action="store_true", help="play the main run with the seeds declared for it")
    add("--cifar", default="", metavar="ROOT", help="also on CIFAR-10 from this folder or archive")
    cores = usable_cores()
    add("--jobs", type=int, default=cores, help="processes at a time; default: the usable cores")
    add("--seeds", type=int, help="how many of the declared seeds, from the first; default: all")
    add("--name", help=f"of the record; default: {DECLARED}, and of main runs {MAIN_NAME}")
    add("--folder", type=Path, help="of the units; default: runs/proof/NAME")
    options = parser.parse_intermixed_args(arguments)
    declared, name = (MAIN_SEEDS, MAIN_NAME) if options.main else (SEEDS, DECLARED)
    options.players = (MAIN,) if options.main else PLAYERS
    options.jobs = 1 if options.main else max(1, options.jobs)
    options.seeds = declared[: options.seeds]
    options.name = options.name or name
    if options.results and options.name == name and (options.settings or options.seeds != declared):
        parser.error(
            "settings or fewer seeds make another proof than the declared one: give it a --name "
            f"of its own, not {name}, or --results '' to keep no record"
        )
    options.folder = (options.folder or ROOT / "runs" / "proof" / options.name).resolve()
    return options


def main() -> None:
    """Play, compare, keep."""
    options = parse()
    report(options, play, main_lines if options.main else proof_lines)


if __name__ == "__main__":
    main()
