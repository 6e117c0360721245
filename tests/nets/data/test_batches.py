"""Which images are drawn, how they are cropped and normalised; no env notices the others."""

from dataclasses import replace

import pytest
import torch

from esper_soa.nets.data import orders
from esper_soa.nets.data.batches import Draw, check_classes, check_work
from esper_soa.nets.data.datasets import ImageSet
from esper_soa.nets.data.images import (
    ImageBank,
    TrainingImages,
    ValidationImages,
    cut_batch,
    evaluation_crops,
    training_crops,
)
from esper_soa.nets.data.orders import (
    SampleOrders,
    Split,
    random_permutations,
    split_sizes,
    split_training_order,
    split_validation_order,
    validation_order,
)
from esper_soa.system.errors import SettingError
from esper_soa.system.streams import AUGMENTATION, DATA_ORDER, integers, stream_keys

MEAN = (0.1, 0.2, 0.3)
STD = (0.5, 0.25, 0.125)


def training_order(keys: torch.Tensor, dataset_size: int, start: int, count: int) -> torch.Tensor:
    return SampleOrders(keys, dataset_size, len(keys)).draw(start, count)


@pytest.fixture(scope="module")
def images() -> ImageSet:
    """7 training and 5 test images of noise with distinct labels."""
    generator = torch.Generator().manual_seed(0)
    train = torch.randint(0, 256, (7, 32, 32, 3), dtype=torch.uint8, generator=generator)
    test = torch.randint(0, 256, (5, 32, 32, 3), dtype=torch.uint8, generator=generator)
    parts = (train, torch.arange(7), test, torch.arange(5) + 3, test[:1], torch.arange(1))
    return ImageSet("noise", *parts, MEAN, STD, "", "")


@pytest.fixture(scope="module")
def bank(images: ImageSet) -> ImageBank:
    return images.banks[0]


def keys(purpose: int, envs: range) -> torch.Tensor:
    return stream_keys(9, purpose, (1,), torch.tensor(envs))


def slow_crop(image: torch.Tensor, crop: int) -> torch.Tensor:
    """[3, 32, 32] of crop number `crop` of one image, by plain loops: pad, cut, mirror,
    normalise.
    """
    mirrored = crop // 81
    top = crop // 9 % 9
    left = crop % 9
    source = image.tolist()
    black = [0, 0, 0]
    padded = [[black] * 40 for _ in range(40)]
    for row in range(32):
        for column in range(32):
            padded[row + 4][column + 4] = source[row][31 - column if mirrored else column]
    cut = [line[left : left + 32] for line in padded[top : top + 32]]
    values = torch.tensor(cut) / 255
    return ((values - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)


def assert_passes(order: torch.Tensor) -> None:
    """Three passes over 11 images for every env, each another permutation."""
    assert order.dtype == torch.int64
    passes = order.unflatten(1, (3, 11)).flatten(0, 1)
    assert torch.equal(passes.sort(dim=1).values, torch.arange(11).expand(len(passes), 11))
    assert len(passes.unique(dim=0)) == len(passes)


def test_an_order_is_a_permutation_in_every_pass() -> None:
    assert_passes(training_order(keys(DATA_ORDER, range(3)), 11, 0, 33))


def test_an_order_drawn_in_pieces_equals_one_drawn_at_once() -> None:
    stream = keys(DATA_ORDER, range(2))
    whole = training_order(stream, 11, 0, 40)
    book = SampleOrders(stream, 11, 2)
    # inside, across 1, across 2
    pieces = torch.cat([book.draw(0, 7), book.draw(7, 9), book.draw(16, 24)], dim=1)
    assert torch.equal(pieces, whole)
    order = book.order
    book.draw(36, 8)
    assert book.order is order  # made once in a pass
    assert torch.equal(training_order(stream, 11, 16, 5), whole[:, 16:21])


@pytest.mark.parametrize("at_a_time", [2 * 11, 6])  # two envs, or one whatever it takes
def test_an_order_that_is_too_large_to_hold_is_looked_up(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    stream = keys(DATA_ORDER, range(5))
    monkeypatch.setattr(orders, "SORT_ELEMENTS", at_a_time)
    sorted_ones = training_order(keys(DATA_ORDER, range(5)), 11, 0, 33)
    monkeypatch.setattr(orders, "MAX_STORED", 5 * 11 - 1)
    book = SampleOrders(stream, 11, 5)
    order = torch.cat([book.draw(0, 7), book.draw(7, 26)], dim=1)
    assert book.order.numel() == 0
    assert_passes(order)
    assert not torch.equal(order, sorted_ones)


def test_an_env_draws_the_same_whoever_has_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "MAX_STORED", 5 * 11 - 1)
    whole = SampleOrders(keys(DATA_ORDER, range(5)), 11, 5).draw(4, 30)
    shares = [
        SampleOrders(keys(DATA_ORDER, envs), 11, 5).draw(4, 30) for envs in (range(2), range(2, 5))
    ]
    assert torch.equal(torch.cat(shares), whole)


def test_all_permutations_are_equally_likely() -> None:
    stream = stream_keys(0, DATA_ORDER, (), torch.arange(6000))
    orders = random_permutations(stream, 3) @ torch.tensor([9, 3, 1], dtype=torch.int32)
    counts = orders.unique(return_counts=True)[1]
    assert counts.numel() == 6
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 20.5  # chi-square(5), 99.9 %


def test_validation_images_are_a_fixed_draw_without_repetition() -> None:
    order = validation_order(50, 20, seed=1)
    assert order.shape == (20,)
    assert order.unique().numel() == 20
    assert torch.equal(order, validation_order(50, 50, seed=1)[:20])
    assert not torch.equal(order, validation_order(50, 20, seed=2))


def test_work_and_classes_beyond_the_data_are_errors_that_name_the_limit(images: ImageSet) -> None:
    check_work(images, 7, 5)
    for sizes, name, most, change in (
        ((8, 5), "train_samples=8", "7, the training", "lower"),
        ((7, 6), "val_samples=6", "5, the validation", "raise"),
    ):
        told = f"^{name}: must be at most {most} images of noise. Lower {name[:-2]}, {change} "
        with pytest.raises(SettingError, match=f"{told}data.validation_images, or choose a larger"):
            check_work(images, *sizes)
    check_classes(images, 8)  # labels 0 to 7
    told = r"^task\.num_classes=7: must be at least 8, the classes of noise\.$"
    with pytest.raises(SettingError, match=told):
        check_classes(images, 7)
    for part in ("train_labels", "val_labels", "test_labels"):
        labels = getattr(images, part).clone()
        labels[-1] = 8  # in this part alone
        with pytest.raises(SettingError, match=r"=8: must be at least 9, the classes of noise"):
            check_classes(replace(images, **{part: labels}), 8)


def test_a_batch_equals_crops_made_by_plain_loops(images: ImageSet, bank: ImageBank) -> None:
    indices = torch.tensor([[0, 6, 3], [5, 5, 1]])  # [n = 2, B = 3]
    stream = keys(AUGMENTATION, range(2))
    pixels, labels = cut_batch(training_crops(bank, indices, stream, 40, True))
    assert pixels.shape == (3, 6, 32, 32)
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [[0, 5], [6, 5], [3, 1]]
    crops = integers(stream[:, None], torch.arange(40, 43), 162)
    for env in range(2):
        for sample in range(3):
            expected = slow_crop(images.train_images[indices[env, sample]], int(crops[env, sample]))
            torch.testing.assert_close(pixels[sample, 3 * env : 3 * env + 3], expected)


def test_every_crop_of_an_image_can_come_out_and_half_are_mirrored(
    images: ImageSet, bank: ImageBank
) -> None:
    stream = keys(AUGMENTATION, range(1))
    crops = integers(stream[:, None], torch.arange(4000), 162)[0]
    assert crops.unique().numel() == 162
    assert abs(float((crops >= 81).double().mean()) - 0.5) < 0.025  # standard deviation 0.008
    for crop in (0, 8, 72, 80, 81, 89, 153, 161):  # the corners, plain and mirrored
        start = crops.tolist().index(crop)
        # the last image
        pixels, _ = cut_batch(training_crops(bank, torch.tensor([[6]]), stream, start, True))
        torch.testing.assert_close(pixels[0], slow_crop(images.train_images[6], crop))


def test_without_augmentation_the_image_comes_as_it_is(images: ImageSet, bank: ImageBank) -> None:
    pixels, _ = cut_batch(
        training_crops(bank, torch.tensor([[2], [4]]), keys(AUGMENTATION, range(2)), 0, False)
    )
    # 40 = top 4, left 4
    torch.testing.assert_close(pixels[0, :3], slow_crop(images.train_images[2], 40))
    torch.testing.assert_close(pixels[0, 3:], slow_crop(images.train_images[4], 40))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.bfloat16, 0.04)])
def test_other_dtypes_agree(bank: ImageBank, dtype: torch.dtype, tolerance: float) -> None:
    crops = training_crops(bank, torch.tensor([[2, 3]]), keys(AUGMENTATION, range(1)), 0, True)
    other = cut_batch(crops, dtype)[0]
    assert other.dtype == dtype
    if dtype == torch.bfloat16:  # rounded once
        assert torch.equal(other, cut_batch(crops)[0].to(dtype))
    apart = cut_batch(crops)[0].double() - other.double()
    assert float(apart.abs().max()) < tolerance  # values reach 7; bfloat16 has 8 bits


def env_step(bank: ImageBank, envs: range) -> TrainingImages:
    order = training_order(keys(DATA_ORDER, envs), 7, 5, 6)
    draw = Draw(order, keys(AUGMENTATION, envs), 5, 3, True)
    return TrainingImages(bank, draw, torch.float32)


def test_what_networks_draw_follows_from_the_samples_before_and_never_repeats() -> None:
    order = torch.zeros(3, 8, dtype=torch.int64)

    def noise(start: int, index: int) -> torch.Tensor:
        draw = Draw(order, keys(AUGMENTATION, range(3)), start, 2, True)
        return draw.noise(torch.tensor([2, 0]), index)

    assert torch.equal(noise(0, 2), noise(4, 0))
    drawn = torch.stack([noise(start, index) for start in (0, 8) for index in range(4)])
    assert len(drawn.unique()) == drawn.numel()


def test_env_2_of_4_gets_what_it_gets_alone(bank: ImageBank) -> None:
    together = env_step(bank, range(4))
    alone = env_step(bank, range(2, 3))
    for index in range(2):
        many, labels = together.batch(torch.arange(4), index)
        some, _ = together.batch(torch.tensor([2, 3]), index)
        single, label = alone.batch(torch.tensor([0]), index)
        assert torch.equal(many[:, 6:9], single)
        assert torch.equal(some[:, :3], single)
        assert torch.equal(labels[:, 2:3], label)


def test_an_evaluation_batch_is_normalised_and_ignores_index_minus_1(images: ImageSet) -> None:
    bank = images.banks[1]
    pixels, labels = cut_batch(evaluation_crops(bank, torch.tensor([[4, 0], [1, -1]])))
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [[7, 4], [3, -1]]
    for sample, env, index in ((0, 0, 4), (1, 0, 0), (0, 1, 1)):
        expected = slow_crop(images.val_images[index], 40)
        torch.testing.assert_close(pixels[sample, 3 * env : 3 * env + 3], expected)
    assert pixels.isfinite().all()


def test_validation_comes_in_parts_shared_or_per_env(images: ImageSet) -> None:
    bank = images.banks[1]
    shared = ValidationImages(bank, torch.tensor([4, 2, 0]), torch.float32).batches(
        torch.arange(2), 2
    )
    assert [tuple(x.shape) for x, _ in shared] == [(2, 3, 32, 32), (1, 3, 32, 32)]
    assert torch.cat([y for _, y in shared]).tolist() == [[7], [5], [3]]
    feed = ValidationImages(bank, torch.tensor([[4, 2], [1, 0], [3, -1]]), torch.float32)
    assert feed.first(1).order.tolist() == [[4], [1], [3]]
    own = feed.batches(torch.tensor([2, 0]), 2)
    assert own[0][0].shape == (2, 6, 32, 32)
    assert own[0][1].tolist() == [[6, 7], [-1, 5]]


def test_split_training_gives_every_env_its_chunk_of_one_permutation(images: ImageSet) -> None:
    # D = 7, V = 5, B = 1, N = 3: 7 // 3 = 2 training batches; test: one whole batch of 3 and 2
    # left, for envs 0 and 1
    assert split_sizes(images, 1, 3) == Split(3, 1, 2, 2, 2)
    told = "^envs=4: must be at most 3 with data.split=true, so that the 7 training images of noise"
    told += " give every env a batch of 2. Lower envs or batch_size, or set data.split=false.$"
    with pytest.raises(SettingError, match=told):
        split_sizes(images, 2, 4)
    told = "^envs=6: must be at most 5 with data.split=true, so that the validation images of noise"
    told += " give every env one. Lower envs, or set data.split=false.$"
    with pytest.raises(SettingError, match=told):
        split_sizes(images, 1, 6)
    assert split_sizes(images, 1, 5).val_samples == 1
    split = Split(num_envs=3, batch_size=2, num_batches=2, train_samples=4, val_samples=0)
    key = keys(DATA_ORDER, range(1))
    order = split_training_order(key, 13, 4, split)
    permutation = training_order(key, 13, 4 * 13, 13)[0]
    # global batches are places 0..5 and 6..11, the 13th image is dropped; env 1 has places 2, 3 and
    # 8, 9
    assert torch.equal(order[1], permutation[[2, 3, 8, 9]])
    assert torch.equal(order.flatten().sort().values, permutation[:12].sort().values)
    assert not torch.equal(order, split_training_order(key, 13, 5, split))


@pytest.mark.parametrize(
    ("num_test", "batch_size", "num_envs"),
    [(5, 1, 3), (23, 2, 4), (16, 2, 4), (9, 5, 1)],
)
def test_split_validation_equals_tensor_split(
    num_test: int, batch_size: int, num_envs: int
) -> None:
    filler = torch.zeros(num_test, 1)
    parts = (torch.zeros(99, 1), torch.zeros(99), *(filler, torch.zeros(num_test)) * 2)
    images = ImageSet("x", *parts, MEAN, STD, "", "")
    order = split_validation_order(num_test, split_sizes(images, batch_size, num_envs))
    chunks = [
        part.tensor_split(num_envs) for part in torch.arange(num_test).split(batch_size * num_envs)
    ]
    for env in range(num_envs):
        expected = torch.cat([chunk[env] for chunk in chunks])
        assert torch.equal(order[env][order[env] >= 0], expected)
    assert order.shape[1] == max(int((row >= 0).sum()) for row in order)
