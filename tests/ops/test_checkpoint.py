"""Checkpoints come back bit for bit, refuse foreign files, and never destroy the one before."""

import pickle
import resource
from pathlib import Path

import pytest
import torch

from esper_soa.ops.checkpoint import CheckpointError, Content, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")


def some_content() -> dict[str, Content]:
    return {
        "round": 3,
        "weights": {"conv": torch.tensor([0.1, float("nan"), -0.0], dtype=torch.float32), "empty": torch.zeros(0, 2)},
        "random": [torch.arange(5, dtype=torch.uint8), None, "philox", 0.1, True],
    }


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, some_content())
    content = load_checkpoint(path, CPU)
    weights, random = content["weights"], content["random"]
    assert content["round"] == 3
    assert isinstance(weights, dict)
    assert isinstance(random, list)
    conv = weights["conv"]
    assert isinstance(conv, torch.Tensor)
    expected = torch.tensor([0.1, float("nan"), -0.0]).view(torch.int32)
    assert torch.equal(conv.view(torch.int32), expected)
    assert random[1:] == [None, "philox", 0.1, True]


def test_saving_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"round": 1})
    save_checkpoint(path, {"round": 2})
    assert load_checkpoint(path, CPU) == {"round": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"round": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # no file may grow beyond 10 kB
    try:
        with pytest.raises(OSError, match=r"."):
            save_checkpoint(path, {"round": 2, "weights": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_checkpoint(path, CPU) == {"round": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.pt: there is no such file"):
        load_checkpoint(tmp_path / "nowhere.pt", CPU)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, some_content() | {"large": torch.zeros(1000)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: "):
        load_checkpoint(path, CPU)


def test_a_file_with_one_flipped_bit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, {"weights": torch.zeros(1000)})
    whole = bytearray(path.read_bytes())
    zeros = whole.index(bytes(4000))  # the tensor itself
    whole[zeros + 2000] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(path, CPU)


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_text("these are not tensors\n")
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: "):
        load_checkpoint(path, CPU)


def test_the_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, path)
    with pytest.raises(CheckpointError, match="written by another program"):
        load_checkpoint(path, CPU)


def test_another_version_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"format": "esper_soa checkpoint", "version": 999, "content": {}}, path)
    with pytest.raises(CheckpointError, match="has version 999, this program reads version 1"):
        load_checkpoint(path, CPU)


class Hostile:
    """Unpickles by running a function, as an attacker's file would."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_file_is_refused_and_runs_nothing(tmp_path: Path, zipped: bool) -> None:
    path, marker = tmp_path / "checkpoint.pt", tmp_path / "marker"
    if zipped:
        torch.save({"content": Hostile(marker)}, path)
    else:
        path.write_bytes(pickle.dumps(Hostile(marker)))
    with pytest.raises(CheckpointError):
        load_checkpoint(path, CPU)
    assert not marker.exists()
