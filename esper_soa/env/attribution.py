"""What subset accuracies say about each seed: leave-one-out contribution, interactions, exact Shapley values.

Given the accuracies of a set of subsets per env, it knows nothing of networks and can be used on its own: rows of
(subset bit mask, accuracy) in, per-seed numbers out. Called by env/step.py after validation.
"""

import torch
from torch import Tensor

from esper_soa.state import Attribution, Measurements, Slots
from esper_soa.vocabulary import Stage


def lookup(subset: Tensor, accuracy: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy of the subsets `wanted` (int64 [N, W]) in the table (subset int64, accuracy float; both [N, R]).

    Returns values [N, W], 0 where the table does not hold the subset, and bool [N, W], where it does.
    """
    match = (subset[:, None, :] == wanted[:, :, None]) & (subset >= 0)[:, None, :]
    value = torch.where(match, accuracy[:, None, :], torch.zeros_like(accuracy)[:, None, :]).sum(-1)
    return value, match.any(-1)


def subset_size(subset: Tensor, num_slots: int) -> Tensor:
    """Seeds that are on in each subset [N, R] -> int64 [N, R]."""
    slots = torch.arange(num_slots, device=subset.device)
    return ((subset[..., None] >> slots) & 1).sum(-1)


def shapley_values(subset: Tensor, accuracy: Tensor, ablated: Tensor) -> tuple[Tensor, Tensor]:
    """Exact Shapley values [N, S] of the seeds `ablated` (bool [N, S]), 0 for others and where rows are missing.

    phi_i = sum over T without i of |T|! (n - |T| - 1)! / n! (v(T + i) - v(T)) (Shapley 1953). The bool [N] says where
    every subset was in the table.
    """
    num_slots = ablated.shape[1]
    bits = 1 << torch.arange(num_slots, device=subset.device)
    players = ablated.sum(1, keepdim=True)
    size = subset_size(subset, num_slots)
    complete = (subset >= 0).sum(1) >= (1 << players.squeeze(1))
    without = (subset[:, None, :] & bits[None, :, None]) == 0  # [N, S, R], rows that lack the seed
    usable = without & ablated[:, :, None] & (subset >= 0)[:, None, :] & complete[:, None, None]
    larger, _ = lookup(subset, accuracy, (subset[:, None, :] | bits[None, :, None]).flatten(1))
    gain = larger.unflatten(1, (num_slots, -1)) - accuracy[:, None, :]
    rest = (players - size - 1).clamp(min=0).to(accuracy.dtype)
    logs = torch.lgamma(size.to(accuracy.dtype) + 1) + torch.lgamma(rest + 1)
    weight = torch.exp(logs - torch.lgamma(players.to(accuracy.dtype) + 1))
    return torch.where(usable, weight[:, None, :] * gain, torch.zeros_like(gain)).sum(-1), complete


def pair_interactions(subset: Tensor, accuracy: Tensor, ablated: Tensor) -> Tensor:
    """v(ij) - v(i) - v(j) + v(none) [N, S, S] for pairs of ablated seeds, other seeds off; 0 where rows are missing."""
    num_slots = ablated.shape[1]
    bits = 1 << torch.arange(num_slots, device=subset.device)
    pairs = (bits[:, None] | bits[None, :]).flatten().expand(subset.shape[0], -1)
    both, found = lookup(subset, accuracy, pairs)
    alone, _ = lookup(subset, accuracy, bits.expand(subset.shape[0], -1))
    none, _ = lookup(subset, accuracy, torch.zeros_like(subset[:, :1]))
    both, found = both.unflatten(1, (num_slots, num_slots)), found.unflatten(1, (num_slots, num_slots))
    distinct = ~torch.eye(num_slots, dtype=torch.bool, device=subset.device)
    valid = found & distinct & ablated[:, :, None] & ablated[:, None, :]
    interaction = both - alone[:, :, None] - alone[:, None, :] + none[:, :, None]
    return torch.where(valid, interaction, torch.zeros_like(interaction))


def attribute(measurements: Measurements, slots: Slots, execution_rank: Tensor) -> Attribution:
    """Everything the rewards, gates and observations need from this env-step's subset rows.

    execution_rank: int64 [S], position of each slot in the forward pass.
    """
    subset, accuracy, ablated = measurements.subset, measurements.accuracy, measurements.ablated
    num_slots = ablated.shape[1]
    bits = 1 << torch.arange(num_slots, device=subset.device)
    zero = torch.zeros_like(slots.alpha)
    full = torch.where(ablated, bits, torch.zeros_like(bits)).sum(1, keepdim=True)
    fossils = torch.where(ablated & (slots.stage == Stage.FOSSILIZED), bits, torch.zeros_like(bits)).sum(
        1, keepdim=True
    )
    left_out, _ = lookup(subset, accuracy, full & ~bits)
    solo, _ = lookup(subset, accuracy, bits.expand_as(ablated))
    rest, _ = lookup(subset, accuracy, torch.cat([torch.zeros_like(full), fossils], dim=1))
    interactions = pair_interactions(subset, accuracy, ablated)
    boosts = interactions.clamp(min=0)
    shapley, _ = shapley_values(subset, accuracy, ablated)
    alpha = torch.where(ablated, slots.alpha, zero)
    before = execution_rank[None, :] < execution_rank[:, None]  # [S, S], column acts before row
    upstream = torch.where(before, alpha[:, None, :], zero[:, None, :]).sum(-1)
    downstream = torch.where(before.T, alpha[:, None, :], zero[:, None, :]).sum(-1)
    main = accuracy[:, 0]
    return Attribution(
        contribution=torch.where(ablated, main[:, None] - left_out, zero),
        measured=ablated,
        solo=torch.where(ablated, solo, zero),
        interaction_sum=interactions.sum(-1),
        boost=boosts.amax(-1),
        pair_boost=boosts,
        upstream_alpha=torch.where(ablated, upstream, zero),
        downstream_alpha=torch.where(ablated, downstream, zero),
        shapley=shapley,
        all_off=rest[:, 0],
        total=main - rest[:, 0],
        total_known=ablated.any(1),
        committed=rest[:, 1],
        batch_size=[subset.shape[0]],
    )
