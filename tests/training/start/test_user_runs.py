"""Whole runs on own images: by command line, on both engines of a CPU, resumed, refused by name."""

import json
import shlex
from pathlib import Path

import pytest
import torch

import esper_soa
from esper_soa.config.compose import compose_settings
from esper_soa.config.settings import EvaluateConfig, TrainConfig
from esper_soa.system.errors import SettingError, UserError
from esper_soa.training.files.run_folder import RunFolder, open_run_folder
from esper_soa.training.start.begin import resume_start
from tests.builders import user_files
from tests.builders.tiny_runs import evaluate, records, run

CPU = torch.device("cpu")
OWN = shlex.split(
    "data=npz task.num_classes=3 envs=2 rounds=2 steps=3 train_samples=16 val_samples=16 "
    "device=cpu batch_size=8 control=none report=false checkpoint_every=1 telemetry.progress=off"
)
TIMINGS = ("eps", "collect_seconds", "update_seconds")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return user_files.write(tmp_path / "spots.npz", user_files.arrays((40, 30, 3), val=True))


def settings(*overrides: str) -> TrainConfig:
    return compose_settings("smoke", [*OWN, *overrides])


def play(folder: Path, *overrides: str) -> Path:
    run(settings(*overrides), open_run_folder(str(folder), "own"))
    return folder


def resumed(folder: Path, *overrides: str) -> Path:
    start = resume_start(str(folder), "", "own")
    run(settings(f"resume={folder}", *overrides), start.folder, start.checkpoint)
    return folder


def lines(folder: Path) -> list[dict]:
    """metrics.jsonl without what a clock wrote."""
    found = records(folder / "metrics.jsonl")
    return [{name: one for name, one in line.items() if name not in TIMINGS} for line in found]


def versions(folder: Path) -> dict:
    return json.loads((folder / "versions.json").read_text())


def test_a_run_tells_what_is_done_to_the_images_of_its_file(tmp_path: Path, file: Path) -> None:
    play(tmp_path / "run", f"data.root={file}", "rounds=1", "steps=1")
    log = (tmp_path / "run" / "log.txt").read_text()
    for told in (
        f"data     spots: own images from {file} (sha256 ",
        "..., asked for by data.name): 48 training, 16 validation and 24 test images.",
        "data     40x30 pixels, scaled to 32x24 (bilinear and antialiased), put in the middle of ",
        "32x32 black pixels (data.resize=auto)",
        "data     normalised by mean 0.",
        "data     3 classes",
    ):
        assert told in log
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data"].startswith(
        "spots (own images from"
    )
    data = versions(tmp_path / "run")["data"]
    images = esper_soa.images(file)
    assert data["identity"] == images.identity
    assert data["file_sha256"] == images.file_sha256
    assert [float(value) for value in data["std"].split(", ")] == list(images.std)
    assert "scaled to 32x24" in data["preparation"]


def test_a_run_on_own_images_goes_on_to_the_bit_wherever_its_file_is_now(
    tmp_path: Path, file: Path
) -> None:
    whole = play(tmp_path / "whole", f"data.root={file}")
    play(tmp_path / "half", f"data.root={file}", "rounds=1")
    moved = file.rename(tmp_path / "moved.npz")
    assert lines(resumed(tmp_path / "half", f"data.root={moved}")) == lines(whole)
    assert len(lines(whole)) == 2


def test_changed_images_labels_or_normalisation_are_refused(tmp_path: Path, file: Path) -> None:
    before = user_files.arrays((40, 30, 3), val=True)
    play(tmp_path / "run", f"data.root={file}", "rounds=1")
    for key in ("train_labels", "val_images", "test_images"):
        changed = before[key].copy()
        changed[5] = (changed[5] + 1) % 3
        user_files.write(file, before, **{key: changed})
        told = r"the images are not those of the checkpoint\. It was made on own images fr"
        with pytest.raises(UserError, match=told):
            resumed(tmp_path / "run", f"data.root={file}")
    user_files.write(file, before)
    for setting in ("data.resize=stretch", "data.mean=[0.5] data.std=[0.5]"):
        told = r"these settings are not those of the checkpoint:\n  data\."
        with pytest.raises(UserError, match=told):
            resumed(tmp_path / "run", f"data.root={file}", *setting.split())
    assert len(lines(resumed(tmp_path / "run", f"data.root={file}"))) == 2


def test_a_run_on_own_images_is_evaluated_on_them_where_they_lie_elsewhere(
    tmp_path: Path, file: Path
) -> None:
    images = esper_soa.images(file)
    ended = play(tmp_path / "run", f"data.root={file}", "rounds=1")
    file = file.rename(tmp_path / "moved.npz")
    with pytest.raises(SettingError, match="data.name=given: must be npz"):
        play(tmp_path / "none", "data.name=given")
    asked = EvaluateConfig(
        checkpoint=str(ended), policies=["wait"], episodes=1, progress="off", data_root=str(file)
    )
    (tmp_path / "evaluation").mkdir()
    evaluate(asked, RunFolder(tmp_path / "evaluation"))
    assert versions(tmp_path / "evaluation")["data"]["identity"] == images.identity
    assert versions(tmp_path / "evaluation")["data"]["file_sha256"] == images.file_sha256
    assert "these are not the images" not in (tmp_path / "evaluation" / "log.txt").read_text()
    content = user_files.arrays(val=True)
    content["train_images"] = 255 - content["train_images"]
    user_files.write(file, content)
    (tmp_path / "other").mkdir()
    evaluate(asked, RunFolder(tmp_path / "other"))
    told = "WARNING data     these are not the images of the checkpoint, which are: "
    log = (tmp_path / "other" / "log.txt").read_text()
    assert f"{told}{versions(ended)['data']['source']}\n" in log
