"""The file of answers: what is written is read, and what strangers write does no harm."""

import io
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from esper_soa.system.errors import DataError
from esper_soa.training.results import answers
from esper_soa.training.results.answers import read_answers, stacked, write_answers
from esper_soa.training.results.verdict import Episode, HostScore

RIGHT = np.array([[[0, 3, 2], [1, 2, 2]], [[3, 3, 0], [0, 1, 2]]], dtype=np.int8)


def score(name: str, right: np.ndarray) -> HostScore:
    plain = Episode([1.0] * 2, [1.0] * 2, [1.0] * 2, [1.0] * 2, [1.0] * 2)
    return HostScore(name, [replace(plain, answers=rows) for rows in right], num_targets=3)


def test_answers_are_read_as_they_were_written_and_are_small(tmp_path: Path) -> None:
    path = tmp_path / "test_answers.npz"
    bits, others = (np.random.default_rng(0).random((2, 2, 2, 4000)) < 0.8).astype(np.int8)
    unknown = HostScore("wait", [replace(score("", bits).episodes[0], answers=[])])
    write_answers(path, score("ppo", bits), [score("my:agent", others), unknown])
    found = read_answers(path)
    assert list(found.right) == ["grown", "my:agent"]
    assert np.array_equal(found.right["my:agent"], others)
    assert np.array_equal(found.right["grown"], bits)
    assert (found.targets, found.right["grown"].dtype) == (3, np.int8)
    assert path.stat().st_size < 32_000 / 5, "about a bit for each answer"
    assert read_answers(tmp_path / "none").right == {}


def test_means_are_those_of_hosts_that_have_met_the_same_samples() -> None:
    right = RIGHT.copy()
    right[:, 1, 0] = -1
    found = answers.Answers({"grown": right}, 3)
    assert found.means("grown") is None
    assert found.means("wait") is None
    for host, wanted in ((0, [1.5, 3.0, 1.0]), (1, [1.5, 2.0])):
        means = found.means("grown", np.array([[host == 0, host == 1]] * 2))
        assert means == pytest.approx([100 * mean / 3 for mean in wanted])
    assert found.means("grown", np.zeros((2, 2), dtype=bool)) is None
    rows = np.arange(3.0)
    assert np.array_equal(stacked([rows, rows + 1]), [rows, rows + 1])  # type: ignore[arg-type]
    for unlike in ([rows, None], [rows, rows[:2]], []):
        assert stacked(unlike) is None


def packed(compress: bool = True, **arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    (np.savez_compressed if compress else np.savez)(content, **arrays)
    return content.getvalue()


def a_liar() -> bytes:
    """An array that says it has 2^40 numbers."""
    header = io.BytesIO()
    shape = {"descr": "|i1", "fortran_order": False, "shape": (1, 1, 2**40)}
    np.lib.format.write_array_header_1_0(header, shape)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("grown.npy", header.getvalue() + b"1234")
        archive.writestr("targets.npy", b"")
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"no archive",
        packed(grown=RIGHT)[:-20],
        packed(grown=RIGHT),  # of how many targets?
        packed(grown=RIGHT, targets=np.array(0)),
        packed(grown=RIGHT[0], targets=np.array(1)),
        packed(grown=RIGHT.astype(float), targets=np.array(1)),
        packed(grown=RIGHT, wait=RIGHT[:, :1], targets=np.array(1)),
        packed(grown=np.array([[[{}]]]), targets=np.array(1)),
        packed(grown=np.zeros((1, 1, 70_000), dtype=np.int8), targets=np.array(1)),
        a_liar(),
    ],
)
def test_what_is_no_file_of_answers_is_refused_by_name(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MAX_BYTES", 60_000)
    (tmp_path / "test_answers.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"test_answers.npz: must be answers of hosts"):
        read_answers(tmp_path / "test_answers.npz")
