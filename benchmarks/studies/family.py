"""One policy for envs that differ, beside schedules and rules, on the family growth_family.

At commit 41fa474b:

    python -m benchmarks.family schedules   # play every schedule on training draws
    python -m benchmarks.family teacher     # estimate which schedule pays in which env
    python -m benchmarks.ship gardener      # train the policy to imitate that teacher
    python -m benchmarks.family proof       # play all players on draws of which nothing has learned

A draw is an env with its rates, momentum, weight decay, clipping and price of parameters. The score
is the accuracy on the test images minus the rent at the env's own price, in percent points. Seeds,
schedules and players are declared here. A unit is one player on the envs of a seed. Units are
kept as files with the commit that played them, so that the command goes on where it was; settings,
--seeds and the weights of the policy have units of their own. `proof` prints tables and one JSON
line, which is also appended to the results.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console

from benchmarks.family_tables import family_lines
from benchmarks.machine import git_commit
from benchmarks.processes import in_processes
from benchmarks.proof_play import weights_stamp
from benchmarks.records import Record, check_folder, command_line, finish, origin
from benchmarks.studies.schedules import (
    PRICE,
    SCHEDULES,
    TEACHER_FILE,
    Plan,
    fit,
    read_estimate,
    save_estimate,
    teacher,
)
from benchmarks.units import Units, opened
from esper_soa.agent.protocol import Agent
from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import TrainConfig
from esper_soa.env.world import World
from esper_soa.runtime.device import apply_threads, usable_cores
from esper_soa.system.errors import UserError
from esper_soa.training.loop.build import build_world, rule_player
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.final_test import with_test
from esper_soa.training.results.progress import Progress

EXPERIMENT = "growth_family"
ENVS = 32  # of the experiment
PLACE = ("device=cpu", "compute.workers=1", "compute.threads=1", "policy.deterministic=true")
# By axis, what lies below and above the ranges of the experiment.
BEYOND = {
    PRICE: ((0.3, 1.0), (60.0, 180.0)),
    "task.host_lr": ((0.008, 0.02), (0.3, 0.6)),
    "task.seed_lr": ((0.008, 0.02), (0.3, 0.6)),
    "task.momentum": ((0.2, 0.5), (0.95, 0.97)),
    "task.weight_decay": ((0.000001, 0.00001), (0.03, 0.09)),
    "task.max_grad_norm": ((0.1, 0.3), (10.0, 30.0)),
}
# No draw of the last three parts was trained on, tuned on or looked at before the declaration.
# `again` has the draws of the first seeds of `held_out`, with other weights and images; on these
# all schedules are played.
HELD_OUT = tuple(range(20270101, 20270111))
PARTS = {"training": tuple(range(1, 4)), "held_out": HELD_OUT, "again": HELD_OUT[:2]}
PARTS |= {"beyond": HELD_OUT}
OTHER_SEEDS = 1000  # from a seed of `held_out` to that of the same draws in `again`
CURVE = ("1", "3", "6", "12", "25", "60")  # prices at which the policy is played on held-out draws
LEARNED, TEACHER, BY_PRICE = "learned", "teacher", "best_of_price"
# Of a table: where classes of prices end, and where a host's rate is high.
PRICES, RATE = (4.0, 12.0, 25.0), 0.08
RULES = ("heuristic", "random", "wait")
PLAYERS = (LEARNED, TEACHER, BY_PRICE, *RULES)
NUMBERS = tuple(str(number) for number in range(len(SCHEDULES)))


class Job(NamedTuple):
    """Players on the envs of one seed, for one process."""

    part: str  # of PARTS
    seed: int
    players: tuple[str, ...]
    folder: Path
    overrides: tuple[str, ...]  # settings of the experiment


def settings_of(part: str, seed: int, overrides: Sequence[str] = ()) -> TrainConfig:
    """Settings of the envs of a seed: draws from the experiment's ranges or beyond them, or those
    of `held_out` at one price.
    """
    if part == "again":
        drawn = build_world(settings_of("held_out", seed, overrides), torch.device("cpu")).settings
        seed += OTHER_SEEDS
    elif part in CURVE:
        drawn = {PRICE: [float(part)]}
    else:
        drawn = beyond(seed) if part == "beyond" else {}
    own = [f"{name}=[{','.join(map(repr, values))}]" for name, values in drawn.items()]
    return compose_settings(EXPERIMENT, [*PLACE, *overrides, *own, f"seed={seed}"])


def beyond(seed: int) -> dict[str, list[float]]:
    """Of each axis ENVS values below its training range or above it, either side as likely."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, sides in BEYOND.items():
        low, high = np.log(sides)[rng.integers(0, 2, ENVS)].T
        values = np.exp(low + rng.random(ENVS) * (high - low))
        drawn[name] = [float(f"{value:.8f}") for value in values]
    return drawn


def play_job(job: Job) -> None:
    """Play the players of a job one after the other, and write a unit for each."""
    apply_threads(1)
    cfg = settings_of(job.part, job.seed, job.overrides)
    world = build_world(cfg, torch.device("cpu"))
    host = world.rules.reward.counts.host
    for name in job.players:
        request = Round(0, Progress(0, Console(), "off"))
        player = Player(agent_of(name, cfg, world), None)
        result = with_test(world, play_round(world, player, request)[0])
        rents = world.final_rents(result.parameters, result.train_flop, result.settings)
        unit = {
            "settings": world.settings,
            "accuracy": [round(one, 4) for one in result.test_accuracies],
            "rent": [round(one, 4) for one in rents],
            "growth": [size / host for size in result.parameters],
            "commit": git_commit(),
        }
        Units(job.folder).write((job.part, job.seed, name), unit)


def agent_of(name: str, cfg: TrainConfig, world: World) -> Agent:
    """The player of this name: one of PLAYERS, the learned one with its weights behind it, or a
    number of SCHEDULES.
    """
    if name.startswith(LEARNED):
        return build_player(cfg, world).agent
    if name in RULES:
        return rule_player(cfg, name, "policy.name")
    if name == TEACHER:
        return teacher()
    if name == BY_PRICE:
        return Plan(read_estimate(TEACHER_FILE).by_price(list(map(float, world.settings[PRICE]))))
    return Plan([int(name)] * world.sizes.num_envs)


def play(
    part: str, seeds: Sequence[int], players: Sequence[str], overrides: Sequence[str], folder: Path
) -> None:
    """Play what is missing of a part, on all cores."""
    units = Units(folder)
    keys = [(part, seed, player) for seed in seeds for player in players]
    done = units.held(keys)
    work = {}
    jobs = usable_cores()
    for seed in seeds:
        missing = [player for player in players if (part, seed, player) not in done]
        for share in range(jobs):
            own = tuple(missing[share::jobs])
            if own:
                job = Job(part, seed, own, folder, tuple(overrides))
                work[f"{part} seed {seed}, {share + 1}"] = job
    count = len(done)

    def look() -> None:
        nonlocal count
        before, count = count, len(units.held(keys))
        if count > before:
            print(f"{part}: {count} of {len(keys)} units", flush=True)

    in_processes(play_job, work, jobs, look)


def scores(units: Units, part: str, seeds: Sequence[int], player: str) -> np.ndarray:
    """Accuracy minus rent [seeds, ENVS] of a player, in percent points."""
    own = [units.read((part, seed, player)) for seed in seeds]
    return np.array([one["accuracy"] for one in own]) - np.array([one["rent"] for one in own])


def record_of(
    units: Units, parts: Mapping[str, Sequence[int]], single: int, learned: str
) -> Record:
    """Scores by part, player and seed, and those of two oracles on the first held-out seeds.

    `oracle` takes in each env the schedule that ended best in the same episodes, which is partly
    luck. `repeated` takes the same schedules, scored in the same envs with other weights and
    images, beside `single_repeated`, the single schedule there. learned: the units of the learned
    policy.
    """
    players = {name: name for name in PLAYERS} | {LEARNED: learned, "single": str(single)}
    of_parts = {
        part: {name: scores(units, part, parts[part], unit) for name, unit in players.items()}
        for part in ("held_out", "beyond")
    }
    seeds = parts["again"]
    every, again = (
        np.stack([scores(units, part, seeds, name) for name in NUMBERS])
        for part in ("held_out", "again")
    )
    repeated = np.take_along_axis(again, every.argmax(0)[None], 0)[0]
    own = {"oracle": every.max(0), "repeated": repeated, "single_repeated": again[single]}
    of_parts["held_out"] |= own
    found = {
        part: {name: one.mean(1).round(4).tolist() for name, one in own.items()}
        for part, own in of_parts.items()
    }
    curve = {
        price: {
            name: [
                float(np.mean(units.read((price, seed, learned))[name]))
                for seed in parts["held_out"]
            ]
            for name in ("accuracy", "growth")
        }
        for price in CURVE
    }
    record: Record = {"single": single, "schedule": str(SCHEDULES[single]), "scores": found}
    record |= {"curve": curve}
    return record | {"regions": regions(units, parts, single)}


def regions(units: Units, parts: Mapping[str, Sequence[int]], single: int) -> list[Record]:
    """The best schedule of each class of prices and of rates of hosts, chosen on training draws,
    and how it and the single one do on the held-out draws of the class.
    """
    classes, every = {}, {}
    for part, seeds in (("training", parts["training"]), ("held_out", parts["again"])):
        every[part] = np.stack([scores(units, part, seeds, name).ravel() for name in NUMBERS])
        own = [units.read((part, seed, NUMBERS[0]))["settings"] for seed in seeds]
        price, rate = (
            np.concatenate([one[name] for one in own]) for name in (PRICE, "task.host_lr")
        )
        classes[part] = np.searchsorted(PRICES, price) * 2 + (rate > RATE)
    found = []
    for number in range(2 * len(PRICES) + 2):
        inside, outside = (classes[part] == number for part in ("training", "held_out"))
        if not (inside.any() and outside.any()):
            continue
        best = int(every["training"][:, inside].mean(1).argmax())
        held_out = every["held_out"][:, outside].mean(1)
        region: Record = {"prices": number // 2, "rate": number % 2, "best": str(SCHEDULES[best])}
        region |= {"training": int(inside.sum()), "held_out": int(outside.sum())}
        found.append(region | {"score": float(held_out[best]), "single": float(held_out[single])})
    return found


def training_units(units: Units, seeds: Sequence[int]) -> list[dict[str, Mapping]]:
    """The units of all schedules by seed; UserError where `schedules` has not played them."""
    keys = [("training", seed, name) for seed in seeds for name in NUMBERS]
    missing = len(keys) - len(units.held(keys))
    if missing:
        raise UserError(
            f"{missing} of {len(keys)} units of schedules are missing in {units.folder}: give "
            "`python -m benchmarks.studies.family schedules` with the same settings first"
        )
    return [{name: units.read(("training", seed, name)) for name in NUMBERS} for seed in seeds]


def prove(units: Units, parts: Mapping[str, Sequence[int]], overrides: Sequence[str]) -> Record:
    """Play what is missing of all players; returns the record."""
    estimate, quality = fit(training_units(units, parts["training"]))
    save_estimate(estimate, TEACHER_FILE)
    cfg = settings_of("held_out", HELD_OUT[0], overrides)
    player = build_player(cfg, build_world(cfg, torch.device("cpu")))
    weights = weights_stamp(player)
    learned = f"{LEARNED}-{weights}"
    for part in ("held_out", "again"):
        play(part, parts["again"], NUMBERS, overrides, units.folder)
    for part in ("held_out", "beyond"):
        others = (learned, *PLAYERS[1:], str(estimate.single))
        play(part, parts[part], others, overrides, units.folder)
    for part in CURVE:
        play(part, parts["held_out"], (learned,), overrides, units.folder)
    commits = {json.loads(path.read_text())["commit"] for path in units.folder.glob("*-*.json")}
    record = origin("family", torch.device("cpu")) | {
        "settings": overrides,
        "weights": weights,
        **quality,
    }
    record |= {"unit_commits": sorted(commits), "classes": [PRICES, RATE], "envs": cfg.envs}
    return record | record_of(units, parts, estimate.single, learned)


def main() -> None:
    """The command line; ends with status 2 for what cannot be played."""
    parser = command_line(__doc__)
    parser.add_argument("what", choices=["schedules", "teacher", "proof"])
    parser.add_argument("settings", nargs="*", help="of the experiment, for every player")
    parser.add_argument("--seeds", type=int, help="so many of each part, from the first")
    parser.add_argument("--folder", type=Path, default=TEACHER_FILE.parent, help="of the units")
    options = parser.parse_intermixed_args()
    parts = {name: seeds[: options.seeds] for name, seeds in PARTS.items()}
    try:
        with opened(
            options.folder.resolve(), {"settings": options.settings, "seeds": options.seeds}
        ) as units:
            if options.what == "schedules":
                play("training", parts["training"], NUMBERS, options.settings, units.folder)
            elif options.what == "teacher":
                estimate, quality = fit(training_units(units, parts["training"]))
                save_estimate(estimate, TEACHER_FILE)
                print(json.dumps(quality))
            else:
                check_folder(options.results)
                record = prove(units, parts, options.settings)
                print("\n".join(family_lines(record)))
                finish(record, options.results, "family")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
