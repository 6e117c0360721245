"""The plan of a run: what its probe measures and what is made of it. Whether plans come true: test_plan_holds.py."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from program import TINY, finished
from tiny_world import tiny_settings

from esper_soa.build import build_world
from esper_soa.config import TrainConfig
from esper_soa.env.world import World
from esper_soa.errors import UserError
from esper_soa.nets.config import DataConfig
from esper_soa.nets.data import ValidationImages
from esper_soa.ops.memory import GIB
from esper_soa.plan import MIB, Disk, Plan, checkpoints_kept, probed, verdict
from esper_soa.probe import Pace, Took

CPU = torch.device("cpu")
TOOK = Took(
    program=400 * MIB, host=500 * MIB, device=0, free=GIB, build_seconds=1.0, episode_seconds=8.0, bare_seconds=4.0,
    update_seconds=2.0, files_seconds=0.5, report_seconds=3.0, measured_steps=5,
)  # fmt: skip
DISK = Disk(per_round=10, per_checkpoint=100, once=7, free=10**9)


def plan_of(took: Took = TOOK, disk: Disk = DISK, **changed: object) -> Plan:
    return Plan(replace(TrainConfig(envs=4, rounds=20, steps=5), **changed), CPU, took, 2.0 * MIB, disk)


def test_what_is_left_is_shared_by_more_envs() -> None:
    assert plan_of().run_memory == 100 * MIB
    assert plan_of().most_envs == 4 + (1024 - 100) // 2
    assert plan_of(TOOK._replace(free=96 * MIB)).most_envs == 2
    assert plan_of(TOOK._replace(free=-1)).most_envs == 0
    on_gpu = plan_of(TOOK._replace(device=200 * MIB))
    assert (on_gpu.run_memory, on_gpu.most_envs) == (200 * MIB, 4 + (1024 - 200) // 2)


def test_pace_and_duration_follow_from_a_round() -> None:
    plan = plan_of(control="wait", control_rounds=3)
    assert plan.eps == pytest.approx(4 * 5 / 10.0)
    assert plan.seconds == pytest.approx(1.0 + 20 * 10.5 + 3 * 4.0 + 3.0)
    assert plan_of(control="none").seconds == pytest.approx(1.0 + 20 * 10.5 + 3.0)
    assert plan_of(control="heuristic").seconds == pytest.approx(1.0 + 20 * 10.5 + 8.0 + 3.0)


def test_the_disk_holds_all_rounds_and_the_checkpoints_that_stay() -> None:
    plan = plan_of(checkpoint_every=5, checkpoint_keep=3)
    assert checkpoints_kept(plan.cfg) == 3
    assert checkpoints_kept(replace(plan.cfg, checkpoint_every=0)) == 1
    assert checkpoints_kept(replace(plan.cfg, rounds=6, checkpoint_keep=9)) == 2
    assert DISK.whole(plan.cfg) == 20 * 10 + 3 * 100 + 7


def test_what_does_not_fit_says_what_to_lower() -> None:
    assert verdict(plan_of()) == "fits"
    assert "lower envs to 2, or batch_size" in verdict(plan_of(TOOK._replace(free=96 * MIB)))
    assert "memory: lower batch_size" in verdict(plan_of(TOOK._replace(free=MIB)))
    assert "telemetry.level" in verdict(plan_of(disk=DISK._replace(free=406)))


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def world() -> World:
    data = DataConfig(name="synthetic", synthetic_train=16, synthetic_test=64)
    return build_world(replace(tiny_settings(2, 1, 40), train_samples=8, val_samples=64, data=data), CPU)


def paced(pace: Pace, clock: Clock, world: World, seconds: tuple[float, float]) -> None:
    """Play all env-steps; they take these seconds in full, the first of all ten times that, and otherwise."""
    clock.now += 3.0
    pace.phase_ended("reset")
    for step in range(pace.num_steps):
        given = world.work(step)
        work = pace.watch(given)
        assert isinstance(work.validation, ValidationImages)
        full = work is given
        assert (work.num_batches, len(work.validation.order)) == ((4, 64) if full else (1, 16))
        clock.now += seconds[0] * (1 if step else 10) if full else seconds[1]
        pace.phase_ended("training")
        pace.env_step()


def test_an_episode_that_fits_is_played_in_full_and_the_first_env_step_warms_up(world: World) -> None:
    clock = Clock()
    pace = Pace(1000.0, 8, CPU, clock)
    paced(pace, clock, world, (2.0, 0.5))
    assert [full for full, _ in pace.times] == [True] * 8
    assert pace.whole == pytest.approx(8 * 2.0)
    assert pace.beside == pytest.approx(3.0)


def test_one_that_does_not_is_played_in_full_now_and_then_and_told_as_if(world: World) -> None:
    clock = Clock()
    pace = Pace(30.0, 40, CPU, clock)
    paced(pace, clock, world, (2.0, 0.125))
    played = [place for place, (full, _) in enumerate(pace.times) if full]
    assert played[:2] == [0, 1]
    assert 4 <= len(played) <= 8
    assert played[-1] > 25
    assert pace.whole == pytest.approx(40 * 2.0)


def test_on_a_gpu_all_env_steps_are_played_in_full(world: World) -> None:
    pace, work = Pace(0.0, 40, torch.device("cuda")), world.work(0)
    for _ in range(5):
        assert pace.watch(work) is work
        pace.env_step()


def test_the_command_line_plans_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = finished("--plan=json", *TINY, "run_dir=here", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["envs"], found["rounds"], found["env_steps"], found["fits"]) == (2, 2, 8, True)
    memory = found["memory"]
    assert memory["program"] + memory["run"] == memory["process"] < memory["free"]
    assert 0 < memory["least"] < memory["run"]
    assert found["most_envs"] > 1000
    assert found["eps"] > 0 < found["seconds"]
    assert 0 < found["disk"]["per_round"] < found["disk"]["run"]
    assert list(tmp_path.iterdir()) == []
    refused = finished("--plan", *TINY, "envs=1048576", "steps=1000000", folder=tmp_path)
    assert refused.returncode == 2
    assert "GiB are free" in refused.stderr


def test_a_probe_that_is_refused_says_why(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("train_samples: 999999\nbatch_size: 27027\nname: x\n", encoding="utf-8")
    with pytest.raises(UserError, match="train_samples=999999: must be at most"):
        probed(tmp_path, "run", "1")
