"""How a host takes on its seeds: add, multiply, gate, and the straight-through pass in training.

Host and seed activations are [B, m*C, ...]; alpha is one number per network.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets import batched


class _StraightThrough(torch.autograd.Function):
    """Hands the host's activations on; backward, their gradient goes to the seeds as well."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, host: Tensor, seed: Tensor, nets: Tensor | None, num_nets: int
    ) -> Tensor:  # type: ignore[override]
        ctx.place = (nets, num_nets)  # type: ignore[attr-defined]
        return host.view_as(host)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        return gradient, batched.select_nets(gradient, *ctx.place), None, None  # type: ignore[attr-defined]


def straight_through(host: Tensor, seed: Tensor, nets: Tensor | None, num_nets: int) -> Tensor:
    """host [B, n*C, ...] as it is, while seeds [B, m*C, ...] of `nets` get its whole gradient.

    This is h + (s - stop_gradient(s)) without reading seed values: the host cannot notice them.
    """
    return _StraightThrough.apply(host, seed, nets, num_nets)


def multiply(host: Tensor, seed: Tensor, seed_input: Tensor, alpha: Tensor) -> Tensor:
    """host (1 + alpha tanh(seed - seed_input)); alpha [m] in [0, 1]."""
    factor = batched.per_channel(alpha, host.shape[1] // alpha.shape[0], host.dim() - 2)
    return (host * (1 + factor * torch.tanh(seed - seed_input))).to(host.dtype)
