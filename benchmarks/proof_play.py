"""How a unit of the proof is played: one player on the hosts of one seed of one data set, an
episode of every host.

All players of a seed meet the same hosts, data order and images: those of round 0 of the world of
that seed. What static_final and static_large are depends on what the learned policy grew there, so
a job plays it first. Jobs run in processes of their own.
"""

import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import sub
from pathlib import Path
from typing import NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from rich.console import Console

from benchmarks.timing import BenchmarkError
from benchmarks.units import Units, code_stamp
from esper_soa.agent.protocol import Agent
from esper_soa.agent.scripted import scripted_policy
from esper_soa.build import build_player, build_world
from esper_soa.config import TrainConfig, register_schema, settings_from, settings_yaml
from esper_soa.controls import play_control
from esper_soa.env.reward import final_rents
from esper_soa.env.topology import Topology
from esper_soa.env.world import World
from esper_soa.nets.datasets import load_images
from esper_soa.ops.collect import Episode, Player, Round, play_round
from esper_soa.ops.device import apply_threads, resolve_device
from esper_soa.ops.metrics import RoundResult
from esper_soa.ops.progress import Progress
from esper_soa.paths import config_dir

EXPERIMENT = "cifar_3seed"
LEARNED = "learned"
# Of every unit: three hosts, on one thread of a CPU; the learned policy takes its likeliest
# choices. Settings given come after the first two.
HOSTS = ("envs=3", "policy.ppo.minibatches=1")
PLACE = ("device=cpu", "compute.workers=1", "compute.threads=1")
DECLARED = ("policy.deterministic=true",)
NOT_TO_GIVE = (
    "seed",
    "data",
    "policy.deterministic",
    "policy.name",
    "run_dir",
    "resume",
    "+experiment",
    "experiment",
)
UNTIMED = 4  # env-steps of the sample, whatever the length of an episode
TIMED = 4

Facts = dict[str, object]


class Data(NamedTuple):
    """A data set of the proof."""

    name: str
    settings: tuple[str, ...]  # that choose it
    images: str  # identity, a sha256
    train: int  # images
    test: int


class Grown(NamedTuple):
    """How the hosts ended that the controls are set beside."""

    parameters: list[float]  # of every host, with its seeds
    topology: Topology


class Job(NamedTuple):
    """Players of one seed, for one process."""

    data: Data
    seed: int
    settings: tuple[str, ...]  # given on the command line
    players: tuple[str, ...]  # that have not played yet
    folder: Path
    stamp: str  # of the folder's facts
    code: str
    commit: str


def data_settings(cifar: str) -> tuple[str, ...]:
    """The settings that choose CIFAR-10 under `cifar`, or fashion32 where that is empty."""
    return (f"data.root={QuotedString(cifar, Quote.single).with_quotes()}",) if cifar else ()


def check_given(settings: Iterable[str]) -> None:
    """Raise BenchmarkError for a setting that is declared, not given."""
    for setting in settings:
        key = setting.split("=")[0].lstrip("+~")
        declared = next(
            (one for one in NOT_TO_GIVE if key == one or key.startswith(f"{one}.")), None
        )
        if declared is not None:
            raise BenchmarkError(
                f"{setting}: {declared} is declared by the proof and cannot be given; leave it out"
            )


def settings_of(overrides: Iterable[str]) -> TrainConfig:
    """The experiment's settings as `python -m esper_soa.train` composes them; or UserError."""
    register_schema()
    try:
        with initialize_config_dir(config_dir(), version_base="1.3"):
            composed = compose("train", [f"+experiment={EXPERIMENT}", *overrides])
    except HydraException as error:
        raise BenchmarkError(" ".join(str(error).split())) from error
    return settings_from(composed)


def of_seed(data: Data, seed: int, given: Iterable[str]) -> TrainConfig:
    """The settings of a unit."""
    return settings_of((*HOSTS, *PLACE, *given, *data.settings, *DECLARED, f"seed={seed}"))


def find_data(settings: tuple[str, ...], given: Iterable[str]) -> Data:
    """The data set that `settings` choose; raises UserError where it cannot be read."""
    images = load_images(settings_of((*given, *settings)).data, "cpu")
    return Data(
        images.name, settings, images.identity, len(images.train_labels), len(images.test_labels)
    )


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
    """Play all players of the job, the learned policy first, and write a unit for each.

    Raises BenchmarkError where code or images are no longer what they were when the proof began;
    UserError for settings that cannot work.
    """
    if code_stamp() != job.code:
        raise BenchmarkError("the code has changed since the proof was begun. Begin it again")
    cfg = of_seed(job.data, job.seed, job.settings)
    apply_threads(cfg.compute.threads)
    world = build_world(cfg, resolve_device(cfg.device))
    if world.images.identity != job.data.images:
        raise BenchmarkError(
            f"{world.images.name}: the images have changed since the proof was begun. Begin it "
            "again"
        )
    player = build_player(cfg, world)
    units = Units(job.folder, job.stamp)
    weights = weights_stamp(player)
    learned = (job.data.name, job.seed, LEARNED)
    for name in job.players:
        begun = time.monotonic()
        played = Round(0, silent(), name)
        if name == LEARNED:
            result, _ = play_round(world, Player(player.agent, None), played)
        else:
            result = play_control(name, cfg, world, grown_of(units.read(learned)), played)
        found = unit(job, world, result) | {"weights": weights, "seconds": time.monotonic() - begun}
        units.write((job.data.name, job.seed, name), found)


def grown_of(unit: Mapping) -> Grown:
    """What the controls need to know of the learned policy's episode, from its unit."""
    topology = unit["topology"]
    return Grown(
        unit["parameters"],
        Topology(
            torch.tensor(topology["blueprint"], dtype=torch.int64),
            torch.tensor(topology["blend"], dtype=torch.int64),
            torch.tensor(topology["alpha"], dtype=torch.float64),
        ),
    )


def unit(job: Job, world: World, result: RoundResult) -> Facts:
    """What is kept of a unit: numbers per host, in the order of the hosts, and where they come
    from.

    `net` is accuracy minus rent, both in points; rent is that of the parameters above those of the
    task's own host, whether they grew or were there from the start.
    """
    host = world.rules.reward.counts.host
    reward = world.rules.reward.config
    return {
        "accuracies": result.accuracies,
        "parameters": result.parameters,
        "train_flop": result.train_flop,
        "net": [*map(sub, result.accuracies, final_rents(result.parameters, host, reward))],
        "rewards": result.rewards,
        "seeds": result.seeds,
        "topology": {name: part.tolist() for name, part in result.topology._asdict().items()},
        "images": job.data.images,
        "commit": job.commit,
    }


def weights_stamp(player: Player) -> str:
    """A hash of all numbers of the learned policy."""
    if player.learner is None:
        raise BenchmarkError("policy.name: only ppo has learned anything")
    digest = hashlib.sha256()
    for name, tensor in sorted(player.learner.policy.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def silent() -> Progress:
    """Shows nothing."""
    return Progress(0, Console(), "off")


def sample(cfg: TrainConfig) -> float:
    """Seconds per env-step of all hosts, of the slower of the learned policy and the schedule: a
    short episode of each.

    The schedule is made to fill a slot per env-step, so that its hosts are soon as large as they
    get.
    """
    cfg = replace(cfg, steps=UNTIMED + TIMED)
    apply_threads(cfg.compute.threads)
    world = build_world(cfg, resolve_device(cfg.device))
    schedule = replace(cfg.policy.schedule, germinate=[1], stagger=1)
    scripted = scripted_policy(
        replace(cfg.policy, name="schedule", schedule=schedule), cfg.task.blueprints
    )
    return max(
        seconds_per_step(world, agent) for agent in (build_player(cfg, world).agent, scripted)
    )


def seconds_per_step(world: World, agent: Agent) -> float:
    """Of TIMED env-steps of all hosts after UNTIMED ones."""
    episode = Episode(world, Player(agent, None), Round(0, silent()))
    for _ in range(UNTIMED):
        episode.step_()
    begun = time.perf_counter()
    for _ in range(TIMED):
        episode.step_()
    return (time.perf_counter() - begun) / TIMED
