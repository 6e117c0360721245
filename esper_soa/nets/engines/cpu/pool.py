"""The 2x2 max pool on its own, one native call each way; called by layers.py where a seed stands before it."""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets.engines.cpu.library import LANES, Sheet
from esper_soa.nets.engines.cpu.sheet import call, new_activations, pixels_last


def fits(x: Tensor) -> bool:
    """Even height and width, channels in whole vectors."""
    return x.shape[1] % LANES == 0 and x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0


def _sheet(x: Tensor) -> Sheet:
    return Sheet(batch=x.shape[0], out_channels=x.shape[1], height=x.shape[2], width=x.shape[3])


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:  # type: ignore[override]
        out, place = _pool(x, keep=True)
        ctx.held = (place, x.shape)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        place, shape = ctx.held  # type: ignore[attr-defined]
        gradient = pixels_last(gradient)
        grad_x = new_activations(gradient, *shape[1:])
        sheet = _sheet(grad_x)
        sheet.place, sheet.grad_out, sheet.grad_x = place.data_ptr(), gradient.data_ptr(), grad_x.data_ptr()
        call("pool_backward", sheet)
        return grad_x


def _pool(x: Tensor, keep: bool) -> tuple[Tensor, Tensor | None]:
    x = pixels_last(x)
    out = new_activations(x, x.shape[1], x.shape[2] // 2, x.shape[3] // 2)
    place = torch.empty(out.shape, dtype=torch.uint8) if keep else None
    sheet = _sheet(x)
    sheet.x, sheet.out, sheet.place = x.data_ptr(), out.data_ptr(), None if place is None else place.data_ptr()
    call("pool_forward", sheet)
    return out, place


def pool(x: Tensor) -> Tensor:
    """2x2 max pool of x [B, C, H, W] that `fits`; differentiable."""
    return _Pool.apply(x) if torch.is_grad_enabled() and x.requires_grad else _pool(x, keep=False)[0]
