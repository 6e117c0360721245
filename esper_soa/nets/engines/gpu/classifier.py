"""What the kernels of the classifier are told."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper_soa.nets.engines.gpu.kernels.head import Answers, Head
from esper_soa.nets.engines.gpu.kernels.tiles import padded, rows
from esper_soa.nets.host import HostShape


def head_of(
    shape: HostShape, params: Tensor, labels: Tensor, counter: Tensor, features: Tensor
) -> Head:
    """params [n, P]; labels int64 [n or 1, images]; counter int32 [1]; features [., B, area, C]."""
    batch, area, channels = features.shape[1:]
    at = shape.parameters.total - shape.num_classes * (channels + 1)
    middle = at + shape.num_classes * channels
    sizes = (
        area,
        channels,
        shape.num_classes,
        padded(channels),
        padded(shape.num_classes),
        min(256, triton.next_power_of_2(area)),
    )
    return Head(
        rows(params[:, at:middle]),
        rows(params[:, middle:]),
        labels,
        labels.shape[1] if labels.shape[0] > 1 else 0,
        counter,
        batch,
        *(tl.constexpr(size) for size in sizes),
    )


def answers_of(shape: HostShape, num_nets: int, batch: int, like: Tensor) -> Answers:
    """Room for what B = `batch` images of each of `num_nets` networks give."""
    size = (num_nets, batch)
    wide = like.new_empty(0, dtype=torch.float32)
    return Answers(
        wide.new_empty(*size, padded(shape.classifier_inputs)),
        wide.new_empty(*size, padded(shape.num_classes)),
        wide.new_empty(size),
        torch.empty(size, dtype=torch.int32, device=like.device),
    )
