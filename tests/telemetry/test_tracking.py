"""Trackers are told every round, and whatever they do the run is the same."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from program import ENVIRONMENT, TINY, command, finished
from rich.console import Console

from esper_soa.agent.config import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config import ComputeConfig, TelemetryConfig, TrainConfig
from esper_soa.nets.config import DataConfig, TaskConfig
from esper_soa.ops.progress import Progress
from esper_soa.ops.rundir import RunFolder
from esper_soa.ops.session import session
from esper_soa.telemetry import tracking as module
from esper_soa.telemetry.table_files import read_table
from esper_soa.telemetry.tracking import Tracked, Tracker, Tracking, numbers_of
from esper_soa.trainer import open_run, play, run, value_of

TIMES = ("eps", "collect_seconds", "update_seconds")
Opener = Callable[[Tracked], Tracker]


def settings(**changed: object) -> TrainConfig:
    return TrainConfig(
        envs=2, rounds=3, steps=2, batch_size=4, train_samples=4, val_samples=8, slots=["r0c0"], control="none",
        task=TaskConfig(name="tiny", base_channels=2, num_blocks=2, kernel_size=1, num_pools=2),
        data=DataConfig(name="synthetic", synthetic_train=32, synthetic_test=16),
        policy=PolicyConfig(network=NetworkConfig(hidden=8, features=8), ppo=PPOConfig(epochs=1, minibatches=1)),
        telemetry=TelemetryConfig(progress="off"), compute=ComputeConfig(threads=1, workers=1), **changed,
    )  # type: ignore[arg-type]  # fmt: skip


class Sink:
    """Keeps what it is told, a second later or never."""

    def __init__(self, tracked: Tracked, seconds: float = 0.0, fails: bool = False) -> None:
        self.tracked, self.seconds, self.fails = tracked, seconds, fails
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
        job = open_run(settings(), within, None)
        job.trackers = dict(trackers)
        value_of(play(job, Progress(1, Console(file=io.StringIO()), "off", after_step=job.heed)))
    lines = [json.loads(line) for line in place.metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines], job.lacking


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """A run without trackers."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, played(folder, {})[0]


def test_a_tracker_is_told_every_number_of_every_round_and_is_finished_once(tmp_path: Path) -> None:
    sinks: list[Sink] = []

    def open_sink(tracked: Tracked) -> Sink:
        sinks.append(Sink(tracked))
        return sinks[-1]

    _, lacking = played(tmp_path, {"sink": open_sink})
    (sink,) = sinks
    assert [number for number, _ in sink.told] == [1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for (_, numbers), line in zip(sink.told, lines, strict=True):
        assert numbers == dict(numbers_of(line))
        assert numbers["accuracy/mean"] == line["accuracy"]["mean"]
        assert numbers["update/entropy/op"] == line["update"]["entropy/op"]
    assert (sink.finished, lacking) == (1, {})
    assert (sink.tracked.folder, sink.tracked.settings["policy.ppo.epochs"]) == (tmp_path, 1)


@pytest.mark.parametrize(("seconds", "fails"), [(1.0, False), (0.0, True)])
def test_a_tracker_that_sleeps_or_fails_changes_nothing_but_what_it_lacks(
    seconds: float, fails: bool, alone: tuple[Path, list[dict]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LIMIT", 1)
    found, lacking = played(tmp_path, {"sink": lambda tracked: Sink(tracked, seconds, fails)})
    folder, lines = alone
    assert found == lines
    for table in ("steps", "slots", "events"):
        assert json.dumps(
            {name: list(map(str, part)) for name, part in read_table(tmp_path, table).items()}
        ) == json.dumps({name: list(map(str, part)) for name, part in read_table(folder, table).items()})
    assert lacking["sink"] in ((3,) if fails else (1, 2))


def test_a_tracker_that_cannot_be_opened_costs_its_lines_alone(alone: tuple[Path, list[dict]], tmp_path: Path) -> None:
    def refuse(tracked: Tracked) -> Tracker:
        raise OSError("no route to host")

    assert played(tmp_path, {"sink": refuse}) == (alone[1], {"sink": 3})
    assert "track    sink lacks 3 lines: OSError: no route to host" in (tmp_path / "log.txt").read_text()


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path) -> None:
    opened = Tracking(
        {"sink": lambda tracked: Sink(tracked, seconds=30.0)}, Tracked(tmp_path, "run", {}, 0)
    )  # fmt: skip
    for number in (1, 2, 3):
        opened.log({"round": number, "accuracy": 1.0})
    begun = time.monotonic()
    opened.close(seconds=0.5)
    assert time.monotonic() - begun < 5
    assert opened.dropped["sink"] >= 2


def test_what_a_tracker_lacks_stands_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from esper_soa import trainer

    monkeypatch.setattr(trainer, "openers", lambda names: {"sink": lambda tracked: Sink(tracked, fails=True)})
    run(settings(), RunFolder(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["telemetry"] == {
        "level": "events", "env_steps": 12, "dropped": {"sink": 3},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_told_with_the_extra_to_install(name: str, tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None; from esper_soa.train import main; main()"
    words = [sys.executable, "-c", hidden, *TINY, f"track=[{name}]", "run_dir=run"]
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"pip install 'esper-soa[{name}]'" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(settings(track=["tensorboard"]), RunFolder(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    names = set().union(*(dict(numbers_of(line)) for line in lines))
    assert set(found.Tags()["scalars"]) == names
    for name in ("accuracy/mean", "reward/mean", "update/approx_kl", "seeds/germinated"):
        wanted = [(line["round"], pytest.approx(dict(numbers_of(line))[name], rel=1e-6)) for line in lines]
        assert [(one.step, one.value) for one in found.Scalars(name)] == wanted


def test_two_jobs_of_a_sweep_are_two_runs_of_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="extra wandb")
    words = command("-m", "seed=1,2", "track=[wandb]", "run_dir=sweep", *TINY)
    done = subprocess.run(
        words, cwd=tmp_path, env=ENVIRONMENT | {"WANDB_MODE": "offline"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "sweep").rglob("run-*.wandb"))
    assert len(files) == 2
    assert len({file.stem for file in files}) == 2
    assert len({file.parents[2] for file in files}) == 2, "one in the folder of each job"
    for file in files:
        summary = json.loads((file.parents[2] / "summary.json").read_text())
        assert summary["telemetry"]["dropped"] == {}


def test_mlflow_reads_back_what_was_written(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="extra mlflow")
    pytest.importorskip("sqlalchemy", reason="extra mlflow")
    run(settings(track=["mlflow"]), RunFolder(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["telemetry"]["dropped"] == {}, (tmp_path / "log.txt").read_text()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("esper_soa").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FINISHED"
    history = client.get_metric_history(found.info.run_id, "accuracy/mean")
    assert [(one.step, one.value) for one in history] == [(line["round"], line["accuracy"]["mean"]) for line in lines]


def test_a_tracker_that_there_is_not_is_refused(tmp_path: Path) -> None:
    done = finished("track=[paper]", *TINY, folder=tmp_path)
    assert (done.returncode, "track" in done.stderr) == (2, True)
