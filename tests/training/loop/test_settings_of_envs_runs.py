"""Runs whose envs have settings of their own: what they leave, how they go on, how they read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper_soa.config.agent import NetworkConfig
from esper_soa.config.settings import EvaluateConfig, TrainConfig
from esper_soa.env.env import Env
from esper_soa.lab.report import run_tables
from esper_soa.lab.report.run_files import read_run
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.players import build_player
from tests.builders.equal_runs import assert_equal_runs, settings
from tests.builders.tiny_runs import evaluate, fresh, records, resumed

PRICE = "reward.rent_weight"
RATE = "task.host_lr"


def scores_of(summary: dict) -> list[dict]:
    """The grown hosts and those of the control."""
    return [summary["grown"], *summary["controls"]]


def drawn(**more: object) -> TrainConfig:
    """Prices are drawn and seen, rates are a list."""
    cfg = settings(envs=4, **more)
    policy = replace(cfg.policy, observe=[PRICE])
    reward = replace(cfg.reward, rent_weight="log_uniform(0.1,10)")
    task = replace(cfg.task, host_lr="[0.01,0.2]")
    return replace(cfg, task=task, reward=reward, policy=policy)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    fresh(drawn(), path)
    return path


def test_a_run_that_draws_and_sees_prices_goes_on_as_if_undisturbed(
    whole: Path, tmp_path: Path
) -> None:
    fresh(drawn(rounds=2), tmp_path)
    resumed(drawn(), tmp_path)
    assert_equal_runs(whole, tmp_path)
    lines = records(whole / "episodes.jsonl")
    assert [line["settings"][RATE] for line in lines[:4]] == [0.01, 0.2, 0.01, 0.2]
    prices = [line["settings"][PRICE] for line in lines]
    assert len(set(prices)) == len(prices) == 16


def test_the_summary_and_the_report_tell_configurations(tmp_path: Path) -> None:
    cfg = settings("wait", envs=4, rounds=2, control="static_large", control_rounds=2)
    fresh(replace(cfg, task=replace(cfg.task, host_lr="[0.01,0.2]")), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [one["settings"] for one in summary["configurations"]] == [{RATE: 0.01}, {RATE: 0.2}]
    for place, one in enumerate(summary["configurations"]):
        sides = zip(scores_of(summary), (one["grown"], *one["controls"]), strict=True)
        for score, figures in sides:
            own = [value for episode in score["episodes"] for value in episode["nets"][place::2]]
            assert figures["net"] == pytest.approx(sum(own) / 4)
    assert f"{RATE}=0.2" in (tmp_path / "log.txt").read_text()
    table = run_tables.table_of(run_tables.setting_rows([read_run(tmp_path, "run")]))
    assert table["value"] == [0.01, 0.2] * 8
    assert table["hosts"] == ["grown"] * 8 + ["control"] * 8
    assert table["setting"] == [RATE] * 16


def test_each_env_pays_its_own_rent_in_summary_and_evaluation(tmp_path: Path) -> None:
    cfg = settings("random", envs=4, rounds=1, steps=6, control="static_large")
    fresh(replace(cfg, reward=replace(cfg.reward, rent_weight="[0.0,1.0]")), tmp_path)
    asked = EvaluateConfig(str(tmp_path), ["random"], episodes=1, device="cpu", progress="off")
    evaluate(asked, RunFolder(tmp_path))
    summary, found = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("summary", "evaluation")
    )
    played = found["policies"]["random"]["samples"]
    pairs = [(score["test_accuracies"], score["nets"]) for score in scores_of(summary)]
    for tested, nets in (*pairs, (played["test_accuracy"], played["net"])):
        rents = [accuracy - net for accuracy, net in zip(tested, nets, strict=True)]
        assert rents[::2] == [0.0, 0.0]
        assert min(rents[1::2]) > 0


def test_an_evaluation_gives_each_env_its_own(whole: Path, tmp_path: Path) -> None:
    asked = EvaluateConfig(str(whole), ["ppo", "wait"], episodes=2, device="cpu", progress="off")
    evaluate(asked, RunFolder(tmp_path))
    samples = json.loads((tmp_path / "evaluation.json").read_text())["policies"]["wait"]["samples"]
    assert samples["net"] == samples["test_accuracy"]  # without growth no rent is due


@pytest.mark.parametrize(("init", "seen"), [("", [PRICE]), ("grower", [])])
def test_a_policy_begins_with_what_one_that_saw_less_has_learned(
    whole: Path, init: str, seen: list[str]
) -> None:
    """It decides as that one, whatever the new setting is, until it has learned to heed it."""
    learned = []
    network = (
        NetworkConfig(hidden=128, features=128, slot_features=64)
        if init
        else drawn().policy.network
    )
    for observe in (seen, [RATE, PRICE]):
        cfg = drawn(rounds=1)
        policy = replace(cfg.policy, network=network, observe=observe, init=init or str(whole))
        cfg = replace(cfg, policy=policy)
        world = build_world(cfg, torch.device("cpu"))
        view = Env(world).reset(1).view
        agent = build_player(cfg.policy, world).agent
        decision, _ = agent.act(view, agent.start(4, world.device))
        learned.append(torch.cat((decision.log_probs, decision.value[:, None]), 1))
        assert view.observation.features.shape[1] == 23 + len(observe) + 2 * 31
    assert torch.allclose(*learned, atol=1e-5)
