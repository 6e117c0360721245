"""Watches the diagnostics of policy updates, says when something goes wrong, and what to do.

The names go to metrics.jsonl, the advice to the log. Diagnostics that an update does not report are
not judged; limits are in anomalies.yaml and here. Needs no torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import yaml

from esper_soa.config.settings import AnomalyConfig
from esper_soa.vocabulary import HEAD_NAMES

MAX_NAMED = 5  # diagnostics named in one message
ANOMALY_RULES = yaml.safe_load(
    Path(__file__).with_name("anomalies.yaml").read_text(encoding="utf-8")
)
# Updates in a row before entropy, variance, value loss, Bellman error and gradient drift count.
PATIENCE = 3
MAX_GRADIENT_DRIFT = 4.0  # of the gradient norm from its running mean, relative
GRADIENT_MOMENTUM = 0.9  # of that running mean
# Entropy of a head, in units of that of a uniform choice, below which it has collapsed.
MIN_ENTROPY = dict.fromkeys(HEAD_NAMES, 0.08) | {"slot": 0.10, "blueprint": 0.05, "tempo": 0.05}
ENTROPY_RECOVERY = 1.5  # times that limit, above which a head has recovered


@dataclass
class WatchState:
    """State of the watch, for checkpoints."""

    active: list[str] = field(default_factory=list)  # names of what is going on
    streaks: dict[str, int] = field(default_factory=dict)  # unhealthy updates in a row, by name
    explored: list[str] = field(default_factory=list)  # heads whose entropy has been high
    gradient_mean: float | None = None  # running mean of the gradient norm
    full_rounds: int = 0  # rounds to come that telemetry records at level full


class Watch(WatchState):
    """Remembers which anomalies last, so that each is reported once, when it begins."""

    def __init__(self, cfg: AnomalyConfig, state: WatchState = WatchState()) -> None:
        """state: where it goes on."""
        super().__init__(**asdict(state))
        self.cfg = cfg

    def look(self, update: Mapping[str, float]) -> dict[str, str]:
        """Anomalies that begin with this update, messages by name; `active` has all that go on."""
        if not self.cfg.enabled or not update:
            return {}
        rest = chain(self._limits(update), self._entropy(update), self._gradient_drift(update))
        findings = self._skipped(update) | dict(rest)
        new = {name: message for name, message in findings.items() if name not in self.active}
        self.active = list(findings)
        return new

    def escalate(self, rounds: int) -> None:
        """Count a round; where an anomaly began in it (`rounds` > 0), so many follow in full."""
        self.full_rounds = rounds or max(self.full_rounds - 1, 0)

    def _skipped(self, update: Mapping[str, float]) -> dict[str, str]:
        """Updates without a step, and numbers that are not finite in those with one."""
        skipped = update.get("not_finite_steps", 0.0)
        if not update.get("steps", 1.0):
            moved = "the policy moved too far before the first"
            text = f"no gradient step was taken: {'no gradient was finite' if skipped else moved}."
            return {"skipped_update": f"{text} If it happens again, lower policy.ppo.lr."}
        names = [name for name, value in update.items() if not math.isfinite(value)]
        if not names and not skipped:
            return {}
        what = ", ".join(names[:MAX_NAMED]) if names else f"the gradient of {skipped:.0f} step(s)"
        advice = "Look at reward and val_loss of this round in metrics.jsonl; if they are sound, "
        return {"not_finite": f"{what} is not finite. {advice}lower policy.ppo.lr."}

    def _limits(self, update: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        for name, rule in ANOMALY_RULES.items():
            value = update.get(rule["metric"], math.nan)
            side = "above" if "above" in rule else "below"
            limit = vars(self.cfg).get(rule[side], rule[side])
            over = value > limit if side == "above" else value < limit  # False for NaN
            if self._streak(name, over) >= (PATIENCE if rule.get("patient") else 1):
                yield name, f"{rule['metric']} is {value:.3g}, {side} {limit:g}. {rule['advice']}"

    def _entropy(self, update: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """Heads that explored in this run and hardly do any more; unused ones stay as judged."""
        for head in HEAD_NAMES:
            name = f"entropy_collapse/{head}"
            limit = MIN_ENTROPY[head]
            entropy = update.get(f"entropy/{head}", math.nan)
            is_used = update.get(f"head_share/{head}", 0.0) > 0
            recovery_limit = limit * ENTROPY_RECOVERY
            if is_used and entropy > recovery_limit and head not in self.explored:
                self.explored.append(head)
            if is_used:
                low = entropy < (recovery_limit if name in self.active else limit)
                self._streak(name, low and head in self.explored)
            if self.streaks.get(name, 0) >= PATIENCE:
                text = f"entropy/{head} is {entropy:.3g}: low (limit {limit:g}) for "
                text += f"{self.streaks[name]} updates"
                advice = f"Raise policy.ppo.entropy_coef or policy.ppo.probability_floor.{head}."
                yield name, f"{text}. {advice}"

    def _gradient_drift(self, update: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        """The gradient norm far from its running mean, which is taken from before this update."""
        norm = update.get("gradient_norm", math.nan)
        if not math.isfinite(norm) or not update.get("steps", 1.0):
            return
        mean = self.gradient_mean
        if mean is None:
            self.gradient_mean = norm
            return
        self.gradient_mean = GRADIENT_MOMENTUM * mean + (1 - GRADIENT_MOMENTUM) * norm
        drift = abs(norm - mean) / (mean + 1e-8)
        if self._streak("gradient_drift", drift > MAX_GRADIENT_DRIFT) < PATIENCE:
            return
        text = f"the gradient norm is {norm:.3g}, its running mean {mean:.3g} (drift {drift:.2f}, "
        text += f"above {MAX_GRADIENT_DRIFT:g}) for {PATIENCE} updates or more."
        yield "gradient_drift", f"{text} Lower policy.ppo.lr."

    def _streak(self, name: str, unhealthy: bool) -> int:
        """Updates in a row, this one included, that were unhealthy."""
        self.streaks[name] = self.streaks.get(name, 0) + 1 if unhealthy else 0
        return self.streaks[name]
