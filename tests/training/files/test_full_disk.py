"""A disk that is full: the run is played and told to its end, what is missing is named in one line,
the status is 1.

A limit on the size of files fails writes in every environment; a real small file system, where one
may be mounted.
"""

import json
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.builders.program import ENVIRONMENT, PATIENCE, TINY, command, finished, lines

TABLE = ("accuracy, mean over hosts (%)", "without growth", "parameters, mean over hosts")


def at_most(size: int) -> dict[int, int]:
    """The limit of a process none of whose files can grow beyond `size` bytes."""
    return {resource.RLIMIT_FSIZE: size}


def assert_ended_with_its_table(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 1
    for words in TABLE:
        assert words in done.stdout
    assert "(None)" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def assert_whole(folder: Path) -> None:
    """Every line is JSON, and nothing half written is left."""
    for name in ("metrics.jsonl", "episodes.jsonl"):
        for line in lines(folder / name):
            json.loads(line)
    assert list(folder.rglob("*.tmp")) == []


def test_a_run_whose_files_have_no_room_ends_with_its_table_and_names_them_in_one_line(
    tmp_path: Path,
) -> None:
    # 5,400 bytes hold the episodes, the log and one of two lines of metrics, but not config.yaml
    # nor any checkpoint
    done = finished(*TINY, f"run_dir={tmp_path}/run", folder=tmp_path, limits=at_most(5400))
    assert_ended_with_its_table(done)
    assert done.stderr.startswith(f"error: {tmp_path}/run: ")
    assert done.stderr.count("\n") == 1
    for name in ("config.yaml", ".hydra", "metrics.jsonl", "best.pt", "the newest checkpoint"):
        assert name in done.stderr
    assert "summary.json" not in done.stderr
    assert_whole(tmp_path / "run")
    assert len(lines(tmp_path / "run" / "metrics.jsonl")) == 1
    assert len(lines(tmp_path / "run" / "episodes.jsonl")) == 4
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 2
    # of 2 rounds x 2 env-steps x 2 hosts
    assert summary["telemetry"] == {"level": "events", "env_steps": 0, "dropped": {"tables": 8}}
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the newest checkpoint could not be written" in log
    assert "telemetry lacks 8 env-steps: File too large" in log


def file_systems_can_be_mounted() -> bool:
    tools = shutil.which("unshare"), shutil.which("mount")
    if None in tools:
        return False
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=60
    )
    return tried.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not file_systems_can_be_mounted(), reason="no file system can be mounted here")
@pytest.mark.parametrize("room", ["16k"])
def test_a_run_on_a_file_system_that_is_full_ends_with_its_table(tmp_path: Path, room: str) -> None:
    (tmp_path / "small").mkdir()
    # the file system is gone with the process: what lies in it is copied before
    script = (
        f'mount -t tmpfs -o size={room} tmpfs small && "$@"; status=$?; cp -r small/run '
        "copy; exit $status"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", *command(*TINY, "run_dir=small/run")],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert_ended_with_its_table(done)
    assert done.stderr.count("\n") == 1
    assert "the newest checkpoint" in done.stderr
    assert "No space left on device" in done.stderr
    assert "telemetry lacks 8 env-steps" in done.stdout
    assert_whole(tmp_path / "copy")
