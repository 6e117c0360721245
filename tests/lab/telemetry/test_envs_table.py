"""The table of envs on a terminal says what the env-step was, and stands below the bar."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from esper_soa.config.settings import TelemetryConfig
from esper_soa.lab.telemetry.console_table import MAX_SHOWN_ENVS, EnvsTable
from esper_soa.lab.telemetry.recorder import TableRecorder
from esper_soa.system.errors import SettingError
from esper_soa.system.files import WriteErrors
from esper_soa.training.results.progress import Progress
from esper_soa.vocabulary import LIVE_STAGES, OP_NAMES, STAGE_NAMES, Op, Stage
from tests.builders.recorded_world import record


def text_of(table: EnvsTable) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as told:
        console.print(table)
    return told.get().splitlines()


def test_rows_say_what_every_env_was_and_did() -> None:
    recorded = record(3, num_envs=MAX_SHOWN_ENVS + 2, steps=24)
    table = EnvsTable(recorded.legend)
    seen = 0
    heading = ["env", "accuracy %", "reward", "op", *recorded.legend.slots]
    for at in (0, 8, 16, 23):
        table.show(2, at + 1, recorded.numbers[at])
        lines = text_of(table)
        assert lines[0].strip() == f"round 2, env-step {at + 1}"
        assert lines[-1] == f"{'and 2 more':<{len(lines[-1])}}"
        state = recorded.steps[at].view.state
        attribution = recorded.steps[at].observed.attribution
        outcome = recorded.steps[at].result
        assert heading in [re.split(r"\s{2,}", line.strip()) for line in lines]
        rows = [line for line in lines if line.strip()[:1].isdigit()]
        assert [int(row.split()[0]) for row in rows] == list(range(MAX_SHOWN_ENVS))
        for env, row in enumerate(rows):
            assert f"{float(state.signals.val_accuracy[env]):.2f}" in row
            assert f"{float(outcome.terms.total[env]):+.3f}" in row
            op = OP_NAMES[int(outcome.outcome.effective_op[env])]
            assert (op in row) == (op != "wait")
            for slot, stage in enumerate(state.slots.stage[env].tolist()):
                if stage not in LIVE_STAGES:
                    continue
                name = recorded.legend.blueprints[int(state.slots.blueprint[env, slot])]
                words = f"{name} {STAGE_NAMES[stage]} {float(state.slots.alpha[env, slot]):.2f}"
                if attribution.measured[env, slot]:
                    words += f" {float(attribution.contribution[env, slot]):+.1f}"
                assert words in re.split(r"\s{2,}", row.strip())
                seen += 1
    assert seen > 20


def test_the_op_is_the_one_that_rewards_go_by() -> None:
    recorded = record(3, steps=1)
    told = recorded.played  # views of the same numbers
    told.read("op")[:] = Op.PRUNE
    told.read("effective_op")[:] = Op.WAIT
    for name, value in (("accuracy", 5.0), ("reward", -1.5), ("slot.stage", Stage.EMPTY)):
        told.read(name)[:] = value
    table = EnvsTable(recorded.legend)
    heading = ["", "  env   accuracy %   reward   op   r0c0   r0c1   r0c2", f" {'─' * 53}"]
    assert [line.rstrip() for line in text_of(table)] == [*heading, ""], "before an env-step"
    table.show(1, 1, recorded.numbers[0])
    rows = [f"    {env}         5.00   -1.500" for env in range(5)]
    lines = [line.rstrip() for line in text_of(table)]
    assert lines == ["round 1, env-step 1", *heading, *rows, ""]


def test_the_recorder_shows_what_it_is_given_and_the_bar_has_it_below(tmp_path: Path) -> None:
    recorded = record(4, steps=3)
    table = EnvsTable(recorded.legend)
    recorder = TableRecorder(tmp_path, recorded.legend, "full", 60.0, WriteErrors(), table)
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


@pytest.mark.parametrize("level", ["off", "rounds"])
def test_a_table_of_what_is_not_recorded_is_refused(level: str) -> None:
    with pytest.raises(SettingError, match=f"^telemetry.console=envs: .*telemetry.level={level}"):
        TelemetryConfig(level=level, console="envs")
    assert TelemetryConfig(console="envs").level == "events"
