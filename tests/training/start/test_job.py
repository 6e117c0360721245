"""The main job in process, with tiny work: every task, every reward, the edges of every budget, and
what users break.

Settings are composed by Hydra as on the command line; files, data and errors are real.
"""

import json
import shlex
from pathlib import Path

import pytest

from esper_soa.config.compose import compose_settings
from esper_soa.config.env import REWARD_MODES
from esper_soa.config.paths import config_dir
from esper_soa.training.files.run_folder import open_run_folder
from esper_soa.training.results.final_table import Summary
from tests.builders.lanes import some_of
from tests.builders.tiny_runs import run

TASKS = sorted(path.stem for path in Path(config_dir(), "task").glob("*.yaml"))
REAL_CIFAR = Path(__file__).resolve().parents[4] / "shared" / "data" / "cifar-10-batches-py"
TINY = shlex.split(
    "rounds=1 steps=2 train_samples=4 val_samples=4 batch_size=2 control=none report=false "
    "device=cpu telemetry.progress=off data.synthetic_train=32 data.synthetic_test=8"
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
    # a norm seed of 2 channels: 2 * 2 + 1 parameters
    assert summary.grown.figures["size"] - summary.controls[0].figures["size"] == 5
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
