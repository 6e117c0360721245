"""How a unit of the proof is played: one player on the hosts of one seed of one data set, an
episode of every host, or a main run.

All players of a seed meet the same hosts, data order and images: those of round 0 of the world of
that seed. What static_final and static_large are depends on what the learned policy grew there, so
a job plays it first. Jobs run in processes of their own; a main run is a command with all cores.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable, Mapping
from operator import sub
from pathlib import Path
from typing import NamedTuple

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from rich.console import Console

from benchmarks import machine
from benchmarks.processes import train
from benchmarks.timing import BenchmarkError
from benchmarks.units import Key, Units, code_stamp
from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import TrainConfig, settings_yaml
from esper_soa.env.world import World
from esper_soa.nets.data.datasets import load_images
from esper_soa.runtime.device import apply_threads, resolve_device
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.controls import play_control
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.final_test import with_test
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.progress import Progress
from esper_soa.training.results.totals import FinalHosts

EXPERIMENT = "cifar_3seed"
LEARNED = "learned"
# Of every unit: three hosts, on one thread of a CPU; the learned policy takes its likeliest
# choices. Settings given come after the first two.
HOSTS = ("envs=3", "policy.ppo.minibatches=1")
PLACE = ("device=cpu", "compute.workers=1", "compute.threads=1")
DECLARED = ("policy.deterministic=true",)
FIXED = ("seed", "data", "run_dir", "resume", "experiment", "policy.name", "policy.deterministic")
MAIN = "main"  # the player of a main run, which has both sides
SIDES = ("grown", "control")  # of its summary.json

Facts = dict[str, object]


class Data(NamedTuple):
    """A data set of the proof."""

    name: str
    settings: tuple[str, ...]  # that choose it
    images: str  # identity, a sha256
    train: int  # images
    validation: int
    test: int

    @property
    def stem(self) -> str:
        """Of the files of its units: name and images."""
        return f"{self.name}_{self.images[:8]}"


class Job(NamedTuple):
    """Players of one seed, for one process."""

    data: Data
    seed: int
    settings: tuple[str, ...]  # given on the command line
    players: tuple[str, ...]
    folder: Path
    code: str  # stamp

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.data.name} seed {self.seed}"

    @property
    def keys(self) -> list[Key]:
        """Of its units."""
        return [(self.data.stem, self.seed, player) for player in self.players]


def check_given(settings: Iterable[str]) -> None:
    """Raise BenchmarkError for a setting that is declared, not given."""
    for setting in settings:
        key = setting.split("=")[0].lstrip("+~")
        for declared in FIXED:
            if f"{key}.".startswith(f"{declared}."):
                raise BenchmarkError(
                    f"{setting}: {declared} is declared by the proof and cannot be given; leave it "
                    "out"
                )


def settings_of(overrides: Iterable[str]) -> TrainConfig:
    """The experiment's settings as `python -m esper_soa.train` composes them; or UserError."""
    return compose_settings(EXPERIMENT, list(overrides))


def of_seed(data: Data, seed: int, given: Iterable[str]) -> TrainConfig:
    """The settings of a unit."""
    return settings_of((*HOSTS, *PLACE, *given, *data.settings, *DECLARED, f"seed={seed}"))


def find_data(cifar: str, given: Iterable[str]) -> Data:
    """CIFAR-10 in the folder or archive `cifar`, or fashion32 where that is empty; raises UserError
    where it cannot be read.
    """
    quoted = QuotedString(cifar, Quote.single).with_quotes()
    settings = (f"data.root={quoted}",) if cifar else ()
    images = load_images(settings_of((*given, *settings)).data, "cpu")
    parts = images.train_labels, images.val_labels, images.test_labels
    return Data(images.name, settings, images.identity, *map(len, parts))


def plain_settings(cfg: TrainConfig) -> dict:
    """The settings as plain values, but for those that differ by unit or tell of files."""
    settings = OmegaConf.to_container(OmegaConf.create(settings_yaml(cfg)))
    if not isinstance(settings, dict):
        raise TypeError("settings are a table")
    for name in ("seed", "run_dir", "resume", "name"):
        del settings[name]
    del settings["data"]["name"], settings["data"]["root"]
    return settings


def play_job(job: Job) -> None:
    """Play all players of the job, the learned policy first, and write a unit for each."""
    cfg = of_seed(job.data, job.seed, job.settings)
    apply_threads(cfg.compute.threads)
    world = build_world(cfg, resolve_device(cfg.device))
    if (code_stamp(), world.data.identity) != (job.code, job.data.images):
        raise BenchmarkError(
            "code or images have changed since the proof was begun. Begin it again"
        )
    player = build_player(cfg.policy, world)
    units = Units(job.folder)
    learned = (job.data.stem, job.seed, LEARNED)
    for key in units.missing(job.keys):
        name = str(key[2])
        begun = time.monotonic()
        played = Round(0, Progress(0, Console(), "off"), name)
        if name == LEARNED:
            result = with_test(world, play_round(world, Player(player.agent, None), played)[0])
        else:
            result = play_control(name, cfg, world, grown_of(units.read(learned)), played)
        units.write(key, unit(world, result) | {"seconds": time.monotonic() - begun})


def play_main(job: Job) -> None:
    """Play the main run with the seed of the job, from its start, and keep what it came to."""
    units = Units(job.folder)
    (key,) = job.keys
    folder = units.path(key).with_suffix("")
    load = machine.load()
    if folder.exists():
        shutil.rmtree(folder)
    run = (f"+experiment={EXPERIMENT}", f"seed={job.seed}", f"run_dir={folder}")
    begun = time.monotonic()
    train(*run, *job.data.settings, *job.settings)
    seconds = time.monotonic() - begun
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if not summary["controls"]:
        raise BenchmarkError("leave out control=none: the control is what grown hosts are set to")
    scores = dict(zip(SIDES, (summary["grown"], summary["controls"][0]), strict=True))
    kept = {"accuracies": "test_accuracies"}
    kept |= {name: name for name in ("validation_accuracies", "parameters")}
    unit = {side: {name: scores[side][of] for name, of in kept.items()} for side in SIDES}
    units.write(key, {**unit, "seconds": seconds, "load": load})


def grown_of(unit: Mapping) -> FinalHosts:
    """What the controls need to know of the learned policy's episode, from its unit."""
    sizes = unit["parameters"], unit["train_flop"]
    return FinalHosts(unit["validation_accuracy"], *sizes, **unit["topology"])


def unit(world: World, result: RoundResult) -> Facts:
    """What is kept of a unit, by host; `accuracy` is on the test images, `net` is that minus rent,
    both in points, the rent of parameters and training above those of the task's own host.
    """
    rents = world.final_rents(result.parameters, result.train_flop, result.settings)
    return {
        "accuracy": list(result.test_accuracies),
        "validation_accuracy": result.accuracies,
        "parameters": result.parameters,
        "train_flop": result.train_flop,
        "net": [*map(sub, result.test_accuracies, rents)],
        "rewards": result.rewards,
        "seeds": result.seeds,
        "topology": {name: part.tolist() for name, part in result.topology._asdict().items()},
    }


def weights_stamp(player: Player) -> str:
    """A hash of all numbers of the learned policy."""
    if player.learner is None:
        raise BenchmarkError("policy.name: only ppo has learned anything")
    digest = hashlib.sha256()
    for name, tensor in sorted(player.learner.policy.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
