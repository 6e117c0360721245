"""Episodes that end before their last env-step, env by env (EarlyStopConfig, off by default).

An early end cuts the episode off (truncates it): env/step.py keeps the state right behind the env's
last action, from which the bootstrap value is computed, without a device synchronisation.
"""

import torch
from torch import Tensor

from esper_soa.config.env import EarlyStopConfig
from esper_soa.state import EnvState


class Cause:
    """Why an episode ended early."""

    NONE, PLATEAU, DIVERGED, LENGTH = range(4)


CAUSE_NAMES = ("", "plateau", "diverged", "length")


def advance(
    state: EnvState,
    cfg: EarlyStopConfig,
    max_steps: int | Tensor,
    length: int | Tensor | None = None,
) -> EnvState:
    """The state [N] behind an env-step's action, with the episodes that end here marked as over.

    Plateau: the validation accuracy has not risen by more than cfg.min_delta above the best that
    counted, for cfg.patience env-steps in a row. Diverged: the env went back to its snapshot
    cfg.rollbacks times. Length: int64 [N], env-steps. The last env-step of all is no early end.
    """
    ending = state.ending
    signals = state.signals
    improved = signals.val_accuracy > ending.best + cfg.min_delta
    since = torch.where(improved, 0, ending.since + 1)
    before_last = signals.step < max_steps
    cause = torch.zeros_like(ending.cause)
    stalled = (since >= cfg.patience) & (cfg.patience > 0)
    cause = torch.where(stalled, Cause.PLATEAU, cause)
    lost = (state.totals.rollbacks.sum(1) >= cfg.rollbacks) & (cfg.rollbacks > 0)
    cause = torch.where(lost, Cause.DIVERGED, cause)
    cause = torch.where(before_last & (signals.step >= cfg.min_steps), cause, Cause.NONE)
    if isinstance(length, Tensor):
        cause = torch.where(before_last & (signals.step >= length), Cause.LENGTH, cause)
    best = torch.where(improved, signals.val_accuracy, ending.best)
    return state.replace(ending=ending.replace(best=best, since=since, cause=cause))
