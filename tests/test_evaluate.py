"""Evaluations: fresh seeds, equal hosts for all, the same result every time, clear refusals."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper_soa.agent.config import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config import ComputeConfig, EvaluateConfig, TelemetryConfig, TrainConfig
from esper_soa.env.config import GatesConfig, RewardConfig
from esper_soa.errors import SettingError, UserError
from esper_soa.evaluation import Scores, evaluate, evaluation_settings, final_rents, judge
from esper_soa.nets.config import DataConfig, TaskConfig
from esper_soa.ops.resume import read_run
from esper_soa.ops.rundir import RunFolder
from esper_soa.trainer import run

CPU = torch.device("cpu")
TRAINED = TrainConfig(
    envs=2,
    rounds=1,
    steps=4,
    batch_size=4,
    train_samples=8,
    val_samples=8,
    slots=["r0c0", "r0c1"],
    control="none",
    gates=GatesConfig(min_gradient_health=0.3),
    task=TaskConfig(name="tiny", base_channels=2, num_blocks=2, kernel_size=1, num_pools=2),
    data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=64),
    policy=PolicyConfig(network=NetworkConfig(hidden=8, features=8), ppo=PPOConfig(epochs=1)),
    telemetry=TelemetryConfig(progress="off"),
    compute=ComputeConfig(threads=1),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained")
    run(TRAINED, RunFolder(path))
    return path


def asked(trained: Path, **changed: object) -> EvaluateConfig:
    cfg = EvaluateConfig(
        checkpoint=str(trained),
        policies=["ppo", "random", "wait"],
        episodes=2,
        progress="off",
        compute=ComputeConfig(threads=1),
    )
    return replace(cfg, **changed)  # type: ignore[arg-type]


def results(cfg: EvaluateConfig, path: Path) -> dict:
    path.mkdir()
    evaluate(cfg, RunFolder(path))
    return json.loads((path / "evaluation.json").read_text())


def test_every_policy_plays_every_episode_of_every_env_and_again_with_the_same_result(
    trained: Path, tmp_path: Path
) -> None:
    first = results(asked(trained), tmp_path / "a")
    again = results(asked(trained), tmp_path / "b")
    assert first == again
    assert list(first["policies"]) == ["ppo", "random", "wait"]
    for policy in first["policies"].values():
        assert {len(values) for values in policy["samples"].values()} == {4}
    assert first["policies"]["ppo"]["net_less_first"] is None
    assert (
        first["policies"]["wait"]["net_less_first"]["low"]
        <= first["policies"]["wait"]["net_less_first"]["high"]
    )
    assert "accuracy - rent" in (tmp_path / "a" / "evaluation.txt").read_text()


def test_policies_meet_the_same_hosts_and_another_seed_means_others(
    trained: Path, tmp_path: Path
) -> None:
    alone = results(asked(trained, policies=["wait"]), tmp_path / "alone")
    last = results(asked(trained, policies=["random", "wait"]), tmp_path / "last")
    other = results(asked(trained, policies=["wait"], seed=1), tmp_path / "other")
    waiting = [found["policies"]["wait"]["samples"]["accuracy"] for found in (alone, last, other)]
    rewards = [found["policies"]["wait"]["samples"]["reward"] for found in (alone, other)]
    assert waiting[0] == waiting[1]
    assert rewards[0] != rewards[1]


def test_the_rent_is_the_logarithm_of_the_growth_up_to_a_limit() -> None:
    # 0.5 ln(1 + growth), at most 1.5; growth is taken of at least 200 parameters
    reward = RewardConfig()
    assert final_rents([1000.0, 3000.0], 1000, reward) == [0.0, pytest.approx(0.5 * math.log(3))]
    assert final_rents([300.0], 100, reward) == [pytest.approx(0.5 * math.log(2))]
    assert final_rents([1e9], 1000, reward) == [1.5]


def test_a_policy_is_set_against_the_first_pair_by_pair() -> None:
    none = [0.0, 0.0]
    scores = {
        "wait": Scores(none, none, [10.0, 50.0], none),
        "random": Scores(none, none, [12.0, 52.0], none),
    }
    first, second = judge(scores, EvaluateConfig(checkpoint="x"))
    assert first.lead is None
    assert second.lead == (2.0, 2.0, 2.0)
    assert second.means["net"].mean == 32.0


def test_the_learned_policy_of_a_scripted_run_is_refused(tmp_path: Path) -> None:
    scripted = tmp_path / "run"
    scripted.mkdir()
    run(replace(TRAINED, policy=PolicyConfig(name="wait")), RunFolder(scripted))
    with pytest.raises(
        SettingError, match="policies=ppo: must be other than ppo: the checkpoint is of policy wait"
    ):
        results(asked(scripted), tmp_path / "evaluation")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"policies": []}, r"policies=\[\]: must be a list of 1 to 64 items, each one of ppo"),
        ({"policies": ["wait", "wait"]}, "without repetition"),
        ({"policies": ["best"]}, "policies=best: must be one of ppo, random"),
        ({"episodes": 0}, "episodes=0: must be in .1, 1000000."),
        ({"confidence": 1.0}, r"confidence=1\.0: must be in .0, 1."),
        ({"checkpoint": ""}, "checkpoint='': must be a checkpoint or a run folder"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(changed: dict, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        asked(Path("x"), **changed)


def test_a_checkpoint_with_foreign_settings_is_refused(trained: Path) -> None:
    saved = read_run(RunFolder(trained).checkpoint(1), CPU)
    saved.settings["wings"] = 2
    with pytest.raises(
        UserError, match="checkpoint: its settings are not those of this program .*wings"
    ):
        evaluation_settings(saved, asked(trained))


def test_the_command_line_refuses_a_path_that_leads_nowhere_and_needs_no_torch_for_it(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "esper_soa.evaluate", "checkpoint=nowhere"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"HYDRA_FULL_ERROR": "0"},
    )
    assert done.returncode == 2
    assert done.stderr == "error: checkpoint=nowhere: there is no such file or folder\n"
    assert list(tmp_path.iterdir()) == []
