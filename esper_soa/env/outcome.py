"""Outcomes of episodes, trade-offs and statistics by blueprint, by the reference's formulas."""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.parameters import total_params
from esper_soa.state import STATE_FLOAT, Costs, EnvState, Slots, known_false
from esper_soa.vocabulary import NUM_BLUEPRINTS, Stage

SUCCESS_ACCURACY = 80.0  # percent
STABILITY_WINDOW = 20  # last raw rewards of an episode that its stability is judged by
HYPERVOLUME_RATIO = 2.0  # parameter ratio of the reference point; its accuracy is 0
# Cost of a forward pass with a fossil relative to the host alone, by blueprint in the order of
# BLUEPRINT_NAMES: the reference's. That of a user's blueprint is counted.
COMPUTE_MULTIPLIERS = (1.0, 1.15, 1.35, 1.02, 1.08, 1.05, 1.05, 1.25, 1.05, 1.08, 1.15, 1.2, 1.35)
MAX_POINTS = 1024  # compared each with each at a time; memory grows with the square


class Outcomes(NamedTuple):
    """One finished episode per env, [N]."""

    accuracy: Tensor  # float64, percent, every seed on, measured before the last action took effect
    param_ratio: Tensor  # float64, trainable parameters of host and live seeds over the host's
    stability: Tensor  # float64, (0, 1]
    reward: Tensor  # float64, sum of raw rewards
    success: Tensor  # bool, accuracy of at least SUCCESS_ACCURACY
    compute_cost: Tensor  # float64, of a forward pass; 1 = the host alone
    germinated: Tensor  # int64
    fossilized: Tensor  # int64
    contributing: Tensor  # int64, fossils that gained at least 1 point
    pruned: Tensor  # int64
    unfinished: Tensor  # int64, seeds that the end found neither fossilized nor pruned
    num_steps: Tensor  # int64


class BlueprintStats(NamedTuple):
    """Sums by blueprint [P], to be added over env-steps and rounds."""

    germinated: Tensor  # int64
    fossilized: Tensor  # int64
    pruned: Tensor  # int64
    gain: Tensor  # float64, sum over fossils of the accuracy gained since the seed's first record
    churn: Tensor  # float64, the same over pruned seeds
    blending_gain: Tensor  # float64, sum over fossils of the accuracy gained since BLENDING began
    contribution: Tensor  # float64, sum over fossils of the contribution last measured
    measured: Tensor  # int64, fossils with a measured contribution

    def means(self) -> dict[str, Tensor]:
        """Fossils in percent of the seeds that came to an end; percent points per fossil, pruned
        seed, fossil, and fossil that was ever measured. NaN of none.
        """
        return {
            "fossilization_rate": 100 * self.fossilized / (self.fossilized + self.pruned),
            "mean_gain": self.gain / self.fossilized,
            "mean_churn": self.churn / self.pruned,
            "mean_blending_gain": self.blending_gain / self.fossilized,
            "mean_contribution": self.contribution / self.measured,
        }


def outcomes(state: EnvState, rewards: Tensor, counts: Costs, costs: Costs) -> Outcomes:
    """The finished episodes of N envs; rewards [N, STABILITY_WINDOW]: the last, newest last."""
    slots = state.slots
    signals = state.signals
    totals = state.totals
    return Outcomes(
        accuracy=signals.val_accuracy,
        param_ratio=total_params(slots, counts) / counts.host,
        stability=stability(rewards, signals.step),
        reward=totals.reward,
        success=signals.val_accuracy >= SUCCESS_ACCURACY,
        compute_cost=compute_cost(slots, costs),
        germinated=totals.germinated,
        fossilized=totals.fossilized,
        contributing=totals.contributing,
        pruned=totals.pruned,
        unfinished=(slots.live & (slots.stage != Stage.FOSSILIZED)).sum(1),
        num_steps=signals.step,
    )


def stability(rewards: Tensor, num_steps: Tensor) -> Tensor:
    """1 / (1 + variance) [N] of the last min(num_steps, W) of `rewards` [N, W]; 1 for fewer than 2.

    num_steps: int64 [N], rewards received in the episode. The variance is that of a population.
    """
    window = rewards.shape[1]
    valid = torch.arange(window, device=rewards.device) >= window - num_steps.unsqueeze(1)
    count = valid.sum(1)
    mean = torch.where(valid, rewards, 0.0).sum(1) / count
    squares = torch.where(valid, (rewards - mean.unsqueeze(1)).square(), 0.0).sum(1)
    return 1 / (1 + squares / count.clamp(min=1))


def compute_cost(slots: Slots, costs: Costs) -> Tensor:
    """Estimated cost of a forward pass of host and fossils relative to the host alone, float64 [N].

    A blueprint without a number of the reference costs its multiplications over those of the host.
    """
    extra = torch.zeros_like(slots.alpha)
    for code, multiplier in enumerate(COMPUTE_MULTIPLIERS):
        extra = torch.where(slots.blueprint == code, multiplier - 1, extra)
    for code in range(len(COMPUTE_MULTIPLIERS), costs.seed.shape[1]):
        share = costs.seed[:, code] / max(1.0, costs.host)
        extra = torch.where(slots.blueprint == code, share, extra)
    return 1 + torch.where(slots.stage == Stage.FOSSILIZED, extra, 0.0).sum(1)


def pareto_front(accuracy: Tensor, stability: Tensor, param_ratio: Tensor) -> Tensor:
    """bool [M]: points that no other dominates, equals or betters in all three and betters in one.

    Accuracy and stability are to be high, the ratio low. Points with a NaN are never on the front.
    """
    good = torch.stack((accuracy, stability, -param_ratio), 1)  # [M, 3], higher is better
    as_good = (good.unsqueeze(1) >= good.unsqueeze(0)).all(2)  # [M, M], row against column
    better = (good.unsqueeze(1) > good.unsqueeze(0)).any(2)
    return ~(as_good & better).any(0) & ~good.isnan().any(1)


def hypervolume(accuracy: Tensor, param_ratio: Tensor) -> Tensor:
    """Area that the points [M] dominate between accuracy 0 and param_ratio HYPERVOLUME_RATIO.

    Swept by falling accuracy: each point adds a strip from its ratio up to the smallest so far.
    """
    counts = accuracy > 0
    height, order = torch.where(counts, accuracy, 0.0).sort(descending=True)
    ratio = torch.where(counts, param_ratio, HYPERVOLUME_RATIO)[order]
    best_ratio = torch.cat((torch.full_like(ratio[:1], HYPERVOLUME_RATIO), ratio)).cummin(0).values
    return (height * (best_ratio[:-1] - best_ratio[1:])).sum()


def trade_offs(points: Tensor) -> Tensor:
    """Distinct points on the Pareto front [K, 3] of [M, 3] (accuracy, stability, parameter ratio).

    Dominated points can be dropped: they never affect later fronts or hypervolumes.
    """
    parts = points.unique(dim=0).split(MAX_POINTS)
    front = torch.cat([part[pareto_front(*part.unbind(1))] for part in parts]) if parts else points
    return front[pareto_front(*front.unbind(1))]


def empty_blueprint_stats(device: torch.device, number: int = NUM_BLUEPRINTS) -> BlueprintStats:
    """Statistics of no seeds: all zero."""
    count = torch.zeros(number, dtype=torch.int64, device=device)
    amount = torch.zeros(number, dtype=STATE_FLOAT, device=device)
    return BlueprintStats(
        count,
        count,
        count,
        gain=amount,
        churn=amount,
        blending_gain=amount,
        contribution=amount,
        measured=count,
    )


def count_blueprints(stats: BlueprintStats, before: Slots, after: Slots) -> BlueprintStats:
    """`stats` with births and ends of an env-step: slots [N, S] before the action, after the tick.

    Seeds that a rollback removes count as pruned.
    """
    born = after.live & ~before.live
    fossil = (after.stage == Stage.FOSSILIZED) & (before.stage != Stage.FOSSILIZED)
    is_removed = before.live & (before.stage != Stage.FOSSILIZED) & ~after.live
    if known_false(born | fossil | is_removed):
        return stats
    gain = before.total_improvement
    blending = before.accuracy_current - before.accuracy_blending_start
    blended = fossil & before.blending_started
    measured = fossil & before.contribution_known
    return stats._replace(
        germinated=_add(stats.germinated, after.blueprint, born),
        fossilized=_add(stats.fossilized, before.blueprint, fossil),
        pruned=_add(stats.pruned, before.blueprint, is_removed),
        gain=_add(stats.gain, before.blueprint, fossil, amount=gain),
        churn=_add(stats.churn, before.blueprint, is_removed, amount=gain),
        blending_gain=_add(stats.blending_gain, before.blueprint, blended, amount=blending),
        contribution=_add(
            stats.contribution, before.blueprint, measured, amount=before.contribution
        ),
        measured=_add(stats.measured, before.blueprint, measured),
    )


def _add(sums: Tensor, blueprint: Tensor, where: Tensor, amount: Tensor | None = None) -> Tensor:
    """`sums` [P] and, by blueprint, `amount` [N, S], or ones, of slots `where` (bool [N, S])."""
    codes = torch.arange(sums.shape[0], device=blueprint.device)
    matches = where.unsqueeze(-1) & (blueprint.unsqueeze(-1) == codes)
    weight = torch.ones_like(blueprint, dtype=STATE_FLOAT) if amount is None else amount
    return sums + torch.where(matches, weight.unsqueeze(-1), 0.0).sum((0, 1)).to(sums.dtype)
