"""Several tasks in one run: each is played as in a run of its own, one policy learns from all."""

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from esper_soa.config.agent import ImitationConfig
from esper_soa.config.compose import compose_settings
from esper_soa.config.nets import DataConfig, TaskConfig
from esper_soa.config.settings import (
    EvaluateConfig,
    TelemetryConfig,
    TrainConfig,
    settings_from_yaml,
    settings_yaml,
)
from esper_soa.lab.run_folders import find_run_folders
from esper_soa.simulator import Simulator
from esper_soa.system.errors import UserError
from esper_soa.training.files.checkpoint import load_checkpoint, save_checkpoint
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.players import build_players
from esper_soa.training.loop.resume import may_change
from esper_soa.training.start.runs import open_run
from tests.builders.equal_runs import CPU, same, settings
from tests.builders.tiny_runs import evaluate, fresh, log_of, on_tasks, records, resumed, timeless

OTHER = TaskConfig(name="other", base_channels=3, num_blocks=3, kernel_size=3, num_pools=1)
NAMES = ("tiny", "other")
SAME = (".npz", ".parquet", ".safetensors")


def alone(player: str = "ppo", **changed: object) -> list[TrainConfig]:
    """Two tasks, each by itself: other hosts, slots, numbers of envs and images."""
    first = settings(player, **{"rounds": 2} | changed)
    data = DataConfig(name="synthetic", synthetic_train=24, synthetic_test=20)
    slots = ["r0c0", "r0c1", "r0c2"]
    return [first, replace(first, envs=3, task=OTHER, slots=slots, data=data, train_samples=8)]


def together(player: str = "ppo", **changed: object) -> TrainConfig:
    """The tasks of `alone` in one run."""
    return on_tasks(*alone(player, **changed))


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two rounds on both tasks."""
    path = tmp_path_factory.mktemp("learning")
    cfg = together()
    fresh(cfg, path)
    (path / "config.yaml").write_text(settings_yaml(cfg))  # as the command does
    return path


def timeless_files(folder: Path) -> dict[Path, bytes]:
    """Those of a run that no clock is in: answers, episodes, tables and networks."""
    found = [path for path in folder.rglob("*") if path.suffix in SAME or path.stem == "episodes"]
    return {path.relative_to(folder): path.read_bytes() for path in found}


def test_each_task_is_played_to_the_bit_as_in_a_run_of_its_own(tmp_path: Path) -> None:
    telemetry = TelemetryConfig(progress="plain", plain_interval=0.0)
    asked = {"control": "wait", "checkpoint_keep": 1}
    before = {*threading.enumerate()}
    fresh(together("random", telemetry=telemetry, **asked), tmp_path / "both")
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
        assert not thread.is_alive(), "what a task writes with is closed"
    log = log_of(tmp_path / "both")
    bar = [line for line in log if "env-steps  left" in line]
    assert "45/45 env-steps" in bar[-1]
    told = [line.split("  ")[0] for line in bar]
    rounds = [f"round {number}/2" for number in (1, 2)] + ["without growth"]
    assert [*dict.fromkeys(told)] == [f"DEBUG {one} {name}" for one in rounds for name in NAMES]
    for cfg in alone("random", **asked):
        name = cfg.task.name
        fresh(cfg, tmp_path / name)
        mine, its = tmp_path / "both" / name, tmp_path / name
        assert len(records(mine / "episodes.jsonl")) == 2 * cfg.envs
        assert timeless(mine / "metrics.jsonl") == timeless(its / "metrics.jsonl")
        summaries = [json.loads((one / "summary.json").read_text()) for one in (mine, its)]
        assert [line for line in log if f": {name} on " in line], "its final table"
        for part in ("grown", "controls", "telemetry"):
            assert summaries[0][part] == summaries[1][part]
        assert timeless_files(mine) == timeless_files(its)


def test_players_of_several_tasks_share_a_learner_and_each_has_its_agent_and_teacher() -> None:
    worlds = [build_world(one, CPU) for one in alone()]
    slots = [world.setup.shape.slots for world in worlds]
    plain = alone()[0].policy
    imitation = ImitationConfig(rounds=1, teacher="parts_of_users:placed")
    first, second = build_players(replace(plain, imitation=imitation), worlds)
    assert first.learner is second.learner is not None
    assert first.learner.policies == [first.agent, second.agent]
    assert [one.teacher.agent.slots for one in (first, second)] == slots
    players = build_players(replace(plain, name="parts_of_users:placed"), worlds)
    assert [one.agent.agent.slots for one in players] == slots


def test_one_policy_learns_from_the_rounds_of_all_tasks(learning: Path) -> None:
    lines = {name: timeless(learning / name / "metrics.jsonl") for name in NAMES}
    for one, other in zip(*lines.values(), strict=True):
        assert one["update"] == other["update"]
        # two envs and three, of three env-steps
        assert one["update"]["valid_rows"] == 15
        assert one["accuracy"] != other["accuracy"]
    versions = json.loads((learning / "versions.json").read_text())
    assert (list(versions["tasks"]), versions["device"]) == ([*NAMES], "cpu")
    for cfg in alone():
        assert open_run(learning).tasks[cfg.task.name].settings == cfg
        own_ = json.loads((learning / cfg.task.name / "versions.json").read_text())
        assert own_["data"] == versions["tasks"][cfg.task.name]["data"]
    saved = load_checkpoint(RunFolder(learning).checkpoint(2), CPU)
    assert list(saved["tasks"]) == list(NAMES)
    means = [
        sum(line["accuracy"]["mean"] for line in rounds) / 2
        for rounds in zip(*lines.values(), strict=True)
    ]
    assert saved["best_accuracy"] == pytest.approx(max(means))
    best = load_checkpoint(RunFolder(learning).best, CPU)
    assert best["learner"]["rounds"] == means.index(max(means))


def test_a_resumed_run_on_several_tasks_ends_as_the_one_that_went_on(
    learning: Path, tmp_path: Path
) -> None:
    fresh(together(rounds=1), tmp_path)
    for name in NAMES:
        (tmp_path / name / "metrics.jsonl").open("a").write('{"round": 2}\n')
    (tmp_path / "other" / "versions.json").write_text('{"kernels": {"engine": "earlier"}}')
    path = RunFolder(tmp_path).checkpoint(1)
    saved = load_checkpoint(path, CPU)
    saved["versions"]["torch"] = "earlier"
    data = saved["tasks"]["other"]["data"]
    identity = data["identity"]
    data["identity"] = "another"
    save_checkpoint(path, saved)
    with pytest.raises(UserError, match="images are not those of the checkpoint"):
        resumed(together(), tmp_path)
    data["identity"] = identity
    save_checkpoint(path, saved)
    resumed(together(), tmp_path)
    told = (tmp_path / "log.txt").read_text()
    for changed in ("engine", "torch"):
        assert told.count(f"resume   changed {changed}: earlier -> ") == 1
    for name in NAMES:
        files = [one / name / "metrics.jsonl" for one in (tmp_path, learning)]
        assert timeless(files[0]) == timeless(files[1])
    parts = [load_checkpoint(RunFolder(one).checkpoint(2), CPU) for one in (tmp_path, learning)]
    same(parts[0]["learner"], parts[1]["learner"])
    same(parts[0]["watch"], parts[1]["watch"])


def test_every_task_is_evaluated_and_has_its_own_records(learning: Path, tmp_path: Path) -> None:
    cfg = EvaluateConfig(str(learning), policies=["ppo", "wait"], episodes=1, progress="off")
    evaluate(cfg, RunFolder(tmp_path))
    assert not [line for line in log_of(tmp_path) if "these are not" in line]
    run = open_run(learning)
    assert list(run.tasks) == list(NAMES)
    for name, envs, images in zip(NAMES, (2, 3), (16, 20), strict=True):
        found = json.loads((tmp_path / name / "evaluation.json").read_text())
        assert len(found["policies"]["ppo"]["samples"]["reward"]) == envs
        task = run.tasks[name]
        assert task.export(0).spec["task"] == task.summary["task"] == name
        assert task.summary["validation_images"] == images
        controller = run.policy(task=name)
        assert controller.spec["task"] == name
        assert len(controller.spec["slots"]) == envs
    scores = [run.tasks[name].summary["grown"]["test_accuracy"] for name in NAMES]
    assert run.summary["grown"]["test_accuracy"] == pytest.approx(sum(scores) / 2)
    for ask in (run.metrics, run.episodes, run.steps, run.export):
        with pytest.raises(
            UserError, match="^/.*: has a folder for each of its tasks: tiny, other"
        ):
            ask()
    # wherever a run with one task would be found, those of several are
    deep = tmp_path / "runs" / "name" / "sweep" / "0"
    deep.parent.mkdir(parents=True)
    shutil.copytree(learning, deep)
    assert [*find_run_folders([tmp_path / "runs"])] == ["other", "tiny"]


def test_a_folder_that_holds_a_task_of_another_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    told = (
        r"^run_dir=/.*/other: already holds the results of a run \(metrics\.jsonl\)\. Choose "
        r"another folder, or go on with resume=auto\.$"
    )
    with pytest.raises(UserError, match=told):
        fresh(together("wait"), tmp_path)


def test_tasks_are_what_the_settings_make_of_each_alone() -> None:
    common = ["data=fashion32", "task.host_lr=0.03"]
    entries = "tasks=[cifar_impaired,'cifar_baseline envs=3 slots=2','text_small data=text']"
    cfg = compose_settings("smoke", [*common, entries])
    assert [*cfg.by_task] == ["cifar_impaired", "cifar_baseline", "text_small"]
    first, second, third = cfg.by_task.values()
    assert first == compose_settings("smoke", [*common, "task=cifar_impaired"])
    assert second == compose_settings(
        "smoke", [*common, "task=cifar_baseline", "envs=3", "slots=2"]
    )
    assert third == compose_settings("smoke", [common[1], "task=text_small", "data=text"])
    assert settings_from_yaml(settings_yaml(cfg)) == cfg


def test_one_policy_plays_hosts_of_images_and_of_text(tmp_path: Path) -> None:
    text = settings(envs=1, steps=2, rounds=1, val_samples=4, slots=["r0c1"])
    read = compose_settings("smoke", ["data=auto", "task=text_small"])
    text = replace(text, task=read.task, data=read.data)
    images = settings(envs=2, steps=2, rounds=1, val_samples=4)
    fresh(on_tasks(images, text), tmp_path)
    (line,) = timeless(tmp_path / "text_small" / "metrics.jsonl")
    assert line["update"]["valid_rows"] == 6
    assert line["update"]["steps"] > 0
    assert json.loads((tmp_path / "text_small" / "summary.json").read_text())["perplexity"]


@pytest.mark.parametrize(
    ("setting", "free"), [("data.root", True), ("envs", False), ("task.host_lr", False)]
)
def test_a_resumed_run_may_change_of_a_task_what_it_may_of_one_alone(
    setting: str, free: bool
) -> None:
    assert may_change(setting) == may_change(f"worlds.tiny.{setting}") == free


def test_a_single_task_is_the_run_on_it() -> None:
    listed = compose_settings("smoke", ["tasks=['cifar_minimal envs=3']"])
    assert listed == compose_settings("smoke", ["task=cifar_minimal", "envs=3"])
    assert listed.by_task == {"cifar_minimal": listed}


def test_a_simulator_is_of_one_task() -> None:
    with pytest.raises(
        UserError, match=r"^tasks=\[\]: must be a single task here\. Make a simulator of each\.$"
    ):
        Simulator(together("wait"))


BOTH = "tasks=[cifar_impaired,cifar_minimal]"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["tasks=[cifar_impaired,'cifar_minimal seed=3']"],
            "tasks=cifar_minimal seed=3: must be without seed=3, which is a setting of the "
            "whole run.",
        ),
        (
            ["tasks=[cifar_impaired,cifar_impaired]"],
            "tasks=cifar_impaired: must be tasks of different names. Give one of them another, "
            "as in 'cifar_impaired task.name=other'.",
        ),
        (
            ["tasks=[cifar_impaired,nothing]"],
            "task=nothing: must be cifar_baseline, cifar_deep_impaired, "
            "cifar_deep_multichannel, cifar_highres, cifar_impaired, cifar_minimal, "
            "cifar_multichannel, cifar_postpool, cifar_scale, text_small, tinystories. "
            "A host of your own is task.host=module:name.",
        ),
        (
            [BOTH, "task=cifar_scale"],
            "task=cifar_scale: must be left out with tasks=['cifar_impaired', 'cifar_minimal'].",
        ),
        (
            [BOTH, "ranks=2"],
            "ranks=2: must be 1 with several tasks. Or play one alone.",
        ),
        (
            ["tasks=[cifar_impaired,'text_small data=synthetic slots=[r2c2]']"],
            "slots=r2c2: must be a slot of text_small: r0c0, r0c1, r0c2.",
        ),
        (
            ["tasks=[cifar_impaired,text_small]", "policy=heuristic"],
            "policy.heuristic.blueprint_rotation=conv_light: must be one of task.blueprints: "
            "attention, norm, lora, lora_large, mlp_small, mlp, flex_attention.",
        ),
        (
            ["tasks=[cifar_impaired,'cifar_minimal task.blueprints=[norm,my:Own]']"],
            "tasks=['cifar_impaired', 'cifar_minimal task.blueprints=[norm,my:Own]']: must be "
            "so that all tasks offer the same blueprints of your own. The policy has a row for "
            "each of them.",
        ),
    ],
)
def test_what_cannot_be_played_together_is_refused_by_name(words: list[str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_settings("smoke", words)
    assert str(caught.value) == told
