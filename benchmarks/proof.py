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
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import machine, proof_play
from benchmarks.processes import ROOT, in_processes
from benchmarks.proof_play import EXPERIMENT, LEARNED, MAIN, Data, Facts, Job
from benchmarks.proof_tables import DECLARED, main_lines, proof_lines
from benchmarks.records import Record, check_folder, command_line, finish, origin
from benchmarks.units import Key, Units, code_stamp, opened
from esper_soa.config.settings import CONTROLS, TrainConfig
from esper_soa.runtime.device import resolve_device
from esper_soa.system.cores import usable_cores
from esper_soa.system.errors import UserError, check
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


class Watch:
    """Says of every unit that is done how much time is left."""

    def __init__(self, units: Units, keys: Sequence[Key], at_once: int) -> None:
        self.units = units
        self.keys = keys
        self.at_once = at_once
        self.seconds = {key: units.read(key)["seconds"] for key in units.held(keys)}

    def left(self) -> float:
        """Seconds until all units are done, if the others are like those so far."""
        each = sum(self.seconds.values()) / len(self.seconds)
        return each * (len(self.keys) - len(self.seconds)) / self.at_once

    def look(self) -> None:
        """Say what is new."""
        for key in self.units.held([key for key in self.keys if key not in self.seconds]):
            self.seconds[key] = self.units.read(key)["seconds"]
            print(
                f"{key[0]} seed {key[1]} {key[2]:<12} {duration(self.seconds[key])}; "
                f"{len(self.seconds)} of {len(self.keys)} units, left {duration(self.left())}",
                flush=True,
            )


def jobs_left(
    units: Units, sets: Sequence[Data], code: str, options: argparse.Namespace
) -> list[Job]:
    """A job per seed and data set of which a unit is missing."""
    jobs = []
    for data in sets:
        for seed in options.seeds:
            keys: list[Key] = [(data.stem, seed, player) for player in options.players]
            held = units.held(keys)
            missing = tuple(str(key[2]) for key in keys if key not in held)
            if missing:
                jobs.append(Job(data, seed, tuple(options.settings), missing, units.folder, code))
    return jobs


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
    name = cfg.policy.name
    check(name == "ppo", "policy.name", name, "ppo: the proof is about the learned policy")
    learned = cfg.policy.init != "none"
    remedy = "a policy that has learned: the proof is about it"
    check(learned, "policy.init", "none", remedy)
    world = build_world(cfg, resolve_device(cfg.device))
    return facts | {"weights": proof_play.weights_stamp(build_player(cfg, world))}


def play(sets: Sequence[Data], options: argparse.Namespace) -> Record:
    """Play what is missing; returns the record."""
    given = options.settings
    main = proof_play.settings_of((*given, *sets[0].settings)) if options.main else None
    cfg = main or proof_play.of_seed(sets[0], SEEDS[0], given)
    facts = facts_of(cfg, options)
    with opened(options.folder, facts) as units:
        keys: list[Key] = [
            (data.stem, seed, player)
            for data in sets
            for seed in options.seeds
            for player in options.players
        ]
        watch = Watch(units, keys, options.jobs)
        print(
            f"{' '.join([EXPERIMENT, *given])} on {', '.join(one.name for one in sets)}: "
            f"{', '.join(options.players)}; seeds {', '.join(map(str, options.seeds))}, {cfg.envs} "
            f"hosts of {cfg.steps} env-steps each; {len(keys) - len(watch.seconds)} of {len(keys)} "
            f"units are left, in {options.jobs} processes; what is done stays in {units.folder}",
            flush=True,
        )
        jobs = {one.name: one for one in jobs_left(units, sets, str(facts["code"]), options)}
        in_processes(
            proof_play.play_main if options.main else proof_play.play_job,
            jobs,
            options.jobs,
            watch.look,
        )
        record = origin(str(facts["kind"]), torch.device("cpu")) | facts
        record |= {"name": options.name, "seeds": list(options.seeds)}
        if options.main:
            words = ["python -m esper_soa.train", f"+experiment={EXPERIMENT}", *given]
            record |= {"command": " ".join(words)}
        else:
            train_images = cfg.steps * cfg.train_samples
            record |= {"jobs": options.jobs, "train_images": train_images}
            record |= {"unit_seconds": round(sum(watch.seconds.values()), 1)}
        return record | {"data": [data_record(units, data, cfg, options) for data in sets]}


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
    declared = MAIN_SEEDS if options.main else SEEDS
    options.players = (MAIN,) if options.main else PLAYERS
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.main:
        options.jobs = 1
    if options.seeds is not None and not 2 <= options.seeds <= len(declared):
        parser.error(
            f"--seeds must be 2 to {len(declared)}: intervals need two, and no more are declared"
        )
    options.seeds = declared[: options.seeds]
    own = MAIN_NAME if options.main else DECLARED
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
        proof_play.check_given(options.settings)
        roots = ("", options.cifar) if options.cifar else ("",)
        sets = [
            proof_play.find_data(proof_play.data_settings(root), options.settings) for root in roots
        ]
        record = play(sets, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped: what is done stays; begin again to go on", file=sys.stderr)
        sys.exit(130)
    print("\n" + "\n".join((main_lines if options.main else proof_lines)(record)))
    finish(record, options.results, options.name)


if __name__ == "__main__":
    main()
