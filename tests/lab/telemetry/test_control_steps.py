"""The env-steps of the control: a table of their own beside those of the hosts that grow."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper_soa.config.settings import TelemetryConfig
from esper_soa.lab.telemetry.table_files import read_table
from tests.builders import tiny_runs


@pytest.mark.parametrize("control", ["heuristic", "static_large"])
def test_the_control_is_recorded_beside_the_grown_hosts(
    control: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = TelemetryConfig(progress="plain", console="envs")
    cfg = tiny_runs.settings(control=control, rounds=2, telemetry=shown)
    summary = tiny_runs.fresh(cfg, tmp_path)
    assert "round 2, env-step 3" in capsys.readouterr().out
    steps = read_table(tmp_path, "control_steps")
    assert set(steps["round"]) == {2}
    assert sorted(zip(steps["step"], steps["env"], strict=True)) == [
        (step, env) for step in (1, 2, 3) for env in (0, 1)
    ]
    (episode,) = summary.controls[0].episodes
    last = steps["step"] == cfg.steps
    assert steps["accuracy"][last].tolist() == episode.validation_accuracies
    assert steps["train_flop"][steps["env"] == 1].sum() == pytest.approx(episode.train_flop[1])
    if control == "static_large":
        assert set(steps["parameters"]) == set(episode.parameters)
    grown = read_table(tmp_path, "steps")
    assert np.bincount(grown["round"]).tolist() == [0, 6, 6]
    likely = [np.isnan(table["value"]) for table in (steps, grown)]
    assert (likely[0].all(), likely[1].any()) == (True, False), "a control learns nothing"
    assert not (tmp_path / "telemetry" / "control_slots").exists()


def test_without_tables_the_control_has_none(tmp_path: Path) -> None:
    cfg = tiny_runs.settings("random", control="wait", rounds=1)
    quiet = TelemetryConfig(progress="off", level="rounds")
    tiny_runs.fresh(replace(cfg, telemetry=quiet), tmp_path)
    assert not (tmp_path / "telemetry").exists()
