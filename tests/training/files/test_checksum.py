"""Sealed files: any changed byte is found, and an interrupted write leaves the old file whole."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper_soa.training.files.checkpoint import save_checkpoint
from esper_soa.training.files.checksum import find_damage, read_sealed, write_sealed
from esper_soa.training.files.claims import lock_folder
from esper_soa.training.files.run_folder import RunFolder
from tests.builders import warm


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A small checkpoint with two tensors."""
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"round": 3, "weights": {"conv": torch.ones(3), "bias": torch.arange(5)}})
    assert find_damage(path) is None
    return path


def test_every_single_flipped_bit_is_found(whole: Path) -> None:
    unnoticed = []
    content = whole.read_bytes()
    with whole.open("r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), place)
                if find_damage(whole) is None:
                    unnoticed.append((place, bit))
            os.pwrite(file.fileno(), bytes([byte]), place)
    assert unnoticed == []
    assert whole.read_bytes() == content


def test_a_file_of_any_other_length_is_found(whole: Path) -> None:
    content = whole.read_bytes()
    seal = content[content.rindex(b"\nesper_soa") :]
    for length in [*range(0, len(content) - 200, 7), *range(len(content) - 200, len(content))]:
        whole.write_bytes(content[:length])
        assert find_damage(whole) is not None, length
    for more in (b"\0", b"\n", seal, content, bytes(1000)):
        whole.write_bytes(content + more)
        assert find_damage(whole) is not None, more[:20]
        whole.write_bytes(more + content)
        assert find_damage(whole) is not None, more[:20]
    whole.write_bytes(content)
    assert find_damage(whole) is None


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert find_damage(tmp_path / "pipe") == f"checkpoint {tmp_path / 'pipe'}: not a file"
    assert find_damage(tmp_path) == f"checkpoint {tmp_path}: not a file"
    assert (
        find_damage(tmp_path / "none") == f"checkpoint {tmp_path / 'none'}: there is no such file"
    )
    assert find_damage(Path("/dev/zero")) == "checkpoint /dev/zero: not a file"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    reason = "Too many levels of symbolic links"
    assert find_damage(loop) == f"checkpoint {loop}: cannot be read ({reason})"


def test_another_version_is_refused_by_number(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper_soa.training.files.checksum.SEAL_VERSION", 13)
    told = "has version 3: this program reads version 13"
    assert find_damage(whole) == f"checkpoint {whole}: {told}"


def test_file_and_folder_are_on_the_disk_before_and_after_the_new_name_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync = os.fsync
    replace = os.replace

    def noted_fsync(handle: int) -> None:
        status = os.fstat(handle)
        calls.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size}")
        fsync(handle)

    def noted_replace(one: Path, other: Path) -> None:
        calls.append(f"rename to {Path(other).name}")
        replace(one, other)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    save_checkpoint(tmp_path / "a.pt", {"round": 1})
    size = (tmp_path / "a.pt").stat().st_size
    assert calls == [f"file of {size}", "rename to a.pt", "folder"]


FULL = """
import resource, sys
from pathlib import Path
import torch
from esper_soa.training.files.checkpoint import load_checkpoint, save_checkpoint
path, content = Path(sys.argv[1]), {"round": 2, "weights": torch.zeros(50_000)}
save_checkpoint(path, content)
size = path.stat().st_size
save_checkpoint(path, {"round": 1})
for limit in (0, 1, 100, 5_000, size // 2, size - 97, size - 96, size - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save_checkpoint(path, content)
        print(f"{limit}: written")
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        whole = load_checkpoint(path, torch.device("cpu")) == {"round": 1}
        if (whole, error.strerror, error.filename, len(list(path.parent.iterdir()))) != (
            True, "File too large", str(path), 1):
            print(limit, whole, repr(error), list(path.parent.iterdir()))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
save_checkpoint(path, content)
print("done")
"""


def test_wherever_the_room_ends_the_old_checkpoint_stays_whole_and_the_reason_is_told(
    tmp_path: Path,
) -> None:
    path = tmp_path / "room" / "checkpoint.pt"
    path.parent.mkdir()
    done = warm.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


SLOW_WRITER = """
import sys, time
from pathlib import Path
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.claims import lock_folder
from esper_soa.system.files import replacing
with (
    lock_folder(RunFolder(Path(sys.argv[1]))),
    replacing(Path(sys.argv[1]) / "checkpoint_000002.pt") as half,
):
    half.write_bytes(bytes(100_000))
    print("half", flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_left_half_written_goes_when_the_folder_is_claimed_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint_000002.pt"
    write_sealed(path, b"old")
    (tmp_path / "mine.tmp").write_text("not of the program")
    (tmp_path / "checkpoint_000001.pt.backup.tmp").write_text("not of the program")
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    half = tmp_path / f"checkpoint_000002.pt.{process.pid}.tmp"
    with (
        pytest.raises(Exception, match="^run_dir=/.*: another process is writing to this run$"),
        lock_folder(RunFolder(tmp_path)),
    ):
        pass
    assert half.exists()  # what a living process writes is left alone
    process.kill()
    process.wait()
    process.stdout.close()
    assert half.exists()
    with lock_folder(RunFolder(tmp_path)):
        names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [".lock", "checkpoint_000001.pt.backup.tmp", "checkpoint_000002.pt", "mine.tmp"]
    assert read_sealed(path) == b"old"


def test_a_folder_that_is_not_there_is_an_error_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory") as caught:
        save_checkpoint(tmp_path / "none" / "a.pt", {"round": 1})
    assert caught.value.strerror == "No such file or directory"
