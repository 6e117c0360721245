"""Plays episodes on fresh seeds with a trained policy and scripted ones, and compares in pairs.

Task, data, reward and rules are those of the checkpoint. Every policy meets the same hosts on the
same data: sample i of each is the same env of the same episode.
"""

from collections.abc import Sequence
from operator import sub
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.protocol import Agent
from esper_soa.config.agent import PolicyConfig
from esper_soa.config.settings import EvaluateConfig, TrainConfig, settings_from_mapping
from esper_soa.env.world import World
from esper_soa.grown.class_scores import accuracy_by_class, plain
from esper_soa.nets.data.batches import origin
from esper_soa.nets.data.image_set import ImageSet
from esper_soa.nets.model.blueprints import num_codes
from esper_soa.runtime.device import apply_threads, resolve_device
from esper_soa.runtime.memory import memory_errors
from esper_soa.system.errors import RunMemoryError, SettingError, UserError, one_line
from esper_soa.system.files import write_text
from esper_soa.system.json_lines import write_json
from esper_soa.system.transfers import move_module_
from esper_soa.training.files.run_folder import damaged_newer, find_checkpoint
from esper_soa.training.files.saved_run import SavedRun, SavedTask, read_run
from esper_soa.training.files.session import Session
from esper_soa.training.loop.build import build_world, rule_player
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.resume import restore_policy
from esper_soa.training.loop.task_files import write_world_versions
from esper_soa.training.results.final_table import as_text
from esper_soa.training.results.final_test import with_test
from esper_soa.training.results.progress import LOGGER, Progress, show
from esper_soa.training.results.statistics import (
    Interval,
    estimate,
    paired_answers,
    percent_right,
)

# Seeds of training are below 2**31: from here on no evaluation meets hosts, orders or draws that
# training met.
FRESH_SEEDS = 2**31
TABLE_COLUMNS = {  # fields of Scores: titles, and how the numbers are written
    "test_accuracy": ("test (%)", ".2f"),
    "validation_accuracy": ("validation (%)", ".2f"),
    "parameters": ("parameters", ".0f"),
    "net": ("test - rent", ".2f"),
    "reward": ("reward", "+.2f"),
}
TESTED = ("test_accuracy", "net")  # of which the answers to each test sample are known


class Scores(NamedTuple):
    """How one policy did, one number per episode and env, in that order."""

    test_accuracy: list[float]  # percent
    validation_accuracy: list[float]  # at the last env-step, percent
    parameters: list[float]  # those of host and live seeds at the last env-step
    net: list[float]  # test accuracy minus rent
    reward: list[float]  # sum over the episode
    answers: np.ndarray | None = None  # to each test sample, see `estimate`; None: not known

    @property
    def numbers(self) -> dict[str, list[float]]:
        """Those of the table."""
        return {field: getattr(self, field) for field in TABLE_COLUMNS}


class Verdict(NamedTuple):
    """A policy's means, and its paired difference in test accuracy minus rent from the first."""

    policy: str
    means: dict[str, Interval]  # by field of Scores
    lead: Interval | None  # None for the first policy


def build_agent(name: str, settings: PolicyConfig, world: World, checkpoint_run: SavedRun) -> Agent:
    """The policy `name`; ppo is the learned one. Raises UserError where there is none."""
    if name != "ppo":
        return rule_player(name, "policies", settings, setup=world.setup)
    if checkpoint_run.learner is None:
        allowed = f"other than ppo: the checkpoint is of policy {settings.name}"
        raise SettingError("policies", name, allowed, remedy="It has learned nothing.")
    shape = world.setup.shape
    policy = RecurrentPolicy(
        settings, shape.slots, world.setup.seed, num_blueprints=num_codes(shape.blueprints)
    )
    restore_policy(policy, checkpoint_run)
    move_module_(policy, world.device)
    return policy


def score(world: World, agent: Agent, episodes: int, progress: Progress, label: str) -> Scores:
    """Play `episodes` episodes of every env."""
    scores = Scores([], [], [], net=[], reward=[])
    answers = list[Tensor]()
    for episode in range(episodes):
        request = Round(episode, progress, label)
        result = with_test(world, play_round(world, Player(agent, None), request)[0])
        scores.test_accuracy.extend(result.test_accuracies)
        scores.validation_accuracy.extend(result.accuracies)
        scores.parameters.extend(result.parameters)
        scores.reward.extend(result.rewards)
        rents = world.final_rents(result.parameters, result.train_flop, result.settings)
        scores.net.extend(map(sub, result.test_accuracies, rents))
        answers += [] if result.answers is None else [result.answers]
    return scores._replace(
        answers=percent_right(torch.cat(answers).numpy(), world.data.spec.num_targets)
    )


def judge(scores: dict[str, Scores], cfg: EvaluateConfig) -> list[Verdict]:
    """Means and intervals of every policy, each set against the first."""
    first = next(iter(scores.values()))
    verdicts: list[Verdict] = []
    for name, policy_scores in scores.items():
        known = policy_scores.answers
        means = {
            field: estimate(values, cfg.confidence, known if field in TESTED else None).interval
            for field, values in policy_scores.numbers.items()
        }
        less = list(map(sub, policy_scores.net, first.net))
        answers = paired_answers(known, first.answers)
        lead = estimate(less, cfg.confidence, answers).interval if verdicts else None
        verdicts.append(Verdict(name, means, lead))
    return verdicts


def verdict_table(verdicts: list[Verdict]) -> Table:
    table = Table("policy", box=box.SIMPLE_HEAD)
    lead = f"test - rent, less {verdicts[0].policy}"
    for title in (*(title for title, _ in TABLE_COLUMNS.values()), lead):
        table.add_column(title, justify="right", no_wrap=True)
    for verdict in verdicts:
        cells = [verdict.means[field].text(form) for field, (_, form) in TABLE_COLUMNS.items()]
        table.add_row(verdict.policy, *cells, verdict.lead.text() if verdict.lead else "")
    return table


def class_table(accuracies: dict[str, np.ndarray], names: Sequence[str]) -> Table:
    """Accuracy of the hosts of each policy on the test images of each class, and its mean."""
    table = Table("right answers of class (%)", *accuracies, box=box.SIMPLE_HEAD)
    for name, *cells in zip(names, *accuracies.values(), strict=True):
        table.add_row(Text(one_line(name)), *(f"{cell:.2f}" for cell in cells))
    table.add_row("mean of classes", *(f"{np.nanmean(x):.2f}" for x in accuracies.values()))
    return table


def write_results(path: Path, facts: dict, scores: dict[str, Scores], found: list[Verdict]) -> None:
    """evaluation.json: what was played, means with intervals, and every single number."""
    policies = {
        verdict.policy: {
            "means": {field: interval._asdict() for field, interval in verdict.means.items()},
            "net_less_first": None if verdict.lead is None else verdict.lead._asdict(),
            "samples": scores[verdict.policy].numbers,
        }
        for verdict in found
    }
    write_json(path, facts | {"policies": policies})


def evaluate_in_session(session: Session, cfg: EvaluateConfig) -> dict[str, list[Verdict]]:
    """Play every task of the run, compare, write evaluation.json and evaluation.txt and print the
    table; returns what each task says, by name. IncompleteError where something is not written.
    """
    apply_threads(cfg.compute.threads)
    checkpoint = find_checkpoint(cfg.checkpoint, "checkpoint")
    checkpoint_run = read_run(checkpoint, torch.device("cpu"))
    for damaged in damaged_newer(checkpoint):
        LOGGER.warning("policy   %s", damaged)
    LOGGER.info("policy   %s, after %d rounds", checkpoint, checkpoint_run.rounds_done)
    settings = settings_from_mapping(checkpoint_run.settings)
    verdicts = {}
    for name, task in settings.by_task.items():
        part = session.within(name) if settings.worlds else session
        run = task.for_evaluation(cfg)
        verdicts[name] = evaluate_task(part, cfg, run, checkpoint=checkpoint, saved=checkpoint_run)
    LOGGER.info("files    %s", session.folder.path)
    session.finish()
    return verdicts


def evaluate_task(
    session: Session, cfg: EvaluateConfig, run: TrainConfig, checkpoint: Path, saved: SavedRun
) -> list[Verdict]:
    """`evaluate_in_session` of one task, whose settings are those of `run`."""
    device = resolve_device(cfg.device)
    with memory_errors(UserError):
        world = build_world(run, device, FRESH_SEEDS + cfg.seed)
    data = announce(session, saved.task(world.setup.task.name), world)
    agents = {
        name: build_agent(name, run.policy, world, checkpoint_run=saved) for name in cfg.policies
    }
    total = len(agents) * cfg.episodes * run.envs * run.steps
    bar = Progress(
        total,
        session.console,
        style=run.telemetry.progress,
        interval=run.telemetry.plain_interval,
        after_step=session.check_console,
    )
    with bar as progress, memory_errors(RunMemoryError):
        scores = {
            name: score(world, agent, cfg.episodes, progress=progress, label=name)
            for name, agent in agents.items()
        }
    verdicts = judge(scores, cfg)
    facts = {
        "checkpoint": str(checkpoint),
        "rounds_done": saved.rounds_done,
        "seed": cfg.seed,
        "envs": run.envs,
        "episodes": cfg.episodes,
        "steps": run.steps,
        "deterministic": cfg.deterministic,
        "confidence": cfg.confidence,
        "data": data,
    }
    amount = f"{cfg.episodes} episodes of {run.envs} envs and {run.steps} env-steps"
    title = f"{world.setup.task.host_name} on {world.data.name}: {amount}"
    over = f"over hosts, of test scores over hosts and test {world.data.spec.name}"
    confidence = f"means with {cfg.confidence:.0%} t intervals {over}"
    text = f"{title}, {confidence}\n{as_text(verdict_table(verdicts))}"
    images = world.data
    if isinstance(images, ImageSet) and images.class_names:
        labels = images.test_labels.cpu().numpy()
        count = len(images.class_names)
        pairs = [(name, part.answers) for name, part in scores.items()]
        by_class = {name: accuracy_by_class(x, labels, count) for name, x in pairs if x is not None}
        facts["class_names"] = images.class_names
        facts["accuracy_by_class"] = {name: plain(part) for name, part in by_class.items()}
        text += f"\n{as_text(class_table(by_class, images.class_names))}"
    with session.write_errors.attempt(session.folder.evaluation.name):
        write_results(session.folder.evaluation, facts, scores, found=verdicts)
    with session.write_errors.attempt(session.folder.evaluation_table.name):
        write_text(session.folder.evaluation_table, text)
    show(session.console, text)
    return verdicts


def announce(session: Session, saved: SavedTask, world: World) -> dict[str, str]:
    """Tell which data, write versions.json; returns the data's `origin`."""
    source = world.data
    write_world_versions(session, world)
    LOGGER.info("data     %s", source.source)
    if source.identity != saved.data["identity"]:
        other = one_line(saved.data["source"])
        which = f"the {source.spec.name} of the checkpoint, which are"
        LOGGER.warning("data     these are not %s: %s", which, other)
    return origin(source)
