"""Env-steps for callbacks: their numbers are those of the tables, and change none."""

from pathlib import Path

import numpy as np
import pytest

from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.state import EnvState
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.callbacks import Callback, EnvStep
from esper_soa.training.loop.env_steps import StepRecorder, step_recorder
from esper_soa.training.loop.recorder import NO_RECORDER
from esper_soa.training.loop.task import TaskRun
from esper_soa.training.loop.trainer import run_in_session
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES
from tests.builders.equal_runs import assert_equal_runs
from tests.builders.tiny_runs import fresh, settings

SHORT = settings("random", rounds=2, control="wait")


class Keeping(Callback):
    """Keeps the numbers; with `live` what the state says beside them."""

    def __init__(self, live: bool = False) -> None:
        self.live = live
        self.kept: list[EnvStep] = []
        self.steps: list[int] = []
        self.weights: list[float] = []

    def on_env_step(self, run: TaskRun, env_step: EnvStep) -> None:
        self.kept.append(env_step._replace(state=None))
        if isinstance(env_step.state, EnvState):
            self.steps += env_step.state.signals.step.tolist()
            self.weights.append(float(run.world.weights["host", "params"].sum()))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Keeping, Keeping]:
    folder = tmp_path_factory.mktemp("runs") / "watched"
    folder.mkdir()
    late = Keeping()
    live = Keeping(live=True)
    with session(RunFolder(folder)) as opened:
        run_in_session(opened, SHORT, None, callbacks=[late, live])
    return folder, late, live


def test_callbacks_get_the_numbers_of_the_table_at_every_env_step(
    watched: tuple[Path, Keeping, Keeping],
) -> None:
    folder, late, live = watched
    table = {name: column.tolist() for name, column in read_table(folder, "steps").items()}
    for keeping in (late, live):
        places = [(one.round, one.step) for one in keeping.kept]
        assert places == [(number, step) for number in (1, 2) for step in (1, 2, 3)]
        for name in ("accuracy", "val_loss", "train_loss", "reward"):
            column = np.concatenate([one.numbers[name] for one in keeping.kept])
            assert column.tolist() == table[name], name
        ops = np.concatenate([one.numbers["op"] for one in keeping.kept])
        assert [OP_NAMES[int(code)] for code in ops] == table["op"]
        assert {*HEAD_NAMES} < {*keeping.kept[0].numbers}
    assert live.steps == [step for _ in range(2) for step in (1, 2, 3) for _ in range(2)]
    assert len({*live.weights}) == 6, "those of each env-step"
    assert late.steps == [], "which did not ask"


def test_a_run_that_is_watched_is_the_run_without_and_its_control_is_not(
    watched: tuple[Path, Keeping, Keeping], tmp_path: Path
) -> None:
    fresh(SHORT, tmp_path / "alone")
    assert_equal_runs(tmp_path / "alone", watched[0], rounds=2)
    assert len(watched[1].kept) == 2 * 3


def test_a_recorder_stays_as_it_is_where_nobody_asks() -> None:
    assert step_recorder(NO_RECORDER, None, [Callback()]) is NO_RECORDER  # type: ignore[arg-type]
    asked = step_recorder(NO_RECORDER, None, [Callback(), Keeping()])  # type: ignore[arg-type]
    assert isinstance(asked, StepRecorder)


def test_an_exception_of_a_callback_ends_the_run(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_env_step(self, run: TaskRun, env_step: EnvStep) -> None:
            raise ArithmeticError(f"at {env_step.step}")

    with session(RunFolder(tmp_path)) as opened, pytest.raises(ArithmeticError, match="at 1"):
        run_in_session(opened, SHORT, None, callbacks=[Failing()])
