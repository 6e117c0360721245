"""The controls: what each plays, and that all meet the seeds, images and orders of the round."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from esper_soa.agent.scripted import RandomPolicy, SchedulePolicy, WaitPolicy
from esper_soa.config.agent import PolicyConfig, ScheduleConfig
from esper_soa.config.env import GatesConfig, LifecycleConfig
from esper_soa.config.nets import CNN_BLUEPRINT_NAMES, MAX_CHANNELS, DataConfig, TaskConfig
from esper_soa.config.settings import ComputeConfig, TrainConfig
from esper_soa.env.world import World
from esper_soa.nets.model.host import host_shape
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.controls import play_control, widen_host
from esper_soa.training.results.metrics import RoundResult
from esper_soa.training.results.progress import Progress
from esper_soa.vocabulary import BLUEPRINT_NAMES
from tests.builders.recording_agent import Witnessed, witnessed_round
from tests.builders.tiny_world import CPU

ROUND = 3
SCHEDULE = ScheduleConfig(
    germinate=[1, 7], fossilize=5, advance=[1, 2, 4], blueprint="depthwise", style=3, tempo=0
)
CFG = TrainConfig(
    device="cpu",
    envs=2,
    steps=16,
    batch_size=4,
    train_samples=8,
    val_samples=32,
    slots=["r0c0", "r0c1"],
    task=TaskConfig(name="small", base_channels=8, num_blocks=2, num_pools=2),
    data=DataConfig(name="synthetic", synthetic_train=64, synthetic_test=64),
    gates=GatesConfig(min_blending_steps=1, min_gradient_health=0.0),
    lifecycle=LifecycleConfig(embargo_steps=2, min_prune_age=1, auto_forward_g3=True),
    policy=PolicyConfig(name="schedule", schedule=SCHEDULE),
    compute=ComputeConfig(threads=1, workers=1),
)


def quiet() -> Progress:
    return Progress(1, Console(file=io.StringIO()), "off")


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(CFG, CPU, seed=2**31 + 5)


@pytest.fixture(scope="module")
def scheduled(world: World) -> Witnessed:
    """A round in which a gated depthwise seed is put into every slot."""
    return witnessed_round(world, SchedulePolicy(SCHEDULE, CNN_BLUEPRINT_NAMES), ROUND)


@pytest.fixture(scope="module")
def grown(scheduled: Witnessed) -> RoundResult:
    return scheduled.result


@pytest.fixture(scope="module")
def large(world: World, grown: RoundResult) -> RoundResult:
    """static_large beside hosts as large as plain ones of width 9 and of width 11."""
    some = grown._replace(parameters=[host(9) + 0.0, host(11) + 0.0])
    return control("static_large", world, some)


def control(name: str, world: World, grown: RoundResult, cfg: TrainConfig = CFG) -> RoundResult:
    return play_control(name, cfg, world, grown, Round(ROUND, quiet(), name))


def host(width: int, task: TaskConfig = CFG.task) -> int:
    """Parameters of a plain host of this width."""
    return host_shape(replace(task, base_channels=width), ()).parameters.total


def assert_same(one: RoundResult, other: RoundResult) -> None:
    for name in ("accuracies", "parameters", "rewards", "train_flop", "episodes"):
        assert getattr(one, name) == getattr(other, name), name


def test_a_scripted_control_plays_the_round_with_the_settings_of_its_policy(
    world: World, grown: RoundResult
) -> None:
    assert_same(control("schedule", world, grown), grown)
    agent = RandomPolicy()
    by_hand, _ = play_round(world, Player(agent, None), Round(ROUND, quiet()))
    assert_same(control("random", world, grown), by_hand)
    other, _ = play_round(world, Player(agent, None), Round(ROUND + 1, quiet()))
    assert other.rewards != by_hand.rewards, "any round would do"


def test_static_final_trains_what_the_hosts_ended_with_from_the_start(
    world: World, grown: RoundResult
) -> None:
    assert (grown.topology.blueprint == BLUEPRINT_NAMES.index("depthwise")).all(), (
        "the schedule did not finish"
    )
    found = control("static_final", world, grown)
    by_hand, _ = play_round(
        world, Player(WaitPolicy(), None), Round(ROUND, quiet(), topology=grown.topology)
    )
    assert_same(found, by_hand)
    assert found.parameters == grown.parameters
    assert all(whole > some for whole, some in zip(found.train_flop, grown.train_flop, strict=True))


def test_static_large_is_a_plain_host_of_the_mean_size_of_the_grown_ones(
    large: RoundResult,
) -> None:
    mean = (host(9) + host(11)) / 2
    width = min(range(8, 14), key=lambda width: abs(host(width) - mean))
    assert large.parameters == [host(width)] * 2
    assert width == 10
    assert large.topology.blueprint.shape == (2, 1)  # one slot, in which nothing grows
    wide = build_world(
        replace(CFG, task=replace(CFG.task, base_channels=width)), CPU, seed=2**31 + 5
    )
    by_hand, _ = play_round(wide, Player(WaitPolicy(), None), Round(ROUND, quiet()))
    assert large.accuracies == by_hand.accuracies
    assert large.rewards == pytest.approx(by_hand.rewards)
    assert (
        large.train_flop
        == by_hand.train_flop
        == [CFG.steps * CFG.train_samples * wide.flop.host] * 2
    )


def test_a_widened_host_sees_the_images_of_the_growing_one_in_their_order_and_augmented_alike(
    world: World,
) -> None:
    wide = build_world(
        replace(CFG, task=widen_host(CFG.task, 3000)), CPU, seed=2**31 + 5, data=world.data
    )
    assert wide.data.train_images is world.data.train_images
    for played in (world, wide):
        played.start_round(ROUND)
    envs = torch.arange(2)
    for step in (0, 5):
        ours = world.work(step)
        theirs = wide.work(step)
        for index in range(ours.num_batches):
            for mine, other in zip(
                ours.training.batch(envs, index), theirs.training.batch(envs, index), strict=True
            ):
                assert torch.equal(mine, other)
        tested = zip(
            ours.validation.batches(envs, 16), theirs.validation.batches(envs, 16), strict=True
        )
        assert all(
            torch.equal(mine, other) for pair in tested for mine, other in zip(*pair, strict=True)
        )
    world.start_round(ROUND + 1)
    assert not torch.equal(
        world.work(0).training.batch(envs, 0)[0], wide.work(0).training.batch(envs, 0)[0]
    )


def test_a_host_widened_to_its_own_size_is_that_without_growth_and_compiles_nothing(
    world: World, grown: RoundResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = control("wait", world, grown)
    monkeypatch.delattr(torch, "compile")
    compiled = replace(CFG, compute=replace(CFG.compute, compile="on"))
    same = control("static_large", world, alone, compiled)
    assert same.accuracies == alone.accuracies
    assert same.parameters == alone.parameters == [host(8)] * 2


@pytest.mark.parametrize(
    "task", [TaskConfig(), TaskConfig(base_channels=1, num_blocks=5, kernel_size=1, num_pools=5)]
)
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.004, 2.9, 30.0])
def test_no_width_is_nearer_than_that_of_the_widened_task(task: TaskConfig, factor: float) -> None:
    wanted = factor * host(task.base_channels, task)
    found = widen_host(task, wanted)
    assert abs(host(found.base_channels, task) - wanted) == min(
        abs(host(width, task) - wanted) for width in range(task.base_channels, 80)
    )
    assert replace(found, base_channels=task.base_channels) == task


def test_no_host_is_widened_beyond_what_a_block_may_have() -> None:
    assert widen_host(TaskConfig(), 1e12).base_channels == MAX_CHANNELS // 4
    narrow = TaskConfig(base_channels=MAX_CHANNELS // 4)
    assert widen_host(narrow, 1e12) == narrow


def test_other_controls_are_refused_by_name() -> None:
    with pytest.raises(SettingError, match="^control=widest: must be one of none, wait"):
        replace(CFG, control="widest")


def test_a_transformer_is_widened_in_steps_that_its_heads_divide() -> None:
    task = TaskConfig(host="transformer", blueprints=["norm"])

    def size(width: int) -> int:
        return host_shape(task.with_width(width), ()).parameters.total

    wanted = 1.5 * size(32)
    wide = widen_host(task, wanted)
    width = wide.transformer.width
    assert wide == task.with_width(width)
    assert width % 4 == 0
    distances = [abs(size(near) - wanted) for near in (width - 4, width, width + 4)]
    assert min(distances) == distances[1]
    assert width > 32
