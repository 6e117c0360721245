"""The run folder: where it goes, when it is refused, what is recorded in it."""

import json
import re
from pathlib import Path

import pytest

from esper_soa.errors import UserError
from esper_soa.ops.rundir import RunFolder, claimed, open_run_folder, open_sweep_folder, write_config, write_versions


def test_a_run_without_a_folder_gets_one_named_after_run_and_time(tmp_path: Path) -> None:
    folder = open_run_folder("", "trial", root=str(tmp_path))
    assert folder.path.parent == tmp_path / "trial"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", folder.path.name)


def test_runs_in_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = {open_run_folder("", "trial", root=str(tmp_path)).path for _ in range(3)}
    assert len(folders) == 3


def test_a_given_folder_is_taken_as_it_is_and_left_empty(tmp_path: Path) -> None:
    folder = open_run_folder(str(tmp_path / "a" / "b"), "trial")
    assert folder.path == tmp_path / "a" / "b"
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("result", ["metrics.jsonl", "summary.json", "checkpoint_000012.pt", "best.pt"])
def test_a_folder_with_results_is_refused(tmp_path: Path, result: str) -> None:
    (tmp_path / result).touch()
    with pytest.raises(UserError, match=rf"run_dir={tmp_path}: already holds .*{result}"):
        open_run_folder(str(tmp_path), "trial")


def test_a_folder_left_by_a_run_that_never_started_is_taken(tmp_path: Path) -> None:
    write_config(RunFolder(tmp_path), "envs: 1\n", [])
    assert open_run_folder(str(tmp_path), "trial").path == tmp_path


def test_a_path_through_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run_dir=.*file/run: cannot be written"):
        open_run_folder(str(tmp_path / "file" / "run"), "trial")


def test_a_sweep_gets_a_folder_of_its_own_unless_it_goes_on(tmp_path: Path) -> None:
    root = str(tmp_path)
    first, second = (open_sweep_folder("", "trial", resume=False, root=root) for _ in range(2))
    assert first != second
    assert re.fullmatch(r"sweep_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", first.name)
    (tmp_path / "trial" / "2099-01-01_00-00-00").mkdir()  # a run, no sweep
    assert open_sweep_folder("", "trial", resume=True, root=root) == second
    assert open_sweep_folder("", "other", resume=True, root=root).parent == tmp_path / "other"
    assert open_sweep_folder(str(tmp_path / "given"), "trial", resume=True, root=root) == tmp_path / "given"


def test_a_claim_changes_nothing_but_the_lock_and_ends_with_its_context(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("kept")
    for _ in range(2):
        with claimed(RunFolder(tmp_path)):
            assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert (tmp_path / ".lock").read_text() == "kept"


def test_a_folder_in_which_nothing_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with (
        pytest.raises(UserError, match=rf"run_dir={tmp_path}: cannot be written \(Is a directory\)"),
        claimed(RunFolder(tmp_path)),
    ):
        pass


def test_settings_and_overrides_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_config(folder, "envs: 4\n", ["envs=4", "+experiment=smoke"])
    assert folder.config.read_text() == "envs: 4\n"
    assert folder.overrides.read_text() == "envs=4\n+experiment=smoke\n"


def test_versions_name_software_machine_device_and_data(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_versions(folder, "cpu (test)", {"name": "fashion32", "source": "embedded", "identity": "abc"})
    record = json.loads(folder.versions.read_text())
    assert set(record) == {"python", "packages", "git", "platform", "cpu_count", "device", "data"}
    assert record["data"]["name"] == "fashion32"
    assert record["device"] == "cpu (test)"
    assert record["packages"]["torch"]
    assert record["packages"]["hydra-core"]
