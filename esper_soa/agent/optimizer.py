"""Adam over one flat vector of parameters, whose step can be refused by a flag on the device.

A flat vector makes the step a handful of kernels, one all-reduce and three tensors in a checkpoint;
with the flag the host need not wait for the loss.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.999)


class AdamState(NamedTuple):
    """Moments of the gradient."""

    steps: Tensor  # float64 [], steps taken
    first: Tensor  # float32 [P]
    second: Tensor  # float32 [P]


def adam_state(parameters: Tensor) -> AdamState:
    """No step taken yet, for flat parameters [P]."""
    steps = torch.zeros((), dtype=torch.float64, device=parameters.device)
    return AdamState(steps, torch.zeros_like(parameters), torch.zeros_like(parameters))


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """One vector [P] of all of them, in order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def write_parameters_(parameters: list[nn.Parameter], flat: Tensor) -> None:
    """Copy flat [P] into the parameters, in order."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.copy_(piece.view_as(parameter))


def adam_step(
    parameters: Tensor, gradient: Tensor, state: AdamState, lr: float, eps: float, do_step: Tensor
) -> tuple[Tensor, AdamState]:
    """Parameters [P] and state after one step of Adam (Kingma and Ba 2015), where do_step, bool [],
    is False unchanged, and the gradient may hold anything, NaN included.
    """
    steps = state.steps + 1
    first = torch.lerp(state.first, gradient, 1 - BETAS[0])
    second = BETAS[1] * state.second + (1 - BETAS[1]) * gradient.square()
    deviation = (second / (1 - BETAS[1] ** steps)).sqrt() + eps
    moved = parameters - lr * (first / (1 - BETAS[0] ** steps)) / deviation
    both = zip((steps, first, second), state, strict=True)
    updated = AdamState(*(torch.where(do_step, new, old) for new, old in both))
    return torch.where(do_step, moved, parameters), updated
