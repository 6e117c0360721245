"""How crops are distributed: uniform and independent of each other."""

import torch
from torch import Tensor

from esper_soa.nets.data.datasets import ImageSet
from esper_soa.nets.data.images import cut_batch, training_crops
from esper_soa.nets.data.streams import AUGMENTATION, stream_keys

NUM_IMAGES = 12


def maps() -> ImageSet:
    """Images that tell places: red is the line and green the column, both from 1; blue is the
    image; black is 0.
    """
    lines = torch.arange(1, 33, dtype=torch.uint8)
    image = torch.stack((lines[:, None].expand(32, 32), lines.expand(32, 32)), dim=-1)
    numbers = (
        torch.arange(NUM_IMAGES, dtype=torch.uint8)[:, None, None, None].expand(-1, 32, 32, 1) + 1
    )
    train = torch.cat((image.expand(NUM_IMAGES, -1, -1, -1), numbers), dim=-1).contiguous()
    labels = torch.arange(NUM_IMAGES) % 10
    parts = (train, labels, *(train[:8], labels[:8]) * 2)
    return ImageSet("maps", *parts, (0.0,) * 3, (1 / 255,) * 3, "", "")


def crops(pixels: Tensor) -> Tensor:
    """int64 [B, n, 4]: top, left (0 to 8, of the padded image), mirrored, image; of batches [B,
    n*3, 32, 32].
    """
    line, column, image = pixels.unflatten(1, (-1, 3))[..., 16, 15:17].round().long().unbind(2)
    mirrored = column[..., 1] < column[..., 0]
    column = torch.where(mirrored, 33 - column[..., 0], column[..., 0])  # of the mirrored image
    # Line 16 of a crop is line 16 + top - 4 of the image, counted from 1; at most 4 lines are
    # black, so it is none.
    return torch.stack(
        (line[..., 0] - 17 + 4, column - 16 + 4, mirrored.long(), image[..., 0] - 1), dim=-1
    )


def test_places_are_uniform_in_every_env_and_independent_of_each_other() -> None:
    bank = maps().banks[0]
    count = 8100
    keys = stream_keys(5, AUGMENTATION, (0,), torch.arange(2))
    pixels = cut_batch(
        training_crops(bank, torch.zeros(2, count, dtype=torch.int64), keys, 0, True)
    )[0]
    top, left, mirrored, _ = crops(pixels).unbind(2)
    for env in range(2):
        for places in (top[:, env], left[:, env]):
            counts = places.bincount(minlength=9)
            assert counts.shape == (9,)
            assert float(((counts - 900.0) ** 2 / 900).sum()) < 26.1  # chi-square(8), 99.9 %
        # standard deviation 0.0056
        assert abs(float(mirrored[:, env].double().mean()) - 0.5) < 0.02
    # of both envs
    series = torch.stack((top, left, mirrored)).double().permute(0, 2, 1).flatten(0, 1)
    later = series[:, 1:]
    together = torch.corrcoef(torch.cat((series[:, :-1], later)))
    assert float((together - torch.eye(12)).abs().max()) < 0.06  # standard deviation 0.011
