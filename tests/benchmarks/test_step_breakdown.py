"""The breakdown puts every operation into the phase in which it ran."""

import io
import json

import pytest
from rich.console import Console

from benchmarks.eps_config import EpsConfig
from benchmarks.step_breakdown import breakdown
from esper_soa.agent.config import NetworkConfig, PolicyConfig


@pytest.fixture(scope="module")
def broken_down() -> tuple[dict, str]:
    network = PolicyConfig(network=NetworkConfig(hidden=8, features=8))
    network.ppo.target_kl = 0.0
    cfg = EpsConfig(
        envs=1,
        batch_size=4,
        train_samples=8,
        val_samples=4,
        num_slots=1,
        live=1,
        steps=6,
        timed_steps=1,
        repeats=2,
        baseline_threads=1,
        baseline_validation="separate",
        update=False,
        policy=network,
    )
    cfg.compute.threads = 1
    text = io.StringIO()
    record = breakdown(cfg, Console(file=text, width=120))
    return json.loads(json.dumps(record)), text.getvalue()


def test_operations_are_in_the_phase_that_ran_them(broken_down: tuple[dict, str]) -> None:
    loop = broken_down[0]["operations"]["baseline"]
    # Two batches of three blocks and one seed; then one subset with the seed's convolution and one
    # without.
    assert loop["training"]["aten::convolution_backward"][1] == 8
    assert loop["validation"]["aten::convolution"][1] == 7
    assert "aten::convolution_backward" not in loop["validation"]
    engine = broken_down[0]["operations"]["engine"]
    assert set(engine) >= {"training", "validation", "state", "policy", "data"}
    assert "aten::lstm_cell" in engine["policy"]
    assert "aten::lstm_cell" not in engine["training"]


def test_both_sides_are_shown_phase_by_phase(broken_down: tuple[dict, str]) -> None:
    record, text = broken_down
    assert set(record["phases"]["engine"]) == {
        "data",
        "state",
        "training",
        "validation",
        "policy",
        "telemetry",
    }
    assert set(record["phases"]["baseline"]) == {"data", "training", "validation", "state"}
    for title in (
        "engine, training",
        "engine, state",
        "baseline, training",
        "baseline, validation",
    ):
        assert f"{title}: " in text
