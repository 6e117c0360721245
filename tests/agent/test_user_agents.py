"""Users' agents play whole runs, as policies and controls, and are stopped if they break rules."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from esper_soa.agent.protocol import Agent
from esper_soa.agent.scripted import (
    as_decision,
    seed_action,
)
from esper_soa.agent.user_agents import CheckedAgent
from esper_soa.config.agent import ImitationConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env.env import Env
from esper_soa.system.errors import UserError
from esper_soa.training.loop.build import build_world, make_setup, rule_player
from esper_soa.training.loop.players import build_player
from tests.builders.equal_runs import CPU, assert_equal_runs, settings
from tests.builders.tiny_runs import fresh, resumed
from tests.builders.tiny_world import tiny_world

HERE = "parts_of_users"


def played_by(name: str, **changed: object) -> TrainConfig:
    cfg = settings(rounds=2, **changed)
    return replace(cfg, policy=replace(cfg.policy, name=f"{HERE}:{name}"))


def test_an_own_agent_plays_a_run_and_one_that_goes_on(tmp_path: Path) -> None:
    cfg = played_by("eager", control=f"{HERE}:eager")
    whole = tmp_path / "whole"
    halves = tmp_path / "halves"
    summary = fresh(cfg, whole)
    fresh(replace(cfg, rounds=1), halves)
    resumed(cfg, halves)
    assert_equal_runs(whole, halves, rounds=2)
    assert summary.policy == f"{HERE}:eager"
    assert summary.seeds["germinated"] > 0
    assert summary.controls == []  # a policy is no control of itself


def test_an_own_agent_is_a_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = settings("wait", rounds=1, control=f"{HERE}:eager")
    fresh(cfg, tmp_path)
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["controls"][0]["name"] == f"{HERE}:eager"
    assert record["controls"][0]["size"] > record["grown"]["size"]
    assert "agent eager" in capsys.readouterr().out


def test_an_own_agent_teaches(tmp_path: Path) -> None:
    cfg = settings(rounds=1)
    cfg = replace(
        cfg,
        policy=replace(cfg.policy, imitation=ImitationConfig(rounds=1, teacher=f"{HERE}:eager")),
    )
    teacher = build_player(cfg.policy, build_world(cfg, CPU)).teacher
    assert isinstance(teacher, CheckedAgent)
    assert type(teacher.agent).__name__ == "Eager"
    fresh(cfg, tmp_path)
    assert "agreement" in json.loads((tmp_path / "metrics.jsonl").read_text())["update"]


WAIT = torch.zeros(2, dtype=torch.int64)
WAITS = as_decision(seed_action(WAIT, WAIT, WAIT))
FLOATS = WAITS.action.replace(op=WAIT.float())


def player_of(cfg: TrainConfig, name: str, setting: str) -> Agent:
    return rule_player(name, setting, cfg.policy, make_setup(cfg, CPU))


@pytest.mark.parametrize(
    ("decision", "memory", "told"),
    [
        (None, (), "NoneType"),
        (WAITS.replace(action=FLOATS), (), "action.op is of torch.float32"),
        (WAITS.replace(log_probs=WAIT.float()), (), "log_probs is of shape [2]"),
        (WAITS.replace(value=WAIT), (), "value is of torch.int64"),
        (WAITS, None, "memory is a NoneType"),
        (WAITS, (WAIT, 0), "memory is a tuple"),
        (WAITS, (WAIT, WAIT[:1]), "part 1 of its memory is of shape [1], not [2]"),
    ],
)
def test_what_an_agent_must_not_give_is_named(decision: object, memory: object, told: str) -> None:
    agent = SimpleNamespace(start=lambda *_: memory, act=lambda *_: (decision, memory))
    checked = CheckedAgent("policy", agent)  # type: ignore[arg-type]
    view = Env(tiny_world(2, 1, 4)).reset().view
    asked = [lambda: checked.act(view, ())]
    if decision is WAITS:
        asked.append(lambda: checked.start(2, CPU))  # type: ignore[arg-type, return-value]
    for ask in asked:
        with pytest.raises(UserError, match=f"^policy: .*{re.escape(told)}"):
            ask()


def test_an_agent_that_breaks_the_rules_ends_the_run_in_words(tmp_path: Path) -> None:
    told = "env 0: blueprint lora_large for op germinate is not legal; legal are "
    with pytest.raises(UserError, match=f"^policy.name={HERE}:lawless: {told}"):
        fresh(played_by("lawless"), tmp_path)


@pytest.mark.parametrize(
    ("name", "told"),
    [("eager", ""), ("dicing", "decides something else"), ("following", "on the number of envs")],
)
def test_a_run_warns_of_what_its_agent_does_in_the_first_env_steps(
    name: str, told: str, tmp_path: Path
) -> None:
    fresh(played_by(name), tmp_path)
    warned = "".join(re.findall("parts .*", (tmp_path / "log.txt").read_text()))
    assert told in warned
    assert bool(told) == bool(warned)


def test_an_own_agent_is_told_of_its_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "own_parts"))
    cfg = settings()
    cfg = replace(cfg, task=replace(cfg.task, blueprints=["norm", f"{HERE}:twice"]))
    agent = player_of(cfg, "my_parts.agents:patient", "policy.name")
    assert agent.agent.steps == cfg.steps  # type: ignore[attr-defined]
    assert agent.start(3, CPU)[0].tolist() == [0, 0, 0]
