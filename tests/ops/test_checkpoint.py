"""Checkpoints come back bit for bit, refuse foreign files, and never destroy the one before."""

import hashlib
import io
import pickle
from collections import OrderedDict
from pathlib import Path
from random import Random

import pytest
import torch

from esper_soa.ops.checkpoint import CheckpointError, Content, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")


def some_content() -> dict[str, Content]:
    return {
        "round": 3,
        "weights": {
            "conv": torch.tensor([0.1, float("nan"), -0.0], dtype=torch.float32),
            "empty": torch.zeros(0, 2),
        },
        "random": [torch.arange(5, dtype=torch.uint8), None, "philox", 0.1, True],
    }


def test_everything_comes_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(path, some_content())
    content = load_checkpoint(path, CPU)
    weights = content["weights"]
    random = content["random"]
    assert content["round"] == 3
    assert isinstance(weights, dict)
    assert isinstance(random, list)
    conv = weights["conv"]
    assert isinstance(conv, torch.Tensor)
    expected = torch.tensor([0.1, float("nan"), -0.0]).view(torch.int32)
    assert torch.equal(conv.view(torch.int32), expected)
    assert random[1:] == [None, "philox", 0.1, True]


def test_the_checkpoint_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"state_dict": {"weight": torch.zeros(2)}}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of this program"):
        load_checkpoint(path, CPU)


def test_torch_reads_a_checkpoint_too(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", {"round": 3, "weights": torch.arange(4)})
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert content["round"] == 3
    assert content["weights"].tolist() == [0, 1, 2, 3]


def test_subclasses_of_the_plain_types_come_back_as_plain_ones(tmp_path: Path) -> None:
    saved = OrderedDict(weight=torch.nn.Parameter(torch.ones(2)).detach())
    save_checkpoint(tmp_path / "a.pt", {"layer": saved})
    assert type(load_checkpoint(tmp_path / "a.pt", CPU)["layer"]) is dict


class Hostile:
    """Unpickles by running a function, as an attacker's file would."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_file_with_a_seal_that_fits_is_refused_in_own_words_and_runs_nothing(
    tmp_path: Path, zipped: bool
) -> None:
    path = tmp_path / "checkpoint.pt"
    marker = tmp_path / "marker"
    hostile = {"content": Hostile(marker)}
    seal(path, archive(hostile) if zipped else pickle.dumps(hostile))
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, CPU)
    assert not marker.exists()
    assert str(caught.value).count("\n") == 0
    assert "weights_only" not in str(caught.value)


def archive(content: object) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def seal(path: Path, content: bytes) -> None:
    """A file with any content and a seal that fits: SHA-256 of all that is before the digest."""
    signed = content + b"\nesper_soa checkpoint 3 sha256 "
    path.write_bytes(signed + hashlib.sha256(signed).hexdigest().encode() + b"\n")


def endless() -> list:
    content: list = []
    content.append(content)
    return content


def multiplied() -> dict:
    content: dict = {}
    for _ in range(25):
        content = {"a": content, "b": content, "c": content}
    return content


def nested(depth: int) -> dict:
    content: dict = {}
    for _ in range(depth):
        content = {"a": content}
    return content


STRANGE: list[tuple[object, str]] = [
    ([1, 2], "written by another program"),
    (torch.ones(2), "written by another program"),
    ({1: 2}, "a key or text that is none"),
    ({"a": {("b",): 2}}, "a key or text that is none"),
    ({"a": "\ud800"}, "a key or text that is none"),
    ({"a": 2**63}, "an integer beyond 64 bits"),
    ({"a": 10**5000}, "an integer beyond 64 bits|cannot be read or is not trusted"),
    ({"a": {1, 2}}, "holds a set"),
    ({"a": b"bytes"}, "holds a bytes|cannot be read or is not trusted"),
    ({"a": 1j}, "holds a complex|cannot be read or is not trusted"),
    ({"a": torch.ones(3).to_sparse()}, "a tensor that is not of plain numbers"),
    ({"a": torch.ones(3, device="meta")}, "a tensor that is not of plain numbers"),
    ({"a": torch.ones(1).expand(10**12)}, "a tensor that is larger than its memory"),
    ({"a": torch.nn.Parameter(torch.ones(2))}, "holds a Parameter"),
    ({"a": endless()}, "nested too deeply"),
    ({"a": multiplied()}, "nested too deeply"),
    ({"a": nested(300)}, "nested too deeply"),
]


@pytest.mark.parametrize(("content", "told"), STRANGE, ids=range(len(STRANGE)))
@pytest.mark.filterwarnings("ignore")
def test_a_content_that_no_run_writes_is_refused_in_one_line(
    tmp_path: Path, content: object, told: str
) -> None:
    path = tmp_path / "checkpoint.pt"
    seal(path, archive(content))
    with pytest.raises(CheckpointError, match=told) as caught:
        load_checkpoint(path, CPU)
    assert str(caught.value).count("\n") == 0


@pytest.mark.filterwarnings("ignore")
def test_a_content_broken_at_random_under_a_seal_that_fits_is_refused_or_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint.pt"
    random = Random(5)
    whole = archive(
        {"round": 3, "weights": {"conv": torch.ones(3)}, "list": [None, 0.5, "text", (True,)]}
    )
    told = []
    for _ in range(400):
        broken = bytearray(whole)
        for _ in range(random.choice((1, 1, 4))):
            broken[random.randrange(len(broken))] = random.randrange(256)
        seal(
            path,
            bytes(broken[: random.choice((len(broken), random.randrange(len(broken)))) or None]),
        )
        try:
            load_checkpoint(path, CPU)
        except CheckpointError as error:
            told.append(str(error))
    assert len(told) > 200
    assert not any("\n" in line for line in told)
