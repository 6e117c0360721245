"""Attribution of accuracy to seeds: leave-one-out contributions, interactions, Shapley values.

Given the accuracies of a set of subsets per env, it knows nothing of networks and can be used on
its own: rows of (subset bit mask, accuracy) in, per-seed numbers out.
"""

import torch
from torch import Tensor

from esper_soa.config.env import AttributionConfig
from esper_soa.nets.seeds.subsets import EXACT_SLOTS
from esper_soa.state import Attribution, Measurements, Slots
from esper_soa.system import streams
from esper_soa.vocabulary import Stage


def lookup(subset: Tensor, accuracy: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracies [N, W] of the subsets `codes` (int64 [N, W], >= 0) in a table, and bool [N, W],
    where it has them, else 0; the table: subset int64 [N, R] and accuracy [N, R].
    """
    value = torch.zeros_like(accuracy[:, :1]).expand(codes.shape)
    known = torch.zeros_like(codes, dtype=torch.bool)
    # few; passes over [N, W] vectorise where a reduction over the rows does not
    for row in range(subset.shape[1]):
        matches = subset[:, row, None] == codes
        value = torch.where(matches, accuracy[:, row, None], value)
        known = known | matches
    return value, known


def shapley_values(subset: Tensor, accuracy: Tensor, ablated: Tensor) -> tuple[Tensor, Tensor]:
    """Exact Shapley values [N, S] of the seeds `ablated` (bool [N, S]); 0 where rows are missing.

    phi_i = sum over T without i of |T|! (n - |T| - 1)! / n! (v(T + i) - v(T)) (Shapley 1953),
    summed row by row: a row with the seed counts for it, one without it against it. bool [N]: the
    table had every subset.
    """
    num_slots = ablated.shape[1]
    bits = 1 << torch.arange(num_slots, device=subset.device)
    players = ablated.sum(1, keepdim=True)
    valid = subset >= 0
    complete = valid.sum(1) >= (1 << players.squeeze(1))
    member = ((subset[:, None, :] & bits[None, :, None]) != 0) & valid[:, None, :]  # [N, S, R]
    size = member.sum(1)
    # k! (n - k - 1)! / n! at n (S + 1) + k, of n players, k before one
    count = torch.arange(num_slots + 1, device=subset.device)
    factorial = count.clamp(min=1).to(accuracy.dtype).cumprod(0)
    after = (count[:, None] - count - 1).clamp(min=0)
    weights = (factorial * factorial[after] / factorial[:, None]).flatten()
    first = players * (num_slots + 1)
    joins = weights[first + (size - 1).clamp(min=0)] * accuracy
    left_out = weights[first + size] * accuracy
    signed = torch.where(member, joins[:, None, :], -left_out[:, None, :])
    valid_pairs = (valid & complete[:, None])[:, None, :] & ablated[:, :, None]
    return torch.where(valid_pairs, signed, 0.0).sum(-1), complete


def arrival_orders(num_players: int, num_samples: int, seed: int, device: torch.device) -> Tensor:
    """Random orders int64 [P, n], each followed by its reverse; the same on every device."""
    pair = torch.arange(num_samples // 2, device=device)
    keys = streams.stream_keys(seed, streams.SHAPLEY, (num_players,), envs=pair).unsqueeze(1)
    noise = streams.uniform(keys, torch.arange(num_players, device=device), torch.float64)
    forward = noise.argsort(dim=1, stable=True)
    return torch.stack((forward, forward.flip(1)), 1).flatten(0, 1)


def shapley_orders(cfg: AttributionConfig, num_slots: int, seed: int) -> Tensor | None:
    """Orders int64 [P, S] for sampled Shapley values, the same all run long; None where not asked
    for, and where so few slots have all subsets evaluated.
    """
    if cfg.shapley_samples == 0 or num_slots <= EXACT_SLOTS:
        return None
    return arrival_orders(num_slots, cfg.shapley_samples, seed, device=torch.device("cpu"))


def prefix_codes(orders: Tensor) -> Tensor:
    """Players after 0, 1, ..., n arrivals, as bit masks [P, n + 1] of orders int64 [P, n]."""
    bits = torch.ones_like(orders) << orders
    return torch.cat((torch.zeros_like(bits[:, :1]), bits.cumsum(1)), 1)


def sampled_shapley_values(
    subset: Tensor, accuracy: Tensor, ablated: Tensor, orders: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapley values [N, S] of the seeds `ablated` by `orders`, standard errors [N, S], known [N].

    orders: int64 [P, S], of arrival in all slots, each followed by its reverse; without slots that
    are not ablated a random order stays one. An order and its reverse err in opposite directions,
    so a pair is one independent observation (antithetic sampling; Castro, Gomez and Tejada 2009,
    Mitchell et al. 2022). The bool [N] says where the table held every prefix of every order;
    elsewhere both are 0.
    """
    prefixes = prefix_codes(orders)
    bits = 1 << torch.arange(orders.shape[1], device=subset.device)
    full = torch.where(ablated, bits, 0).sum(1, keepdim=True)
    values, found = lookup(subset, accuracy, prefixes.flatten() & full)
    gains = values.unflatten(1, prefixes.shape).diff(dim=2)  # [N, P, S] in the order of arrival
    gains = gains.gather(2, orders.argsort(dim=1).expand_as(gains))  # by slot
    pairs = gains.unflatten(1, (-1, 2)).mean(2)
    known = found.all(1)
    valid = known[:, None] & ablated
    error = pairs.std(1) / pairs.shape[1] ** 0.5
    return torch.where(valid, pairs.mean(1), 0.0), torch.where(valid, error, 0.0), known


def pair_interactions(subset: Tensor, accuracy: Tensor, num_slots: int) -> Tensor:
    """v(ij) - v(i) - v(j) + v(none) [N, S, S] of pairs, other seeds off; 0 where rows lack."""
    bits = 1 << torch.arange(num_slots, device=subset.device)
    codes = torch.cat(((bits[:, None] | bits[None, :]).flatten(), torch.zeros_like(bits[:1])))
    value, known = lookup(subset, accuracy, codes.expand(subset.shape[0], -1))
    joint, pair_known = (part[:, :-1].unflatten(1, (num_slots, -1)) for part in (value, known))
    # a strided slice for the diagonal, as inductor warns of its own lowering of `diagonal`
    single = value[:, : num_slots**2 : num_slots + 1]
    none = value[:, -1:, None]
    valid = pair_known & ~torch.eye(num_slots, dtype=torch.bool, device=subset.device)
    return torch.where(valid, joint - single[:, :, None] - single[:, None, :] + none, 0.0)


def attribute(measured: Measurements, slots: Slots, orders: Tensor | None = None) -> Attribution:
    """Everything the rewards, gates and observations need from this env-step's subset rows.

    orders: int64 [P, S], see `sampled_shapley_values`, for envs without all subsets; None: 0 there.
    """
    subset = measured.subset
    accuracy = measured.accuracy
    ablated = measured.ablated
    num_slots = ablated.shape[1]
    bits = 1 << torch.arange(num_slots, device=subset.device)
    full = torch.where(ablated, bits, 0).sum(1, keepdim=True)
    fossils = torch.where(ablated & (slots.stage == Stage.FOSSILIZED), bits, 0).sum(1, keepdim=True)
    codes = torch.cat((full & ~bits, torch.zeros_like(full), fossils), 1)
    value, _ = lookup(subset, accuracy, codes)
    left_out, all_off, committed = value.split((num_slots, 1, 1), 1)
    interactions = pair_interactions(subset, accuracy, num_slots)
    shapley, complete = shapley_values(subset, accuracy, ablated)
    error = torch.zeros_like(shapley)
    if orders is not None:
        sampled, spread, _ = sampled_shapley_values(subset, accuracy, ablated, orders=orders)
        shapley = torch.where(complete[:, None], shapley, sampled)
        error = torch.where(complete[:, None], error, spread)
    return Attribution(
        contribution=torch.where(ablated, accuracy[:, :1] - left_out, 0.0),
        measured=ablated,
        interaction_sum=interactions.sum(-1),
        pair_boost=interactions.clamp(min=0),
        shapley=shapley,
        shapley_error=error,
        total=accuracy[:, 0] - all_off.squeeze(1),
        total_known=ablated.any(1),
        committed=committed.squeeze(1),
        batch_size=[subset.shape[0]],
    )
