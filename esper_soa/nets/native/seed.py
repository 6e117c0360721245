"""A seed's layer as one native call each way: convolution, group norm, ReLU, residual.

Called by nets/batched.py where `switch.takes` says so; the plain torch functions there are what it must equal.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets.native.library import Sheet
from esper_soa.nets.native.sheet import call, new_activations, new_sheet, pixels_last, whole_vectors


class GroupNorm(NamedTuple):
    """Group norm of n networks and what follows it."""

    scale: Tensor  # [n, O]
    shift: Tensor
    groups: int  # of a network
    relu: bool = True
    eps: float = 1e-5


def _forward(x: Tensor, weight: Tensor, norm: GroupNorm, residual: Tensor | None, saved: list[Tensor]) -> Tensor:
    """Output [B, n*O, H, W]; everything contiguous; fills `saved` (conv, mean, rstd) where given."""
    out = new_activations(x, weight.shape[0] * weight.shape[1], *x.shape[2:])
    sheet = new_sheet(x, weight)
    sheet.groups, sheet.linear, sheet.eps = norm.groups, not norm.relu, norm.eps
    sheet.scale, sheet.shift, sheet.out = norm.scale.data_ptr(), norm.shift.data_ptr(), out.data_ptr()
    sheet.residual = None if residual is None else residual.data_ptr()
    if saved:
        _enter(sheet, saved)
    call("seed_forward", sheet)
    return out


def _enter(sheet: Sheet, saved: list[Tensor]) -> None:
    sheet.conv, sheet.mean, sheet.rstd = (one.data_ptr() for one in saved)


class _SeedLayer(torch.autograd.Function):
    """x + layer(x) where `own`; a residual from elsewhere is added by the caller's graph."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, norm: GroupNorm, own: bool
    ) -> Tensor:
        nets, channels = weight.shape[:2]
        padded = whole_vectors(channels)
        conv = x.new_empty(nets, x.shape[0], *x.shape[2:], padded)
        saved = [conv, *(x.new_empty(nets, x.shape[0], padded) for _ in range(2))]
        norm = norm._replace(scale=scale, shift=shift)
        out = _forward(x, weight, norm, x if own else None, saved)
        ctx.save_for_backward(x, weight, scale, shift)
        ctx.saved, ctx.own = saved, own  # type: ignore[attr-defined]
        ctx.settings = (norm.groups, not norm.relu, norm.eps)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale, shift = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = pixels_last(gradient)
        sheet = new_sheet(x, weight)
        _enter(sheet, ctx.saved)  # type: ignore[attr-defined]
        sheet.groups, sheet.linear, sheet.eps = ctx.settings  # type: ignore[attr-defined]
        sheet.own_residual = ctx.own  # type: ignore[attr-defined]
        grad_x = new_activations(x, *x.shape[1:]) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        grads = [torch.empty_like(one) for one in (weight, scale, shift)]
        sheet.scale, sheet.shift, sheet.grad_out = scale.data_ptr(), shift.data_ptr(), gradient.data_ptr()
        sheet.grad_x = None if grad_x is None else grad_x.data_ptr()
        sheet.grad_weight, sheet.grad_scale, sheet.grad_shift = (grad.data_ptr() for grad in grads)
        call("seed_backward", sheet)
        return grad_x, *grads, None, None


def seed_layer(x: Tensor, weight: Tensor, norm: GroupNorm, residual: Tensor | None) -> Tensor:
    """Convolution, group norm and ReLU of x [B, n*I, H, W], plus residual [B, n*O, H, W]; differentiable."""
    own = residual is x
    x, weight = pixels_last(x), weight.contiguous()
    norm = norm._replace(scale=norm.scale.contiguous(), shift=norm.shift.contiguous())
    if not torch.is_grad_enabled():
        added = residual if residual is None or own else pixels_last(residual)
        return _forward(x, weight, norm, x if own else added, [])
    out = _SeedLayer.apply(x, weight, norm.scale, norm.shift, norm, own)
    return out if own or residual is None else residual + out
