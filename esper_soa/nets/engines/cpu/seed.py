"""A seed's layer as one native call each way: convolution, group norm, ReLU, and its way into a residual.

Called by layers.py; the plain torch of nets/layers.py is what it must equal.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets.engines.cpu.library import Sheet
from esper_soa.nets.engines.cpu.sheet import call, new_activations, new_sheet, pixels_last, whole_vectors
from esper_soa.nets.layers import GroupNorm


class Joined(NamedTuple):
    """What the layer is added to: residual + alpha * layer(x)."""

    residual: Tensor | None = None  # [B, n*O, H, W]
    alpha: Tensor | None = None  # [n]; None for 1
    detached: bool = False  # the residual is x, and the layer sees it cut off from the graph, as does x in alpha * x
    pooled: bool = False  # a 2x2 max pool follows; height and width are even


class Saved(NamedTuple):
    """What the backward pass needs, per network and in whole vectors of channels."""

    conv: Tensor  # [n, B, H, W, P]
    mean: Tensor  # [n, B, P]
    rstd: Tensor
    place: Tensor | None  # uint8 [n, B, H/2, W/2, P], behind a pool only


def _new_saved(x: Tensor, weight: Tensor, pooled: bool) -> Saved:
    nets, padded = weight.shape[0], whole_vectors(weight.shape[1])
    batch, _, height, width = x.shape
    small = (nets, batch, height // 2, width // 2, padded)
    place = x.new_empty(small, dtype=torch.uint8) if pooled else None
    mean, rstd = (x.new_empty(nets, batch, padded) for _ in range(2))
    return Saved(x.new_empty(nets, batch, height, width, padded), mean, rstd, place)


def _sheet(x: Tensor, weight: Tensor, norm: GroupNorm, joined: Joined, saved: Saved | None) -> Sheet:
    sheet = new_sheet(x, weight)
    sheet.groups, sheet.linear, sheet.eps = norm.groups, not norm.relu, norm.eps
    sheet.scale, sheet.shift = norm.scale.data_ptr(), norm.shift.data_ptr()
    sheet.alpha = None if joined.alpha is None else joined.alpha.data_ptr()
    sheet.detached, sheet.pooled = joined.detached, joined.pooled
    if saved is not None:
        sheet.conv, sheet.mean, sheet.rstd = saved.conv.data_ptr(), saved.mean.data_ptr(), saved.rstd.data_ptr()
        sheet.place = None if saved.place is None else saved.place.data_ptr()
    return sheet


def _forward(x: Tensor, weight: Tensor, norm: GroupNorm, joined: Joined, saved: Saved | None) -> Tensor:
    """Output [B, n*O, H or H/2, W or W/2]; everything contiguous; fills `saved` where given."""
    divisor = 2 if joined.pooled else 1
    out = new_activations(x, weight.shape[0] * weight.shape[1], x.shape[2] // divisor, x.shape[3] // divisor)
    sheet = _sheet(x, weight, norm, joined, saved)
    sheet.out = out.data_ptr()
    sheet.residual = None if joined.residual is None else joined.residual.data_ptr()
    call("seed_forward", sheet)
    return out


class _SeedLayer(torch.autograd.Function):
    """joined.residual is x or None here; a residual from elsewhere is added by the caller's graph."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, norm: GroupNorm, joined: Joined
    ) -> Tensor:
        saved = _new_saved(x, weight, joined.pooled)
        out = _forward(x, weight, norm._replace(scale=scale, shift=shift), joined, saved)
        ctx.save_for_backward(x, weight, scale, shift)
        own = joined.residual is not None
        norm = norm._replace(scale=scale.detach(), shift=shift.detach())
        ctx.held = (saved, norm, own, joined._replace(residual=None))  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale, shift = ctx.saved_tensors  # type: ignore[attr-defined]
        saved, norm, own, joined = ctx.held  # type: ignore[attr-defined]
        gradient = pixels_last(gradient)
        sheet = _sheet(x, weight, norm, joined, saved)
        sheet.own_residual = own
        grad_x = new_activations(x, *x.shape[1:]) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        grads = [torch.empty_like(one) for one in (weight, scale, shift)]
        sheet.grad_out = gradient.data_ptr()
        sheet.grad_x = None if grad_x is None else grad_x.data_ptr()
        sheet.grad_weight, sheet.grad_scale, sheet.grad_shift = (grad.data_ptr() for grad in grads)
        call("seed_backward", sheet)
        return grad_x, *grads, None, None


def seed_layer(x: Tensor, weight: Tensor, norm: GroupNorm, joined: Joined) -> Tensor:
    """Convolution, group norm and ReLU of x [B, n*I, H, W], joined to a residual [B, n*O, H, W]; differentiable."""
    own = joined.residual is x
    x, weight = pixels_last(x), weight.contiguous()
    norm = norm._replace(scale=norm.scale.contiguous(), shift=norm.shift.contiguous())
    alpha = None if joined.alpha is None else joined.alpha.contiguous()
    joined = joined._replace(residual=x if own else joined.residual, alpha=alpha)
    if not torch.is_grad_enabled():
        added = None if joined.residual is None else pixels_last(joined.residual)
        return _forward(x, weight, norm, joined._replace(residual=added), None)
    inside = joined if own else Joined()
    out = _SeedLayer.apply(x, weight, norm.scale, norm.shift, norm, inside)
    return out if own or joined.residual is None else joined.residual + out
