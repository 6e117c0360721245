"""The table of envs on a terminal says what the env-step was, and stands below the bar."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from recorded_world import record
from rich.console import Console

from esper_soa.config import TelemetryConfig
from esper_soa.errors import SettingError
from esper_soa.ops.files import Unwritten
from esper_soa.ops.progress import Progress
from esper_soa.telemetry.envs_table import MOST_ENVS, EnvsTable
from esper_soa.telemetry.pack import unpack
from esper_soa.telemetry.recorder import Recorder
from esper_soa.vocabulary import LIVE_STAGES, OP_NAMES, STAGE_NAMES, Op


def text_of(table: EnvsTable) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as told:
        console.print(table)
    return told.get().splitlines()


def test_rows_say_what_every_env_was_and_did() -> None:
    recorded = record(3, num_envs=MOST_ENVS + 2, steps=40)
    table = EnvsTable(recorded.legend)
    seen = 0
    for at in (0, 17, 39):
        table.show(2, at + 1, recorded.numbers[at])
        lines = text_of(table)
        assert lines[0].strip() == f"round 2, env-step {at + 1}"
        assert lines[-1].strip() == "and 2 more"
        state = recorded.steps[at].observed.state
        outcome = recorded.steps[at].result
        rows = {
            int(line.split()[0]): line
            for line in lines
            if line.split() and line.split()[0].isdigit()
        }
        assert list(rows) == list(range(MOST_ENVS))
        for env, row in rows.items():
            assert f"{float(state.signals.val_accuracy[env]):.2f}" in row
            assert f"{float(outcome.terms.total[env]):+.3f}" in row
            op = OP_NAMES[int(outcome.outcome.effective_op[env])]
            assert (op in row) == (op != "wait")
            for slot in range(3):
                stage = int(state.slots.stage[env, slot])
                alpha = float(state.slots.alpha[env, slot])
                if stage in LIVE_STAGES:
                    name = recorded.legend.blueprints[int(state.slots.blueprint[env, slot])]
                    known = bool(recorded.steps[at].observed.attribution.measured[env, slot])
                    contribution = float(
                        recorded.steps[at].observed.attribution.contribution[env, slot]
                    )
                    words = f"{name} {STAGE_NAMES[stage]} {alpha:.2f}" + (
                        f" {contribution:+.1f}" if known else ""
                    )
                    assert words in re.split(r"\s{2,}", row.strip())
                    seen += 1
    assert seen > 20


def test_the_op_is_the_one_that_rewards_go_by() -> None:
    recorded = record(3, steps=1)
    numbers = recorded.numbers[0].copy()
    told = unpack(recorded.legend, np.ones(1), numbers[None])  # views of the same numbers
    told.env("op")[:] = Op.PRUNE
    told.env("effective_op")[:] = Op.WAIT
    table = EnvsTable(recorded.legend)
    table.show(1, 1, numbers)
    assert "prune" not in "".join(text_of(table))


def test_the_recorder_shows_what_it_is_given_and_the_bar_has_it_below(tmp_path: Path) -> None:
    recorded = record(4, steps=3)
    table = EnvsTable(recorded.legend)
    recorder = Recorder(tmp_path, recorded.legend, "full", 60.0, Unwritten(), table)
    recorder.begin(7)
    recorder.emit(1, recorded.numbers[0])
    recorder.close()
    for style, terminal in (("live", True), ("plain", False)):
        console = Console(file=io.StringIO(), width=200, height=60, force_terminal=terminal)
        shown = Progress(10, console, style, 0.0)
        shown.below = table
        with console.capture() as told, shown as progress:
            progress.advance(10, "round 7", 50.0, 1.0)
        assert "round 7, env-step 1" in told.get()
        assert told.get().rindex("50.00 %") < told.get().rindex("round 7, env-step 1")


def test_a_table_before_the_first_env_step_is_empty() -> None:
    assert "accuracy %" in "".join(text_of(EnvsTable(record(5, steps=1).legend)))


@pytest.mark.parametrize("level", ["off", "rounds"])
def test_a_table_of_what_is_not_recorded_is_refused(level: str) -> None:
    with pytest.raises(
        SettingError, match=f"telemetry.console=envs: must be bar with telemetry.level={level}"
    ):
        TelemetryConfig(level=level, console="envs")
    assert TelemetryConfig(console="envs").level == "events"
