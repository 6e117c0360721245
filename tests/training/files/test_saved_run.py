"""Records of runs under a seal that fits: what they hold is refused in words, or a run goes on."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esper_soa.config.settings import settings_from_mapping
from esper_soa.system.errors import UserError
from esper_soa.training.files.checkpoint import (
    CheckpointError,
    load_checkpoint,
    mismatch,
    save_checkpoint,
)
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.files.session import session
from esper_soa.training.loop import resume
from esper_soa.training.loop.run import Run
from esper_soa.training.results.final_table import SEED_EVENTS
from tests.builders.tiny_runs import fresh, settings

CPU = torch.device("cpu")
Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run of one round that has written its checkpoint, built anew."""
    cfg = settings(rounds=1, steps=1)
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    fresh(cfg, folder.path)
    with session(folder) as within:
        yield Run(cfg, within)


@pytest.fixture
def record(job: Run) -> dict:
    """What a real run has saved."""
    return dict(load_checkpoint(job.folder.checkpoint(1), CPU))


def changed(record: dict, place: Place, value: object) -> dict:
    """The record with another value at `place`; without it for Ellipsis. Shares the rest."""
    part = record[place[0]] if len(place) > 1 else None
    inner = changed(part, place[1:], value) if part is not None else value
    if isinstance(record, list):
        return [*record[: place[0]], *([] if inner is ... else [inner]), *record[place[0] + 1 :]]  # type: ignore
    rest = {name: item for name, item in record.items() if name != place[0]}
    return rest if inner is ... else rest | {place[0]: inner}


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (
            ("adam", "first"),
            torch.ones(3),
            "learner.adam.first is a float32 of shape [3] where a float32 of shape [",
        ),
        (
            ("adam", "steps"),
            torch.ones(()),
            "learner.adam.steps is a float32 of shape [] where a float64 of shape []",
        ),
        (("adam", "steps"), 1.0, "learner.adam.steps is 1.0 where a float64 of shape []"),
        (("adam", "second"), ..., "learner.adam lacks second"),
        (("rounds",), True, "learner.rounds is True where a count is wanted"),
        (
            ("value", "mean"),
            torch.tensor(math.nan).double(),
            "learner.value.mean holds values that are not finite",
        ),
        (("policy", "wings"), torch.ones(1), "learner.policy has wings"),
    ],
)
def test_a_learner_that_does_not_fit_changes_nothing(
    job: Run, record: dict, tmp_path: Path, place: Place, value: object, told: str
) -> None:
    assert job.learner is not None
    before = copy.deepcopy(job.learner.state_dict())
    first, weight = next(iter(record["learner"]["policy"].items()))
    # what a restoring that stops halfway would have taken over
    other = changed(record, ("learner", "policy", first), weight + 1)
    other = changed(other, ("learner", *place), value)
    save_checkpoint(tmp_path / "a.pt", other)
    with pytest.raises(CheckpointError) as caught:
        resume.restore_learner(job.learner, read_run(tmp_path / "a.pt", CPU), tmp_path / "a.pt")
    assert f"the learner does not fit this run ({told}" in str(caught.value)
    assert mismatch(job.learner.state_dict(), before, "learner") == ""
    assert torch.equal(job.learner.policy.state_dict()[first], before["policy"][first])  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rounds_done", -1), ("seconds", math.nan), ("cut_off", -3), ("alpha_rows", math.inf)),
        *(("front", [[1.0]]), ("recent", [{}]), ("recent", []), ("rewards", [])),
        *(("seeds", {}), ("seeds", dict.fromkeys(SEED_EVENTS, -1))),
    ],
)
def test_sums_that_no_run_can_have_are_refused_with_their_name(
    record: dict, tmp_path: Path, name: str, value: object
) -> None:
    (task,) = record["tasks"]
    if value == [{}]:
        (hosts,) = record["tasks"][task]["progress"]["recent"]
        value = [hosts | {"accuracies": []}]
    save_checkpoint(tmp_path / "x.pt", changed(record, ("tasks", task, "progress", name), value))
    with pytest.raises(CheckpointError, match=rf"x\.pt.*{task}\.{name}"):
        read_run(tmp_path / "x.pt", CPU)


@pytest.mark.parametrize(
    "odd", [{"worlds": {"a": 3}}, {"reward": {"split": [1]}}, {"reward": {3: 4}}, {3: 4}]
)
def test_settings_that_no_run_can_have_are_refused(
    job: Run, record: dict, tmp_path: Path, odd: dict
) -> None:
    save_checkpoint(tmp_path / "x.pt", record | {"settings": record["settings"] | odd})
    saved = read_run(tmp_path / "x.pt", CPU)
    for take in (settings_from_mapping, lambda _: resume.check_settings(saved, job.cfg)):
        with pytest.raises(UserError, match="checkpoint"):
            take(saved.settings)
