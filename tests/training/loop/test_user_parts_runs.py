"""Whole runs with a user's blueprints: learned, saved, resumed, handed on, called by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper_soa.agent.policy import BLUEPRINT_TABLES
from esper_soa.config.nets import DataConfig, TaskConfig, TransformerConfig
from esper_soa.config.settings import EvaluateConfig, TrainConfig, settings_from_mapping
from esper_soa.system.errors import UserError
from esper_soa.training.files.policies import load_policy, save_policy
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.evaluation import build_agent
from esper_soa.training.loop.players import build_player
from tests.builders.equal_runs import CPU, assert_equal_runs, lines, settings, with_own
from tests.builders.tiny_runs import fresh, log_of, resumed

FACTS: dict[str, object] = {"rounds": 3, "tasks": ["tiny"], "data": ["synthetic"]}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six rounds that nothing disturbed, of a learning policy, with a control that trains."""
    path = tmp_path_factory.mktemp("before")
    fresh(with_own("grouped", "twice", control="static_final"), path)
    return path


def test_a_resumed_run_with_own_blueprints_equals_one_that_was_not_stopped(
    before: Path, tmp_path: Path
) -> None:
    cfg = with_own("grouped", "twice", control="static_final")
    fresh(replace(cfg, rounds=3), tmp_path)
    resumed(cfg, tmp_path)
    assert_equal_runs(before, tmp_path, rounds=6)
    grown = {name for record in lines(before) for name in record["blueprints"]}
    assert grown == {"norm", "grouped", "twice"}
    assert [line for line in log_of(before) if "seeds    " in line and "INFO" in line] == [
        "INFO seeds    grouped of your own, code 13",
        "INFO seeds    twice of your own, code 14",
    ]
    assert not any("plain torch" in line for line in log_of(before))


TEXT: dict[str, object] = {
    "task": TaskConfig(
        host="transformer",
        num_classes=256,
        blueprints=["norm"],
        transformer=TransformerConfig(width=6, layers=2, heads=2, context=8, segments=2),
    ),
    "data": DataConfig(name="text", context=8),
}


@pytest.mark.parametrize(("mine", "changed"), [("particular", {}), ("dense", TEXT)])
def test_a_wider_control_needs_nothing_of_what_was_made_for_the_hosts_of_the_run(
    mine: str, changed: dict[str, object], tmp_path: Path
) -> None:
    cfg = settings("schedule", control="static_large", rounds=1, **changed)
    mine = f"parts_of_users:{mine}"
    schedule = replace(cfg.policy.schedule, blueprint=mine)
    cfg = replace(
        cfg,
        task=replace(cfg.task, blueprints=[mine]),
        policy=replace(cfg.policy, schedule=schedule),
    )
    summary = fresh(
        replace(cfg, reward=replace(cfg.reward, mode="parts_of_users:second")), tmp_path
    )
    assert summary.seeds["germinated"] > 0


def test_rewards_that_are_not_finite_are_said_once_and_counted(tmp_path: Path) -> None:
    cfg = settings("ppo", rounds=2, steps=4)
    mine = ["norm", "parts_of_users:infinite"]
    cfg = replace(cfg, task=replace(cfg.task, blueprints=mine))
    fresh(replace(cfg, reward=replace(cfg.reward, mode="parts_of_users:lost")), tmp_path)
    assert [line["rewards_not_finite"] for line in lines(tmp_path)] == [cfg.envs] * 2
    (told,) = (line for line in log_of(tmp_path) if "is not finite" in line)
    assert told.startswith("WARNING round 1  the reward of env 0 is not finite at env-step 2")
    parts = "".join(line for line in log_of(tmp_path) if line.startswith("WARNING parts"))
    assert "infinite in [2, 8, 8]: its initial values are not finite" in parts
    assert "lost: it pays nan, not a finite number" in parts


def test_a_run_does_not_go_on_with_other_blueprints(before: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"task.blueprints: \['norm', 'parts_of_users:grouped', .* -> \['norm', 'parts",
    ):
        resumed(with_own("twice", "grouped", control="static_final"), before)


def test_the_policy_of_a_run_with_own_blueprints_is_evaluated(before: Path) -> None:
    saved = read_run(RunFolder(before).checkpoint(6), CPU)
    cfg = settings_from_mapping(saved.settings).for_evaluation(
        EvaluateConfig(checkpoint="given", envs=2)
    )
    policy = build_agent("ppo", cfg.policy, build_world(cfg, CPU), saved)
    rows = policy.state_dict()["embedding.weight"]  # type: ignore[attr-defined]
    assert rows.shape[0] == 13 + 2 + 1


def rows_of(cfg: TrainConfig) -> dict[str, torch.Tensor]:
    """The tables by blueprint of the policy that a run of these settings begins with."""
    learner = build_player(cfg.policy, build_world(cfg, CPU)).learner
    assert learner is not None
    return {name: learner.policy.state_dict()[name] for name in BLUEPRINT_TABLES}


def test_a_policy_is_handed_on_to_other_own_blueprints_by_their_names(
    before: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cfg = with_own("instead", "grouped")
    saved = read_run(RunFolder(before).checkpoint(6), CPU)
    save_policy(tmp_path / "mine.policy", saved, FACTS)
    assert load_policy(str(tmp_path / "mine.policy"), CPU).facts["blueprints"] == [
        "grouped",
        "twice",
    ]
    learned = saved.learner["policy"] if saved.learner is not None else {}
    for init in (before, tmp_path / "mine.policy"):
        found = rows_of(replace(cfg, policy=replace(cfg.policy, init=str(init))))
        for name, rows in found.items():
            assert torch.equal(rows[:13], learned[name][:13])
            # instead, which is new to it
            torch.testing.assert_close(rows[13], learned[name][1:8].mean(0))
            assert torch.equal(rows[14], learned[name][13])  # grouped
            assert torch.equal(rows[15:], learned[name][15:])
    told = "start    blueprints it does not know begin as the mean of the others: instead"
    assert caplog.messages.count(told) == 2
