"""Runs that start from a policy learned before, runs that imitate first, and how that fails."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper_soa.agent.ppo import Learner
from esper_soa.config.agent import ImitationConfig, NetworkConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.system.errors import UserError
from esper_soa.training.files import find_policy
from esper_soa.training.files.checkpoint import load_checkpoint, save_checkpoint
from esper_soa.training.files.policies import POLICY_FORMAT, save_policy
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.players import build_player
from tests.builders.equal_runs import assert_equal_runs, content, lines, same, settings
from tests.builders.tiny_runs import fresh, resumed

CPU = torch.device("cpu")
FACTS: dict[str, object] = {
    "rounds": 40,
    "tasks": ["cifar_baseline", "cifar_impaired"],
    "data": ["fashion32"],
}


def starting(init: object, **changed: object) -> TrainConfig:
    """The small run of equal_runs with another seed, from the policy `init`."""
    cfg = settings(seed=7, **changed)
    return replace(cfg, policy=replace(cfg.policy, init=str(init)))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three rounds."""
    path = tmp_path_factory.mktemp("before")
    fresh(settings(rounds=3), path)
    return path


@pytest.fixture
def package(before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of policies that ship, with one: the policy of `before`, named `grower`."""
    folder = tmp_path / "policies"
    folder.mkdir()
    save_policy(folder / "grower.policy", read_run(RunFolder(before).checkpoint(3), CPU), FACTS)
    monkeypatch.setattr(find_policy, "POLICY_FOLDER", folder)
    return folder


def built(cfg: TrainConfig) -> Learner:
    learner = build_player(cfg.policy, build_world(cfg, CPU)).learner
    assert learner is not None
    return learner


def assert_taken_over(learner: Learner, before: Path) -> None:
    saved = content(before, 3)["learner"]
    state = learner.state_dict()
    for part in ("policy", "reward", "value"):
        assert isinstance(state[part], dict)
        same(dict(state[part]), saved[part], part)
    assert saved["adam"]["steps"] > 0
    assert learner.rounds == learner.train_steps == learner.skipped == int(learner.adam.steps) == 0
    assert not learner.adam.first.any()
    assert not learner.adam.second.any()


# --- where it may come from


def test_a_run_starts_from_the_newest_checkpoint_of_a_run_folder(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_taken_over(built(starting(before)), before)
    monkeypatch.setenv("HOME", str(before.parent))
    assert_taken_over(built(starting(f"~/{before.name}")), before)


def test_a_run_starts_from_a_policy_that_ships_by_its_name_or_from_its_file(
    before: Path, package: Path
) -> None:
    assert find_policy.packaged_policies() == ["grower"]
    assert_taken_over(built(starting("grower")), before)
    assert_taken_over(built(starting(package / "grower.policy")), before)


# --- going on


@pytest.mark.parametrize("teacher", ["schedule", pytest.param("heuristic", marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_within_its_rounds_of_imitation_equals_one_that_was_not(
    tmp_path: Path, teacher: str
) -> None:
    cfg = settings(rounds=3)
    imitation = ImitationConfig(rounds=2, teacher=teacher, epochs=3)
    cfg = replace(cfg, policy=replace(cfg.policy, imitation=imitation))
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    fresh(cfg, whole)
    fresh(replace(cfg, rounds=1), parts)
    resumed(replace(cfg, rounds=2), parts)
    resumed(cfg, parts)
    assert_equal_runs(whole, parts, rounds=3)
    told = [{"cross_entropy", "agreement"} & set(line["update"]) for line in lines(whole)]
    assert told == [{"cross_entropy", "agreement"}] * 2 + [set()]
    assert ["approx_kl" in line["update"] for line in lines(whole)] == [False] * 2 + [True]
    assert [line["update"]["steps"] for line in lines(whole)] == [3] * 2 + [2]
    assert content(whole, 3)["learner"]["adam"]["steps"] == 2  # of the round of PPO


def test_rounds_of_imitation_have_the_teacher_that_is_asked_for() -> None:
    cfg = settings()
    imitation = ImitationConfig(rounds=1, teacher="schedule")
    cfg = replace(
        cfg,
        policy=replace(
            cfg.policy, imitation=imitation, schedule=replace(cfg.policy.schedule, tempo=2)
        ),
    )
    world = build_world(cfg, CPU)
    assert vars(build_player(cfg.policy, world).teacher)["cfg"].tempo == 2
    assert build_player(settings().policy, world).teacher is None


# --- what fails


def test_other_sizes_are_refused_with_the_settings_to_give(package: Path) -> None:
    cfg = starting("grower")
    wider = replace(
        cfg, policy=replace(cfg.policy, network=NetworkConfig(hidden=16, features=8, layers=2))
    )
    with pytest.raises(UserError) as caught:
        built(wider)
    assert str(caught.value) == (
        "policy.init=grower: its network is of another size. Give policy.network.hidden=8 "
        "policy.network.layers=1 "
        "(instead of hidden=16 layers=2)"
    )


def test_a_head_that_a_policy_does_not_know_is_told(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = package / "grower.policy"
    whole = load_checkpoint(path, CPU)
    assert isinstance(whole["learner"], dict)
    weights = whole["learner"]["policy"]
    known = {name: weights[name] for name in weights if not name.startswith("heads.tempo.")}
    save_checkpoint(path, whole | {"learner": whole["learner"] | {"policy": known}})
    caplog.set_level("INFO")
    built(starting("grower"))
    assert "start    heads it does not know begin as new: tempo" in caplog.messages


def test_a_policys_file_holds_tensors_and_plain_values_alone_and_names_no_folder(
    before: Path, package: Path
) -> None:
    found = torch.load(package / "grower.policy", weights_only=True)
    assert found["format"] == POLICY_FORMAT
    assert set(found["learner"]) == {"policy", "reward", "value"}
    assert (found["network"]["hidden"], found["network"]["layers"]) == (8, 1)
    assert found["facts"] == dict(FACTS)
    assert str(before).encode() not in (package / "grower.policy").read_bytes()
