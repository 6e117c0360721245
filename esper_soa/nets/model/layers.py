"""The layers of n networks that may be computed in more than one way, as methods of an object that
an engine holds.

`Layers` is plain torch and the meaning of them; an engine with kernels of its own overrides what it
has them for. What is the same everywhere is in batched.py.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import batched, sgd


class GroupNorm(NamedTuple):
    """Group norm of n networks and what follows it."""

    scale: Tensor  # [n, O]
    shift: Tensor
    groups: int  # of a network
    relu: bool = True
    eps: float = batched.NORM_EPS


class Layers:
    """Plain torch; nothing in it changes, so that threads may share it."""

    def conv2d(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Same-padded convolution of x [B, n*I or I, H, W] with weight [n, O, I, k, k], bias [n,
        O]: [B, n*O, H, W].

        x may be [B, I, H, W], the same images for every network: then it is one dense convolution.
        """
        flat = None if bias is None else bias.reshape(-1)
        groups = x.shape[1] // weight.shape[2]
        return F.conv2d(x, weight.flatten(0, 1), flat, padding=weight.shape[-1] // 2, groups=groups)

    def train_block(
        self,
        x: Tensor,
        weight: Tensor,
        norm: tuple[Tensor, Tensor],
        running: tuple[Tensor, Tensor],
        pooled: bool,
    ) -> Tensor:
        """Convolution, batch norm, ReLU and 2x2 max pool, training; x [B, n*I, H, W] -> [B, n*O, H
        or H/2, W or W/2].

        norm = scale and shift [n, O]; running = mean and variance [n*O], moved in place.
        """
        x = batched.batch_norm(self.conv2d(x, weight), *norm, *running)
        return F.relu(F.max_pool2d(x, 2) if pooled else x, inplace=True)

    def infer_block(self, x: Tensor, weight: Tensor, bias: Tensor, pooled: bool) -> Tensor:
        """Convolution with bias, ReLU and pool; x [B, n*I, H, W], or [B, I, H, W] shared by all."""
        x = self.conv2d(x, weight, bias)
        return F.relu(F.max_pool2d(x, 2) if pooled else x, inplace=True)

    def seed_layer(
        self, x: Tensor, weight: Tensor, norm: GroupNorm, residual: Tensor | None = None
    ) -> Tensor:
        """Convolution, group norm and ReLU of x [B, n*I, H, W], plus residual [B, n*O, H, W]."""
        out = batched.group_norm(self.conv2d(x, weight), norm.groups, norm.scale, norm.shift)
        out = F.relu(out, inplace=True) if norm.relu else out
        return out if residual is None else residual + out

    def added_layer(
        self,
        x: Tensor,
        weight: Tensor,
        norm: GroupNorm,
        alpha: Tensor,
        detached: bool,
        pooled: bool = False,
    ) -> Tensor:
        """x [B, n*C, H, W] moved by alpha [n] towards x + layer(x), and behind it a 2x2 max pool
        where `pooled`.

        detached: the seed sees x cut off from the graph.
        """
        seen = x.detach() if detached else x
        out = batched.mixed(x, self.seed_layer(seen, weight, norm, seen), alpha)
        return self.max_pool(out) if pooled else out

    def max_pool(self, x: Tensor) -> Tensor:
        """2x2 max pool."""
        return F.max_pool2d(x, 2)

    def sgd_(self, params: Tensor, momentum: Tensor, grad: Tensor, rule: sgd.UpdateRule) -> None:
        """One optimiser step by `rule`, in place; all [n, P], a tensor lr []."""
        sgd.sgd_(params, momentum, grad, rule)


PLAIN = Layers()
