"""Sealed files: any changed byte is found, and an interrupted write leaves the old file whole."""

import os
import stat
from pathlib import Path

import pytest
import torch

from esper_soa.training.files.checkpoint import save_checkpoint
from esper_soa.training.files.checksum import find_damage


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

    def noted_replace(one: str, other: str, **folders: int) -> None:
        calls.append(f"rename to {other}")
        replace(one, other, **folders)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    save_checkpoint(tmp_path / "a.pt", {"round": 1})
    size = (tmp_path / "a.pt").stat().st_size
    assert calls == [f"file of {size}", "rename to a.pt", "folder"]
