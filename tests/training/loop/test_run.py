"""Every headline number of real runs, worked out again from the states of the same rounds played by
hand.

One run of the random policy (two rounds) and one of the learning policy (four rounds); their files
are compared with what a witness sees who plays the same rounds in a world of its own.
"""

import io
import json
import math
from collections import Counter
from copy import copy
from dataclasses import replace
from operator import sub
from pathlib import Path
from statistics import pvariance
from typing import NamedTuple

import pytest
import torch
from rich.console import Console
from torch import Tensor

from esper_soa.agent.scripted import RandomPolicy, WaitPolicy
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.settings import TelemetryConfig, TrainConfig
from esper_soa.env.world import World
from esper_soa.state import EnvState
from esper_soa.training.files.checkpoint import load_checkpoint
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Round
from esper_soa.training.loop.controls import play_control
from esper_soa.training.loop.players import build_player
from esper_soa.training.loop.run import Run
from esper_soa.training.results.final_table import Summary
from esper_soa.training.results.progress import Progress
from esper_soa.training.results.totals import FinalHosts, RunTotals
from esper_soa.vocabulary import LIVE_STAGES, Stage
from tests.builders import tiny_runs
from tests.builders.lanes import some_of
from tests.builders.recording_agent import Witnessed, witnessed_round
from tests.builders.tiny_runs import records, run
from tests.builders.tiny_world import CPU

ENVS = 2
ROUNDS = 2
STEPS = 16


def settings(player: str, **changed: object) -> TrainConfig:
    """Hosts whose seeds mature in a few env-steps."""
    given: dict = {
        "rounds": ROUNDS,
        "steps": STEPS,
        "val_samples": 16,
        "control": "wait",
        "checkpoint_keep": 9,
        "gates": GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
        "lifecycle": LifecycleConfig(embargo_steps=2, min_prune_age=1),
    }
    return tiny_runs.settings(player, **given | changed)


class Done(NamedTuple):
    """A run that has ended, and its files."""

    folder: RunFolder
    summary: Summary
    lines: list[dict]  # of metrics.jsonl
    episodes: list[dict]


def done(cfg: TrainConfig, path: Path) -> Done:
    folder = RunFolder(path)
    summary = run(cfg, folder)
    return Done(folder, summary, records(folder.metrics), records(folder.episodes))


@pytest.fixture(scope="module")
def random_run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return done(settings("random"), tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def learning_run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return done(
        settings("ppo", rounds=4, steps=3, control="none"), tmp_path_factory.mktemp("learning")
    )


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(settings("random"), CPU)


@pytest.fixture(scope="module")
def rounds(world: World) -> list[Witnessed]:
    """The rounds of `random_run`."""
    found = [witnessed_round(world, RandomPolicy(), number) for number in range(ROUNDS)]
    for played in found:
        assert all(not state.guard.panic.any() for state in played.states), (
            "a rollback: sums below are of actions alone"
        )
    return found


def spread(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


def stages(state: EnvState) -> list[list[int]]:
    return state.slots.stage.tolist()


def sizes(world: World, state: EnvState) -> list[float]:
    """Parameters of host, live seeds and gates, per env, one slot at a time."""
    counts = world.rules.reward.counts
    found = []
    for env in range(ENVS):
        size = float(counts.host)
        for slot, stage in enumerate(stages(state)[env]):
            if stage in LIVE_STAGES:
                size += counts.seed[slot, state.slots.blueprint[env, slot]].item()
                gated = state.slots.blend[env, slot] == 3 and stage not in (
                    Stage.GERMINATED,
                    Stage.TRAINING,
                )
                size += counts.gate[slot].item() if gated else 0.0
        found.append(size)
    return found


def test_accuracy_loss_and_reward_of_a_round_are_those_of_its_last_env_step(
    random_run: Done, rounds: list[Witnessed]
) -> None:
    for line, played in zip(random_run.lines, rounds, strict=True):
        signals = played.views[-1].state.signals
        assert line["accuracy"] == pytest.approx(spread(signals.val_accuracy))
        assert line["val_loss"] == pytest.approx(signals.val_loss.mean().item())
        assert line["train_loss"] == pytest.approx(signals.train_loss.mean().item())
        assert line["train_accuracy"] == pytest.approx(signals.train_accuracy.mean().item())
        assert line["reward"] == pytest.approx(spread(played.rewards().sum(0)))
        # accuracy in percent of 16 images: with every seed on, so a sixteenth is what it counts by
        assert all(accuracy * 16 % 100 == 0 for accuracy in signals.val_accuracy.tolist())


def test_the_summary_counts_the_seeds_of_all_rounds(
    random_run: Done, rounds: list[Witnessed]
) -> None:
    totals = Counter[str]()
    for line, played in zip(random_run.lines, rounds, strict=True):
        before = torch.zeros_like(played.states[0].slots.stage)
        for state in played.states:
            stage = state.slots.stage
            was, now = (sum(one == live for live in LIVE_STAGES).bool() for one in (before, stage))
            totals["germinated"] += int((~was & now).sum())
            totals["blended"] += int(((before != stage) & (stage == Stage.BLENDING)).sum())
            totals["fossilized"] += int(((before != stage) & (stage == Stage.FOSSILIZED)).sum())
            totals["pruned"] += int((was & ~now).sum())
            before = stage
        for name in ("germinated", "fossilized", "pruned"):
            counted = sum(row[name] for row in line["blueprints"].values())
            assert counted == line["seeds"][name], name
    assert random_run.summary.seeds == totals
    assert min(totals[name] for name in ("germinated", "blended", "pruned")) > 0, (
        "too tame to mean anything"
    )


def test_every_episode_is_a_line_with_its_own_outcome(
    random_run: Done, rounds: list[Witnessed], world: World
) -> None:
    order = [(number, env) for number in range(1, ROUNDS + 1) for env in range(ENVS)]
    assert [(episode["round"], episode["env"]) for episode in random_run.episodes] == order
    for episode in random_run.episodes:
        played = rounds[episode["round"] - 1]
        env = episode["env"]
        last = played.states[-1]
        rewards = played.rewards()[:, env].tolist()
        assert episode["accuracy"] == played.views[-1].state.signals.val_accuracy[env].item()
        assert episode["param_ratio"] == pytest.approx(
            sizes(world, last)[env] / world.rules.reward.counts.host
        )
        assert episode["reward"] == pytest.approx(sum(rewards))
        assert episode["stability"] == pytest.approx(1 / (1 + pvariance(rewards[-20:])))
        assert episode["success"] == (episode["accuracy"] >= 80)
        assert episode["env_steps"] == STEPS
        assert episode["rollbacks"] == 0
        own = stages(last)[env]
        assert episode["seeds"]["unfinished"] == sum(
            stage in LIVE_STAGES and stage != Stage.FOSSILIZED for stage in own
        )


def test_the_means_of_a_line_are_those_of_its_episodes(
    random_run: Done, rounds: list[Witnessed], world: World
) -> None:
    for number, line in enumerate(random_run.lines, start=1):
        own = [episode for episode in random_run.episodes if episode["round"] == number]
        for name in ("success", "stability", "param_ratio", "compute_cost"):
            assert line["outcome"][name] == pytest.approx(
                sum(episode[name] for episode in own) / ENVS
            ), name
        assert line["parameters"] == pytest.approx(
            sum(sizes(world, rounds[number - 1].states[-1])) / ENVS
        )
        assert sum(line["reward_terms"].values()) == pytest.approx(line["reward"]["mean"])
        for name in ("germinated", "fossilized", "contributing", "pruned"):
            assert line["seeds"][name] == sum(episode["seeds"][name] for episode in own)


def beaten(one: tuple, other: tuple) -> bool:
    better = (one[0] <= other[0], one[1] <= other[1], one[2] >= other[2])
    return all(better) and one != other


def test_the_pareto_front_is_of_all_episodes_so_far(random_run: Done) -> None:
    for number, line in enumerate(random_run.lines, start=1):
        so_far = [
            (episode["accuracy"], episode["stability"], episode["param_ratio"])
            for episode in random_run.episodes
            if episode["round"] <= number
        ]
        front = {one for one in so_far if not any(beaten(one, other) for other in so_far)}
        assert line["pareto"]["front_size"] == len(front)
        area = 0.0
        reached = 2.0
        for accuracy, _, ratio in sorted(front, key=lambda point: (-point[0], point[2])):
            if ratio < reached:
                area = area + accuracy * (reached - ratio)
                reached = ratio
        assert line["pareto"]["hypervolume"] == pytest.approx(area)
    last = random_run.lines[-1]["pareto"]
    assert vars(random_run.summary.pareto) == pytest.approx(last)


@pytest.mark.parametrize("name", ["random_run", "learning_run"])
def test_env_steps_per_second_count_collecting_and_updating(
    name: str, request: pytest.FixtureRequest
) -> None:
    played: Done = request.getfixturevalue(name)
    steps = played.summary.steps
    for number, line in enumerate(played.lines, start=1):
        assert line["round"] == number
        assert line["env_steps"] == number * ENVS * steps
        assert line["eps"] * (line["collect_seconds"] + line["update_seconds"]) == pytest.approx(
            ENVS * steps
        )
        assert line["collect_seconds"] > 0
    if name == "learning_run":
        assert all(line["update_seconds"] > 1e-3 for line in played.lines)
    speed = played.summary.speed
    rows = sum(line["alpha_rows"] for line in played.lines) / len(played.lines)
    assert speed.alpha_rows == pytest.approx(rows)
    seconds = sum(line["collect_seconds"] + line["update_seconds"] for line in played.lines)
    assert speed.seconds == pytest.approx(seconds)
    assert speed.env_steps == len(played.lines) * ENVS * steps
    assert speed.eps == pytest.approx(speed.env_steps / seconds)
    assert (speed.train_samples, speed.val_samples) == (4, 16)
    assert played.summary.wall_seconds > seconds
    assert played.summary.reward == pytest.approx(played.lines[-1]["reward"]["mean"])


def test_the_summary_tells_the_last_round(
    random_run: Done, rounds: list[Witnessed], world: World
) -> None:
    summary = random_run.summary
    last = rounds[-1]
    (grown,) = summary.grown.episodes
    assert grown.validation_accuracies == last.views[-1].state.signals.val_accuracy.tolist()
    assert grown.parameters == sizes(world, last.states[-1])
    assert grown.train_flop == last.result.train_flop
    assert summary.reward == pytest.approx(last.rewards().sum(0).mean().item())
    assert (summary.envs, summary.rounds, summary.steps) == (ENVS, ROUNDS, STEPS)
    assert summary.rollbacks == 0
    written = json.loads(random_run.folder.summary.read_text())
    assert written["grown"]["test_accuracies"] == grown.test_accuracies
    assert written["grown"]["validation_accuracies"] == grown.validation_accuracies
    assert written["grown"]["train_flop"] == grown.train_flop
    mean = random_run.lines[-1]["accuracy"]["mean"]
    assert written["grown"]["validation_accuracy"] == pytest.approx(mean)
    assert written["grown"]["size"] == pytest.approx(random_run.lines[-1]["parameters"])
    assert written["speed"]["eps"] == summary.speed.eps


def test_the_seed_of_a_run_decides_what_its_policy_begins_with(world: World) -> None:
    def weights(seed: int) -> Tensor:
        seeded = copy(world)
        seeded.rules = world.rules._replace(setup=world.setup._replace(seed=seed))
        learner = build_player(settings("ppo").policy, seeded).learner
        assert learner is not None
        return torch.cat([parameter.flatten() for parameter in learner.parameters])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_a_policy_that_only_waits_is_its_own_control(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = done(
        settings("wait", rounds=1, steps=2, telemetry=TelemetryConfig(progress="plain")), tmp_path
    )
    assert waited.summary.controls == []
    written = json.loads(waited.folder.summary.read_text())
    assert written["controls"] == []
    assert "without growth" not in capsys.readouterr().out


def test_the_control_plays_the_last_round_on_its_hosts_and_its_data(
    random_run: Done, world: World
) -> None:
    alone = [witnessed_round(world, WaitPolicy(), number).result for number in range(ROUNDS)]
    assert alone[0].accuracies != alone[-1].accuracies, "any round would do"
    (control,) = random_run.summary.controls
    (episode,) = control.episodes
    assert control.name == "wait"
    # nothing has grown, so there is no rent
    assert episode.validation_accuracies == alone[-1].accuracies
    assert episode.test_accuracies == episode.nets
    host = float(world.rules.reward.counts.host)
    assert episode.parameters == alone[-1].parameters == [host] * ENVS
    assert episode.train_flop == alone[-1].train_flop == [STEPS * 4 * world.flop.host] * ENVS
    assert len(random_run.lines) == ROUNDS  # it leaves no line and no episode
    assert len(random_run.episodes) == ROUNDS * ENVS


@pytest.mark.parametrize(
    "name", some_of(("static_final", "static_large", "schedule"), "static_final")
)
def test_a_control_plays_the_last_rounds_each_beside_the_hosts_that_grew_in_it(
    tmp_path: Path, world: World, rounds: list[Witnessed], name: str
) -> None:
    played = done(settings("random", rounds=3, control=name, control_rounds=2), tmp_path).summary
    (score_of_control,) = played.controls
    third = witnessed_round(world, RandomPolicy(), 2)
    quiet = Progress(1, Console(file=io.StringIO()), "off")
    host = world.rules.reward.counts.host
    for number, grown in ((1, rounds[1].result), (2, third.result)):
        other = play_control(name, settings("random"), world, grown, Round(number, quiet))
        for score, result in ((played.grown, grown), (score_of_control, other)):
            episode = score.episodes[number - 1]
            assert episode.validation_accuracies == result.accuracies
            assert episode.parameters == result.parameters
            assert episode.train_flop == result.train_flop
            rents = [
                min(1.5, 0.5 * math.log1p(max(0, size - host) / max(host, 200)))
                for size in result.parameters
            ]
            assert episode.nets == pytest.approx([*map(sub, episode.test_accuracies, rents)])
    assert len(played.grown.episodes) == len(score_of_control.episodes) == 2
    assert score_of_control.env_steps == 2 * ENVS * STEPS
    assert (score_of_control.name, played.grown.name) == (name, "random")


def saved(done: Done, rounds_done: int) -> dict:
    return load_checkpoint(done.folder.checkpoint(rounds_done), CPU)


def test_a_checkpoint_holds_the_sums_of_the_rounds_before_it(learning_run: Done) -> None:
    for number in range(1, 5):
        kept_run = saved(learning_run, number)
        progress = kept_run["tasks"]["tiny"]["progress"]
        so_far = learning_run.lines[:number]
        assert progress["rounds_done"] == number
        seconds = sum(line["collect_seconds"] + line["update_seconds"] for line in so_far)
        assert progress["seconds"] == pytest.approx(seconds)
        assert progress["alpha_rows"] == pytest.approx(sum(line["alpha_rows"] for line in so_far))
        assert kept_run["best_accuracy"] == pytest.approx(
            max(line["accuracy"]["mean"] for line in so_far)
        )
        assert len(progress["front"]) == so_far[-1]["pareto"]["front_size"]
        own = learning_run.episodes[ENVS * (number - 1) : ENVS * number]
        (kept,) = progress["recent"]
        assert kept["accuracies"] == [episode["accuracy"] for episode in own]
        assert progress["rewards"] == pytest.approx([episode["reward"] for episode in own])
        learner = saved(learning_run, number)["learner"]
        assert learner["rounds"] == number
        assert learner["adam"]["steps"] == sum(line["update"]["steps"] for line in so_far)


def test_the_best_policy_is_the_one_that_played_the_best_round_with_its_weights(
    learning_run: Done, world: World
) -> None:
    accuracies = [line["accuracy"]["mean"] for line in learning_run.lines]
    best = accuracies.index(max(accuracies))
    kept = load_checkpoint(learning_run.folder.best, CPU)
    after = saved(learning_run, best + 1)["learner"]
    if best > 0:
        before = saved(learning_run, best)["learner"]
    else:
        untrained = build_player(settings("ppo").policy, world).learner
        assert untrained is not None
        before = untrained.state_dict()
    moved = 0
    for name, weight in kept["learner"]["policy"].items():
        assert torch.equal(weight, before["policy"][name]), name
        moved += not torch.equal(weight, after["policy"][name])
    assert moved > 10
    assert torch.equal(kept["learner"]["adam"]["first"], before["adam"]["first"])
    assert kept["learner"]["rounds"] == kept["tasks"]["tiny"]["progress"]["rounds_done"] == best


def test_the_first_of_equally_good_rounds_stays_the_best(tmp_path: Path) -> None:
    """One host that is measured on one image is right or wrong, so rounds are equally good."""
    few = settings("ppo", envs=1, rounds=3, steps=1, val_samples=1, control="none", seed=1)
    played = done(few, tmp_path)
    accuracies = [line["accuracy"]["mean"] for line in played.lines]
    assert accuracies.count(max(accuracies)) > 1, "no two rounds are equally good"
    kept = load_checkpoint(played.folder.best, CPU)
    assert kept["learner"]["rounds"] == accuracies.index(max(accuracies))


def test_progress_ends_with_all_env_steps_those_of_the_control_included(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = TelemetryConfig(progress="plain")
    done(settings("random", envs=2, rounds=3, steps=3, control_rounds=2, telemetry=told), tmp_path)
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if "EPS" in line]
    # 3 rounds and 2 of the control, of 6 each
    assert shown.startswith("without growth  30/30 env-steps  ")


@pytest.mark.parametrize(
    ("every", "keep", "names"),
    [(2, 2, [4, 5]), (3, 9, [3, 5]), (0, 9, [5])],
)
def test_checkpoints_are_written_after_every_so_many_rounds_and_after_the_last(
    tmp_path: Path, every: int, keep: int, names: list[int]
) -> None:
    few = settings("wait", envs=1, rounds=5, steps=1, checkpoint_every=every, checkpoint_keep=keep)
    found = done(few, tmp_path).folder.checkpoints()
    assert [path.name for path in found] == [f"checkpoint_{number:06d}.pt" for number in names]


def test_rollbacks_of_all_rounds_stand_in_the_summary(tmp_path: Path) -> None:
    with session(RunFolder(tmp_path)) as within:
        job = Run(settings("wait"), within)
        counts = dict.fromkeys(("germinated", "blended", "fossilized", "pruned"), 0)
        kept = FinalHosts([50.0], [1.0], [1.0], [[-1, -1]], [[1, 1]], [[0.0, 0.0]])
        (task,) = job.tasks.values()
        task.totals = RunTotals(1, 1.0, 1.0, counts | {"rollbacks": 3}, [], [0.0], [kept])
        assert task.summarise().rollbacks == 3


def test_penalties_relax_over_the_rounds_that_the_settings_name_and_not_over_those_of_the_run(
    world: World,
) -> None:
    policy = settings("ppo").policy
    policy = replace(policy, ppo=replace(policy.ppo, floor_penalty_rounds=33))
    learner = build_player(settings("ppo", policy=policy, rounds=7).policy, world).learner
    assert learner is not None
    assert learner.total_updates == 33
