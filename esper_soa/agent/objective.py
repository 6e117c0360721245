"""The losses of a minibatch: PPO and imitation.

The terms are those of losses.py. Means are over all envs, those of other processes too.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from esper_soa.agent import diagnostics, losses
from esper_soa.agent.diagnostics import Metrics, by_head
from esper_soa.agent.losses import Means
from esper_soa.agent.policy import Evaluation
from esper_soa.agent.rollout import Row
from esper_soa.config.agent import PPOConfig
from esper_soa.env.legal import available_heads, open_heads, relevant_heads
from esper_soa.env.reduction import ALL_ENVS, Reduction
from esper_soa.system.transfers import move
from esper_soa.vocabulary import HEAD_NAMES

Q_SHARE = 0.5  # weight of the Q loss over that of the value loss
CONTRIBUTION_CLIP = 10.0  # percent points, of the targets of the auxiliary loss


class Batch(NamedTuple):
    """The part of a rollout that the losses read."""

    rows: Row  # [T, n]
    advantages: Tensor  # [T, n], normalised
    targets: Tensor  # [T, n], normalised returns

    def of(self, envs: Tensor) -> "Batch":
        """The part of the envs int64 [n]; sequences stay whole."""
        return Batch(self.rows[:, envs], self.advantages[:, envs], self.targets[:, envs])


class Coefficients(NamedTuple):
    """Weights of the loss terms in this update; numbers, or float32 [] on the device."""

    entropy: float | Tensor
    value: float | Tensor
    q: float | Tensor
    floor_penalty: float | Tensor
    contribution: float | Tensor


class HeadTables(NamedTuple):
    """Per-head settings, float32 [8] in HEADS order."""

    multiplier: Tensor
    floor: Tensor
    penalty: Tensor


def head_tables(config: PPOConfig, device: torch.device) -> HeadTables:
    """The per-head settings of the entropy terms."""
    tables = (config.entropy_multiplier, config.entropy_floor, config.entropy_floor_penalty)
    rows = [torch.tensor([table[name] for name in HEAD_NAMES]) for table in tables]
    return HeadTables(*move(rows, device))


def coefficients(config: PPOConfig, train_steps: int, total_updates: int) -> Coefficients:
    """Schedules after `train_steps` updates of a run of `total_updates`."""
    ramp = partial(losses.ramp, train_steps)
    entropy = config.entropy_coef
    if config.entropy_anneal_rounds > 0:
        entropy = ramp(config.entropy_anneal_rounds, entropy, config.entropy_coef_end)
    value = ramp(config.value_warmup_rounds, config.value_coef_start, config.value_coef)
    return Coefficients(
        entropy=max(entropy, config.entropy_coef_min),
        value=value,
        q=Q_SHARE * value,
        floor_penalty=losses.penalty_schedule(train_steps, total_updates),
        contribution=ramp(config.contribution_warmup, 0.0, config.contribution_coef),
    )


Part: TypeAlias = tuple[Evaluation, Batch]  # the network's outputs for a batch, the batch


def total_loss(
    parts: Sequence[Part],
    config: PPOConfig,
    weights: Coefficients,
    tables: HeadTables,
    reduction: Reduction = ALL_ENVS,
) -> tuple[Tensor, Metrics]:
    """Loss of a gradient step and its parts; forced env-steps train the critics only, weigh less.

    A head counts where the effective op made it matter, so a vetoed action is not credited. Means
    are over all envs of the minibatch; the gradient is the share of this process.
    """
    means_by_part = []
    ratios = []
    for evaluation, batch in parts:
        valid = batch.rows.valid
        log_ratio = losses.clamped_log_ratio(evaluation.log_probs, batch.rows.log_probs)
        means_by_part.append(
            policy_means(evaluation, log_ratio, batch, clip=config.clip_ratio)
            | critic_means(evaluation, batch, config, known=torch.ones_like(valid))
            | diagnostics.memory_means(evaluation.hidden, evaluation.cell, valid)
        )
        ratios.append(torch.where(valid, losses.joint_ratio(log_ratio), 1.0))
    means = losses.global_means(means_by_part, reduction.total)
    policy = -means["surrogate"].value.sum()
    critics, metrics = critic_losses(means, weights)
    entropy = -(tables.multiplier * means["entropy"].value).sum()
    penalty = weights.floor_penalty * tables.penalty
    floor = losses.floor_penalty(means["available"], tables.floor, penalty)
    loss = policy + critics + weights.entropy * entropy + floor
    kl = means["kl"].value
    metrics |= {
        "loss": loss,
        "policy_loss": policy,
        "entropy_loss": entropy,
        "floor_penalty": floor,
        "approx_kl": losses.divergence(kl, means["mattered"].value),
        "clip_fraction": means["clip_fraction"].value,
        "ratio_max": losses.largest_of(ratios),
        "ratio_min": -losses.largest_of([-ratio for ratio in ratios]),
    }
    metrics |= by_head("clip_fraction", means["head_clip_fraction"].value) | by_head("kl", kl)
    metrics |= by_head("entropy", means["decided"].value)
    metrics |= by_head("head_share", means["head_share"].value)
    return loss, _with_memory_health(metrics, means, parts)


def _with_memory_health(metrics: Metrics, means: Means, parts: Sequence[Part]) -> Metrics:
    """The metrics of a loss and the health of the memory, without gradient."""
    memories = [
        (evaluation.hidden, evaluation.cell, batch.rows.valid) for evaluation, batch in parts
    ]
    metrics |= diagnostics.memory_health(means, memories)
    return {name: metric.detach() for name, metric in metrics.items()}


def policy_means(evaluation: Evaluation, log_ratio: Tensor, batch: Batch, clip: float) -> Means:
    """Means that the policy's terms and diagnostics use; `decided`: entropies with a choice."""
    rows = batch.rows
    relevant = relevant_heads(rows.effective_op) & rows.valid.unsqueeze(-1)
    free = (rows.valid & ~rows.forced).unsqueeze(-1)
    decided = relevant & free & open_heads(rows.masks, rows.action.op)
    return {
        "surrogate": losses.surrogate(log_ratio, batch.advantages, relevant & free, clip=clip),
        "entropy": losses.mean_where(evaluation.entropies, relevant & free),
        "available": losses.mean_where(evaluation.entropies, available_heads(rows.masks.op) & free),
        "decided": losses.mean_where(evaluation.entropies, decided),
        "head_share": losses.head_share(decided, rows.valid),
    } | losses.ratio_means(log_ratio.detach(), relevant, rows.valid, clip=clip)


def imitation_loss(
    parts: Sequence[Part], config: PPOConfig, weights: Coefficients, reduction: Reduction = ALL_ENVS
) -> tuple[Tensor, Metrics]:
    """The loss of a gradient step towards a teacher, whose choices are the rows' action; its parts.

    The cross-entropy of the policy as it plays, floors included: minus the log-probability of the
    teacher's choices, summed over the heads that its op makes matter, mean over the env-steps with
    a choice (Ross et al. 2011). Critics learn the returns of what was played, so the value of an op
    only where the teacher would have done the same.
    """
    means_by_part = []
    for evaluation, batch in parts:
        rows = batch.rows
        means_by_part.append(
            agreement_means(evaluation, rows)
            | critic_means(evaluation, batch, config, known=rows.action.op == rows.effective_op)
            | diagnostics.memory_means(evaluation.hidden, evaluation.cell, rows.valid)
        )
    means = losses.global_means(means_by_part, reduction.total)
    cross_entropy = -means["chosen"].value
    critics, metrics = critic_losses(means, weights)
    loss = cross_entropy + critics
    metrics |= {"loss": loss, "cross_entropy": cross_entropy, "agreement": means["agreement"].value}
    metrics |= by_head("agreement", means["head_agreement"].value)
    return loss, _with_memory_health(metrics, means, parts)


def agreement_means(evaluation: Evaluation, rows: Row) -> Means:
    """Log-probability of the teacher's choices, and the share of them that is the likeliest."""
    free = rows.valid & ~rows.forced
    relevant = relevant_heads(rows.action.op) & free.unsqueeze(-1)
    log_probs = torch.where(relevant, evaluation.log_probs, 0.0).sum(-1)
    agreed = (evaluation.likeliest | ~relevant).all(-1)
    return {
        "chosen": losses.weighted_mean(log_probs, free.float()),
        "agreement": losses.weighted_mean(agreed.float(), free.float()),
        "head_agreement": losses.mean_where(evaluation.likeliest.float(), relevant),
    }


def critic_means(evaluation: Evaluation, batch: Batch, config: PPOConfig, known: Tensor) -> Means:
    """Errors of value, Q and contributions; known: bool [T, n], the op's return is known."""
    rows = batch.rows
    weight = torch.where(rows.forced, config.forced_value_weight, 1.0) * rows.valid
    measured = rows.contribution_measured & rows.valid.unsqueeze(-1)
    contribution = losses.contribution_error(
        evaluation.contribution, rows.contribution, measured, clip=CONTRIBUTION_CLIP
    )
    return {
        "value": losses.half_squared_error(evaluation.value, batch.targets, weight),
        "q": losses.half_squared_error(evaluation.q, batch.targets, weight * known),
        "contribution": contribution,
    }


def critic_losses(means: Means, weights: Coefficients) -> tuple[Tensor, Metrics]:
    """The weighted sum of the losses of value, Q and predicted contributions, and the losses."""
    value, q, contribution = (means[name].value for name in ("value", "q", "contribution"))
    critics = weights.value * value + weights.q * q + weights.contribution * contribution
    return critics, {"value_loss": value, "q_loss": q, "contribution_loss": contribution}
