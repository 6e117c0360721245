"""Settings of earlier versions that are gone, and what to do instead: one table of all. No torch.

Commands refuse them by name. Settings on record may have one with the value that holds in all runs
now, which changes nothing.
"""

from collections.abc import Mapping
from typing import NamedTuple

from esper_soa.system.errors import UserError, one_line
from esper_soa.vocabulary import HEAD_NAMES


class Gone(NamedTuple):
    """A setting that is gone."""

    value: object  # that holds in all runs now
    instead: str  # what to do, in a sentence


ANOMALY_LIMITS = (
    "Leave it out: it is a constant. telemetry.anomaly.enabled=false looks for no anomaly."
)
HEURISTIC_RULES = "Leave it out, or change the rules in an agent of your own."
ILLEGAL_ACTIONS = "Leave it out: no action that it is for is legal."
MIN_ENTROPY = dict.fromkeys(HEAD_NAMES, 0.08) | {"slot": 0.10, "blueprint": 0.05, "tempo": 0.05}
GONE = {
    "reward.split": Gone([], "Give the list to reward.mode, as in reward.mode=[shaped,net]."),
    "reward.germinate_with_seed_penalty": Gone(-0.3, ILLEGAL_ACTIONS),
    "reward.invalid_fossilize_penalty": Gone(-1.0, ILLEGAL_ACTIONS),
    "reward.prune_fossilized_penalty": Gone(-1.0, ILLEGAL_ACTIONS),
    "policy.ppo.contribution_clip": Gone(10.0, "Leave it out: it is a constant."),
    "policy.heuristic.embargo_steps_after_prune": Gone(5, HEURISTIC_RULES),
    "policy.heuristic.blueprint_penalty_on_prune": Gone(2.0, HEURISTIC_RULES),
    "policy.heuristic.penalty_decay": Gone(0.5, HEURISTIC_RULES),
    "policy.heuristic.penalty_threshold": Gone(3.0, HEURISTIC_RULES),
    "policy.heuristic.ransomware_contribution": Gone(0.1, HEURISTIC_RULES),
    "policy.heuristic.ransomware_total_improvement": Gone(0.0, HEURISTIC_RULES),
    "telemetry.anomaly.max_ratio": Gone(5.0, ANOMALY_LIMITS),
    "telemetry.anomaly.min_ratio": Gone(0.1, ANOMALY_LIMITS),
    "telemetry.anomaly.max_ratio_error_first": Gone(1e-3, ANOMALY_LIMITS),
    "telemetry.anomaly.max_value_loss": Gone(5.0, ANOMALY_LIMITS),
    "telemetry.anomaly.max_bellman_error": Gone(5.0, ANOMALY_LIMITS),
    "telemetry.anomaly.min_explained_variance": Gone(-0.5, ANOMALY_LIMITS),
    "telemetry.anomaly.min_lstm_rms": Gone(1e-6, ANOMALY_LIMITS),
    "telemetry.anomaly.max_gradient_drift": Gone(4.0, ANOMALY_LIMITS),
    "telemetry.anomaly.gradient_momentum": Gone(0.9, ANOMALY_LIMITS),
    "telemetry.anomaly.entropy_collapse": Gone(MIN_ENTROPY, ANOMALY_LIMITS),
    "telemetry.anomaly.patience": Gone(3, ANOMALY_LIMITS),
    "telemetry.anomaly.entropy_recovery": Gone(1.5, ANOMALY_LIMITS),
}


def gone_text(name: str) -> str:
    """The message to a user who gives the setting `name` of GONE."""
    return f"{name}: this setting is gone. {GONE[name].instead}"


def drop_gone(settings: Mapping[str, object], where: str, path: str = "") -> dict[str, object]:
    """Nested settings without those of GONE; raises UserError for one with another value.

    settings: on record, all below the dotted `path`. where: what has them, in the message.
    """
    kept: dict[str, object] = {}
    for key, value in settings.items():
        name = path + key
        if name in GONE:
            if value != GONE[name].value:
                raise UserError(f"{where} has {name}={one_line(value)}. {gone_text(name)}")
        elif name == "worlds" and isinstance(value, Mapping):
            kept[key] = {task: drop_gone(world, where) for task, world in value.items()}
        elif isinstance(value, Mapping):
            kept[key] = drop_gone(value, where, f"{name}.")
        else:
            kept[key] = value
    return kept


def join_split(settings: Mapping[str, object]) -> dict[str, object]:
    """Nested settings on record with the list of reward.split as that of reward.mode."""
    joined = dict(settings)
    reward = settings.get("reward")
    if isinstance(reward, Mapping) and reward.get("split"):
        joined["reward"] = {**reward, "mode": f"[{','.join(reward['split'])}]", "split": []}
    worlds = settings.get("worlds")
    if isinstance(worlds, Mapping):
        joined["worlds"] = {task: join_split(world) for task, world in worlds.items()}
    return joined
