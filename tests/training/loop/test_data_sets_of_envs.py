"""Runs whose envs take several data sets in turn: each env is that of a run on its set alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from esper_soa.config.nets import DATA_NAME, DataConfig
from esper_soa.config.settings import EvaluateConfig, TrainConfig, settings_yaml
from esper_soa.env.world import World
from esper_soa.lab.report import run_tables
from esper_soa.lab.report.run_files import read_run
from esper_soa.nets.data.datasets import SampleCount, count_samples, load_images, load_samples
from esper_soa.nets.data.image_set import join_sets, sets_of
from esper_soa.nets.data.images import cut_batch
from esper_soa.runtime.memory import needs
from esper_soa.training.files.run_folder import RunFolder, write_config
from esper_soa.training.loop.build import build_world, make_setup
from esper_soa.training.results.answers import GROWN, read_answers
from esper_soa.training.start.runs import open_run
from tests.builders import user_files
from tests.builders.equal_runs import settings
from tests.builders.tiny_runs import evaluate, fresh, records
from tests.builders.tiny_world import SingleEnv

CPU = torch.device("cpu")
NAMES = "synthetic", "fashion32"
BOTH = "[synthetic,fashion32]"
# by set, its test images
TESTED = {"synthetic": 16, "fashion32": 1000}


def on(name: str, player: str = "random", **changed: object) -> TrainConfig:
    """Three envs, two rounds, on the data sets of this name."""
    given: dict = {"envs": 3, "rounds": 2, "steps": 4, "control": "wait", "control_rounds": 2}
    cfg = settings(player, **given | changed)
    return replace(cfg, data=replace(cfg.data, name=name))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    cfg = on(BOTH)
    write_config(RunFolder(path), settings_yaml(cfg))
    fresh(cfg, path)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By its name, the run on each set."""
    paths = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, path in paths.items():
        fresh(on(name), path)
    return paths


def summary_of(path: Path) -> dict:
    return json.loads((path / "summary.json").read_text())


def test_each_env_ends_as_in_a_run_on_its_set_alone(whole: Path, alone: dict[str, Path]) -> None:
    both = summary_of(whole)
    for place, name in enumerate(NAMES):
        single = summary_of(alone[name])
        for side in (0, 1):
            scores = [[summary["grown"], *summary["controls"]][side] for summary in (both, single)]
            for mine, its in zip(*(score["episodes"] for score in scores), strict=True):
                assert mine["settings"] == {DATA_NAME: ["synthetic", "fashion32", "synthetic"]}
                for of in mine.keys() - {"settings"}:
                    assert mine[of][place::2] == its[of][place::2], (name, side, of)
        answers, its_answers = (
            read_answers(RunFolder(path).answers) for path in (whole, alone[name])
        )
        first = place * TESTED["synthetic"]
        for of, rows in its_answers.right.items():
            assert rows.shape == (2, 3, TESTED[name])
            own = np.full((*rows[:, place::2].shape[:2], sum(TESTED.values())), -1)
            own[..., first : first + TESTED[name]] = rows[:, place::2]
            assert np.array_equal(answers.right[of][:, place::2], own)
        hosts = np.arange(3) % 2 == place
        mean = answers.means(GROWN, np.array([hosts] * 2))
        assert mean is not None
        assert mean == pytest.approx(its_answers.right[GROWN][:, place::2].mean((0, 1)) * 100)
    assert answers.means(GROWN) is None, "hosts have met different images"
    (difference,) = (control["difference"] for control in both["controls"])
    assert difference["source"] == "hosts and test images"


def test_a_list_of_one_set_is_that_set(tmp_path: Path) -> None:
    sets = load_samples(DataConfig("[synthetic,synthetic]"), CPU)
    assert (sets.name, len(sets_of(sets))) == ("synthetic", 1)
    names = BOTH, "[synthetic,fashion32,synthetic]"
    more = [load_samples(DataConfig(name), CPU) for name in names]
    assert more[0].identity != more[1].identity
    for name in ("[synthetic,synthetic]", "synthetic"):
        fresh(on(name), tmp_path / name)
    one, other = (RunFolder(tmp_path / name) for name in ("[synthetic,synthetic]", "synthetic"))
    both = [records(folder.metrics) for folder in (one, other)]
    assert [line["accuracy"] for line in both[0]] == [line["accuracy"] for line in both[1]]
    files = [folder.network_files("hosts")[-1].read_bytes() for folder in (one, other)]
    assert files[0] == files[1]


def test_sets_together_tell_of_each(tmp_path: Path) -> None:
    own = DataConfig(root=str(user_files.write(tmp_path / "m.npz")))
    one, other = (load_images(cfg, CPU) for cfg in (DataConfig("synthetic"), own))
    both = join_sets([one, other])
    assert (both.source, both.notes) == (f"{one.source} {other.source}", other.notes)


def test_a_set_that_is_there_twice_is_kept_once() -> None:
    twice = load_samples(DataConfig("[synthetic,fashion32,synthetic]"), CPU)
    once = load_samples(DataConfig(BOTH), CPU)
    assert torch.equal(twice.train_images, once.train_images)
    assert [entry.source.name for entry in twice.sets] == ["synthetic", "fashion32", "synthetic"]


def test_records_name_the_set_of_each_env(whole: Path) -> None:
    lines = records(whole / "episodes.jsonl")
    assert [line["settings"][DATA_NAME] for line in lines[:3]] == [*NAMES, "synthetic"]
    log = (whole / "log.txt").read_text()
    assert log.count("INFO data     synthetic images") == 1
    assert "data     fashion32, the embedded" in log
    assert f"{DATA_NAME}=fashion32" in log
    assert "each on all test images of its data set" in log
    assert "on V=8 validation images of its data set" in log
    found = [one["settings"][DATA_NAME] for one in summary_of(whole)["configurations"]]
    assert found == [*NAMES]
    data = json.loads((whole / "versions.json").read_text())["data"]
    assert data["name"] == "synthetic+fashion32"
    assert data["fashion32.mean"].startswith("0.2199")
    assert "mean" not in data
    table = run_tables.table_of(run_tables.setting_rows([read_run(whole, "run")]))
    assert set(table["setting"]) == {f"{DATA_NAME} (1: synthetic, 2: fashion32)"}
    assert table["value"] == [1, 2, 1] * 4


@pytest.mark.parametrize("env", [0, 1, 2])
def test_a_network_knows_the_images_of_its_env(whole: Path, env: int) -> None:
    run = open_run(whole)
    net = run.export(env)
    name = NAMES[env % 2]
    assert net.spec["data"]["name"] == name
    assert net.spec["test_images"] == TESTED[name] == len(run.images("test", env)[1])
    assert net.spec["test_accuracy"] == run.evaluate(net).accuracy
    last = run.summary["grown"]["episodes"][-1]["test_accuracies"]
    assert net.spec["test_accuracy"] == pytest.approx(last[env], abs=1e-9)
    seen = run.evaluate(net, "validation")
    assert seen.accuracy == net.spec["validation_accuracy"]
    assert seen.loss == pytest.approx(net.spec["validation_loss"], abs=1e-5)
    assert run.images("train", env)[0].shape[0] == (32 if name == "synthetic" else 4000)


def test_an_evaluation_gives_each_env_its_own(
    whole: Path, alone: dict[str, Path], tmp_path: Path
) -> None:
    found = {}
    for name, run in {"both": whole, **alone}.items():
        asked = EvaluateConfig(str(run), ["wait"], episodes=1, device="cpu", progress="off")
        (tmp_path / name).mkdir()
        evaluate(asked, RunFolder(tmp_path / name))
        text = (tmp_path / name / "evaluation.json").read_text()
        found[name] = json.loads(text)["policies"]["wait"]["samples"]["test_accuracy"]
    assert found["both"][0::2] == found["synthetic"][0::2]
    assert found["both"][1] == found["fashion32"][1]


def own_images(path: Path) -> str:
    """A file of grey images, 9 to train on, of another brightness than other sets."""
    draw = np.random.default_rng(1)
    parts = {
        "train_images": draw.integers(0, 90, (9, 32, 32), np.uint8),
        "train_labels": np.arange(9) % 10,
        "test_images": draw.integers(0, 90, (7, 32, 32), np.uint8),
        "test_labels": np.arange(10)[3:],
    }
    np.savez(path, **parts)
    return str(path)


@pytest.mark.parametrize("env", range(4))
def test_envs_get_the_samples_of_their_sets(tmp_path: Path, env: int) -> None:
    """Of sets of unlike sizes, one of them twice; as in one process with all envs or with one."""
    root = own_images(tmp_path / "mine.npz")
    data = DataConfig("[npz,synthetic,npz]", root, synthetic_train=20, label_noise=0.5, share=0.5)
    cfg = replace(on(BOTH, envs=4), val_samples=1, data=data)
    name = ("npz", "synthetic", "npz", "npz")[env]
    single = replace(data, name=name, root=root if name == "npz" else "")
    here = SingleEnv(env, 4)
    every = build_world(cfg, CPU)
    own = build_world(replace(cfg, envs=1, data=single), CPU)
    alone = World(own.rules, own.data, cfg.seed, reduction=here)
    as_rank = own.rules._replace(setup=own.setup._replace(data=data))
    of_rank = World(as_rank, every.data, cfg.seed, reduction=here)
    first = torch.zeros(1, dtype=torch.int64)
    for world, envs in ((every, first + env), (of_rank, first)):
        for step in range(6):  # beyond a pass
            mine, its = (one.work(step).training for one in (world, alone))
            for one, other in zip(mine.batch(envs, 0), its.batch(first, 0), strict=True):
                assert torch.equal(one, other)
        crops = world.validation.crops(envs), alone.validation.crops(first)
        for one, other in zip(*map(cut_batch, crops), strict=True):
            assert torch.equal(one, other)


def test_memory_counts_the_file_once_and_its_orders_by_env(tmp_path: Path) -> None:
    root = own_images(tmp_path / "mine.npz")
    counted = count_samples(DataConfig("[npz,synthetic,npz]", root))
    assert counted == count_samples(DataConfig("npz", root)) == SampleCount(9, 7)
    cfg = replace(on(BOTH, envs=30), data=DataConfig("[npz,synthetic]", root))
    setup = make_setup(cfg, CPU)._replace(unread=SampleCount(1000, 0))
    found = {need.what: need.size for need in needs(setup, cfg.policy)}
    assert found["the order of the images"] == 30 * 8 * cfg.train_samples + 4 * 15 * 1000
    assert found["drawing the synthetic images"] > 0


def test_sets_of_another_kind_or_too_small_are_refused(tmp_path: Path) -> None:
    data = DataConfig("[synthetic,npz]", own_images(tmp_path / "mine.npz"))
    with pytest.raises(Exception, match="val_samples=8: must be at most 1, the validation images"):
        build_world(replace(on(BOTH), data=data), CPU)
    cfg = on(BOTH)
    with pytest.raises(Exception, match="task.num_classes=9: must be at least 10, the classes of"):
        build_world(
            replace(cfg, val_samples=1, data=data, task=replace(cfg.task, num_classes=9)), CPU
        )
    for classes in (11, "auto"):  # a list may have more, and has the largest
        task = replace(cfg.task, num_classes=classes)
        world = build_world(replace(cfg, val_samples=1, data=data, task=task), CPU)
        assert world.setup.shape.num_classes == {11: 11, "auto": 10}[classes]
