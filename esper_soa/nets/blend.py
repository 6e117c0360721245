"""How a host takes on its seeds: add, multiply, gate, and the straight-through pass of a seed in training.

Host and seed activations are [B, m*C, H, W]; alpha is one number per network. Called by supervised.py.
"""

import torch
from torch import Tensor

from esper_soa.nets import batched


def straight_through(host: Tensor, seed: Tensor) -> Tensor:
    """The host's value with the seed's gradient: the seed learns from the full loss, the host does not notice."""
    return host + (seed - seed.detach())


def add(host: Tensor, seed: Tensor, alpha: Tensor) -> Tensor:
    """host + alpha (seed - host); alpha [m] in [0, 1]."""
    share = batched.per_channel(alpha, host.shape[1] // alpha.shape[0])
    return torch.lerp(host, seed, share)


def multiply(host: Tensor, seed: Tensor, seed_input: Tensor, alpha: Tensor) -> Tensor:
    """host (1 + alpha tanh(seed - seed_input)); alpha [m] in [0, 1]."""
    share = batched.per_channel(alpha, host.shape[1] // alpha.shape[0])
    return host * (1 + share * torch.tanh(seed - seed_input))


def gate(host: Tensor, seed: Tensor, gates: Tensor, alpha: Tensor) -> Tensor:
    """host + alpha g (seed - host) with a gate g [B, m] per sample; alpha [m] in [0, 1]."""
    share = batched.per_channel(alpha * gates, host.shape[1] // alpha.shape[0])
    return torch.lerp(host, seed, share)
