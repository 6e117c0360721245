"""Checkpoints come back bit for bit, and what is none of ours is refused in words."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper_soa.training.checkpoint import load_checkpoint, save_checkpoint
from esper_soa.training.checksum import CheckpointError, write_sealed

CPU = torch.device("cpu")


def test_everything_comes_back_bit_for_bit_and_torch_reads_it_too(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    conv = torch.tensor([0.1, float("nan"), -0.0])
    listed = [torch.arange(5, dtype=torch.uint8), None, "philox", 0.1, True]
    weights = {"conv": conv, "empty": torch.zeros(0, 2)}
    save_checkpoint(path, {"round": 3, "weights": weights, "random": listed})
    for content in (load_checkpoint(path, CPU), torch.load(path, weights_only=True)):
        assert content["round"] == 3
        assert torch.equal(content["weights"]["conv"].view(torch.int32), conv.view(torch.int32))
        assert content["weights"]["empty"].shape == (0, 2)
        assert content["random"][0].dtype == torch.uint8
        assert content["random"][1:] == listed[1:]


def test_the_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        load_checkpoint(path, CPU)


class Hostile:
    """Unpickles by running a function, as an attacker's file would."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


def archive(content: object) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "written", [archive, pickle.dumps, lambda content: archive([content])[:-9]]
)
def test_a_hostile_file_with_a_seal_that_fits_is_refused_in_own_words_and_runs_nothing(
    tmp_path: Path, written: Callable[[object], bytes]
) -> None:
    marker = tmp_path / "marker"
    write_sealed(tmp_path / "a.pt", written({"content": Hostile(marker)}))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "a.pt", CPU)
    assert not marker.exists()
    assert str(caught.value).count("\n") == 0
    assert "weights_only" not in str(caught.value)


def test_a_content_that_is_no_table_of_names_is_refused(tmp_path: Path) -> None:
    write_sealed(tmp_path / "a.pt", archive([1, 2]))
    with pytest.raises(CheckpointError, match="written by another program"):
        load_checkpoint(tmp_path / "a.pt", CPU)
