"""Whole env-steps with the engine of a GPU, without one: nobody waits, few launches.

On the device "meta", which holds no values, every read of one raises, so nothing that is launched
can depend on what grows; there, unlike on a CPU, the code of a GPU is the one that runs.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.protocol import restart
from esper_soa.agent.rollout import write_
from esper_soa.agent.scripted import RandomPolicy
from esper_soa.config.agent import NetworkConfig
from esper_soa.config.nets import TaskConfig, host_slots
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.env import Env
from esper_soa.env.step import EAGER
from esper_soa.env.world import World
from esper_soa.nets.data.datasets import synthetic
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import EpisodeRunner, Player, Round, rollout_of, row_of
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.metrics import MetricsAccumulator
from tests.builders.tiny_world import CPU, quiet_progress, rules_from, tiny_settings

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

from esper_soa.nets.engines.gpu.engine import GpuEngine
from tests.builders.gpu_launches import Launches, Watched, Within, counted

META = torch.device("meta")
READ_PROGRESS = "read_progress"  # a copy that is started, not waited for
TABLES = ("seed_init_of", "slot_table", "tensor_table")  # made once, at the first env-step of a run
DEFAULT = TaskConfig()
DEEP = TaskConfig(name="deep", num_blocks=5, num_pools=5)
SMALLEST = TaskConfig(name="bare", base_channels=1, num_blocks=2, num_pools=2)
TOLD_OUTSIDE = 190  # what docs/gpu.md tells, and how far another version of torch may be from it
NEAR = 5
MOST_WITHIN = 3400  # kernels within those replays, as they are written: torch's, one by one
EVERY_SLOT = ["r0c0", "r0c1", "r0c2", "r1c0", "r1c1", "r1c2"]


def settings(
    num_envs: int, task: TaskConfig, slots: list[str], engine: str = "triton"
) -> TrainConfig:
    cfg = tiny_settings(num_envs, 1, 6)
    cfg.task = task
    cfg.slots = slots
    cfg.compute = ComputeConfig(workers=1, engine=engine)
    cfg.policy.network = NetworkConfig(hidden=16, features=16)
    return cfg


@pytest.mark.slow
def test_a_round_reads_nothing_that_it_would_wait_for_whether_seeds_are_born_or_not() -> None:
    cfg = settings(1, SMALLEST, ["r1c1"])
    cfg.val_samples = 2
    world = build_world(cfg, CPU)
    assert isinstance(world.rules.engine, GpuEngine)
    episode = EpisodeRunner(world, Player(RandomPolicy(), None), Round(0, quiet_progress()))
    states = []
    found = []
    with SyncGuard([READ_PROGRESS, *TABLES]) as guard:
        for _ in range(6):
            states.append(episode.env.state)
            episode.step_()
            found.append({sync.function for sync in guard.log})
            guard.log.clear()
    assert found == [{READ_PROGRESS, *TABLES}] + [{READ_PROGRESS}] * 5
    assert any(bool(state.slots.newborn.any()) for state in states[1:])
    assert bool(episode.env.state.slots.running.any())
    assert bool(episode.env.state.signals.val_loss.isfinite().all())


def launches_of_an_env_step(
    num_envs: int,
    slots: list[str],
    launches: "Launches",
    monkeypatch: pytest.MonkeyPatch,
    task: TaskConfig,
) -> tuple[int, list["Within"]]:
    """Of the second env-step of a learner's round, two batches in it, without values.

    All but the copy of the progress bar's numbers to the host; and the steps replayed in it.
    """
    # looks at labels, before a run
    monkeypatch.setattr("esper_soa.nets.data.batches.check_classes", lambda *_: None)
    cfg = settings(num_envs, task, slots, "torch")
    cfg = replace(cfg, batch_size=2, train_samples=4, val_samples=4)
    rules = rules_from(cfg, META)._replace(engine=GpuEngine(Watched(launches)))
    images = synthetic(16, 8, CPU).to(META)
    world = World(rules, images, 0, EAGER._replace(steps=Watched(launches)))
    player = build_player(cfg.policy, world)
    env = Env(world)
    assert isinstance(player.agent, RecurrentPolicy)
    assert player.learner is not None
    agent = player.agent
    agent.steps = Watched(launches)
    rollout = rollout_of(world, player)
    assert rollout is not None
    metrics = MetricsAccumulator(rules, num_envs, cfg.train_samples, world.kernels)
    fresh = memory = agent.start(num_envs, META)
    env.begin_(0)
    for step in range(2):
        launches.take()
        launches.steps.clear()
        observed = env.observe_()
        decision, memory = agent.act(observed.view, restart(memory, fresh, observed.restarted))
        result = env.apply_action_(decision.action)
        write_(rollout, step, row_of(observed, decision, result, env.truncated))
        metrics.add_(observed, result)
    return launches.take(), launches.steps


def expected_kernels(blocks: int, slots: int) -> dict[str, int]:
    """Launches of a training batch without statistics, by kernel."""
    once = ("cut", "head", "head_sums", "seed_weights", "sum", "step")
    per_block = (
        "conv",
        "statistics",
        "norm_pool",
        "norm_sums",
        "output_gradient",
        "weight_gradient",
    )
    counts = dict.fromkeys(once, 1) | dict.fromkeys(per_block, blocks)
    counts |= {"input_gradient": blocks - 1}
    counts |= dict.fromkeys(("slot_forward", "slot_backward"), slots)
    return {f"{name}_kernel": count for name, count in counts.items()}


@pytest.mark.parametrize(
    ("num_envs", "task", "num_slots", "batch", "validation"),
    [
        (17, DEFAULT, 3, 32, 10),
        pytest.param(4_096, DEFAULT, 6, 38, 13, marks=pytest.mark.slow),
        pytest.param(17, DEEP, 1, 42, 10, marks=pytest.mark.slow),
        pytest.param(17, DEEP, 3, 46, 12, marks=pytest.mark.slow),
        (17, DEEP, 10, 60, 19),
    ],
)
def test_an_env_step_launches_little_as_blocks_and_slots_alone_say(
    num_envs: int,
    task: TaskConfig,
    num_slots: int,
    batch: int,
    validation: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = EVERY_SLOT[:num_slots] if task is DEFAULT else [s.name for s in host_slots(task)]
    with counted(monkeypatch) as launches:
        outside, steps = launches_of_an_env_step(
            num_envs, slots[:num_slots], launches, monkeypatch, task
        )
    others = [step for step in steps if not step.name.endswith("Step")]
    with_statistics, training = [step for step in steps if step.name == "TrainStep"]
    assert training.kernels == expected_kernels(task.num_blocks, num_slots)
    assert training.launches == 5 + 7 * task.num_blocks - 1 + 2 * num_slots + 1 == batch
    assert with_statistics.launches == batch + 1
    assert {step.launches for step in steps if step.name == "ValidationStep"} == {validation}
    assert 4 + task.num_blocks + num_slots == validation
    names = "claimed guard_and_record decide_with_probabilities apply_action count_actions"
    assert [step.name for step in others] == names.split()
    outside -= len(steps) - len(others)  # the replays of batches
    assert abs(outside - TOLD_OUTSIDE) <= NEAR
    assert task is not DEFAULT or sum(step.launches for step in others) <= MOST_WITHIN
