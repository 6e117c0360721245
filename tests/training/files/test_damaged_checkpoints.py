"""A checkpoint damaged on the disk costs the rounds since the one before it, not the run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.start.begin import resume_start
from tests.builders.tiny_runs import fresh, records, run, settings

CPU = torch.device("cpu")
TINY = settings(checkpoint_keep=3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three rounds with three checkpoints."""
    path = tmp_path_factory.mktemp("whole")
    fresh(TINY, path)
    return path


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> RunFolder:
    """The same run with one flipped bit in its newest checkpoint."""
    folder = RunFolder(shutil.copytree(whole, tmp_path / "damaged"))
    path = folder.checkpoint(3)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)
    return folder


def rewards(path: Path) -> list[dict]:
    """Rewards and accuracies of every round."""
    lines = records(path / "metrics.jsonl")
    return [{name: line[name] for name in ("round", "reward", "accuracy")} for line in lines]


@pytest.mark.parametrize("by", ["auto", "folder"])
def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_names_both(
    whole: Path, damaged: RunFolder, by: str
) -> None:
    given, run_dir = ("auto", str(damaged.path)) if by == "auto" else (str(damaged.path), "")
    start = resume_start(given, run_dir, "train")
    run(replace(TINY, resume=given), start.folder, start.checkpoint)
    log = (damaged.path / "log.txt").read_text()
    told = (
        f"WARNING resume   checkpoint {damaged.checkpoint(3)}: damaged (its content is not "
        "what was written); "
    )
    assert f"{told}checkpoint_000002.pt is taken\n" in log
    assert "resume   checkpoint_000002.pt: 2 of 3 rounds are done\n" in log
    assert rewards(damaged.path) == rewards(whole)
    one, other = (read_run(RunFolder(path).checkpoint(3), CPU) for path in (whole, damaged.path))
    assert one.task("tiny").progress.rewards == other.task("tiny").progress.rewards
    assert one.learner is not None
    assert other.learner is not None
    for name, weight in one.learner["policy"].items():
        assert torch.equal(weight, other.learner["policy"][name]), name
