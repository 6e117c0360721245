"""The host's block as one native call each way: tensors in, a sheet filled, block.c called, tensors out.

Called by layers.py; the plain torch of nets/layers.py is what it must equal.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets.engines.cpu.library import Sheet
from esper_soa.nets.engines.cpu.sheet import call, new_activations, new_sheet, pixels_last, whole_vectors


class Statistics(NamedTuple):
    """What moves while a batch norm trains; buffers, not part of the graph."""

    mean: Tensor
    variance: Tensor
    momentum: float
    eps: float


class Saved(NamedTuple):
    """What the backward pass needs, per network and in whole vectors of channels."""

    conv: Tensor  # [n, B, H, W, P]
    peak: Tensor | None  # [n, B, H/2, W/2, P]
    place: Tensor | None  # uint8, as peak
    mean: Tensor  # [n, P]
    rstd: Tensor


def _new_saved(x: Tensor, weight: Tensor, pooled: bool) -> Saved:
    nets, channels = weight.shape[:2]
    batch, _, height, width = x.shape
    padded = whole_vectors(channels)
    conv = x.new_empty(nets, batch, height, width, padded)
    small = (nets, batch, height // 2, width // 2, padded)
    peak = x.new_empty(small) if pooled else None
    place = x.new_empty(small, dtype=torch.uint8) if pooled else None
    return Saved(conv, peak, place, x.new_empty(nets, padded), x.new_empty(nets, padded))


def _enter(sheet: Sheet, saved: Saved) -> None:
    sheet.conv, sheet.mean, sheet.rstd = saved.conv.data_ptr(), saved.mean.data_ptr(), saved.rstd.data_ptr()
    if saved.peak is not None and saved.place is not None:
        sheet.peak, sheet.place = saved.peak.data_ptr(), saved.place.data_ptr()


class _TrainBlock(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, moving: Statistics, pooled: bool
    ) -> Tensor:
        x, weight, scale, shift = pixels_last(x), weight.contiguous(), scale.contiguous(), shift.contiguous()
        divisor = 2 if pooled else 1
        channels = weight.shape[0] * weight.shape[1]
        out = new_activations(x, channels, x.shape[2] // divisor, x.shape[3] // divisor)
        saved, sheet = _new_saved(x, weight, pooled), new_sheet(x, weight)
        _enter(sheet, saved)
        sheet.scale, sheet.shift, sheet.out = scale.data_ptr(), shift.data_ptr(), out.data_ptr()
        sheet.pooled, sheet.momentum, sheet.eps = pooled, moving.momentum, moving.eps
        sheet.running_mean, sheet.running_var = moving.mean.data_ptr(), moving.variance.data_ptr()
        call("block_train", sheet)
        ctx.save_for_backward(x, weight, scale, shift)
        ctx.saved, ctx.pooled = saved, pooled  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale, shift = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = pixels_last(gradient)
        sheet = new_sheet(x, weight)
        sheet.pooled = ctx.pooled  # type: ignore[attr-defined]
        _enter(sheet, ctx.saved)  # type: ignore[attr-defined]
        grad_x = new_activations(x, *x.shape[1:]) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        grads = [torch.empty_like(one) for one in (weight, scale, shift)]
        sheet.scale, sheet.shift, sheet.grad_out = scale.data_ptr(), shift.data_ptr(), gradient.data_ptr()
        sheet.grad_x = None if grad_x is None else grad_x.data_ptr()
        sheet.grad_weight, sheet.grad_scale, sheet.grad_shift = (grad.data_ptr() for grad in grads)
        call("block_backward", sheet)
        return grad_x, *grads, None, None


def train_block(x: Tensor, weight: Tensor, norm: tuple[Tensor, Tensor], moving: Statistics, pooled: bool) -> Tensor:
    """Convolution, training batch norm, ReLU and 2x2 max pool of x [B, n*I, H, W]; differentiable.

    weight [n, O, I, k, k], norm = scale and shift [n, O]; the statistics [n*O] of `moving` are moved in place.
    """
    return _TrainBlock.apply(x, weight, *norm, moving, pooled)


def infer_block(x: Tensor, weight: Tensor, bias: Tensor, pooled: bool) -> Tensor:
    """Convolution with bias [n, O], ReLU and 2x2 max pool of x [B, n*I or I, H, W]; not differentiable."""
    x, weight, bias = pixels_last(x), weight.contiguous(), bias.contiguous()
    divisor = 2 if pooled else 1
    out = new_activations(x, weight.shape[0] * weight.shape[1], x.shape[2] // divisor, x.shape[3] // divisor)
    sheet = new_sheet(x, weight)
    sheet.pooled, sheet.shift, sheet.out = pooled, bias.data_ptr(), out.data_ptr()
    call("block_infer", sheet)
    return out
