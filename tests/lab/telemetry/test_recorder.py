"""A recorder keeps whole rounds in files that are always whole, and holds nobody up."""

import json
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from esper_soa.lab.telemetry import recorder as module
from esper_soa.lab.telemetry.recorder import RankRecorder, TableFolder, TableRecorder
from esper_soa.lab.telemetry.table_files import read_file, read_table, table_files, table_path
from esper_soa.runtime.ranks import SINGLE_PROCESS, Ranks
from esper_soa.system.files import WriteErrors
from esper_soa.training.loop.recorder import Recorder
from esper_soa.vocabulary import CURVE_NAMES, HEAD_NAMES, OP_NAMES, STAGE_NAMES, STYLE_NAMES
from tests.builders.recorded_world import Recorded, record


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record(seed=4, num_envs=2, num_slots=2, steps=6)


def made(
    recorded: Recorded, folder: Path, level: str = "events", interval: float = 100.0
) -> TableRecorder:
    return TableRecorder(folder, recorded.legend, level, interval, WriteErrors())


def columns(recorder: Recorder, recorded: Recorded) -> np.ndarray:
    """What the recorder's own level packs of each env-step."""
    packed = [recorder.pack(facts) for facts in recorded.facts]
    return np.stack([one.numpy() for one in packed if one is not None])


def play(
    recorder: Recorder, recorded: Recorded, number: int, steps: int = 6, ends: bool = False
) -> None:
    recorder.begin(number)
    for step, numbers in enumerate(columns(recorder, recorded)[:steps], 1):
        recorder.emit(step, numbers)
    if ends:
        recorder.end()


def twice(steps: int) -> list[int]:
    """Env-steps of two hosts."""
    return [step for step in range(1, steps + 1) for _ in range(2)]


@pytest.mark.parametrize("level", ["events", "full"])
def test_each_round_has_a_file_per_table(recorded: Recorded, tmp_path: Path, level: str) -> None:
    recorder = made(recorded, tmp_path, level)
    for number in (1, 2):
        play(recorder, recorded, number, ends=True)
    recorder.flush()
    assert len(read_table(tmp_path, "steps")["env"]) == 24, "flushed, and not on the disk"
    recorder.close()
    tables = {"events", "slots", "steps"} | ({"choices", "subsets"} if level == "full" else set())
    assert {path.name for path in (tmp_path / "telemetry").iterdir()} == tables
    assert all(list(table_files(tmp_path, table)) == [1, 2] for table in tables)
    assert (recorder.env_steps, recorder.dropped) == (24, 0)
    assert read_table(tmp_path, "steps")["round"].tolist() == [1] * 12 + [2] * 12
    assert read_table(tmp_path, "steps", rounds=[2])["round"].tolist() == [2] * 12
    legend = {
        "ops": [*OP_NAMES],
        "slots": [*recorded.legend.slots],
        "blueprints": [*recorded.legend.blueprints],
        "styles": [*STYLE_NAMES],
        "curves": [*CURVE_NAMES],
        "stages": [*STAGE_NAMES],
        "heads": [*HEAD_NAMES],
    }
    for number in (1, 2):
        facts = read_file(table_path(tmp_path, "slots", number), "slots").facts
        told = {"table": "slots", "schema": "1", "complete": "true", "legend": legend}
        assert facts | {"legend": json.loads(facts["legend"])} == told
    table_path(tmp_path, "steps", 1_000_000).touch()
    TableFolder(tmp_path).truncate(1)
    assert all(list(table_files(tmp_path, table)) == [1] for table in tables)
    TableFolder(tmp_path).truncate(0)
    assert len(read_table(tmp_path, "steps")["env"]) == 0


def test_single_rounds_are_in_full_where_ranks_share_the_envs(
    recorded: Recorded, tmp_path: Path
) -> None:
    recorder = RankRecorder(made(recorded, tmp_path), SINGLE_PROCESS, "events")
    for number in (1, 2, 3):
        recorder.escalate(number == 2)
        play(recorder, recorded, number, ends=True)
    recorder.close()
    assert list(table_files(tmp_path, "steps")) == [1, 2, 3]
    assert list(table_files(tmp_path, "choices")) == [2]


class HeldWriter:
    """Writes files once it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self._write = module.write_bytes
        monkeypatch.setattr(module, "write_bytes", self)

    def __call__(self, path: Path, content: bytes) -> None:
        self.begun.set()
        assert self.go.wait(60)
        self._write(path, content)


def test_a_disk_that_is_slow_costs_env_steps_and_is_not_waited_for(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    monkeypatch.setattr(module, "MAX_WAITING_STEPS", 4)
    recorder = made(recorded, tmp_path)
    play(recorder, recorded, 1, steps=1, ends=True)
    assert held.begun.wait(60)
    play(recorder, recorded, 2)
    assert list(table_files(tmp_path, "steps")) == [], "the disk was waited for"
    held.go.set()
    recorder.end()
    recorder.flush()
    play(recorder, recorded, 3, steps=1, ends=True)
    recorder.close()
    assert recorder.dropped == 2 * 2
    found = [read_file(table_path(tmp_path, "steps", number), "steps") for number in (2, 3)]
    assert [one.values["step"].tolist() for one in found] == [twice(4), twice(1)]
    assert [one.facts.get("dropped") for one in found] == ["4", None]


def test_a_round_of_ranks_is_handed_over_no_faster_than_it_is_taken(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    monkeypatch.setattr(module, "MAX_WAITING_STEPS", 4)
    recorder = made(recorded, tmp_path)
    relay = RankRecorder(recorder, SINGLE_PROCESS, "events")
    play(relay, recorded, 1, steps=1)
    relay.end()
    assert held.begun.wait(60)
    play(relay, recorded, 2)
    flush = recorder.flush

    def let_go() -> None:
        held.go.set()
        flush()

    monkeypatch.setattr(recorder, "flush", let_go)
    relay.end()
    recorder.close()
    assert recorder.dropped == 0
    assert read_table(tmp_path, "steps", [2])["step"].tolist() == twice(6)


class Longer(Ranks):
    """Another rank has played two env-steps more."""

    def gather_values(self, value: int) -> list[int]:  # type: ignore[override]
        return [value, value + 2]


def test_envs_that_are_over_have_no_rows_where_those_of_other_ranks_play_on(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = made(recorded, tmp_path, "full")
    given = mock.Mock(wraps=recorder.emit)
    monkeypatch.setattr(recorder, "emit", given)
    relay = RankRecorder(recorder, Longer(), "full")
    play(relay, recorded, 1, steps=4, ends=True)
    relay.close()
    assert (relay.received, relay.env_steps, relay.dropped) == (8, 8, 0)
    assert [call.args[0] for call in given.call_args_list] == [1, 2, 3, 4, 5, 6]
    for name in ("steps", "slots", "choices", "subsets"):
        assert sorted(set(read_table(tmp_path, name)["step"].tolist())) == [1, 2, 3, 4], name
    assert read_table(tmp_path, "events")["step"].max() <= 4
    relay.truncate(0)
    assert table_files(tmp_path, "steps") == {}


@contextmanager
def disk_that_takes(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_waits_for_a_full_disk_is_bounded_and_what_is_given_up_is_counted(
    recorded: Recorded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = made(recorded, tmp_path)
    play(recorder, recorded, 1, ends=True)
    recorder.flush()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    monkeypatch.setattr(module, "MAX_QUEUED_BYTES", 2 * size + size // 2)
    with disk_that_takes(500):
        for number in range(2, 8):
            play(recorder, recorded, number, ends=True)
        recorder.flush()
    play(recorder, recorded, 8, ends=True)
    recorder.close()
    assert list(table_files(tmp_path, "steps")) == [1, 6, 7, 8], "two rounds had room to wait"
    assert (recorder.env_steps, recorder.dropped) == (4 * 12, 4 * 12)
    lacks = "telemetry lacks 48 env-steps: the disk was full, or too slow"
    assert caplog.messages[-1] == lacks
