"""The page on own images does what it says: its code runs as it stands, in an empty folder."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import esper_soa
from tests.builders import user_files
from tests.builders.program import finished

PAGE = Path(__file__).resolve().parents[1] / "docs" / "images.md"


def blocks(language: str) -> list[str]:
    """The code of the page in `language`, in its order."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_code_of_the_page_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(blocks("python")[1:]), {})
    told = capsys.readouterr().out
    assert told.startswith("stripes: own images from stripes.npz (sha256 ")
    assert "\n  40x40 pixels, scaled to 32x32 (bilinear and antialiased) (resize=auto)\n" in told
    assert told.endswith("2 classes: 0 upright, 1 level\n[]\n")
    (command,) = blocks("sh")
    python, option, module, *overrides = command.split()
    assert [python, option, module] == ["python", "-m", "esper_soa.train"]
    ended = finished(*overrides, "rounds=1", "steps=2", folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "data     stripes: own images from stripes.npz" in ended.stdout
    assert (tmp_path / "stripes" / "summary.json").is_file()


def test_a_folder_becomes_a_network_that_classifies_by_name_in_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of files of every kind, three sizes and classes with umlauts and Chinese names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = user_files.folder(tmp_path / "fruit", each=18)
    (folder / user_files.CLASSES[2] / "0_grey.png").rename("new.jpg")
    (first, *_) = blocks("python")
    exec(first, {})
    assert capsys.readouterr().out.split()[-1] in user_files.CLASSES
    run = esper_soa.open_run("fruit_run")
    assert run.settings.task.num_classes == "auto"
    net = run.export()
    assert net.spec["class_names"] == [*user_files.CLASSES]
    # 53 images: 10 for the test part, 8 of the other 43 for validation, of 35 two batches of 16
    summary = json.loads((run.path / "summary.json").read_text())
    assert (summary["test_images"], summary["validation_images"]) == (10, 8)
    assert (
        "train_samples=32 and val_samples=8 as images are few" in (run.path / "log.txt").read_text()
    )
    by_class = net.spec["test_by_class"]
    assert np.sum(by_class["confusion"]) == 10
    assert run.evaluate_by_class(net) == by_class
    overrides = ["checkpoint=fruit_run", "policies=[wait,random]", "run_dir=evaluation"]
    ended = finished(*overrides, folder=tmp_path, program="evaluate")
    evaluation = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    images_of_class = np.sum(by_class["confusion"], 1)
    for policy in ("wait", "random"):
        # the mean over classes, each by its images, is the accuracy over all images
        mean = np.average(evaluation["accuracy_by_class"][policy], weights=images_of_class)
        means = evaluation["policies"][policy]["means"]
        assert mean == pytest.approx(means["test_accuracy"]["mean"])
    lines = [line.split() for line in ended.stdout.splitlines()]
    percents = [evaluation["accuracy_by_class"][policy] for policy in ("wait", "random")]
    for name, *cells in zip(user_files.CLASSES, *percents, strict=True):
        assert [name, *(f"{cell:.2f}" for cell in cells)] in lines
    # every format says the same, and the code makes the same inputs
    inputs = net.preprocess("new.jpg")
    content = {"spec.json": ""}
    torch.export.load(esper_soa.export(net, "host.pt2"), extra_files=content)
    names = {"__name__": "host"}
    exec(esper_soa.export(net, "host.py").read_text(encoding="utf-8"), names)
    again = names["network"]()  # type: ignore[operator]
    session = pytest.importorskip("onnxruntime").InferenceSession("fruit.onnx")
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["spec"])
    esper_soa.save(net, "host.safetensors")
    for spec in (json.loads(content["spec.json"]), again.spec, metadata):
        assert spec == esper_soa.load("host.safetensors").spec == net.spec
    assert torch.equal(again.preprocess("new.jpg"), inputs)
    assert inputs.shape == (1, *net.spec["input"]["shape"])


@pytest.mark.parametrize(
    ("size", "channels", "classes", "each"), [(28, 1, 3, 20), (64, 3, 100, 4), (48, 1, 2, 20)]
)
def test_hosts_take_images_of_other_sizes_and_of_one_channel(
    tmp_path: Path, size: int, channels: int, classes: int, each: int
) -> None:
    shape = (size, size, 3)[: 2 + channels // 3]
    parts = [user_files.part(name, shape, classes, classes * each) for name in ("train", "test")]
    path = user_files.write(tmp_path / "own.npz", parts[0] | parts[1])
    settings = ["data=npz", f"data.root={path}", f"data.size={size}", f"data.channels={channels}"]
    settings += ["task.num_classes=auto", "task.num_pools=2", "rounds=1", "steps=2", "control=none"]
    run = esper_soa.train("smoke", overrides=[*settings, f"run_dir={tmp_path}/run", "report=false"])
    assert run.settings.train_samples == 32
    versions = json.loads((run.path / "versions.json").read_text(encoding="utf-8"))
    assert versions["kernels"]["engine"] == "native"
    net = run.export()
    assert net.spec["input"]["shape"] == [channels, size, size]
    assert net.spec["classes"] == classes
    images, _ = run.images("test")
    given = parts[1]["test_images"][0]
    assert torch.equal(net.preprocess(given)[0], images[0])
    assert torch.equal(images[0], torch.from_numpy(given).view(size, size, -1).movedim(2, 0) / 255)
    assert run.evaluate(net).accuracy == net.spec["test_accuracy"]
    assert net.block0.conv.weight.shape[1] == channels
