"""A run calls callbacks at its start, after every round and at its end, and needs no lab."""

import gc
import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from esper_soa.config.settings import TelemetryConfig, TrainConfig
from esper_soa.lab.telemetry.table_files import table_files
from esper_soa.runtime.ranks import SINGLE_PROCESS
from esper_soa.system.errors import PrunedError, UserError
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import Session, session
from esper_soa.training.loop import trainer
from esper_soa.training.loop.callbacks import Callback, make_callbacks
from esper_soa.training.loop.recorder import NO_RECORDER, Recorder, make_recorder
from esper_soa.training.loop.run import Run
from esper_soa.training.loop.task import TaskRun
from esper_soa.training.loop.trainer import run_in_session
from esper_soa.training.results.final_table import Summary
from esper_soa.training.start import runs
from tests.builders.program import ENVIRONMENT, TINY
from tests.builders.tiny_runs import fresh, on_tasks, records, resumed, settings
from tests.builders.tiny_world import tiny_world

PACKAGE = Path(__file__).resolve().parents[3] / "esper_soa"
SHORT = settings("wait", rounds=2, steps=1)


class Listing(Callback):
    """Lists the calls."""

    def __init__(self, fails_in: int = 0) -> None:
        self.fails_in = fails_in
        self.calls: list[tuple] = []

    def on_run_start(self, run: TaskRun) -> None:
        assert len(vars(run)) <= 10  # what callbacks are handed is small
        self.calls.append(("start", run.cfg.task.name, run.totals.rounds_done))

    def on_round_end(self, run: TaskRun, metrics: Mapping) -> None:
        self.calls.append(("round", metrics["round"], records(run.folder.metrics)[-1] == metrics))
        if self.fails_in == metrics["round"]:
            raise ArithmeticError("of the user")

    def finish(self) -> dict[str, int]:
        self.calls.append(("finish",))
        return {"listing": 7}

    def on_run_end(self, run: TaskRun, summary: Summary) -> None:
        dropped = summary.telemetry["dropped"]
        written = json.loads(run.folder.summary.read_text())
        self.calls.append(("end", written["task"] == summary.task, dropped))

    def close(self) -> None:
        self.calls.append(("close",))


def called(
    listing: Listing, folder: Path, resume: Path | None = None, cfg: TrainConfig = SHORT
) -> list[tuple]:
    other = Listing()
    with session(RunFolder(folder)) as opened:
        run_in_session(opened, cfg, resume, callbacks=[listing, other])
    assert other.calls == listing.calls
    return listing.calls


ROUNDS = [("round", 1, True), ("round", 2, True)]
END = [("finish",), ("end", True, {"listing": 7}), ("close",)]


def test_callbacks_are_called_in_order_and_closed_where_one_fails(tmp_path: Path) -> None:
    failing = Listing(fails_in=2)
    with pytest.raises(ArithmeticError, match="of the user"):
        called(failing, tmp_path)
    assert failing.calls == [("start", "tiny", 0), *ROUNDS, ("close",)]
    checkpoint = RunFolder(tmp_path).checkpoint(1)
    assert called(Listing(), tmp_path, checkpoint) == [("start", "tiny", 1), ROUNDS[1], *END]


def test_callbacks_are_called_for_every_task_and_its_share_of_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=count().__next__))
    cfg = on_tasks(SHORT, replace(SHORT, task=replace(SHORT.task, name="other")))
    calls = called(Listing(), tmp_path, cfg=cfg)
    assert calls[:2] == [("start", "tiny", 0), ("start", "other", 0)]
    assert calls[2:] == [call for call in (*ROUNDS, *END) for _ in cfg.worlds]
    for name in cfg.worlds:
        lines = records(tmp_path / name / "metrics.jsonl")
        assert [line["update_seconds"] for line in lines] == [0.5, 0.5]


def test_a_run_that_a_callback_gives_up_leaves_a_checkpoint_of_its_last_round(
    tmp_path: Path,
) -> None:
    class Pruning(Callback):
        def on_round_end(self, run: TaskRun, metrics: Mapping) -> None:
            raise PrunedError(metrics["round"], metrics["accuracy"]["mean"])

    cfg = replace(SHORT, checkpoint_every=0)
    with session(RunFolder(tmp_path)) as opened, pytest.raises(PrunedError):
        run_in_session(opened, cfg, None, callbacks=[Pruning()])
    assert RunFolder(tmp_path).checkpoints() == [RunFolder(tmp_path).checkpoint(1)]


def test_all_callbacks_are_closed_where_one_cannot_be() -> None:
    class Broken(Callback):
        def close(self) -> None:
            raise OSError("no")

    first = Listing()
    last = Listing()
    task = SimpleNamespace(callbacks=[first, Broken(), last])
    with pytest.raises(OSError, match="no"):
        Run.close(SimpleNamespace(tasks={"task": task}))  # type: ignore[arg-type]
    assert first.calls == last.calls == [("close",)]


def test_a_run_that_is_resumed_without_tables_drops_those_of_later_rounds(tmp_path: Path) -> None:
    fresh(SHORT, tmp_path)
    assert list(table_files(tmp_path, "steps")) == [1, 2]
    plain = replace(SHORT, telemetry=TelemetryConfig(level="rounds", progress="off"))
    resumed(plain, tmp_path, "checkpoint_000001.pt")
    assert list(table_files(tmp_path, "steps")) == [1]


def test_a_rollout_is_freed_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = list[weakref.ref]()
    play = trainer.play_round

    def watched(*args: object) -> tuple:
        gc.collect()
        assert not [one for one in rollouts if one() is not None]
        result, rollout = play(*args)
        rollouts.append(weakref.ref(rollout.rows.features))
        return result, rollout

    monkeypatch.setattr(trainer, "play_round", watched)
    fresh(settings(rounds=2, steps=1), tmp_path)
    assert len(rollouts) == 2


def test_a_run_of_several_ranks_takes_no_callbacks(tmp_path: Path) -> None:
    words = ["envs=2", "ranks=2", f"run_dir={tmp_path}/run"]
    with pytest.raises(
        UserError, match=r"^ranks=2: must be 1 with callbacks, which one process calls\.$"
    ):
        runs.train("smoke", words, [Listing()])


TRACKED = "track=['tensorboard']"
RECORDER = "telemetry.recorder"


def test_a_setting_that_needs_the_lab_is_named_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = tiny_world(2, 1, 2)

    def recorder(level: str, escalation: int = 0) -> Recorder:
        telemetry = TelemetryConfig(level=level, escalation=escalation)
        return make_recorder(telemetry, world, Session(RunFolder(tmp_path), 0), SINGLE_PROCESS)

    def made(**asked: object) -> list[Callback]:
        cfg = settings(**asked)
        return make_callbacks(cfg.track, cfg.report)

    assert recorder("rounds") is NO_RECORDER
    RunFolder(tmp_path).tables.mkdir()
    for module, asked, remedy, make in (
        ("report.end", "report=true", "report=false", lambda: made(report=True)),
        ("telemetry.tracking", TRACKED, "track=[]", lambda: made(track=["tensorboard"])),
        (RECORDER, "telemetry.level=full", "telemetry.level=rounds", lambda: recorder("full")),
        (RECORDER, "telemetry.level=rounds", "another run_dir", lambda: recorder("rounds")),
        (
            RECORDER,
            "telemetry.level=rounds",
            "telemetry.escalation=0",
            lambda: recorder("rounds", 2),
        ),
    ):
        monkeypatch.setitem(sys.modules, f"esper_soa.lab.{module}", None)
        with pytest.raises(UserError) as caught:
            make()
        missing = f"needs esper_soa.lab.{module}, which is not installed"
        assert str(caught.value) == f"{asked} {missing}. Take {remedy}"


def test_trackers_come_before_callbacks_of_a_user_and_the_report_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = SimpleNamespace(SummaryWriter=object)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", library)
    own = [Callback()]
    made = make_callbacks(["tensorboard"], True, own)
    assert [type(one).__name__ for one in made] == ["Tracking", "Callback", "EndReport"]
    assert made[1:2] == own


WITHOUT_LAB = """
import sys
from dataclasses import replace
from pathlib import Path

import esper_soa

assert not Path(esper_soa.__file__).with_name("lab").exists()
*tiny, tables, report = sys.argv[1:]
for setting, other in ((tables, "report=false"), (report, "telemetry.level=rounds")):
    try:
        esper_soa.train("smoke", [*tiny, setting, other])
    except esper_soa.UserError as error:
        assert str(error).startswith(f"{setting} needs esper_soa.lab"), error
    else:
        sys.exit(f"{setting} was accepted")
tiny += ["telemetry.level=rounds", "report=false"]
esper_soa.train("smoke", [*tiny, "rounds=1", "resume=auto"])
run = esper_soa.train("smoke", [*tiny, "resume=auto"])
assert [line["round"] for line in run.metrics()] == [1, 2]
assert run.export().spec["test_accuracy"] is not None
"""


@pytest.mark.slow
def test_a_copy_of_the_package_without_the_lab_trains_resumes_and_exports(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("lab", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "esper_soa", ignore=ignore)
    shutil.copytree(PACKAGE.parent / "configs", tmp_path / "configs")
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    (tmp_path / "work").mkdir()
    words = (*TINY[1:], "run_dir=run", "telemetry.level=events", "report=true")
    given = {"cwd": tmp_path / "work", "env": ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}}
    asked = [sys.executable, "-c", WITHOUT_LAB, *words]
    done = subprocess.run(asked, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stderr
