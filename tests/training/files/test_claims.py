"""Two processes and one folder: the second is refused and changes nothing there."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper_soa.system.errors import UserError
from esper_soa.training.files.checksum import write_sealed
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from tests.builders.program import TINY, contents, finished

HOLD = """
import sys, time
from pathlib import Path
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.claims import lock_folder
with lock_folder(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A run folder as a run leaves it in its first round, in which another process is at work."""
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    for name in (
        "config.yaml",
        "overrides.txt",
        "versions.json",
        "log.txt",
        ".hydra/config.yaml",
        ".hydra/hydra.yaml",
    ):
        (folder / name).write_text(f"{name} of the first\n")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    yield folder
    holder.kill()
    holder.wait()
    holder.stdout.close()


SLOW_WAYS = ("hydra.run.dir=run", "run_dir=run resume=auto")


@pytest.mark.parametrize(
    "way",
    [
        "run_dir=run",
        "resume=run",
        *(pytest.param(way, marks=pytest.mark.slow) for way in SLOW_WAYS),
    ],
)
def test_a_second_run_is_refused_and_changes_nothing(held: Path, way: str) -> None:
    if way == "resume=run":
        write_sealed(held / "checkpoint_000001.pt", b"whatever")
    before = contents(held)
    done = finished("+experiment=smoke", "envs=3", *way.split(), folder=held.parent)
    assert done.stderr == f"error: run_dir={held}: another process is writing to this run\n"
    assert done.returncode == 2
    assert contents(held) == before


def test_a_run_that_ended_in_its_first_round_begins_again_with_its_own_records(
    tmp_path: Path,
) -> None:
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    done = finished(*TINY, "rounds=1", "run_dir=run", "resume=auto", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    kept = (tmp_path / "run" / ".hydra" / "overrides.yaml").read_text()
    assert kept.startswith(f"- {TINY[0]}\n")


def test_a_second_sweep_of_the_same_folder_is_refused(held: Path) -> None:
    done = finished("-m", "+experiment=smoke", "envs=3", f"run_dir={held}", folder=held.parent)
    assert done.stderr == f"error: run_dir={held}: another process is playing this sweep\n"
    assert done.returncode == 2


def test_a_folder_is_free_again_after_its_session_and_once_its_process_is_killed(
    held: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="another process"), session(RunFolder(held)):
        pass
    free = RunFolder(tmp_path)
    for _ in range(2):
        with session(free), pytest.raises(UserError, match="another process"), session(free):
            pass
