"""Whole runs with episodes that end early: beside a control, with what they leave and a report."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.env import EarlyStopConfig, GatesConfig
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig, TelemetryConfig, TrainConfig, settings_yaml
from esper_soa.lab.report.groups import groups_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.lab.report.sections import make_drawing
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.results.final_table import Summary
from tests.builders.lanes import some_of
from tests.builders.tiny_runs import run

ENVS = 3
STEPS = 12
ROUNDS = 2
SETTINGS = TrainConfig(
    device="cpu",
    envs=ENVS,
    rounds=ROUNDS,
    steps=STEPS,
    batch_size=4,
    train_samples=8,
    val_samples=32,
    slots=["r0c0", "r0c1"],
    control="none",
    task=TaskConfig(name="tiny", base_channels=2, num_blocks=2, kernel_size=1, num_pools=2),
    data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=32),
    gates=GatesConfig(min_gradient_health=0.3),
    policy=PolicyConfig(
        network=NetworkConfig(hidden=8, features=8), ppo=PPOConfig(epochs=2, minibatches=1)
    ),
    telemetry=TelemetryConfig(progress="off"),
    compute=ComputeConfig(threads=1, workers=1),
    report=False,
)
# after the first env-step nothing is a gain
AT_ONCE = EarlyStopConfig(patience=1, min_delta=100.0, min_steps=4)


def played(folder: Path, **changed: object) -> tuple[Summary, list[dict], list[dict]]:
    """What a run came to, its lines of metrics.jsonl and of episodes.jsonl."""
    cfg = replace(SETTINGS, **changed)  # type: ignore[arg-type]
    place = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    summary = run(cfg, place)
    return summary, lines_of(place.metrics), lines_of(place.episodes)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("player", "engine"),
    [("ppo", "auto"), pytest.param("heuristic", "torch", marks=pytest.mark.slow)],
)
def test_a_round_whose_episodes_all_end_early_is_one_of_fewer_env_steps(
    tmp_path: Path, player: str, engine: str
) -> None:
    compute = replace(SETTINGS.compute, engine=engine)
    policy = replace(SETTINGS.policy, name=player)
    same = {"policy": policy, "compute": compute, "early_stop": AT_ONCE, "checkpoint_every": 1}
    summary, lines, episodes = played(tmp_path, **same)
    assert [one["env_steps"] for one in episodes] == [4] * ENVS * ROUNDS
    assert [line["env_steps"] for line in lines] == [4 * ENVS, 8 * ENVS]
    assert {one["ended_by"] for one in episodes} == {"plateau"}
    for line in lines:
        assert sum(line["ops"].values()) == 4 * ENVS
        assert not line.get("non_finite")
        if player == "ppo":
            assert line["update"]["valid_rows"] == 4 * ENVS
            assert np.isfinite(list(line["update"].values())).all()
    steps = read_table(tmp_path, "steps")
    events = read_table(tmp_path, "events")
    assert (len(steps["step"]), steps["step"].max()) == (4 * ENVS * ROUNDS, 4)
    assert (events["kind"] == "ended_early").sum() == ENVS * ROUNDS
    assert np.isfinite(steps["accuracy"]).all()
    assert summary.telemetry["env_steps"] == 4 * ENVS * ROUNDS


def test_env_steps_and_pace_count_those_that_were_played_also_after_a_resume(
    tmp_path: Path,
) -> None:
    early = EarlyStopConfig(patience=4, min_delta=0.0, min_steps=3)
    random = replace(SETTINGS.policy, name="random")
    asked = {"early_stop": early, "checkpoint_every": 1, "policy": random}
    played(tmp_path, **asked)
    place = RunFolder(tmp_path)
    plain = replace(SETTINGS.telemetry, progress="plain", plain_interval=1000.0)
    longer = replace(SETTINGS, rounds=3, control="wait", telemetry=plain, **asked)
    summary = run(longer, place, place.checkpoint(2))
    lines = lines_of(place.metrics)
    episodes = lines_of(place.episodes)
    counts = [
        sum(one["env_steps"] for one in episodes if one["round"] <= number) for number in (1, 2, 3)
    ]
    assert counts[-1] < 3 * ENVS * STEPS
    assert [line["env_steps"] for line in lines] == counts
    assert (summary.speed.env_steps, summary.env_steps_before) == (counts[2], counts[1])
    for line, before in zip(lines, (0, *counts), strict=False):
        seconds = line["collect_seconds"] + line["update_seconds"]
        assert line["eps"] * seconds == pytest.approx(line["env_steps"] - before)
    (control,) = summary.controls
    bar = [line for line in place.log.read_text().splitlines() if "env-steps  " in line]
    whole = counts[2] + control.env_steps
    assert f"{whole}/{whole} env-steps" in bar[-1]
    assert len(bar) == 1


@pytest.mark.parametrize(
    "control", some_of(["wait", "static_final", "heuristic", "static_large"], "wait")
)
def test_a_control_heeds_early_stop_too(tmp_path: Path, control: str) -> None:
    """And is what a run of that policy would be."""
    early = EarlyStopConfig(patience=4, min_delta=0.0, min_steps=3)
    random = replace(SETTINGS.policy, name="random")
    summary, _, _ = played(tmp_path / "run", control=control, early_stop=early, policy=random)
    whole, _, _ = played(tmp_path / "whole", control=control, policy=random)
    (stopped,), (not_stopped,) = summary.controls, whole.controls
    for mine, its in zip(stopped.episodes, not_stopped.episodes, strict=True):
        assert all(np.isfinite(mine.test_accuracies))
        assert all(flop > 0 for flop in mine.train_flop)
        assert sum(mine.train_flop) < sum(its.train_flop)
    if control in ("wait", "heuristic"):
        policy = replace(SETTINGS.policy, name=control)
        own, lines, _ = played(tmp_path / "own", early_stop=early, policy=policy)
        assert stopped.episodes == own.grown.episodes
        assert stopped.env_steps == lines[1]["env_steps"] - lines[0]["env_steps"]
        flop = sum(stopped.episodes[-1].train_flop) / ENVS
        assert lines[-1]["train_flop"] == pytest.approx(flop)


def test_learning_rates_follow_the_length_of_each_episode(tmp_path: Path) -> None:
    """Hosts with an episode of so many env-steps end as those of a run of that length."""
    task = replace(SETTINGS.task, lr_schedule="cosine")
    lengths = EarlyStopConfig(length=f"[4,{STEPS}]")
    asked = {"policy": replace(SETTINGS.policy, name="wait"), "task": task, "rounds": 1}
    mixed, _, _ = played(tmp_path / "mixed", early_stop=lengths, **asked)
    for first, steps in enumerate((4, STEPS)):
        plain, _, _ = played(tmp_path / str(steps), steps=steps, **asked)
        for mine, its in zip(mixed.grown.episodes, plain.grown.episodes, strict=True):
            assert mine.test_losses[first::2] == its.test_losses[first::2]


def test_controls_train_at_the_cost_of_the_grown_host(tmp_path: Path) -> None:
    names = ["wait", "static_final", "static_large"]
    asked = {"control": f"[{','.join(names)}]", "control_budget": "flop"}
    asked |= {"policy": replace(SETTINGS.policy, name="heuristic"), "rounds": 1}
    summary, _, _ = played(tmp_path / "run", **asked)
    assert [control.name for control in summary.controls] == names
    for control in summary.controls:
        assert max(control.flat("num_steps")) > (control.name == "wait") * STEPS
        costs = (score.flat("train_flop")[-ENVS:] for score in (summary.grown, control))
        for spent, budget, steps in zip(*costs, control.flat("num_steps"), strict=True):
            assert abs(budget - spent) <= budget / steps


def test_a_control_on_as_many_images_ends_where_the_grown_host_did(tmp_path: Path) -> None:
    early = EarlyStopConfig(patience=4, min_delta=0.0, min_steps=3)
    random = replace(SETTINGS.policy, name="random")
    asked = {"control": "[wait,static_final]", "control_budget": "images"}
    summary, _, _ = played(tmp_path / "run", early_stop=early, policy=random, **asked)
    ends = summary.grown.flat("num_steps")
    assert len(set(ends)) > 1
    assert [control.flat("num_steps") for control in summary.controls] == [ends, ends]
    wait = {"policy": replace(SETTINGS.policy, name="wait"), "steps": int(ends[-1])}
    longest, _, _ = played(tmp_path / "wait", early_stop=EarlyStopConfig(), **wait)
    assert summary.controls[0].flat("test_losses")[-1] == longest.grown.flat("test_losses")[-1]


def test_a_report_of_such_a_run_shows_the_env_steps_that_were_played(tmp_path: Path) -> None:
    early = EarlyStopConfig(patience=4, min_delta=0.0, min_steps=3)
    asked = {"control": "wait", "early_stop": early}
    _, _, episodes = played(tmp_path, **asked)
    RunFolder(tmp_path).config.write_text(settings_yaml(replace(SETTINGS, **asked)))
    _, tables = make_drawing(groups_of(find_runs([str(tmp_path)])))
    ends = {(one["round"], one["env"]): one["env_steps"] for one in episodes}
    curve = tables["accuracies"]
    points = zip(curve["round"], curve["host"], strict=True)
    counted: dict[tuple[int, int], int] = {}
    for name, env in points:
        place = int(str(name).split()[0]), int(str(env))
        counted[place] = counted.get(place, 0) + 1
    assert counted
    assert counted == {place: ends[place] for place in counted}
    early_ones = {place for place in counted if ends[place] < STEPS}
    marks = tables["marks"]
    marked = {
        (int(str(name).split()[0]), int(str(env)))
        for name, env, event in zip(marks["round"], marks["host"], marks["event"], strict=True)
        if event == "ended_early"
    }
    assert marked == early_ones
    assert early_ones
    for column in tables["hosts"].values():
        assert None not in column
    assert max(int(str(end)) for end in tables["lanes"]["to"]) <= max(ends.values())
