"""The governor: detects divergence of a host, and rolls its env's state back.

`watch` and `discard_panicked` come before anything is recorded, `roll_back` where actions are
carried out. The weights are nets/seeds/snapshot.py's business.
"""

import math

import torch
from torch import Tensor

from esper_soa.config.env import NUM_REASONS, GovernorConfig
from esper_soa.env.lifecycle import prune_now
from esper_soa.env.masks import allowed_choices
from esper_soa.env.reward_modes import RewardTerms, add_terms, no_terms
from esper_soa.env.signals import push
from esper_soa.state import EnvState, Guard, Masks, Measurements, known_false, with_fields
from esper_soa.vocabulary import HEADS, Op, names_of

RECOVERED_SHARE = 0.6  # mean loss below this share of the chance loss: the host has learned
CHANCE_BAND = 0.065  # share of the chance loss within which a loss counts as chance


class PanicReason:
    """Reason of a panic. DIVERGED panics only after enough in a row."""

    NONE, NOT_FINITE, COLLAPSED_TO_CHANCE, DIVERGED = range(4)


REASON_NAMES = names_of(PanicReason)


def watch(
    state: EnvState, loss: Tensor, num_classes: int, cfg: GovernorConfig
) -> tuple[EnvState, Tensor]:
    """Judge the validation loss [N] of this env-step, before it is recorded.

    Returns the state, whose `guard` holds the verdict, and bool [N]: envs of which a snapshot is to
    be taken now. One is due every `snapshot_steps` env-steps and after a fossilization, and waits
    until the env is healthy: it neither panics nor is in a run of divergent losses.
    """
    guard, panic, reason = check_panic(state.guard, loss, math.log(num_classes), cfg=cfg)
    due = guard.snapshot_due | ((state.signals.step + 1) % cfg.snapshot_steps == 0)
    healthy = ~panic & (guard.anomalies == 0)
    guard = guard.replace(
        anomalies=torch.where(panic, 0, guard.anomalies),
        reason=reason,
        panic=panic,
        snapshot_due=due & ~healthy,
    )
    return with_fields(state, guard=guard), due & healthy


def discard_panicked(measured: Measurements, state: EnvState) -> Measurements:
    """`measured` without the values of panicking hosts: losses NaN, accuracies as last recorded.

    Nothing of its seeds counts as measured, so attribution, state and learner get nothing of it.
    """
    panic = state.guard.panic
    if known_false(panic):
        return measured
    unaffected = ~panic[:, None]
    return measured.replace(
        train_loss=torch.where(panic, torch.nan, measured.train_loss),
        train_accuracy=torch.where(panic, torch.nan, measured.train_accuracy),
        val_loss=torch.where(panic, torch.nan, measured.val_loss),
        accuracy=torch.where(unaffected, measured.accuracy, state.signals.val_accuracy[:, None]),
        ablated=measured.ablated & unaffected,
        gradients=measured.gradients.replace(measured=measured.gradients.measured & unaffected),
    )


def allow_only_wait(masks: Masks, where: Tensor) -> Masks:
    """`masks` that leave the envs `where` (bool [N]) nothing but WAIT."""
    if known_false(where):
        return masks
    allowed = ~where[:, None] | (torch.arange(masks.op.shape[1], device=where.device) == Op.WAIT)
    op = masks.op & allowed
    heads = [head for head in HEADS if head.fixed]
    fixed = {head.name: masks.get(head.name) & allowed_choices(head, op) for head in heads}
    return masks.replace(op=op, slot_by_op=masks.slot_by_op & allowed[:, :, None], **fixed)


def roll_back(
    state: EnvState, cfg: GovernorConfig, prune_penalty: float | Tensor
) -> tuple[EnvState, RewardTerms]:
    """The env-step of an env that is rolled back to its snapshot, computed for all N envs.

    Its seeds short of fossils are removed and counted, each for `prune_penalty` with the next
    reward; the reward of this env-step is the death penalty alone. Nothing else happens: no action,
    no tick. The removal is not charged as an alpha move, as it was not the decision maker's.
    """
    slots, ramp = prune_now(state.slots, state.ramp, torch.ones_like(state.slots.newborn))
    is_removed = state.slots.live & ~slots.live
    slots = slots.replace(rent_params=torch.where(is_removed, 0.0, slots.rent_params))
    totals = state.totals
    reasons = torch.arange(NUM_REASONS, device=is_removed.device)
    penalty = -(torch.zeros_like(totals.reward) + cfg.death_penalty)
    totals = totals.replace(
        reward=totals.reward + penalty,
        # float32, as a number times integers is
        pending_penalty=totals.pending_penalty + prune_penalty * is_removed.sum(1).float(),
        rollbacks=totals.rollbacks + (state.guard.reason[:, None] == reasons),
    )
    signals = state.signals.replace(
        last_op=torch.full_like(state.signals.last_op, Op.WAIT),
        last_success=torch.zeros_like(state.signals.last_success),
    )
    after = state.replace(slots=slots, ramp=ramp, totals=totals, signals=signals)
    return after, add_terms(no_terms(penalty), {"rollback_penalty": penalty})


def check_panic(
    guard: Guard, loss: Tensor, chance_loss: Tensor | float, cfg: GovernorConfig
) -> tuple[Guard, Tensor, Tensor]:
    """The reference's rule on validation losses [N]: guard, panic bool [N] and PanicReason [N].

    The first that applies decides. Not finite: panic at once. Collapsed: a host that had learned is
    back at the loss of guessing, panic at once. Diverged: above the absolute, the statistical and
    the relative threshold, panic at the `min_panics`-th in a row. Only an ordinary loss enters the
    window, and only one that was judged ends a run of divergent losses.
    """
    finite = torch.isfinite(loss)
    size = guard.losses.shape[-1]
    # mean and population deviation of the losses in the window, 0 where there is none
    counted = torch.arange(size, device=loss.device) >= size - guard.count.unsqueeze(-1)
    number = guard.count.clamp(min=1)
    mean = torch.where(counted, guard.losses, 0.0).sum(-1) / number
    spread = torch.where(counted, guard.losses - mean.unsqueeze(-1), 0.0)
    deviation = (spread.square().sum(-1) / number).sqrt()
    is_judged = finite & (guard.count >= cfg.min_samples)
    learned = mean < RECOVERED_SHARE * chance_loss
    collapsed = is_judged & learned & ((loss - chance_loss).abs() < CHANCE_BAND * chance_loss)
    is_outlier = (loss > mean + cfg.sensitivity * deviation) & (loss > cfg.multiplier * mean)
    diverged = is_judged & ~collapsed & (loss > cfg.absolute_threshold) & is_outlier
    ordinary = finite & ~collapsed & ~diverged
    anomalies = torch.where(ordinary & is_judged, 0, guard.anomalies + diverged)
    panic = ~finite | collapsed | (diverged & (anomalies >= cfg.min_panics))
    reason = torch.where(diverged, PanicReason.DIVERGED, PanicReason.NONE)
    reason = torch.where(collapsed, PanicReason.COLLAPSED_TO_CHANCE, reason)
    reason = torch.where(finite, reason, PanicReason.NOT_FINITE)
    losses = torch.where(ordinary.unsqueeze(-1), push(guard.losses, loss), guard.losses)
    count = (guard.count + ordinary).clamp(max=losses.shape[-1])
    return guard.replace(losses=losses, count=count, anomalies=anomalies), panic, reason
