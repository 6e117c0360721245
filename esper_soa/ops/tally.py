"""What happened during a round, summed on the device and read by the host once, for metrics.jsonl and the final table.

Filled by the trainer after every env-step; `pulse` is the one small copy per env-step that the progress bar reads late.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.governor import REASON_NAMES
from esper_soa.env.parameters import total_params
from esper_soa.env.reward_records import TERM_NAMES, RewardTerms
from esper_soa.ops.telemetry import Json
from esper_soa.state import LEDGER_FLOAT, ActionOutcome, EnvState, Measurements, ParameterCounts
from esper_soa.vocabulary import OP_NAMES

COUNTS = ("germinated", "blended", "fossilized", "contributing", "pruned")


class RoundResult(NamedTuple):
    """One round on the host."""

    accuracies: list[float]  # per env at the last env-step, percent
    parameters: list[float]  # per env at the last env-step
    rewards: list[float]  # per env, sum of raw rewards
    seeds: dict[str, int]  # by COUNTS, and "rollbacks", over all envs
    alpha_rows: float  # mean number validated per env and env-step
    record: dict[str, Json]  # the round's part of a line of metrics.jsonl


class Tally:
    """Sums over the env-steps of a round, on the device."""

    def __init__(self, device: torch.device) -> None:
        def zeros(count: int) -> Tensor:
            return torch.zeros(count, dtype=LEDGER_FLOAT, device=device)

        self.terms = zeros(len(TERM_NAMES))
        self.ops, self.successes = zeros(len(OP_NAMES)), zeros(len(OP_NAMES))
        self.rows = zeros(1)
        self.env_steps = 0

    def add_(self, measured: Measurements, terms: RewardTerms, outcome: ActionOutcome) -> None:
        """Count one env-step of N envs."""
        self.terms += torch.stack([terms.get(name).mean() for name in TERM_NAMES])
        choices = torch.arange(len(OP_NAMES), device=self.ops.device)
        chosen = outcome.effective_op[:, None] == choices
        self.ops += chosen.sum(0)
        self.successes += (chosen & outcome.success[:, None]).sum(0)
        self.rows += (measured.subset >= 0).sum()
        self.env_steps += measured.subset.shape[0]

    def read(self, state: EnvState, counts: ParameterCounts) -> RoundResult:
        """One packed copy to the host at the end of a round; `state` is the last ledger."""
        signals, totals = state.signals, state.totals
        per_env = torch.stack(
            [signals.val_accuracy, signals.val_loss, signals.train_loss, signals.train_accuracy, totals.reward,
             total_params(state.slots, counts), *(totals.get(name).to(LEDGER_FLOAT) for name in COUNTS)]
        )  # fmt: skip
        sums = [self.terms, self.ops, self.successes, totals.rollbacks.sum(0), self.rows, per_env.flatten()]
        packed = torch.cat(sums).cpu()
        terms, ops, successes, reasons, rows, rest = packed.split([part.numel() for part in sums])
        accuracy, loss, train_loss, train_accuracy, reward, parameters, *seeds = rest.view_as(per_env)
        counted = {name: int(column.sum()) for name, column in zip(COUNTS, seeds, strict=True)}
        counted["rollbacks"] = int(reasons.sum())
        by_reason = {name: int(count) for name, count in zip(REASON_NAMES, reasons, strict=True)}
        alpha_rows = float(rows) / self.env_steps
        record: dict[str, Json] = {
            "accuracy": {"mean": float(accuracy.mean()), "min": float(accuracy.min()), "max": float(accuracy.max())},
            "val_loss": float(loss.mean()),
            "train_loss": float(train_loss.mean()),
            "train_accuracy": float(train_accuracy.mean()),
            "reward": {"mean": float(reward.mean()), "min": float(reward.min()), "max": float(reward.max())},
            "reward_terms": dict(zip(TERM_NAMES, terms.tolist(), strict=True)),
            "parameters": float(parameters.mean()),
            "seeds": {name: count for name, count in counted.items() if name != "rollbacks"},
            "rollbacks": {"total": counted["rollbacks"]} | {name: by_reason[name] for name in REASON_NAMES[1:]},
            "ops": dict(zip(OP_NAMES, ops.tolist(), strict=True)),
            "ops_successful": dict(zip(OP_NAMES, successes.tolist(), strict=True)),
            "alpha_rows": alpha_rows,
        }
        return RoundResult(
            accuracy.tolist(), parameters.tolist(), reward.tolist(), counted, alpha_rows, record
        )  # fmt: skip


def pulse(state: EnvState) -> Tensor:
    """[2] on the host, not yet waited for: mean validation accuracy and mean reward of the episode so far."""
    values = torch.stack([state.signals.val_accuracy.mean(), state.totals.reward.mean()])
    return values.to("cpu", non_blocking=True)
