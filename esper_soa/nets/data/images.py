"""Batches of images: crops cut from a bank of bytes that is resident on the device, for many envs
at once, without a loop over them or a copy to the host.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.nets.data.batches import Draw, SampleSpec, TrainingFeed, ValidationFeed
from esper_soa.system.streams import integers
from esper_soa.system.transfers import move

CROP_PADDING = 4  # black pixels around a training image, before normalisation
NUM_SHIFTS = 2 * CROP_PADDING + 1  # places of a crop along one side
NUM_CROPS = 2 * NUM_SHIFTS**2  # crops of an image, mirrored or not
CROPS = "crops"  # engines cut batches from an ImageBank; see `crops_of`


def image_spec(size: int, channels: int) -> SampleSpec:
    """The kind of samples that images of size x size pixels are, which are stored as they are and
    as they are cut from: in training padded, and all mirrored too.
    """
    image_bytes = channels * size**2
    padded_bytes = channels * (size + 2 * CROP_PADDING) ** 2
    return SampleSpec(
        "images",
        (channels, size, size),
        train_bytes=image_bytes + 2 * padded_bytes,
        test_bytes=2 * image_bytes,
        cuts=frozenset({CROPS}),
    )


IMAGES = image_spec(IMAGE_SIZE, IMAGE_CHANNELS)


class ImageCrops(NamedTuple):
    """Images that are still to be cut from a bank."""

    bank: "ImageBank"
    first: Tensor  # int64 [n, B], bytes of the bank at which they begin; n = 1 where all share them
    labels: Tensor  # int64 [n, B]; -1 does not count


def crops_of(feed: TrainingFeed | ValidationFeed) -> Callable[..., ImageCrops]:
    """The method `crops` of a feed, by which engines get images uncut."""
    return cast(Callable[..., ImageCrops], getattr(feed, CROPS))


class ImageBank(NamedTuple):
    """Images as batches are cut from them: each line has its red, then green, then blue values, or
    its grey ones.
    """

    lines: Tensor  # uint8 [M, H, C, W]
    labels: Tensor  # int64 [D]
    # Numbers of a data set; of several that envs take in turn those of each, [sets, ...].
    scale: Tensor  # float32 [C], normalised = byte * scale + offset
    offset: Tensor  # float32 [C]
    values: Tensor  # float32 [C, 256], every byte normalised
    first_env: int = 0  # number of the first of the envs that batches are for
    size: int = IMAGE_SIZE  # S, pixels a side of an image that is cut

    def of(self, envs: Tensor) -> "ImageBank":
        """The same with the numbers that normalise images of each of `envs` [n], if they differ."""
        if self.scale.dim() == 1:
            return self
        entry = (envs + self.first_env) % len(self.scale)
        scaling = {name: getattr(self, name)[entry] for name in ("scale", "offset", "values")}
        return self._replace(**scaling, first_env=0)


Statistics = tuple[float, ...]  # red, green, blue, or grey
Means = Statistics | Sequence[Statistics]  # of one data set, or of each


def padded_lines(images: Tensor) -> Tensor:
    """Lines [2 D, S + 8, C, S + 8] of images uint8 [D, S, S, C]: all padded, then all mirrored."""
    padded = F.pad(
        images.permute(0, 1, 3, 2), (CROP_PADDING, CROP_PADDING, 0, 0, CROP_PADDING, CROP_PADDING)
    )
    return torch.cat((padded, padded.flip(3)))


def normalisation(mean: Means, std: Means, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, offset [., 3] that make (value in [0, 1] - mean) / std of bytes, and that of each."""
    means = torch.tensor(mean, dtype=torch.float64)
    stds = torch.tensor(std, dtype=torch.float64)
    scale, offset = move([(1 / (255 * stds)).float(), (-means / stds).float()], device)
    levels = torch.arange(256.0, device=device)
    return scale, offset, levels.mul(scale[..., None]).add(offset[..., None])


def cut_batch(crops: ImageCrops, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Normalised images [B, n*C, S, S] (channels_last; env, then colour), labels int64 [B, n]."""
    bank = crops.bank
    first = crops.first.T
    batch_size, num_envs = first.shape
    _, line, colour, _ = bank.lines.stride()
    size = bank.size
    lines = torch.arange(0, size * line, line, device=first.device)[:, None, None]
    colours = torch.arange(0, bank.lines.shape[2] * colour, colour, device=first.device)
    starts = first[:, None, :, None] + lines + colours
    every_start = bank.lines.as_strided((bank.lines.numel() - size + 1, size), (1, 1))
    cut = every_start.index_select(0, starts.flatten())
    channels = num_envs * bank.lines.shape[2]
    by_pixel = cut.view(batch_size, size, channels, size).transpose(2, 3).contiguous()
    exact = torch.promote_types(dtype, torch.float32)
    scale, offset = (
        numbers.to(exact).expand(num_envs, -1).flatten().repeat(size)
        for numbers in (bank.scale, bank.offset)
    )
    normalised = by_pixel.to(exact).flatten(2).mul_(scale).add_(offset).to(dtype)
    images = normalised.view(batch_size, size, size, channels).permute(0, 3, 1, 2)
    return images, crops.labels.T


def training_crops(
    bank: ImageBank, indices: Tensor, keys: Tensor, start: int | Tensor, augment: bool
) -> ImageCrops:
    """Training images that are still to be cut.

    bank: of padded lines. indices: int64 [n, B], images per env. keys: int64 [n], stream_keys(seed,
    AUGMENTATION, (round,), envs). start: samples that each env has drawn before. augment: take a
    random one of the crops of the image with PADDING black pixels around it, mirrored in half of
    the cases; otherwise the image as it is.
    """
    if augment:
        samples = start + torch.arange(indices.shape[1], device=indices.device)
        crop = integers(keys[:, None], samples, NUM_CROPS)
    else:
        crop = torch.full_like(indices, NUM_CROPS // 2 // 2)
    left = crop % NUM_SHIFTS
    top = crop // NUM_SHIFTS % NUM_SHIFTS
    image = indices + crop // NUM_SHIFTS**2 * len(bank.labels)  # the mirrored stand behind all
    whole, line, *_ = bank.lines.stride()
    return ImageCrops(bank, image * whole + top * line + left, bank.labels[indices])


def evaluation_crops(bank: ImageBank, indices: Tensor) -> ImageCrops:
    """Images int64 [n, b] of each env that are still to be cut, as they are in the bank; -1 has the
    label -1, n = 1 where all envs share them.
    """
    valid = indices.clamp(min=0)
    labels = torch.where(indices < 0, -1, bank.labels[valid])
    return ImageCrops(bank, valid * bank.lines.stride(0), labels)


class TrainingImages(NamedTuple):
    """Training batches of one env-step."""

    bank: ImageBank  # of padded lines
    draw: Draw
    dtype: torch.dtype

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Images [B, n*C, S, S] (channels_last), labels [B, n] of batch `index` for envs [n]."""
        return cut_batch(self.crops(envs, index), self.dtype)

    def crops(self, envs: Tensor, index: int, count: int = 1) -> ImageCrops:
        """The images of `count` batches from `index` on, uncut [n, count * B]."""
        indices, keys, start = self.draw.batches(envs, index, count)
        cut = training_crops(
            self.bank.of(envs), indices, keys, start=start, augment=self.draw.augment
        )
        noise = self.draw.label_noise
        return cut if noise is None else cut._replace(labels=noise.of(envs, indices, cut.labels))


class ValidationImages(NamedTuple):
    """Validation batches: the same images for all envs, or others for each."""

    bank: ImageBank  # of images as they are
    order: Tensor  # int64 [V] shared, or [N, V] with -1 for nothing
    dtype: torch.dtype

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """Images [b, C or n*C, S, S] (channels_last), labels [b, 1 or n], at most `size` each."""
        crops = self.crops(envs)
        parts = zip(crops.first.split(size, dim=1), crops.labels.split(size, dim=1), strict=True)
        return [cut_batch(ImageCrops(crops.bank, *part), self.dtype) for part in parts]

    def crops(self, envs: Tensor) -> ImageCrops:
        """The images of all `batches`, uncut [1 or n, V]."""
        order = self.order[None] if self.order.ndim == 1 else self.order[envs]
        return evaluation_crops(self.bank.of(envs), order)

    def first(self, count: int) -> "ValidationImages":
        """A feed of the first `count` images only."""
        return self._replace(order=self.order[..., :count])
