"""Checkpoints come back bit for bit, and what is none of ours is refused in words."""

import io
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from esper_soa.system.value_types import type_error
from esper_soa.training.files.checkpoint import load_checkpoint, mismatch, save_checkpoint
from esper_soa.training.files.checksum import CheckpointError, write_sealed

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
    elsewhere = load_checkpoint(path, torch.device("meta"))
    assert elsewhere["weights"]["conv"].device.type == "meta"


def test_the_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, path)
    told = r"^checkpoint /.*/checkpoint\.pt: cut off, damaged, or not a checkpoint of this program$"
    with pytest.raises(CheckpointError, match=told):
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


def packed(content: bytes) -> bytes:
    """The archive with deflated entries, which takes much more memory than room."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as stored, zipfile.ZipFile(file, "w") as made:
        for name in stored.namelist():
            made.writestr(name, stored.read(name), zipfile.ZIP_DEFLATED)
    return file.getvalue()


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (archive, "UnpicklingError"),
        (pickle.dumps, "BadZipFile"),
        (lambda content: archive([content])[:-9], "BadZipFile"),
        (lambda content: b"", "BadZipFile"),
        (lambda content: packed(archive(torch.zeros(10_000))), "ValueError"),
    ],
)
def test_a_hostile_file_with_a_seal_that_fits_is_refused_in_own_words_and_runs_nothing(
    tmp_path: Path, written: Callable[[object], bytes], error: str
) -> None:
    marker = tmp_path / "marker"
    write_sealed(tmp_path / "a.pt", written({"content": Hostile(marker)}))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(tmp_path / "a.pt", CPU)
    assert not marker.exists()
    told = f"its content cannot be read or is not trusted ({error})"
    assert str(caught.value) == f"checkpoint {tmp_path / 'a.pt'}: {told}"


def test_a_content_that_is_no_table_of_names_is_refused(tmp_path: Path) -> None:
    write_sealed(tmp_path / "a.pt", archive([1, 2]))
    with pytest.raises(
        CheckpointError, match=r"^checkpoint /.*/a\.pt: written by another program$"
    ):
        load_checkpoint(tmp_path / "a.pt", CPU)


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("CPUAllocator: can't allocate memory"), MemoryError()),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_checkpoint_for_which_there_is_no_memory_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: object, **__: object) -> None:
        raise error

    save_checkpoint(tmp_path / "a.pt", {})
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError, match=r"there is not enough memory on cpu to read it$"):
        load_checkpoint(tmp_path / "a.pt", CPU)


@dataclass
class Part:
    """A record of a checkpoint."""

    counts: dict[str, list[int]]
    share: float
    learner: dict | None


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"share": 1, "learner": {"a": 0.5}}, ""),
        ({"share": True}, "it.share is True"),
        ({"share": "1"}, "it.share is a str"),
        ({"counts": {"a": [1, 2.0]}}, "it.counts.a.1 is 2.0"),
        ({"counts": {"a": [True]}}, "it.counts.a.0 is True"),
        ({"counts": [1]}, "it.counts is a list"),
        ({"learner": 3}, "it.learner is 3"),
        ({"counts": None}, "it.counts is None"),
        ({"zebra": 3, "other": 3}, "it has other"),
    ],
)
def test_what_a_record_should_hold_is_said(changed: dict, fault: str) -> None:
    content = {"counts": {"a": [1, 2]}, "share": 0.5, "learner": None}
    assert type_error(content | changed, Part, "it") == fault
    assert type_error({"counts": {}, "share": 0.5}, Part, "it") == "it lacks learner"


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, ""),
        ({"steps": 0}, ""),
        ({"steps": -1}, "it.steps is -1 where a count is wanted"),
        ({"steps": 2**63}, f"it.steps is {2**63} where a count is wanted"),
        ({"steps": True}, "it.steps is True where a count is wanted"),
        ({"weight": torch.zeros(2, 1)}, "float32 of shape [2, 1] where a float32 of shape [2] is"),
        ({"weight": torch.zeros(2).half()}, "float16 of shape [2] where a float32 of shape [2] is"),
        ({"weight": torch.tensor([0.0, torch.inf])}, "it.weight holds values that are not finite"),
        ({"more": 1}, "it has more"),
    ],
)
def test_how_a_state_is_unlike_another_is_said(changed: dict, fault: str) -> None:
    like = {"steps": 3, "weight": torch.zeros(2)}
    found = mismatch(like | changed, like, "it")
    assert fault in found if fault else not found
    assert mismatch({"steps": 3}, like, "it") == "it lacks weight"
