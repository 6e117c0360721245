"""What a World hands out: hosts, orders, crops, streams and noise, new for every seed, round, env
and env-step.
"""

import itertools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from esper_soa.config.nets import DataConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.env import world as module
from esper_soa.env.world import World
from esper_soa.nets.data.images import TrainingImages, cut_batch, training_crops
from esper_soa.nets.data.orders import validation_order
from esper_soa.system import streams
from esper_soa.system.errors import SettingError
from esper_soa.training.loop.build import build_world
from esper_soa.vocabulary import HEADS
from tests.builders.tiny_world import CPU, SMALL_TASK, tiny_settings

ENVS = 3
STEPS = 4
BATCH = 2
TRAIN = 6
TEST = 5
IMAGES = 16


def settings(envs: int = ENVS, **data_settings: object) -> TrainConfig:
    """Hosts that see 6 of 16 images an env-step in batches of 2: the third spans two passes."""
    cfg = tiny_settings(envs, 2, STEPS)
    cfg.batch_size = BATCH
    cfg.train_samples = TRAIN
    cfg.val_samples = TEST
    cfg.data = DataConfig(
        **({"name": "synthetic", "synthetic_train": IMAGES, "synthetic_test": 8} | data_settings)
    )
    return cfg


@pytest.fixture(scope="module")
def world() -> World:
    return build_world(settings(), CPU, seed=7)


def feed(world: World, step: int) -> TrainingImages:
    training = world.work(step).training
    assert isinstance(training, TrainingImages)
    return training


def all_different(tensors: Iterable[Tensor]) -> bool:
    """No two of the tensors share a number in the same place, or anywhere else."""
    numbers = torch.cat([tensor.flatten() for tensor in tensors])
    return len(numbers.unique()) == len(numbers)


def test_an_env_step_has_the_work_of_the_settings(world: World) -> None:
    world.start_round(0)
    work = world.work(1)
    assert work.num_batches == 3
    assert feed(world, 1).draw.order.shape == (ENVS, TRAIN)
    images, labels = work.training.batch(world.envs, 0)
    assert images.shape == (BATCH, ENVS * 3, 32, 32)
    assert labels.shape == (BATCH, ENVS)
    assert images.dtype == world.dtype == torch.float32
    assert world.validation.order.shape[-1] == TEST
    assert (world.setup.train_samples, world.setup.val_samples) == (TRAIN, TEST)


def test_env_steps_go_through_all_images_before_any_comes_again(world: World) -> None:
    world.start_round(0)
    # 48 images: three passes over 16
    drawn = torch.cat([feed(world, step).draw.order for step in range(8)], 1)
    for one_pass in drawn.split(IMAGES, 1):
        assert torch.equal(one_pass.sort(1).values, torch.arange(IMAGES).expand(ENVS, IMAGES))
    orders = {tuple(order.tolist()) for one_pass in drawn.split(IMAGES, 1) for order in one_pass}
    assert len(orders) == 3 * ENVS
    for step in (3, 0, 2, 1):  # also asked for out of turn
        assert torch.equal(
            feed(world, step).draw.order, drawn[:, TRAIN * step : TRAIN * (step + 1)]
        )


def test_images_are_those_of_the_order_under_crops_that_never_repeat(world: World) -> None:
    world.start_round(2)
    keys = streams.stream_keys(7, streams.AUGMENTATION, (2,), world.envs)
    for step, index in itertools.product((0, 1), (0, 2)):
        images, labels = world.work(step).training.batch(world.envs, index)
        chosen = feed(world, step).draw.order[:, BATCH * index : BATCH * (index + 1)]
        start = TRAIN * step + BATCH * index
        expected, same = cut_batch(training_crops(world.data.banks[0], chosen, keys, start, True))
        assert torch.equal(images, expected)
        assert torch.equal(labels, same)
        assert torch.equal(labels, world.data.train_labels[chosen].T)


PURPOSES = [
    getattr(streams, name)
    for name in ("DATA_ORDER", "AUGMENTATION", "HOST_INIT", "SEED_INIT", "POLICY_SAMPLE")
]


def test_every_seed_round_purpose_and_env_has_a_stream_of_its_own(world: World) -> None:
    keys = []
    for one in (world, build_world(settings(), CPU, seed=8)):
        for round_number in (0, 1, 5):
            one.start_round(round_number)
            keys += [one.keys(purpose) for purpose in PURPOSES]
    assert all(key.shape == (ENVS,) for key in keys)
    assert all_different(keys)


def test_a_seed_that_is_born_draws_from_the_env_step_of_its_birth(world: World) -> None:
    keys = []
    for round_number in (0, 1):
        world.start_round(round_number)
        keys += [world.work(step).seed_keys for step in range(STEPS)]
        keys.append(world.keys(streams.SEED_INIT))
    assert all_different(keys)
    world.start_round(1)
    assert torch.equal(world.work(2).seed_keys, keys[5 + 2])


def test_the_noise_of_decisions_never_repeats_within_a_round_or_over_rounds(world: World) -> None:
    draws = []
    for round_number in (0, 1):
        world.start_round(round_number)
        draws += [world.noise(step) for step in range(STEPS + 1)]
    assert all(
        noise.shape == (ENVS, len(HEADS)) and noise.dtype == torch.float32 for noise in draws
    )
    numbers = torch.stack(draws)
    assert all_different(draws)  # 240 of 2**24 numbers
    assert 0 <= numbers.min() < 0.1 < 0.9 < numbers.max() < 1
    world.start_round(1)
    assert torch.equal(world.noise(3), draws[STEPS + 1 + 3])


def test_a_new_head_moves_no_number_of_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEADS", (*HEADS, HEADS[1]))
    more = build_world(settings(), CPU, seed=7)
    world.start_round(0)
    others = torch.stack([world.noise(step) for step in range(9)])
    for step in (0, 3):
        noise = more.noise(step)
        assert torch.equal(noise[:, :-1], others[step])
        assert not torch.isin(noise[:, -1], others).any()


def hosts(world: World, round_number: int) -> Tensor:
    world.start_round(round_number)
    return world.weights["host", "params"].clone()


def test_every_round_and_env_has_hosts_of_its_own_and_a_round_started_again_has_the_same(
    world: World,
) -> None:
    first = hosts(world, 0)
    second = hosts(world, 1)
    rows = torch.cat([first, second, hosts(build_world(settings(), CPU, seed=8), 0)])
    assert len(rows.unique(dim=0)) == 3 * ENVS
    world.weights["host", "params"].fill_(9.0)
    world.weights["host", "momentum"].fill_(9.0)
    assert torch.equal(hosts(world, 0), first)
    assert (world.weights["host", "momentum"] == 0).all()
    assert torch.equal(world.weights["snapshot", "params"], first)
    assert not world.weights["snapshot", "fossil"].any()
    assert not world.start_round(0).slots.live.any()


def test_all_envs_and_rounds_are_measured_on_the_same_test_images_which_the_seed_chooses(
    world: World,
) -> None:
    chosen = world.validation.order.clone()
    assert torch.equal(chosen.flatten(), validation_order(8, TEST, 7))
    world.start_round(4)
    assert torch.equal(world.work(3).validation.order, chosen)
    others = [build_world(settings(), CPU, seed=seed).validation.order for seed in (8, 9, 10)]
    assert any(not torch.equal(other, chosen) for other in others)


def test_a_split_pass_gives_every_image_to_one_env_and_is_drawn_anew_at_every_env_step_and_round() -> (  # noqa: E501
    None
):
    world = build_world(settings(split=True), CPU, seed=7)
    # 16 images: 2 batches of 2 for each of 3
    assert (world.setup.train_samples, world.work(0).num_batches) == (4, 2)
    orders = []
    for round_number in (0, 1):
        world.start_round(round_number)
        orders += [feed(world, step).draw.order for step in range(2)]
    for order in orders:
        assert order.shape == (3, 4)
        assert len(order.unique()) == 12
    assert len({tuple(order.flatten().tolist()) for order in orders}) == 4
    tested = world.validation.order
    assert tested.shape == (3, 3)
    assert sorted(tested[tested >= 0].tolist()) == list(range(8))


def test_work_that_the_images_cannot_give_is_refused() -> None:
    cfg = settings()
    cfg.val_samples = 9
    with pytest.raises(SettingError, match="val_samples=9: must be at most 8"):
        build_world(cfg, CPU)
    cfg.val_samples = 8
    cfg.train_samples = 18
    with pytest.raises(SettingError, match="train_samples=18: must be at most 16"):
        build_world(cfg, CPU)
    read = settings()
    read.data = DataConfig("text", context=8)
    refusal = r"task.host=chain: must be a host of sequences \[8\], not of inputs \[3, 32, 32\]"
    with pytest.raises(SettingError, match=refusal):
        build_world(read, CPU)
    few = settings()
    few.task = type(SMALL_TASK)(**(vars(SMALL_TASK) | {"num_classes": 7}))
    with pytest.raises(SettingError, match="task.num_classes=7: must be at least 10"):
        build_world(few, CPU)
