"""Shapley values of any value function: exact from all subsets, or sampled with error bars.

Knows nothing of networks or of the simulator. `exact_shapley` takes (subsets, values) as they come
from an evaluation; `sampled_shapley` calls a value function on the subsets that it needs, in
batches, and never enumerates permutations.

    >>> import torch
    >>> from esper_soa.env.shapley import exact_shapley, sampled_shapley
    >>> subsets = torch.tensor([[False, False], [True, False], [False, True], [True, True]])
    >>> exact_shapley(subsets, torch.tensor([50.0, 52.0, 53.0, 57.0]))
    tensor([3., 4.])
    >>> weights = torch.arange(20.0)
    >>> sample = sampled_shapley(lambda s: s.float() @ weights, num_players=20, num_samples=12)
    >>> torch.allclose(sample.value, weights)
    True
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from scipy.special import stdtrit
from torch import Tensor

from esper_soa.config.env import MIN_SHAPLEY_SAMPLES
from esper_soa.env.attribution import prefix_codes, shapley_values
from esper_soa.nets.data import streams

MAX_EXACT_PLAYERS = 12  # a table of 4096 subsets
MAX_SAMPLED_PLAYERS = 62  # a subset is the bits of an int64
CONFIDENCE = 0.99  # that the intervals of all players hold together

ValueFunction = Callable[[Tensor], Tensor]  # bool [M, n], the subsets -> float [M], their values


class ShapleySample(NamedTuple):
    """Estimates for n players, all [n]."""

    value: Tensor
    standard_error: Tensor  # of `value`, from the spread of the pairs of orders
    # Limits of the intervals, which hold for all players at once with probability CONFIDENCE.
    lower: Tensor
    upper: Tensor
    num_subsets: int  # that the value function was asked for


def exact_shapley(subsets: Tensor, values: Tensor) -> Tensor:
    """Shapley values [n] from values [2^n] of all `subsets` (bool [2^n, n], any order, who is in).

    Raises ValueError where a subset lacks or occurs twice, and beyond MAX_EXACT_PLAYERS players.
    """
    num_players = subsets.shape[1]
    allowed = f"must be 1..{MAX_EXACT_PLAYERS}. Use sampled_shapley."
    if not 1 <= num_players <= MAX_EXACT_PLAYERS:
        raise ValueError(f"exact_shapley: {num_players} players, {allowed}")
    bits = 1 << torch.arange(num_players, device=subsets.device)
    codes = torch.where(subsets, bits, 0).sum(1)
    if values.shape != codes.shape or codes.sort().values.tolist() != list(range(1 << num_players)):
        raise ValueError(
            f"exact_shapley: needs each of the {1 << num_players} subsets once, with one value"
        )
    full = torch.ones(1, num_players, dtype=torch.bool, device=subsets.device)
    shares, _ = shapley_values(codes.unsqueeze(0), values.unsqueeze(0), full)
    return shares.squeeze(0)


def sampled_shapley(
    value: ValueFunction,
    num_players: int,
    num_samples: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> ShapleySample:
    """Shapley values from `num_samples` random orders of arrival, each with its reverse.

    An order and its reverse err in opposite directions (antithetic sampling; Castro, Gomez and
    Tejada 2009, Mitchell et al. 2022), so one pair counts as one independent observation. The
    estimates of all players sum to value(all) - value(none), and `value` is asked once for at most
    num_samples (n - 1) + 2 subsets, each once.
    num_samples: even, at least MIN_SHAPLEY_SAMPLES. Raises ValueError otherwise, and for more than
    MAX_SAMPLED_PLAYERS players.
    """
    if num_samples < MIN_SHAPLEY_SAMPLES or num_samples % 2:
        allowed = f"must be even and at least {MIN_SHAPLEY_SAMPLES}"
        raise ValueError(f"sampled_shapley: num_samples={num_samples}, {allowed}")
    if not 1 <= num_players <= MAX_SAMPLED_PLAYERS:
        allowed = f"must be 1..{MAX_SAMPLED_PLAYERS}"
        raise ValueError(f"sampled_shapley: {num_players} players, {allowed}")
    orders = arrival_orders(num_players, num_samples, seed, torch.device(device))
    codes, place = prefix_codes(orders).unique(return_inverse=True)
    distinct = (codes.unsqueeze(1) >> torch.arange(num_players, device=codes.device)) & 1 == 1
    values = value(distinct)[place]
    gains = torch.zeros_like(values[:, 1:]).scatter(1, orders, values.diff(dim=1))
    return estimate(gains.unflatten(0, (-1, 2)).mean(1), len(distinct))


def arrival_orders(num_players: int, num_samples: int, seed: int, device: torch.device) -> Tensor:
    """Random orders int64 [P, n], each followed by its reverse; the same on every device."""
    pair = torch.arange(num_samples // 2, device=device)
    keys = streams.stream_keys(seed, streams.SHAPLEY, (num_players,), pair).unsqueeze(1)
    noise = streams.uniform(keys, torch.arange(num_players, device=device), torch.float64)
    forward = noise.argsort(dim=1, stable=True)
    return torch.stack((forward, forward.flip(1)), 1).flatten(0, 1)


def estimate(observations: Tensor, num_subsets: int) -> ShapleySample:
    """Mean, standard error and interval of independent `observations` [K, n], K at least 6.

    The error is the standard deviation over observations by the root of their number. The interval
    is Student's t with K - 1 degrees of freedom, its level shared by n players (Bonferroni).
    """
    count, num_players = observations.shape
    mean = observations.mean(0)
    error = observations.std(0) / count**0.5
    half_width = float(stdtrit(count - 1, 1 - (1 - CONFIDENCE) / (2 * num_players))) * error
    return ShapleySample(mean, error, mean - half_width, mean + half_width, num_subsets)
