"""Runs whose actions are measured: the run is the one without twins, and an effect is what a run
without the action says.
"""

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from esper_soa.config.agent import PolicyConfig, ScheduleConfig
from esper_soa.config.env import EarlyStopConfig, GatesConfig, LifecycleConfig
from esper_soa.config.settings import EffectsConfig, TelemetryConfig, TrainConfig
from esper_soa.lab.telemetry.table_files import read_table, table_path
from esper_soa.nets.needs import network_needs
from esper_soa.system.errors import SettingError
from esper_soa.system.signals import Interrupted
from esper_soa.training.loop.build import make_setup
from esper_soa.training.results.statistics import estimate
from tests.builders import equal_runs
from tests.builders.equal_runs import CPU, assert_equal_runs
from tests.builders.tiny_runs import fresh, resumed, signal_at

STEPS = 14
OPS = ["germinate", "fossilize", "prune"]
AUTOMATIC = LifecycleConfig(auto_forward_g1=True, auto_forward_g2=True, auto_forward_g3=True)


def settings(player: str = "random", **changed: object) -> TrainConfig:
    given: dict = {
        "steps": STEPS,
        "rounds": 2,
        "envs": 3,
        "gates": GatesConfig(min_blending_steps=1, min_gradient_health=0),
        "lifecycle": replace(AUTOMATIC, min_prune_age=1),
        "effects": EffectsConfig(ops=OPS),
    }
    return equal_runs.settings(player, **given | changed)


def once(step: int, **changed: object) -> TrainConfig:
    """Every host gets a single seed, at env-step `step`, which blends at once."""
    schedule = ScheduleConfig(germinate=[step], fossilize=4, blueprint="conv_light")
    policy = PolicyConfig(name="schedule", schedule=schedule)
    given: dict = {"slots": ["r0c0"], "policy": policy, "control": "wait"}
    effects = EffectsConfig(ops=["germinate"], rows=3, placebo=0.0)
    return settings("schedule", **given | {"effects": effects} | changed)


def effects_of(folder: Path, **where: object) -> dict[str, np.ndarray]:
    table = read_table(folder, "effects")
    chosen = np.ones(len(table["round"]), bool)
    for name, value in where.items():
        chosen &= table[name] == value
    return {name: column[chosen] for name, column in table.items()}


def left_out(folder: Path, number: int = 1) -> int:
    facts = parquet.read_metadata(table_path(folder, "effects", number)).metadata
    return int(facts[b"left_out"])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured")
    fresh(settings("ppo"), path)
    return path


def test_a_run_with_twins_is_the_run_without(measured: Path, tmp_path: Path) -> None:
    fresh(settings("ppo", effects=EffectsConfig()), tmp_path)
    assert_equal_runs(measured, tmp_path, rounds=2)
    assert {*effects_of(measured)["op"]} >= {"germinate", "prune"}
    assert not table_path(tmp_path, "effects", 1).exists()
    for table in ("steps", "slots", "events"):
        for name, column in read_table(measured, table).items():
            other = read_table(tmp_path, table)[name]
            assert [*map(str, column)] == [*map(str, other)], (table, name)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single")
    fresh(once(3, rounds=1), path)
    return path


def test_the_effect_of_the_only_seed_is_the_difference_to_the_host_without(single: Path) -> None:
    steps = read_table(single, "steps")
    control = read_table(single, "control_steps")
    found = effects_of(single)
    assert [*found["horizon"][:4]] == ["1", "5", "10", "end"]
    assert len(found["env"]) == 4 * 3
    for row, (env, after) in enumerate(zip(found["env"], found["after"], strict=True)):
        at = (steps["env"] == env) & (steps["step"] == 3 + after)
        for name, other in {
            "accuracy": "accuracy",
            "loss": "val_loss",
            "parameters": "parameters",
        }.items():
            difference = steps[other][at] - control[other][at]
            assert found[name][row] == difference[0], (name, env, after)
        past = (steps["env"] == env) & (steps["step"] <= 3 + after)
        flop = steps["train_flop"][past].sum() - control["train_flop"][past].sum()
        assert found["train_flop"][row] == pytest.approx(flop)
    assert np.any(found["accuracy"] != 0)
    summary = json.loads((single / "summary.json").read_text())
    accuracies = [side["test_accuracies"] for side in (summary["grown"], summary["controls"][0])]
    ends = effects_of(single, horizon="end")
    assert [*ends["after"]] == [STEPS - 3] * 3
    assert ends["test_accuracy"].tolist() == pytest.approx(np.subtract(*accuracies).tolist())
    assert np.isnan(found["test_loss"]).sum() == 3 * 3


def test_an_event_has_the_age_and_alpha_that_its_seed_had_when_it_was_acted_on(
    measured: Path,
) -> None:
    events = effects_of(measured, horizon="1", op="prune")
    slots = read_table(measured, "slots")
    assert len(events["step"]) > 2
    for row in range(len(events["step"])):
        where = np.logical_and.reduce(
            [slots[name] == events[name][row] for name in ("round", "step", "env", "slot")]
        )
        assert events["seed_age"][row] == slots["seed_age"][where], row
        assert events["alpha"][row] == slots["alpha"][where], row
    assert {*events["seed_age"]} - {0}


def test_the_effect_of_a_seed_that_never_blends_is_nothing(tmp_path: Path) -> None:
    cfg = settings(gates=GatesConfig(min_blending_steps=100), rounds=1)
    fresh(replace(cfg, effects=replace(cfg.effects, rows=40, placebo=0.5)), tmp_path)
    real = effects_of(tmp_path, placebo=False)
    assert len(real["env"]) > 10
    for name in ("accuracy", "loss"):
        assert not real[name].any()
    assert not real["test_loss"][real["horizon"] == "end"].any()
    assert effects_of(tmp_path, placebo=True)["loss"].any(), "whose weight has moved"


def test_actions_that_find_no_free_row_are_counted(tmp_path: Path) -> None:
    fresh(once(3, rounds=1, effects=EffectsConfig(["germinate"], rows=2, placebo=0.0)), tmp_path)
    assert sorted({*effects_of(tmp_path)["env"]}) == [0, 1]
    assert left_out(tmp_path) == 1


def test_a_row_is_free_again_behind_its_horizon(tmp_path: Path) -> None:
    effects = EffectsConfig(ops=OPS, rows=1, horizon="2", placebo=0.0)
    fresh(settings(effects=effects, rounds=1, envs=1), tmp_path)
    found = effects_of(tmp_path, horizon="2")
    assert len(found["step"]) > 1
    assert (np.diff(found["step"]) >= 2).all()
    assert {*found["after"]} == {2}
    assert {*effects_of(tmp_path)["horizon"]} == {"1", "2"}
    assert np.isnan(found["test_accuracy"]).all()


def test_the_share_and_the_placebos_are_drawn(tmp_path: Path) -> None:
    effects = EffectsConfig(ops=OPS, rows=40, share=0.5, placebo=0.5)
    fresh(settings(effects=effects, rounds=1), tmp_path)
    every = tmp_path / "every"
    fresh(settings(effects=replace(effects, share=1.0), rounds=1), every)
    some, all_of = (
        {*zip(*(table[name] for name in ("env", "step", "placebo")), strict=True)}
        for table in (effects_of(tmp_path), effects_of(every))
    )
    assert some < all_of
    assert {placebo for _, _, placebo in some} == {True, False}
    actions = read_table(every, "steps")
    drawn = np.isin(actions["effective_op"], OPS) & actions["success"] & (actions["step"] < STEPS)
    assert sum(not placebo for _, _, placebo in all_of) == drawn.sum()


def test_an_effect_ends_with_the_episode_of_its_host(tmp_path: Path) -> None:
    lengths = EarlyStopConfig(length="[8,14,9]")
    fresh(once(3, rounds=1, early_stop=lengths), tmp_path)
    ends = effects_of(tmp_path, horizon="end")
    assert dict(zip(ends["env"].tolist(), ends["after"].tolist(), strict=True)) == {
        0: 5,
        1: 11,
        2: 6,
    }
    assert not np.isnan(ends["test_accuracy"]).any()
    steps, control = (read_table(tmp_path, name) for name in ("steps", "control_steps"))
    for env, after, accuracy in zip(ends["env"], ends["after"], ends["accuracy"], strict=True):
        at = (steps["env"] == env) & (steps["step"] == 3 + after)
        beside = (control["env"] == env) & (control["step"] == 3 + after)
        assert accuracy == steps["accuracy"][at] - control["accuracy"][beside]


def test_a_run_stopped_while_twins_are_awake_goes_on_to_the_same_effects(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGTERM, report=STEPS + 9)
        with pytest.raises(Interrupted):
            fresh(settings("ppo"), tmp_path)
    assert table_path(tmp_path, "effects", 1).exists()
    assert not table_path(tmp_path, "effects", 2).exists()
    resumed(settings("ppo"), tmp_path)
    for number in (1, 2):
        mine, theirs = (table_path(path, "effects", number) for path in (tmp_path, measured))
        assert mine.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ranks": 2}, r"with ranks=2"),
        ({"telemetry": TelemetryConfig(level="off")}, r"with telemetry\.level=off"),
    ],
)
def test_runs_whose_actions_cannot_be_measured_are_refused(
    changed: dict[str, object], told: str
) -> None:
    with pytest.raises(SettingError, match=rf"^effects\.ops=.* must be \[\] {told}"):
        settings(**changed)


def test_memory_of_rows_that_sleep_is_told() -> None:
    with_rows, without = (
        {need.what: need.size for need in network_needs(make_setup(settings(effects=effects), CPU))}
        for effects in (EffectsConfig(ops=OPS, rows=6), EffectsConfig(rows=6))
    )
    twins = with_rows.pop("weights of twins")
    assert twins >= 2 * without["weights"], "those of six rows, beside three envs"
    assert with_rows == without


@pytest.mark.slow
def test_placebos_bring_nothing_on_average(tmp_path: Path) -> None:
    effects = EffectsConfig(ops=["germinate"], rows=16, placebo=0.5)
    losses: list[float] = []
    for seed in range(1, 9):
        folder = tmp_path / str(seed)
        fresh(once(3, seed=seed, envs=8, rounds=1, control="none", effects=effects), folder)
        losses += effects_of(folder, placebo=True, horizon="end")["loss"].tolist()
    assert len(losses) == 64
    found = estimate(losses, 0.999).interval
    assert found.low < 0 < found.high
