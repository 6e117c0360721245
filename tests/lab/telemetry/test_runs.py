"""What a run leaves of its env-steps: at each level, when it goes on, and when it is killed."""

import json
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper_soa.config.settings import AnomalyConfig, TelemetryConfig, TrainConfig
from esper_soa.lab.telemetry import recorder
from esper_soa.lab.telemetry import table_files as tables
from esper_soa.lab.telemetry.table_files import read_file, read_table, table_files, table_path
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop import run as running
from tests.builders.program import TINY, finished, started, wait_until
from tests.builders.tiny_runs import fresh, log_of, on_tasks, resumed, settings, timeless


def at(level: str, rounds: int = 2) -> TrainConfig:
    return settings(rounds=rounds, steps=6, telemetry=TelemetryConfig(progress="off", level=level))


def same_tables(one: Path, other: Path) -> bool:
    """Those of level events; what is no number is like itself."""
    tables = ("steps", "slots", "events")
    pairs = [[read_table(place, table) for place in (one, other)] for table in tables]
    columns = [(mine[name], its[name]) for mine, its in pairs for name in its]
    return all(str(mine.tolist()) == str(its.tolist()) for mine, its in columns)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run at every level."""
    found = {}
    for level in ("off", "rounds", "events", "full"):
        found[level] = tmp_path_factory.mktemp(level)
        fresh(at(level), found[level])
    return found


def test_each_level_adds_its_files_and_changes_no_number(folders: dict[str, Path]) -> None:
    lines = ["metrics.jsonl", "episodes.jsonl"]
    ends = []
    for level, names, env_steps in (
        ("off", [], 0),
        ("rounds", lines, 0),
        ("events", [*lines, "telemetry"], 24),
        ("full", [*lines, "telemetry"], 24),
    ):
        for name in (*lines, "telemetry"):
            assert (folders[level] / name).exists() == (name in names), (level, name)
        summary = json.loads((folders[level] / "summary.json").read_text())
        assert summary["telemetry"] == {"level": level, "env_steps": env_steps, "dropped": {}}
        ends.append(summary["grown"])
    assert all(end == ends[0] for end in ends)
    tables = {path.name for path in (folders["full"] / "telemetry").iterdir()}
    assert tables == {"steps", "slots", "events", "choices", "subsets"}
    told = [timeless(folders[level] / "metrics.jsonl") for level in ("rounds", "events", "full")]
    assert told[0] == told[1] == told[2]
    assert same_tables(folders["events"], folders["full"])


def test_the_probability_of_a_choice_is_that_among_all_choices(folders: dict[str, Path]) -> None:
    steps = read_table(folders["full"], "steps")
    choices = read_table(folders["full"], "choices")
    facts = read_file(table_path(folders["full"], "steps", 1), "steps").facts
    ops = json.loads(facts["legend"])["ops"]
    places = np.arange(len(steps["op"])), [ops.index(op) for op in steps["op"]]
    np.testing.assert_allclose(steps["op_probability"], choices["op_probability"][places], 1e-6)
    np.testing.assert_allclose(choices["op_probability"].sum(1), 1, rtol=1e-5)
    assert not choices["op_probability"][~choices["op_legal"]].any()


def test_a_run_that_goes_on_has_the_tables_of_one_that_was_never_stopped(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_CELLS", 1)  # as in a round of many env-steps
    fresh(at("events", rounds=1), tmp_path)
    stale = table_path(tmp_path, "steps", 2)
    stale.write_bytes(table_path(tmp_path, "steps", 1).read_bytes())
    table_path(tmp_path, "events", 7).write_bytes(b"of a round that will be played anew")
    shutil.copytree(tmp_path, tmp_path / "quiet")
    resumed(at("rounds"), tmp_path / "quiet")
    assert list(table_files(tmp_path / "quiet", "events")) == [1], "the others are not of this run"
    summary = resumed(at("events"), tmp_path)
    assert summary.telemetry["env_steps"] == len(read_table(tmp_path, "steps")["step"])
    assert same_tables(tmp_path, folders["events"])
    assert list(table_files(tmp_path, "events")) == [1, 2]


@pytest.mark.parametrize(
    ("level", "recorded"),
    [("rounds", [2, 3]), pytest.param("events", [1, 2, 3, 4], marks=pytest.mark.slow)],
)
def test_rounds_after_an_anomaly_are_recorded_in_full_by_a_run_that_goes_on_too(
    level: str, recorded: list[int], tmp_path: Path
) -> None:
    cfg = at(level, rounds=4)
    sick = AnomalyConfig(max_lstm_rms=1e-6)  # from the first update on
    cfg = replace(cfg, telemetry=replace(cfg.telemetry, escalation=2, anomaly=sick))
    cfg = on_tasks(cfg, replace(cfg, task=replace(cfg.task, name="other")))
    fresh(cfg, tmp_path / "whole")
    fresh(replace(cfg, rounds=2), tmp_path / "parts")
    resumed(cfg, tmp_path / "parts")
    paths = [tmp_path / part / "other" for part in ("whole", "parts")]
    for path in paths:
        assert list(table_files(path, "steps")) == recorded
        assert all(list(table_files(path, table)) == [2, 3] for table in ("choices", "subsets"))
        assert all(len(read_table(path, table)["round"]) > 0 for table in ("choices", "subsets"))
    (told,) = (line for line in log_of(tmp_path / "whole") if line.startswith("INFO tables"))
    assert "2 to 3" in told
    assert timeless(paths[0] / "metrics.jsonl") == timeless(paths[1] / "metrics.jsonl")


def test_a_checkpoint_waits_for_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = recorder.write_bytes
    save = running.save_checkpoint
    seen = []
    written = list[Path]()

    def slowly(path: Path, content: bytes) -> None:
        written.append(path)
        time.sleep(0.2)
        write(path, content)

    def look(path: Path, content: dict) -> None:
        if path.name.startswith("checkpoint"):
            seen.append(list(table_files(tmp_path / "other", "events")))
        save(path, content)

    monkeypatch.setattr(recorder, "write_bytes", slowly)
    monkeypatch.setattr(running, "save_checkpoint", look)
    often = TelemetryConfig(progress="off", write_interval=0)
    cfg = replace(at("events"), telemetry=often)
    fresh(on_tasks(cfg, replace(cfg, task=replace(cfg.task, name="other"))), tmp_path)
    assert seen == [[1], [1, 2]]
    assert written.count(table_path(tmp_path / "other", "steps", 1)) > 1, "a round in progress"


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_whole_files_and_goes_on(tmp_path: Path) -> None:
    more = ("rounds=500", "steps=10", "run_dir=run", "checkpoint_every=1")
    more += ("telemetry.write_interval=0",)
    process = started(*TINY, *more, folder=tmp_path)
    folder = RunFolder(tmp_path / "run")
    third = table_path(folder.path, "steps", 3)
    wait_until(lambda: len(folder.checkpoints()) > 0 and third.exists(), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    found = read_table(folder.path, "steps")
    last = int(found["round"].max())
    for number in range(1, last):
        assert (found["round"] == number).sum() == 20
        facts = read_file(table_path(folder.path, "slots", number), "slots").facts
        assert facts["complete"] == "true"
    rounds = max(int(path.stem.split("_")[1]) for path in folder.checkpoints())
    assert rounds <= last
    done = finished(*TINY, *more, f"rounds={rounds + 1}", "resume=auto", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(table_files(folder.path, "steps")) == list(range(1, rounds + 2))
    assert not list(folder.path.rglob("*.tmp"))
