"""Trackers are told every round, and whatever they do the run is the same."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest

from esper_soa.config.settings import flat_settings
from esper_soa.lab.telemetry import tracking as module
from esper_soa.lab.telemetry.table_files import read_table
from esper_soa.lab.telemetry.tracking import TrackedRun, Tracker, TrackerState, Tracking
from esper_soa.system.errors import UserError
from esper_soa.system.files import WriteErrors
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.loop.trainer import start_run, train_rounds
from tests.builders.program import ENVIRONMENT, TINY, command
from tests.builders.tiny_runs import TIMES, fresh, records, resumed, settings, timeless

Opener = Callable[[TrackedRun], Tracker]
SHORT = settings(steps=2, slots=["r0c0"])


class Sink:
    """Keeps what it is told, a second later or never."""

    def __init__(self, tracked: TrackedRun, seconds: float = 0.0, fails: bool = False) -> None:
        self.tracked = tracked
        self.seconds = seconds
        self.fails = fails
        self.id = tracked.id or "new"
        self.told: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def log(self, number: int, numbers: Mapping[str, float]) -> None:
        time.sleep(self.seconds)
        if self.fails:
            raise ConnectionError("nobody there")
        self.told.append((number, dict(numbers)))

    def finish(self) -> None:
        self.finished += 1


def played(folder: Path, trackers: Mapping[str, Opener]) -> tuple[list[dict], dict[str, int]]:
    """The lines of a run with `trackers`, without times, and what these lack."""
    place = RunFolder(folder)
    with session(place) as within:
        tracking = Tracking([])
        tracking.openers = dict(trackers)
        job = start_run(within, SHORT, callbacks=[tracking])
        for _ in train_rounds(job):
            pass
    return timeless(place.metrics), next(iter(job.tasks.values())).files.lost


class Sinks(list[Sink]):
    """Opens sinks and keeps them."""

    def opener(self, seconds: float = 0.0, fails: bool = False) -> Opener:
        return lambda tracked: self.append(Sink(tracked, seconds, fails)) or self[-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A run without trackers."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, played(folder, {})[0]


@pytest.mark.parametrize(("seconds", "fails"), [(0.1, False), (0.0, True)])
def test_a_tracker_that_sleeps_or_fails_changes_nothing_but_what_it_lacks(
    seconds: float, fails: bool, alone: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_ROUNDS", 1)
    sinks = Sinks()
    found, lacking = played(tmp_path, {"sink": sinks.opener(seconds, fails)})
    assert found == alone[1]
    for table in ("steps", "slots", "events"):
        mine, its = (read_table(place, table) for place in (tmp_path, alone[0]))
        assert all(str(mine[name].tolist()) == str(its[name].tolist()) for name in its)
    assert lacking.get("sink", 0) + len(sinks[0].told) == 3
    assert bool(sinks[0].told) != fails


def test_a_tracker_that_cannot_be_opened_costs_its_lines_alone_which_the_summary_counts(
    alone: tuple[Path, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tracked: TrackedRun) -> Tracker:
        raise OSError("no route to host")

    monkeypatch.setattr(module, "find_openers", lambda names: {"sink": refuse})
    fresh(replace(SHORT, track=["wandb"]), tmp_path)
    assert timeless(tmp_path / "metrics.jsonl") == alone[1]
    told = json.loads((tmp_path / "summary.json").read_text())["telemetry"]
    assert told == {"level": "events", "env_steps": 12, "dropped": {"sink": 3}}
    lacks = "track    sink lacks 3 lines: OSError: no route to host"
    assert lacks in (tmp_path / "log.txt").read_text()


def test_trackers_are_told_the_finite_numbers_by_their_places() -> None:
    record = {
        "round": 3,
        "update": {"kl": 0.5, "loss": float("nan"), "heads": {"op": 2, "slot": float("inf")}},
        "done": True,
        "anomalies": ["a"],
        "name": "x",
        "none": None,
    }
    found = list(module.numbers_of(record))
    assert found == [("round", 3.0), ("update/kl", 0.5), ("update/heads/op", 2.0), ("done", 1.0)]
    assert all(type(value) is float for _, value in found)


def test_all_trackers_together_are_waited_for_so_long() -> None:
    workers = {name: mock.Mock(dropped=count, reason="") for name, count in (("a", 0), ("b", 2))}
    tracking = Tracking([])
    tracking._workers = dict(workers)
    assert tracking.finish() == {"b": 2}
    for worker in workers.values():
        assert worker.method_calls == [mock.call.insist((0, {})), mock.call.close(15.0)]
    assert tracking.finish() == {}
    tracking._workers = {"a": workers["a"]}
    tracking.close()
    assert workers["a"].method_calls[2:] == [mock.call.insist((0, {})), mock.call.close(30.0)]


def test_rounds_wait_for_a_tracker_that_is_slow_to_open(tmp_path: Path) -> None:
    held = threading.Event()
    sinks = Sinks()

    def slow(tracked: TrackedRun) -> Tracker:
        held.wait(60)
        return sinks.opener()(tracked)

    opened = Tracking([])
    opened.openers = {"sink": slow}
    opened.start(TrackedRun(tmp_path, "run", {}), TrackerState(tmp_path, False, WriteErrors()))
    for number in range(1, 51):
        opened.on_round_end(None, {"round": number, "accuracy": 1.0})
    held.set()
    assert opened.finish() == {}
    assert [number for number, _ in sinks[0].told] == [*range(1, 51)]


def test_a_tracker_that_hangs_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = threading.Event()
    held = threading.Event()

    def hang(tracked: TrackedRun) -> Tracker:
        begun.set()
        held.wait(60)
        return Sink(tracked)

    opened = Tracking([])
    opened.openers = {"sink": hang}
    opened.start(TrackedRun(tmp_path, "run", {}), TrackerState(tmp_path, False, WriteErrors()))
    for number in (1, 2, 3):
        opened.on_round_end(None, {"round": number, "accuracy": 1.0})
    assert begun.wait(60)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0)
    lost = opened.finish()
    assert not held.is_set()
    assert lost == {"sink": 3}, "two rounds, and that there are no more"
    assert caplog.messages == ["track    sink lacks 3 lines: it is too slow"]
    held.set()


@pytest.mark.slow
def test_two_jobs_of_a_sweep_are_two_runs_of_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="extra wandb")
    words = command("-m", "seed=1,2", "track=[wandb]", "run_dir=sweep", *TINY)
    env = ENVIRONMENT | {"WANDB_MODE": "offline"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "sweep").rglob("run-*.wandb"))
    for each in (files, {file.stem for file in files}, {file.parents[2] for file in files}):
        assert len(each) == 2, "one in the folder of each job"
    for file in files:
        summary = json.loads((file.parents[2] / "summary.json").read_text())
        assert summary["telemetry"]["dropped"] == {}


def goes_on(folder: Path, trackers: Sequence[str] = ()) -> list[dict]:
    """A run of three rounds that loses its last checkpoint, so that round 3 is played twice."""
    place = RunFolder(folder)
    cfg = replace(SHORT, track=list(trackers), checkpoint_keep=5)
    fresh(cfg, folder)
    place.checkpoint(3).unlink()
    resumed(replace(cfg, rounds=4), folder)
    told = json.loads(place.summary.read_text())["telemetry"]
    assert told["dropped"] == {}, place.log.read_text()
    return records(place.metrics)


def test_a_tracker_is_told_every_number_of_every_round_once_also_where_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = Sinks()
    monkeypatch.setattr(module, "find_openers", lambda names: {"sink": sinks.opener()})
    TrackerState(tmp_path, False, WriteErrors()).save("sink", ("old", 9))  # of another run
    played = goes_on(tmp_path, ["wandb"])
    told = [one for sink in sinks for one in sink.told]
    assert [number for number, _ in told] == [line["round"] for line in played] == [1, 2, 3, 4]
    for (number, numbers), line in zip(told, played, strict=True):
        # what a clock said of a round that was played twice was told the first time
        clock = TIMES if number == 3 else ()
        same = {name: value for name, value in module.numbers_of(line) if name not in clock}
        assert {name: value for name, value in numbers.items() if name not in clock} == same
        assert numbers["accuracy/mean"] == line["accuracy"]["mean"]
        assert numbers["update/entropy/op"] == line["update"]["entropy/op"]
    assert [sink.finished for sink in sinks] == [1, 1]
    assert [(sink.tracked.id, sink.tracked.last_round) for sink in sinks] == [("", 0), ("new", 3)]
    cfg = replace(SHORT, track=["wandb"], checkpoint_keep=5)
    assert sinks[0].tracked == TrackedRun(tmp_path, cfg.name, flat_settings(asdict(cfg)))
    known = json.dumps({"sink": {"id": "new", "round": 4}}, indent=2)
    assert RunFolder(tmp_path).trackers.read_text() == f"{known}\n"


def test_rounds_that_a_killed_run_had_not_sent_are_sent_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sinks = Sinks()
    monkeypatch.setattr(module, "find_openers", lambda names: {"sink": sinks.opener()})
    cfg = replace(SHORT, track=["wandb"])
    fresh(cfg, tmp_path)
    TrackerState(tmp_path, False, WriteErrors()).save("sink", ("new", 1))  # as a kill leaves it
    resumed(replace(cfg, rounds=4), tmp_path)
    assert [number for number, _ in sinks[1].told] == [2, 3, 4]


def test_a_fresh_run_is_a_new_one_and_files_not_ours_are_refused(tmp_path: Path) -> None:
    TrackerState(tmp_path, False, WriteErrors()).save("sink", ("old", 3))
    assert TrackerState(tmp_path, True, WriteErrors()).known == {"sink": ("old", 3)}
    assert TrackerState(tmp_path, False, WriteErrors()).known == {}
    told = rf"^{tmp_path}/trackers\.json: must be of trackers.* \(.+\)$"
    texts = ("no JSON", "[1]", '{"x": {"id": "x"}}', '{"x": {"id": "x", "round": "y"}}', "")
    for text in texts:
        RunFolder(tmp_path).trackers.write_text(text)
        if not text:
            RunFolder(tmp_path).trackers.unlink()
            RunFolder(tmp_path).trackers.mkdir()
        with pytest.raises(UserError, match=told):
            TrackerState(tmp_path, True, WriteErrors())
    unwritten = WriteErrors()
    TrackerState(tmp_path, False, unwritten).save("sink", ("new", 1))
    assert str(unwritten) == "trackers.json could not be written (Is a directory)"


def test_tensorboard_has_every_step_once_after_a_run_has_gone_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told = [dict(module.numbers_of(line)) for line in goes_on(tmp_path, ["tensorboard"])]
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set().union(*told)
    for name in ("accuracy/mean", "update/approx_kl", "seeds/germinated"):
        scalars = [(one.step, one.value) for one in found.Scalars(name)]
        assert scalars == [(line["round"], pytest.approx(line[name], rel=1e-6)) for line in told]


def test_mlflow_has_one_run_with_every_step_once_after_a_run_has_gone_on(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow")
    pytest.importorskip("sqlalchemy", reason="extra mlflow")
    told = goes_on(tmp_path, ["mlflow"])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("esper_soa").experiment_id])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "accuracy/mean")
    assert [(one.step, one.value) for one in history] == [
        (line["round"], line["accuracy"]["mean"]) for line in told
    ]


def test_mlflow_shows_a_resumed_run_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow")
    pytest.importorskip("sqlalchemy", reason="extra mlflow")
    from esper_soa.lab.telemetry.trackers.mlflow import open_tracker

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "lr 50%25?#"  # signs that URLs have a meaning for
    folder.mkdir()
    first = open_tracker(TrackedRun(folder, "run", {"rounds": 2}))
    first.finish()
    open_tracker(TrackedRun(folder, "run", {"rounds": 4}, first.id, 2))
    shutil.copy(folder / "mlflow.db", tmp_path)
    found = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(first.id)
    assert (found.info.status, found.data.params) == ("RUNNING", {"rounds": "2"})


def test_wandb_offline_has_one_id_and_every_step_once_after_a_run_has_gone_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="extra wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    played = goes_on(tmp_path, ["wandb"])
    files = sorted(tmp_path.rglob("run-*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len({file.stem for file in files}) == 1
    assert len(files) == 2, "one for each process"
    told = [step for file in files for step in wandb_history(file, "accuracy/mean")]
    assert told == [(line["round"], line["accuracy"]["mean"]) for line in played]


def wandb_history(file: Path, metric: str) -> list[tuple[int, float]]:
    """Step and value of every row of a W&B file: records as in a LevelDB log, after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = file.read_bytes()
    place = 7
    whole = b""
    found = []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # the rest of a block that holds no header
            place += 32768 - place % 32768
            continue
        size = int.from_bytes(content[place + 4 : place + 6], "little")
        kind = content[place + 6]
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the end of one
            record = Record.FromString(whole)
            values = {
                item.key or "/".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            found += [(record.history.step.num, float(values[metric]))] if metric in values else []
            whole = b""
    return found
