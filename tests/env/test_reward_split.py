"""Modes of reward shared out over the envs: each env is paid, to the bit, as where its mode pays
all; told apart.
"""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import esper_soa
from esper_soa.config.env import RewardConfig
from esper_soa.env.reward_modes import RewardTerms
from esper_soa.env.step import EnvRules, StepResult
from esper_soa.state import Slots, Totals
from esper_soa.system.errors import UserError
from tests.builders.tiny_world import CPU, play_state, rules_from, tiny_settings

HERE = "parts_of_users"
NUM_ENVS = 5
NUM_SLOTS = 3
STEPS = 16
TINY = [
    "steps=4",
    "envs=5",
    "rounds=2",
    "train_samples=16",
    "val_samples=16",
    "batch_size=8",
    "report=false",
    "control=none",
]


def rules_of(*modes: str) -> EnvRules:
    """Of one mode for all envs, or of several by turns."""
    reward = RewardConfig(mode=modes[0] if len(modes) == 1 else f"[{','.join(modes)}]")
    return rules_from(replace(tiny_settings(NUM_ENVS, NUM_SLOTS, STEPS), reward=reward), CPU)


def parts(result: StepResult) -> tuple[RewardTerms, Slots, Totals]:
    """What a reward leaves behind."""
    return result.terms, result.state.slots, result.state.totals


@pytest.mark.parametrize(
    "modes",
    [("shaped", "escrow", "shaped"), ("net", "sparse"), (f"{HERE}:gain", "loss")],
)
def test_every_env_is_paid_as_where_its_mode_pays_all(modes: tuple[str, ...]) -> None:
    split = play_state(rules_of(*modes), NUM_ENVS, seed=5)
    alone = [play_state(rules_of(mode), NUM_ENVS, seed=5) for mode in modes]
    paid = 0
    for step in split:
        others = [next(one) for one in alone]
        for place, other in enumerate(others):
            mine = slice(place, None, len(modes))
            for ours, theirs in zip(parts(step.result), parts(other.result), strict=True):
                assert (ours[mine] == theirs[mine]).all()
        paid += int((step.result.terms.total != 0).sum())
    assert paid > 30


def test_rounds_and_episodes_tell_the_modes_apart(tmp_path: Path) -> None:
    run = esper_soa.train("smoke", [*TINY, f"run_dir='{tmp_path}'", "reward.mode=[net,simplified]"])
    episodes = run.episodes()
    modes = ["net", "simplified", "net", "simplified", "net"]
    assert [line["reward_mode"] for line in episodes[:5]] == modes
    for line in run.metrics():
        mine = [one for one in episodes if one["round"] == line["round"]]
        assert list(line["reward_split"]) == ["net", "simplified"]
        host = line["parameters"] / fmean(one["param_ratio"] for one in mine)
        for mode, told in line["reward_split"].items():
            of_mode = [one for one in mine if one["reward_mode"] == mode]
            assert told["envs"] == len(of_mode) == (3 if mode == "net" else 2)
            for name, scale in (("accuracy", 1), ("reward", 1), ("param_ratio", host)):
                mean = scale * fmean(one[name] for one in of_mode)
                found = told["parameters" if name == "param_ratio" else name]
                assert found == pytest.approx(mean), name
    assert "reward net+simplified" in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("reward.mode=[shaped,shapely]", "reward.mode"),
        ("reward.mode=[shaped,basic_plus]", "reward.drip_fraction"),
        ("reward.mode=[basic,basic_plus]", "reward.mode=.*reward.drip_fraction"),
        ("reward.mode=[net,net,net,net,net,net]", "at most envs=5 modes"),
        ("reward.mode=[shaped,nowhere:reward]", "reward.mode=nowhere:reward"),
    ],
)
def test_a_split_that_cannot_be_is_refused(tmp_path: Path, given: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        esper_soa.train("smoke", [*TINY, f"run_dir='{tmp_path}'", given])
