"""Layers of n networks by the native kernels, one call each; where they have none for a tensor, plain torch.

For hosts that engine.py does not take: held by the engine in torch instead of plain layers. Made for float32 on a CPU.
"""

import torch
from torch import Tensor

from esper_soa.nets import batched
from esper_soa.nets.engines.cpu import block, head, pool, seed, sgd
from esper_soa.nets.engines.cpu.library import LANES
from esper_soa.nets.layers import GroupNorm, Layers
from esper_soa.nets.sgd import Rule


def takes(x: Tensor, dims: int = 4) -> bool:
    """True where the kernels are made for x, which they want with `dims` dimensions."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.dim() == dims


def _convolves(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels take a convolution of x with weight [n, O, ...].

    They work on whole vectors of channels: narrower layers are quicker in torch as soon as they are differentiated.
    """
    return takes(x) and (weight.shape[1] >= LANES or not torch.is_grad_enabled())


def _even(x: Tensor, pooled: bool) -> bool:
    return not pooled or (x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0)


class NativeLayers(Layers):
    """Those of Layers that have a kernel; see there for what they do."""

    def train_block(
        self, x: Tensor, weight: Tensor, norm: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor], pooled: bool
    ) -> Tensor:
        """One call each way."""
        if not (_convolves(x, weight) and _even(x, pooled)):
            return super().train_block(x, weight, norm, running, pooled)
        moving = block.Statistics(*running, batched.BATCH_NORM_MOMENTUM, batched.NORM_EPS)
        return block.train_block(x, weight, norm, moving, pooled)

    def infer_block(self, x: Tensor, weight: Tensor, bias: Tensor, pooled: bool) -> Tensor:
        """One call."""
        if not (_convolves(x, weight) and _even(x, pooled)):
            return super().infer_block(x, weight, bias, pooled)
        return block.infer_block(x, weight, bias, pooled)

    def seed_layer(self, x: Tensor, weight: Tensor, norm: GroupNorm, residual: Tensor | None = None) -> Tensor:
        """One call each way."""
        if not _convolves(x, weight):
            return super().seed_layer(x, weight, norm, residual)
        return seed.seed_layer(x, weight, norm, seed.Joined(residual))

    def added_layer(
        self, x: Tensor, weight: Tensor, norm: GroupNorm, alpha: Tensor, detached: bool, pooled: bool = False
    ) -> Tensor:
        """One call each way, the pool within it where height and width are even."""
        if not _convolves(x, weight):
            return super().added_layer(x, weight, norm, alpha, detached, pooled)
        within = pooled and _even(x, pooled)
        out = seed.seed_layer(x, weight, norm, seed.Joined(x, alpha, detached, within))
        return self.max_pool(out) if pooled and not within else out

    def max_pool(self, x: Tensor) -> Tensor:
        """One call each way."""
        return pool.pool(x) if takes(x) and pool.fits(x) else super().max_pool(x)

    def classifier_loss(self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """One call each way."""
        return head.head_loss(x, weight, bias, labels) if takes(x) else super().classifier_loss(x, weight, bias, labels)

    def sgd_(self, params: Tensor, momentum: Tensor, grad: Tensor, rule: Rule) -> None:
        """One call; reads a rate that is a tensor."""
        if takes(params, dims=2):
            sgd.sgd_(params, momentum, grad, rule)
        else:
            super().sgd_(params, momentum, grad, rule)
