"""Images of a pass for the kernel that cuts them."""

import torch
from torch import Tensor

from esper_soa.nets.config import IMAGE_SIZE
from esper_soa.nets.data import EnvStepBatches, ImageBank, ImageCrops
from esper_soa.nets.engine import TrainingFeed
from esper_soa.nets.engines.gpu.kernels.images import Crops, cut_kernel

TILE = 256  # pixels
EXACT = {"enable_fp_fusion": False}  # the numbers of torch's cutter, to the bit


def all_crops(feed: TrainingFeed, envs: Tensor, num_batches: int) -> ImageCrops:
    """The images of all batches of an env-step, uncut [n, T]."""
    if isinstance(
        feed, EnvStepBatches
    ):  # in one go, where the launches would be as many for every batch
        return feed._replace(batch_size=feed.batch_size * num_batches).crops(envs, 0)
    parts = [feed.crops(envs, index) for index in range(num_batches)]
    first, labels = (
        torch.cat(one, dim=1) for one in zip(*(part[1:] for part in parts), strict=True)
    )
    return ImageCrops(parts[0].bank, first, labels)


def crops_of(bank: ImageBank, first: Tensor) -> Crops:
    """What the kernel is told; first: int64 [n, images]."""
    _, line, colour, _ = bank.lines.stride()
    return Crops(bank.lines, first, first.shape[1], line, colour, bank.scale, bank.offset)


def cut_(crops: Crops, counter: Tensor, images: Tensor) -> None:
    """images [n, B, 1024, 4]: those of the batch that `counter` (int32 [1]) tells."""
    num_nets, batch = images.shape[:2]
    cut_kernel[num_nets, batch](crops, batch, counter, images, side=IMAGE_SIZE, tile=TILE, **EXACT)
