"""History of every host's training: losses, accuracies, plateau, stability, seeds.

Nothing that is not finite enters the env state.
"""

import torch
from torch import Tensor

from esper_soa.config.env import SignalsConfig
from esper_soa.state import Attribution, GradientStats, Measurements, Signals, Slots, set_where

VELOCITY_MEMORY = 0.7  # weight of the past in the moving average of a contribution's change
RATIO_MEMORY = 0.9  # weight of the past in the moving average of the gradient ratio
MIN_PREVIOUS_LOSS = 1e-8  # relative loss changes are not judged from below this loss


def record_signals(signals: Signals, measured: Measurements, cfg: SignalsConfig) -> Signals:
    """Signals after one more env-step (reference signal tracker).

    A loss or accuracy that is not finite leaves the last finite one in place, with a delta of 0,
    and counts as not stable; the first loss has delta 0.
    """
    finite = torch.isfinite(measured.val_loss)
    val_loss = torch.where(finite, measured.val_loss, signals.val_loss)
    val_accuracy = _finite_or(measured.accuracy[:, 0], signals.val_accuracy)
    loss_known = signals.val_loss > 0  # 0 = no finite loss so far
    loss_delta = torch.where(loss_known, signals.val_loss - val_loss, 0.0)
    accuracy_delta = val_accuracy - signals.val_accuracy
    # stable env-steps in a row, and the latch that closes after enough
    change = loss_delta / signals.val_loss
    stable = finite & (change > -cfg.regression_threshold)
    stable = stable & (change < cfg.stabilization_threshold)
    count = torch.where(stable, signals.stable_count + 1, 0)
    evaluated = (signals.val_loss > MIN_PREVIOUS_LOSS) & ~signals.stabilized
    count = torch.where(evaluated, count, signals.stable_count)
    return signals.replace(
        step=signals.step + 1,
        train_loss=_finite_or(measured.train_loss, signals.train_loss),
        train_accuracy=_finite_or(measured.train_accuracy, signals.train_accuracy),
        val_loss=val_loss,
        val_accuracy=val_accuracy,
        loss_delta=loss_delta,
        accuracy_delta=accuracy_delta,
        loss_history=push(signals.loss_history, val_loss),
        accuracy_history=push(signals.accuracy_history, val_accuracy),
        plateau=torch.where(accuracy_delta < cfg.plateau_threshold, signals.plateau + 1, 0),
        stable_count=count,
        stabilized=signals.stabilized | (count >= cfg.stabilization_steps),
    )


def record_attribution(slots: Slots, attribution: Attribution) -> Slots:
    """Slots with this env-step's contributions and interactions; none for unmeasured seeds."""
    measured = attribution.measured
    change = attribution.contribution - slots.contribution
    velocity = VELOCITY_MEMORY * slots.contribution_velocity + (1.0 - VELOCITY_MEMORY) * change
    unmeasured = torch.where(slots.live, 0.0, slots.interaction_sum)
    again = measured & slots.contribution_known
    return slots.replace(
        contribution=torch.where(measured, attribution.contribution, slots.contribution),
        contribution_velocity=torch.where(again, velocity, slots.contribution_velocity),
        contribution_known=slots.contribution_known | measured,
        contribution_age=torch.where(measured, 0, slots.contribution_age),
        interaction_sum=torch.where(measured, attribution.interaction_sum, unmeasured),
    )


def record_gradients(slots: Slots, stats: GradientStats) -> Slots:
    """Slots with the gradient telemetry of this env-step's training pass, where it was measured.

    The gradient ratio is a moving average that starts at its first finite value. A norm or health
    that is not finite is kept as 0: health 0 and the exploding flag say what happened.
    """
    measured = stats.measured
    finite = torch.isfinite(stats.ratio)
    average = RATIO_MEMORY * slots.gradient_ratio + (1.0 - RATIO_MEMORY) * stats.ratio
    ratio = torch.where(slots.gradient_ratio_known, average, stats.ratio)
    values = {
        "gradient_norm": _finite_or(stats.l2, 0.0),
        "gradient_health": _finite_or(stats.health, 0.0),
        "gradient_measured": measured,
        "gradient_vanishing": stats.vanishing,
        "gradient_exploding": stats.exploding,
        "gradient_ratio": torch.where(finite, ratio, slots.gradient_ratio),
        "gradient_ratio_known": slots.gradient_ratio_known | finite,
    }
    return set_where(slots, measured, values)


def age_memories(slots: Slots) -> Slots:
    """Slots after the action: gradient health of before, contributions one env-step older."""
    measured = slots.gradient_measured
    return slots.replace(
        previous_health=torch.where(measured, slots.gradient_health, slots.previous_health),
        previous_health_known=slots.previous_health_known | measured,
        contribution_age=slots.contribution_age + slots.contribution_known,
    )


def stable_accuracy(signals: Signals, window: int | Tensor) -> Tensor:
    """float64 [N]: smallest of the last `window` accuracies (at most HISTORY)."""
    history = signals.accuracy_history
    lag = torch.arange(history.shape[1], 0, -1, device=history.device)
    counted = (lag <= signals.step.unsqueeze(-1)) & (lag <= window)
    return torch.where(counted, history, torch.inf).amin(-1)


def push(history: Tensor, value: Tensor) -> Tensor:
    """`history` [N, H] shifted left by one, with `value` [N] as its newest entry."""
    return torch.cat((history[:, 1:], value.unsqueeze(-1)), -1)


def _finite_or(value: Tensor, otherwise: Tensor | float) -> Tensor:
    return torch.where(torch.isfinite(value), value, otherwise)
