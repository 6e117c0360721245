"""What the entry points of the C library make of small networks of all sizes equals torch in double
precision.

The networks are those of the proof (proof.py): two blocks, and a seed of every kind in a slot
before the first pool.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_soa.errors import SettingError
from esper_soa.nets import data
from esper_soa.nets.datasets import ImageSet
from esper_soa.nets.engines.cpu import images, proof, records
from esper_soa.nets.engines.cpu.engine import takes
from esper_soa.nets.engines.cpu.proof import Size, Trial
from esper_soa.nets.engines.cpu.support import choose_native

pytestmark = pytest.mark.usefixtures("native")

CPU = torch.device("cpu")
ROUNDING = 2e-5  # of the largest number

# Odd sides and narrow inputs are convolved directly, the others by tiles; channels that fill no
# vectors, one, several.
SIZES = [
    Size(),
    Size((8, 16)),
    Size((16, 32), batch=2),
    Size((12, 5), side=8, kernel=1, groups=1),
    Size((5, 12), groups=1),
    Size((8, 8), side=32, pooled=(False, False)),
    Size((1, 1), side=6, kernel=5, pooled=(True, False), groups=1),
    Size((32, 8), side=16, pooled=(False, True)),
    Size((64, 64), side=4, pooled=(False, False), groups=4),
    Size((24, 8), side=12, pooled=(True, True)),
    Size((8, 16), side=2),
    Size((8, 24), side=7, pooled=(False, False)),
    Size((24, 40), side=5, kernel=5, pooled=(False, False)),
    Size((16, 16), side=6, kernel=1, pooled=(True, False)),
    Size((9, 9), side=6, groups=3),
    Size((3, 48), side=6, groups=1),
    Size((40, 20), side=20, pooled=(True, False)),
    Size((24, 16), side=12),
    Size((2, 4), side=8, kernel=1, pooled=(True, True), classes=10),
    Size((8, 8), batch=24, classes=2),
]


def name_of(size: Size) -> str:
    return f"{size.channels[0]}_{size.channels[1]}_{size.kernel}x{size.kernel}_side_{size.side}"


def assert_close(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], rounding: float = ROUNDING
) -> None:
    """Numbers to a share of the largest, counts exactly, not finite where torch's are."""
    assert ours.keys() == theirs.keys()
    for name, wanted in theirs.items():
        found = ours[name].double()
        assert found.shape == wanted.shape
        assert torch.equal(found.isnan(), wanted.isnan()), name
        if "correct" in name:
            assert torch.equal(ours[name], wanted), name
        finite = wanted.isfinite() & found.isfinite()
        scale = float(wanted[finite].abs().max()) if finite.any() else 1.0
        assert float((found - wanted)[finite].abs().max() if finite.any() else 0) <= rounding * max(
            scale, 1e-6
        ), name


@pytest.mark.parametrize("size", SIZES, ids=name_of)
def test_a_step_and_a_validation_equal_torch(size: Size) -> None:
    given = proof.draw(size, seed=3)
    assert_close(proof.native_results(size, given), proof.torch_results(size, given))


def changed(size: Size, change: Callable[[Trial, Size], None], seed: int = 4) -> Trial:
    trial = proof.draw(size, seed)
    change(trial, size)
    return trial


def host_parts(size: Size, row: Tensor) -> list[Tensor]:
    """Kernel, scale and shift of both blocks, weight and bias of the classifier; views of a row."""
    return proof._unpack(row, size.host)


def pairs_of_pixels(trial: Trial, size: Size) -> None:
    trial.lines[:, 1::2] = trial.lines[:, ::2]
    trial.lines[..., 1::2] = trial.lines[..., ::2]
    # from an even column of the first line on
    trial.first.copy_(trial.first // 2 * 2 % trial.lines.stride(2))


@pytest.mark.parametrize("channels", [(8, 8), (16, 24), (3, 8)])
def test_equal_pixels_send_their_gradient_to_the_first_as_torch_does(
    channels: tuple[int, int],
) -> None:
    size = Size(channels, kernel=1, groups=1, pooled=(True, True))
    given = changed(size, pairs_of_pixels)
    seen = proof._images(size, given, 0)
    assert torch.equal(seen[:, :, ::2, ::2], seen[:, :, 1::2, 1::2])
    assert_close(proof.native_results(size, given), proof.torch_results(size, given))


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("part", range(8))
def test_a_number_that_is_not_finite_spreads_as_in_torch_and_to_no_other_network(
    part: int, broken: float
) -> None:
    size = Size((8, 16))

    def break_one(trial: Trial, size: Size) -> None:
        host_parts(size, trial.host[2])[part].view(-1)[1] = broken

    clean = proof.draw(size, 4)
    given = changed(size, break_one)
    ours = proof.native_results(size, given)
    theirs = proof.torch_results(size, given)
    healthy = proof.native_results(size, clean)
    others = [place for place in range(len(proof.KINDS)) if place != 2]
    for name, values in ours.items():
        if name == "images":
            continue
        assert torch.equal(values[others], healthy[name][others]), name
        if broken != 1e30:  # whose square overflows here alone
            assert torch.equal(values[2].isnan(), theirs[name][2].isnan()), name


def equal_logits(trial: Trial, size: Size) -> None:
    *_, weight, bias = host_parts(size, trial.host[0])
    weight.zero_(), bias.zero_()
    *_, weight, bias = host_parts(size, trial.host[1])
    weight[1:] = weight[0]  # the last two of three are equal
    bias.copy_(torch.tensor([-1.0, 0.5, 0.5]))
    *_, bias = host_parts(size, trial.host[3])
    bias[1] = float("nan")
    *_, bias = host_parts(size, trial.host[4])
    bias[1:] = float("nan")


@pytest.mark.parametrize("label", range(3))
def test_right_answers_among_equal_or_broken_logits_are_those_of_torch(label: int) -> None:
    size = Size()
    given = changed(size, equal_logits)
    given.labels.fill_(label)
    ours = proof.native_results(size, given)
    theirs = proof.torch_results(size, given)
    wanted = [size.batch * (label == 0), size.batch * (label == 1), None, size.batch * (label == 1)]
    for place, correct in enumerate(wanted):
        if correct is not None:
            assert int(ours["correct"][place]) == correct
    assert torch.equal(ours["correct"], theirs["correct"])
    for name in ("validation correct", "shared validation correct"):
        assert torch.equal(ours[name][3:5], theirs[name][3:5])
    assert torch.equal(ours["loss"].isnan(), theirs["loss"].isnan())


def coarse(trial: Trial, size: Size) -> None:
    """The same host everywhere, with floats so coarse that many values become equal only behind the
    norm.
    """
    for rows in (trial.host, trial.host_momentum, trial.statistics, trial.first, trial.labels):
        rows.copy_(rows[:1].expand_as(rows).clone())
    for row in trial.host:
        host_parts(size, row)[2].add_(3e4)
        host_parts(size, row)[1][0] *= -1  # and there a channel's order may turn round
    trial.seed[:, size.gate_at :] = 0.0
    trial.seed[:, -1] = 100.0  # a gate of exactly 1


class Seeds(NamedTuple):
    """What seeds all networks of a trial have."""

    kind: str  # "" for none
    flags: int = 0
    alpha: float = 0.0


def stepped(size: Size, given: Trial, seeds: Seeds) -> tuple[Trial, Tensor]:
    """Weights after one step with these seeds, and its loss."""
    trial = Trial(*(part.clone() for part in given))
    nets = proof.networks(size, trial, np.full((len(proof.KINDS), 1), seeds.flags, dtype=np.int64))
    _, _, held, alpha, *_ = nets.held
    assert isinstance(held, records.Seeds)
    assert isinstance(alpha, Tensor)
    held.kind[:] = held.kind[proof.KINDS.index(seeds.kind)].copy() if seeds.kind else 0
    alpha.fill_(seeds.alpha)
    loss, _ = proof.train_(
        size, trial, nets, images.crops_of(trial.lines, trial.first, trial.values)
    )
    return trial, loss


@pytest.mark.parametrize("channels", [(8, 8), (24, 16), (5, 8)])
@pytest.mark.parametrize(
    "seeds",
    [
        *(
            Seeds(kind, flags)
            for kind in proof.KINDS
            for flags in (0, records.THROUGH | records.DETACHED)
        ),
        Seeds("conv_light", records.MULTIPLIED),
        Seeds("conv_light", records.GATED),
    ],
)
def test_a_pool_within_the_block_one_within_a_seed_and_one_behind_it_are_the_same_to_the_bit(
    channels: tuple[int, int], seeds: Seeds
) -> None:
    # which of them is used depends on a seed that has no part in the host
    size = Size(channels, groups=1, side=16)
    given = changed(size, coarse)
    alone, loss = stepped(size, given, Seeds(""))
    beside, other = stepped(size, given, seeds)
    assert torch.equal(other, loss)
    for name in ("host", "host_momentum", "statistics"):
        assert torch.equal(beside._asdict()[name], alone._asdict()[name]), name
    assert torch.equal(alone.seed, given.seed)


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_a_pool_within_the_seed_and_one_behind_its_join_are_the_same_to_the_bit(
    alpha: float,
) -> None:
    size = Size((16, 8), side=16)
    given = changed(size, coarse)
    within, loss = stepped(size, given, Seeds("conv_light", 0, alpha))
    behind, other = stepped(size, given, Seeds("conv_light", records.GATED, alpha))
    assert torch.equal(loss, other)
    for name in ("host", "statistics"):
        torch.testing.assert_close(
            within._asdict()[name], behind._asdict()[name], rtol=1e-5, atol=1e-6
        )


def test_two_threads_at_once_get_the_bits_of_one() -> None:
    size = Size((8, 16), side=16, batch=8)
    given = proof.draw(size, 6)
    first = proof.native_results(size, given)
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda _: proof.native_results(size, given), range(16)):
            assert all(torch.equal(values, first[name]) for name, values in result.items())


def test_rows_that_the_kernels_do_not_know_are_not_taken() -> None:
    assert takes(torch.zeros(2, 3))
    assert not takes(torch.zeros(2, 3, dtype=torch.float64))
    assert not takes(torch.zeros(2, 3, device="meta"))
    assert not takes(torch.zeros(6))


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_only_a_cpu_has_native_kernels(device: str) -> None:
    assert not choose_native("auto", torch.device(device)).native
    with pytest.raises(SettingError, match="float32 on a CPU"):
        choose_native("native", torch.device(device))


@pytest.mark.parametrize("augment", [False, True])
def test_batches_of_images_are_those_of_torch_to_the_bit(augment: bool) -> None:
    g = torch.Generator().manual_seed(5)
    bytes_ = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8, generator=g)
    noise = ImageSet(
        "noise",
        bytes_,
        torch.arange(9),
        bytes_[:4],
        torch.arange(4),
        (0.4, 0.5, 0.6),
        (0.2, 0.3, 0.4),
        "",
        "",
    )
    indices = torch.randint(9, (3, 20), generator=g)
    keys = torch.tensor([1, 2, 3])
    crops = (
        data.training_crops(data.training_bank(noise), indices, keys, 7, augment),
        data.evaluation_crops(data.evaluation_bank(noise), torch.tensor([[3, -1], [0, 2]])),
    )
    ours, theirs = (
        [part for one in crops for part in data.cut_batch(one, torch.float32, cut)]
        for cut in (images.cut_images, data.cut_images)
    )
    assert all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(ours, theirs, strict=True)
    )
