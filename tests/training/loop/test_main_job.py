"""The main job in process, with tiny work: every task, every reward, the edges of every budget, and
what users break.

Settings are composed by Hydra as on the command line; files, data and errors are real.
"""

import json
import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from esper_soa.config.compose import compose_settings
from esper_soa.config.env import REWARD_MODES
from esper_soa.config.paths import config_dir
from esper_soa.system.errors import UserError
from esper_soa.training.files.run_folder import open_run_folder
from esper_soa.training.results.final_table import Summary
from tests.builders.lanes import some_of
from tests.builders.tiny_runs import run

TASKS = sorted(path.stem for path in Path(config_dir(), "task").glob("*.yaml"))
REAL_CIFAR = Path(__file__).resolve().parents[4] / "shared" / "data" / "cifar-10-batches-py"
TINY = shlex.split(
    "rounds=1 steps=2 train_samples=4 val_samples=4 batch_size=2 control=none report=false "
    "telemetry.progress=off data.synthetic_train=32 data.synthetic_test=8"
)


def play(folder: Path, *overrides: str) -> Summary:
    """Compose, check and run, as the command line does."""
    settings = compose_settings("smoke", [*TINY, *overrides])
    return run(settings, open_run_folder(str(folder), settings.name))


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", some_of(TASKS, "cifar_minimal", "cifar_scale"))
def test_every_task_runs_with_its_first_and_last_slot(tmp_path: Path, task: str) -> None:
    is_text = task in ("text_small", "tinystories")
    slots = "[r0c0,r0c2]" if is_text or task == "cifar_minimal" else "[r0c0,r1c2]"
    data = ["data=text"] if is_text else []
    summary = play(tmp_path / "run", f"task={task}", f"slots={slots}", "steps=1", *data)
    assert summary.task == task
    assert 0 <= summary.grown.figures["validation_accuracy"] <= 100


@pytest.mark.parametrize(
    "overrides",
    [
        ("envs=1", "steps=1", "slots=[r1c1]"),
        ("task=cifar_scale", "slots=[r0c0,r0c1,r0c2,r0c3,r0c4,r1c0,r1c1,r1c2,r1c3,r1c4]"),
        ("envs=3", "compute.env_chunk=2"),
        ("policy=random", "max_seeds=1", "data.split=true", "envs=3"),
        ("policy=heuristic", "gates=strict", "val_samples=8", "data.augment=false"),
    ],
    ids=lambda overrides: ",".join(overrides)[:40],
)
def test_the_edges_of_the_settings_run(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    play(tmp_path / "run", *overrides)
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize("mode", some_of(REWARD_MODES, "shaped", "escrow"))
def test_every_reward_mode_writes_components_that_sum_to_the_total(
    tmp_path: Path, mode: str
) -> None:
    play(
        tmp_path / "run",
        f"reward={mode}",
        "steps=8",
        "envs=2",
        "policy=random",
        "lifecycle=auto_forward",
        "gates.min_blending_steps=1",
        "gates.min_gradient_health=0",
    )
    (line,) = lines(tmp_path / "run")
    assert sum(line["reward_terms"].values()) == pytest.approx(line["reward"]["mean"], abs=1e-9)
    assert any(value != 0 for value in line["reward_terms"].values()) or mode in (
        "sparse",
        "minimal",
        "basic",
    )


def test_seeds_live_whole_lives_and_the_table_counts_them(tmp_path: Path) -> None:
    # the schedule germinates at env-step 1, advances at 2, 4 and 9, and fossilizes at 10
    summary = play(
        tmp_path / "run",
        "policy=schedule",
        "control=wait",
        "steps=12",
        "slots=[r0c1]",
        "gates.min_blending_steps=2",
        "policy.schedule.advance=[1,3,8]",
        "policy.schedule.fossilize=9",
    )
    assert summary.seeds == {"germinated": 2, "blended": 2, "fossilized": 2, "pruned": 0}
    assert summary.control is not None
    # a norm seed of 2 channels: 2 * 2 + 1 parameters
    assert summary.grown.figures["size"] - summary.control.figures["size"] == 5
    (line,) = lines(tmp_path / "run")
    assert line["ops_successful"]["fossilize"] == 2


@pytest.mark.skipif(not REAL_CIFAR.is_dir(), reason=f"no CIFAR-10 in {REAL_CIFAR}")
def test_real_cifar_is_read_and_named(tmp_path: Path) -> None:
    summary = play(tmp_path / "run", "data=auto", f"data.root={REAL_CIFAR}")
    assert summary.data.startswith("cifar10")
    assert "cifar10" in (tmp_path / "run" / "log.txt").read_text()
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["data"]["name"] == "cifar10"


def test_without_a_root_the_embedded_images_are_taken_and_named(tmp_path: Path) -> None:
    assert play(tmp_path / "run", "data=auto").data.startswith("fashion32")
    assert "data     fashion32" in (tmp_path / "run" / "log.txt").read_text()


class Hostile:
    """Would run a command if a naive reader unpickled it."""

    def __reduce__(self) -> tuple:
        return eval, ("1 + 1",)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("val_samples=9",), "val_samples=9: must be at most 8"),
        (("data=auto", "data.root=/nowhere"), "/nowhere"),
        (("device=cuda:99",), "device=cuda:99"),
        (("envs=5", "batch_size=8", "train_samples=8", "data.split=true"), "data.split"),
    ],
)
def test_what_cannot_work_is_one_message(
    tmp_path: Path, overrides: tuple[str, ...], told: str
) -> None:
    with pytest.raises(UserError, match=told.replace(".", r"\.")) as caught:
        play(tmp_path / "run", *overrides)
    assert "\n" not in str(caught.value)


GOOD = pickle.dumps({b"data": b"\0" * 3072, b"labels": [0]}, protocol=2)


@pytest.mark.parametrize("bad", [pickle.dumps(Hostile()), GOOD[: len(GOOD) // 2], b""])
def test_a_broken_data_file_is_named_and_not_run(tmp_path: Path, bad: bytes) -> None:
    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        (root / name).write_bytes(bad)
    with pytest.raises(UserError, match="data_batch_1"):
        play(tmp_path / "run", "data=auto", f"data.root={root}")


def test_a_part_of_cifar_is_named_in_a_warning(tmp_path: Path) -> None:
    root = tmp_path / "cifar-10-batches-py"
    root.mkdir()
    for number, name in enumerate([*(f"data_batch_{one}" for one in range(1, 6)), "test_batch"]):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 3072), np.uint8)
        part = {b"data": pixels, b"labels": [*range(8)]}
        (root / name).write_bytes(pickle.dumps(part, protocol=2))
    play(tmp_path / "run", "data=auto", f"data.root={root}", "val_samples=4")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r" WARNING +data     cifar10: a subset \(0\.08 %\) of CIFAR-10 from ", log), (
        log
    )


def test_the_resolved_settings_of_an_experiment_are_the_documented_ones() -> None:
    chosen = compose_settings("cifar_3seed")
    assert chosen.slots == ["r0c0", "r0c1", "r0c2"]
    found = (chosen.max_seeds, chosen.task.name, chosen.policy.name)
    assert found == (3, "cifar_baseline", "ppo")
