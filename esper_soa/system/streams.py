"""Owned random streams: every random number is a hash of (seed, purpose, round, env, counter), and
depends on nothing else: not on N, chunking, what was drawn before, or the device. So env i of N
equals env i alone, and a resumed run continues the same streams without stored generator state.
"""

import torch
from torch import Tensor

DATA_ORDER = 1
AUGMENTATION = 2
HOST_INIT = 3
SEED_INIT = 4
POLICY_SAMPLE = 5
VALIDATION_SET = 6
MINIBATCH = 7
SHAPLEY = 8
DROPOUT = 9
REWARD_PROBE = 10
ENV_SETTINGS = 11
DATA_SHARE = 12
LABEL_NOISE = 13
EFFECTS = 14

_WEYL = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The 64-bit pattern of `value` as a Python int that fits int64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _shift(value: Tensor, places: int) -> Tensor:
    """Logical right shift of int64 bit patterns."""
    return (value >> places) & ((1 << (64 - places)) - 1)


def mix(value: Tensor) -> Tensor:
    """SplitMix64 finaliser on int64 bit patterns (Steele, Lea and Flood 2014)."""
    value = (value ^ _shift(value, 30)) * _signed(_MIX_A)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_B)
    return value ^ _shift(value, 31)


def fold(key: Tensor, coordinate: Tensor | int) -> Tensor:
    """A key for the sub-stream `coordinate` (>= 0) of `key`; both broadcast."""
    if isinstance(coordinate, Tensor):
        return mix(key + (coordinate + 1) * _signed(_WEYL))
    return mix(key + _signed((coordinate + 1) * _WEYL))


def stream_keys(seed: int, purpose: int, coordinates: tuple[int, ...], envs: Tensor) -> Tensor:
    """int64 keys shaped as `envs` (global env ids), one stream each; `coordinates`: (round,)."""
    key = torch.zeros((), dtype=torch.int64, device=envs.device)
    for coordinate in (seed, purpose, *coordinates):
        key = fold(key, coordinate)
    return fold(key, envs)


def uniform(keys: Tensor, counters: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers in [0, 1), a function of (key, counter); shapes broadcast."""
    bits = 53 if dtype == torch.float64 else 24
    return _shift(fold(keys, counters), 64 - bits).to(dtype) * 2.0**-bits


def integers(keys: Tensor, counters: Tensor, high: int) -> Tensor:
    """Integers in [0, high), high < 2**31, with bias below high / 2**63."""
    return _shift(fold(keys, counters), 1) % high
