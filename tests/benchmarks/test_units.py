"""A folder of results goes on where it was, and never mixes what was made under other facts."""

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.processes import in_processes, why
from benchmarks.timing import BenchmarkError
from benchmarks.units import CODE, FACTS, Units, code_stamp, opened, stamp_of
from esper_soa.errors import UserError

NOW = {
    "commit": "1234567",
    "code": "aaa",
    "settings_given": [],
    "settings": {"steps": 75, "policy": {"init": "x"}},
}
KEY = ("fashion32", 20260101, "learned")


def begun(folder: Path, **facts: object) -> Units:
    with opened(folder, NOW | facts, fresh=False) as units:
        units.write(KEY, {"accuracies": [1.5]})
    return units


def test_what_a_folder_holds_is_found_again(tmp_path: Path) -> None:
    begun(tmp_path / "a")
    with opened(tmp_path / "a", NOW, fresh=False) as units:
        assert units.held([KEY, ("fashion32", 20260101, "wait")]) == [KEY]
        assert units.read(KEY)["accuracies"] == [1.5]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"code": "bbb", "commit": "7654321"}, "code: aaa there, bbb now"),
        ({"settings": {"steps": 40, "policy": {"init": "x"}}}, "settings.steps: 75 there, 40 now"),
        (
            {"settings": {"steps": 75, "policy": {"init": "y"}}},
            "settings.policy.init: x there, y now",
        ),
        ({"torch": "3"}, "torch: nothing there, 3 now"),
    ],
)
def test_results_of_other_code_settings_or_versions_are_refused(
    tmp_path: Path, facts: dict, words: str
) -> None:
    begun(tmp_path)
    with pytest.raises(BenchmarkError) as refused, opened(tmp_path, NOW | facts, fresh=False):
        pass
    message = str(refused.value)
    assert str(tmp_path) in message
    assert "--fresh" in message
    assert f"({words})" in message
    assert "commit 1234567, this is " + str(facts.get("commit", "1234567")) in message
    with opened(tmp_path, NOW | facts, fresh=True) as units:
        assert units.held([KEY]) == []
    assert json.loads((tmp_path / FACTS).read_text()) == NOW | facts


def test_a_commit_that_changes_words_alone_goes_on(tmp_path: Path) -> None:
    begun(tmp_path)
    with opened(
        tmp_path, NOW | {"commit": "7654321", "settings_given": ["steps=75"]}, fresh=False
    ) as units:
        assert units.held([KEY]) == [KEY]


def test_a_unit_from_another_folder_or_a_damaged_one_is_refused_by_name(tmp_path: Path) -> None:
    here = begun(tmp_path / "here")
    there = begun(tmp_path / "there", code="bbb")
    here.path(KEY).write_text(there.path(KEY).read_text())
    with pytest.raises(
        BenchmarkError, match="fashion32-20260101-learned.json comes from another folder"
    ):
        here.read(KEY)
    here.path(KEY).write_text('{"stamp": ')
    with pytest.raises(BenchmarkError, match="fashion32-20260101-learned.json is no result"):
        here.read(KEY)


def test_files_of_something_else_stay_even_with_fresh(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    for fresh in (False, True):
        with (
            pytest.raises(BenchmarkError, match="holds files of something else"),
            opened(tmp_path, NOW, fresh=fresh),
        ):
            pass
    assert (tmp_path / "letter.txt").read_text() == "dear"


def test_half_written_files_of_a_killed_process_go_and_a_second_process_is_kept_out(
    tmp_path: Path,
) -> None:
    begun(tmp_path)
    (tmp_path / "fashion32-20260101-wait.json.77.tmp").write_text('{"stamp"')
    with opened(tmp_path, NOW, fresh=False):
        assert not list(tmp_path.glob("*.tmp"))
        with pytest.raises(UserError, match="another process"), opened(tmp_path, NOW, fresh=True):
            pass
    assert (tmp_path / "fashion32-20260101-learned.json").exists()


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


# --- processes


def work(job: tuple[str, Path]) -> str:
    """A job: writes its file, and ends as it is told."""
    how, path = job
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "fails":
        raise ValueError("no good")
    if how == "refuses":
        raise UserError("steps=0: must be more")
    if how in ("waits", "slow"):
        time.sleep(120 if how == "waits" else 1)
    path.write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
    return how


def test_a_process_that_dies_or_fails_takes_no_other_along(tmp_path: Path) -> None:
    jobs = [
        ("dies", tmp_path / "0"),
        ("fails", tmp_path / "1"),
        ("well", tmp_path / "2"),
        ("well", tmp_path / "3"),
    ]
    looks: list[int] = []
    dead, failed, *well = in_processes(
        work, jobs, 2, lambda: looks.append(len(list(tmp_path.iterdir())))
    )
    assert isinstance(dead, Exception)
    assert isinstance(failed, Exception)
    assert why(dead).startswith("its process died")
    assert why(failed) == "ValueError: no good"
    assert well == ["well", "well"]
    assert looks[-1] == 2  # the last look sees all
    pids, threads = zip(*((tmp_path / name).read_text().split() for name in "23"), strict=True)
    assert len({*pids, str(os.getpid())}) == 3
    assert set(threads) == {"1"}


@pytest.mark.slow
def test_after_a_setting_that_cannot_work_no_more_jobs_are_begun(tmp_path: Path) -> None:
    jobs = [("refuses", tmp_path / "0"), *(("slow", tmp_path / str(n)) for n in range(1, 9))]
    found = in_processes(work, jobs, 1)
    assert why(found[0]) == "steps=0: must be more"
    assert isinstance(found[-1], UserError)
    assert len(list(tmp_path.iterdir())) <= 2


@pytest.mark.slow
def test_an_error_while_looking_ends_all_processes_at_once(tmp_path: Path) -> None:
    def look() -> None:
        raise BenchmarkError("enough")

    with pytest.raises(BenchmarkError, match="enough"):
        in_processes(work, [("waits", tmp_path / "0"), ("waits", tmp_path / "1")], 1, look)
    assert not multiprocessing.active_children()
    assert not list(tmp_path.iterdir())
