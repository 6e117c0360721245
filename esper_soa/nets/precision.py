"""Number formats of host training: 16 bits inside the networks, a loss scale per env for float16.
Weights, running statistics, momentum, losses and gradients stay in float32 or wider.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

INITIAL_SCALE = 65536.0
SCALE_GROWTH = 2.0
SCALE_BACKOFF = 0.5
GROWTH_INTERVAL = 2000  # updates in a row without overflow after which a scale grows
SMALLEST_SCALE = 2.0**-14
LARGEST_SCALE = 2.0**24
SCALE_KEY = "loss_scale"  # of the weights: float32 [N]
GOOD_KEY = "good_updates"  # of the weights: int64 [N], in a row


class Precision(NamedTuple):
    """Number format of the networks, with the reason."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_precision(setting: str, device: torch.device) -> Precision:
    """The format that compute.precision (auto, float32, bfloat16, float16) names on `device`.

    Auto takes bfloat16 on a GPU that has it, else float16 there. A CPU stays with float32: for
    hosts of few channels the C kernels and grouped convolutions in float32 beat bfloat16 through
    autocast, which was measured.
    """
    if setting != "auto":
        return Precision(getattr(torch, setting), "as compute.precision asks")
    if device.type != "cuda":
        return Precision(torch.float32, f"fastest on {device.type} for networks of few channels")
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return Precision(torch.bfloat16, "the GPU computes in it natively")
    return Precision(torch.float16, "the GPU has no bfloat16; each env has a loss scale of its own")


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Where networks run: in `dtype` if that has 16 bits, else as their weights are."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    autocast_dtype = dtype if is_half else torch.bfloat16
    return torch.autocast(device.type, autocast_dtype, enabled=is_half, cache_enabled=False)


def as_input(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Inputs in the format that the networks compute in; whole numbers stay what they are."""
    short = dtype in (torch.bfloat16, torch.float16) and inputs.is_floating_point()
    return inputs.to(dtype) if short else inputs


def add_loss_scales_(weights: TensorDict) -> None:
    """Give every env of `weights` a loss scale; `reset_loss_scales_` sets it."""
    like = weights["host", "params"]
    weights[SCALE_KEY] = torch.zeros(like.shape[0], dtype=torch.float32, device=like.device)
    weights[GOOD_KEY] = torch.zeros(like.shape[0], dtype=torch.int64, device=like.device)


def reset_loss_scales_(weights: TensorDict) -> None:
    """Fresh hosts start at INITIAL_SCALE; without loss scales nothing happens."""
    if SCALE_KEY in weights:
        weights[SCALE_KEY].fill_(INITIAL_SCALE)
        weights[GOOD_KEY].zero_()


class LossScales:
    """Loss scales of the n envs of a chunk while they train: copies, returned by `write_back_`. As
    in torch.amp.GradScaler, per env, an update whose gradient is not finite is skipped and halves
    the scale; GROWTH_INTERVAL good updates in a row double it.
    """

    def __init__(self, weights: TensorDict, envs: Tensor) -> None:
        """envs: int64 [n], their numbers."""
        self._weights = weights
        self.scale = weights[SCALE_KEY].index_select(0, envs)
        self.good = weights[GOOD_KEY].index_select(0, envs)

    def unscaled(self, grad: Tensor, nets: Tensor | None) -> Tensor:
        """Gradients [m, P] of losses of `nets` (positions in the chunk; None = all), unscaled."""
        return grad / of_nets(self.scale, nets)[:, None]

    def update_(self, finite: Tensor) -> None:
        """Move the scales; finite: bool [n], whether each env's gradient was."""
        self.good.copy_(torch.where(finite, self.good + 1, 0))
        grown = self.good >= GROWTH_INTERVAL
        factor = torch.where(finite, torch.where(grown, SCALE_GROWTH, 1.0), SCALE_BACKOFF)
        self.scale.mul_(factor).clamp_(SMALLEST_SCALE, LARGEST_SCALE)
        self.good.masked_fill_(grown, 0)

    def write_back_(self, envs: Tensor) -> None:
        self._weights[SCALE_KEY].index_copy_(0, envs, self.scale)
        self._weights[GOOD_KEY].index_copy_(0, envs, self.good)


def of_nets(values: Tensor, nets: Tensor | None) -> Tensor:
    """Rows [m, ...] of the networks `nets` (None = all) out of values [n, ...]."""
    return values if nets is None else values.index_select(0, nets)


def all_finite(grads: Sequence[Tensor], places: Sequence[Tensor | None]) -> Tensor:
    """bool [n]: all gradients [m, P] of a network are finite; places: int64 [m], None: all."""
    broken = ~grads[0].isfinite().all(1)
    for grad, nets in zip(grads[1:], places[1:], strict=True):
        wrong = ~grad.isfinite().all(1)
        if nets is not None:
            wrong = torch.zeros_like(broken).index_copy(0, nets, wrong)
        broken = broken | wrong
    return ~broken


def where_finite_(finite: Tensor, new: Tensor, old: Tensor) -> None:
    """Put rows of `old` back into `new` where not `finite` [n]; both [n, ...] or flat [n*C]."""
    rows = new.view(finite.shape[0], -1)
    rows.copy_(torch.where(finite[:, None], rows, old.view_as(rows)))
