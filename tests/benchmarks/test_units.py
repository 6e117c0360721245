"""A folder of results goes on where it was, and never mixes what was made under other facts."""

import os
import signal
from pathlib import Path

import pytest

from benchmarks.processes import in_processes
from benchmarks.timing import BenchmarkError
from benchmarks.units import CODE, Units, code_stamp, opened, stamp_of
from esper_soa.system.errors import UserError

NOW = {"commit": "1234567", "code": "aaa", "settings_given": [], "settings": {"steps": 75}}
KEY = ("fashion32", 20260101, "learned")


def held(folder: Path, facts: dict) -> list:
    with opened(folder, facts) as units:
        return units.held([KEY, ("fashion32", 20260101, "wait")])


def test_what_was_done_under_the_same_facts_is_found_again_and_no_other(tmp_path: Path) -> None:
    with opened(tmp_path, NOW) as units:
        units.write(KEY, {"accuracy": [1.5]})
        assert units.read(KEY) == {"accuracy": [1.5]}
        with pytest.raises(UserError, match="another process"), opened(tmp_path, NOW):
            pass
    assert held(tmp_path, NOW) == [KEY]
    assert held(tmp_path, NOW | {"commit": "7654321", "settings_given": ["steps=75"]}) == [KEY]
    for facts in ({"code": "bbb"}, {"settings": {"steps": 40}}, {"torch": "3"}):
        assert held(tmp_path, NOW | facts) == []


def test_a_stamp_covers_every_file_that_decides_results(tmp_path: Path) -> None:
    for name in CODE:
        path = tmp_path / name if name.endswith(".py") else tmp_path / name / "part" / "file.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    stamps = [code_stamp(tmp_path)]
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        path.write_text("2")
        stamps.append(code_stamp(tmp_path))
    assert len(set(stamps)) == 1 + len(CODE)
    cache = tmp_path / "esper_soa" / "__pycache__" / "x.pyc"
    cache.parent.mkdir()
    cache.write_text("3")
    assert code_stamp(tmp_path) == stamps[-1]
    assert stamp_of(NOW) != stamp_of(NOW | {"code": "bbb"})
    assert stamp_of(NOW) == stamp_of(dict(reversed(NOW.items())))


def work(job: tuple[str, Path]) -> None:
    """A job: writes its file, or ends as it is told."""
    how, folder = job
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise BenchmarkError("no good.")
    Units(folder).write((how,), {"pid": os.getpid()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("dies", "second: its process died"), ("fails", "second: no good. What was")]
)
def test_a_job_that_fails_is_named_and_earlier_ones_stay(
    how: str, said: str, tmp_path: Path
) -> None:
    looks: list[int] = []
    jobs = {"first": ("well", tmp_path), "second": (how, tmp_path), "third": ("never", tmp_path)}
    with pytest.raises(BenchmarkError, match=said):
        in_processes(work, jobs, 1, lambda: looks.append(len(list(tmp_path.iterdir()))))
    assert looks[-1] >= 1
    assert Units(tmp_path).read(("well",))["pid"] != os.getpid()
