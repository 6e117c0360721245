"""The observation vector of the policy ("Obs V3"): 23 features of the env and 31 of every slot.

Computed in float64, returned in float32, and always finite. Normalisation belongs to the agent.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_soa.state import EnvState, Observation, Ramp, Signals, Slots, stage_in
from esper_soa.vocabulary import OP_NAMES, STAGE_NAMES, AlphaMode, Blueprint, Stage

SYMLOG_SCALE = 7.0  # symlog(1000) is about 7
PERCENT = 100.0
POINTS = 10.0  # percent points of contribution or interaction that read as 1
TEMPO_SCALE = 12.0
OBSERVED_HISTORY = 5
UNKNOWN = -1.0  # stands for a value that was never measured
FRESHNESS_DECAY = 0.995  # per env-step since the contribution was measured
UNOBSERVED = (Stage.RETIRED, Stage.EMPTY)
OBSERVED_STAGES = tuple(code for code in range(len(STAGE_NAMES)) if code not in UNOBSERVED)
_LAGS = range(OBSERVED_HISTORY - 1, -1, -1)
ENV_FEATURES = (
    *("step", "val_loss", "val_accuracy"),
    *(f"val_loss_{lag}_ago" for lag in _LAGS),
    *(f"val_accuracy_{lag}_ago" for lag in _LAGS),
    *("training_share", "blending_share", "holding_share", "last_success"),
    *(f"last_op_{name}" for name in OP_NAMES),
)
SLOT_FEATURES = (
    "active",
    *(f"stage_{STAGE_NAMES[stage]}" for stage in OBSERVED_STAGES),
    *("alpha", "contribution", "contribution_velocity", "tempo", "alpha_target", "alpha_mode"),
    *("ramp_length", "ramp_done", "ramp_left", "alpha_velocity", "blend", "interaction_sum"),
    *("gradient_norm", "gradient_health", "gradient_vanishing", "gradient_exploding"),
    *("previous_health", "stage_age", "contribution_freshness", "seed_age"),
)
NUM_ENV_FEATURES = len(ENV_FEATURES)
NUM_SLOT_FEATURES = len(SLOT_FEATURES)
FEATURE_LIMIT = 102.0  # beyond symlog / 7 of the largest float64; only infinities reach it


def observe(
    state: EnvState, max_steps: int | Tensor, settings: Sequence[Tensor] = ()
) -> Observation:
    """Observation of N envs; `max_steps` is the number of env-steps of an episode.

    settings: float64 [N] each, those of the env that the policy observes, as `setting_feature`.
    A feature that is not finite reads 0 where it is NaN and FEATURE_LIMIT where it is infinite.
    """
    slots = state.slots
    ramp = state.ramp
    env = env_features(state.signals, state.signals.step, slots.stage, max_steps=max_steps)
    left = ramp.length - ramp.done
    seeds = slot_features(slots, ramp, alpha_velocity(ramp), left=left, max_steps=max_steps)
    observed = [setting_feature(value).unsqueeze(-1) for value in settings]
    features = torch.cat((env, *observed, seeds.flatten(-2)), -1)
    is_number = features == features  # isnan and nan_to_num do not vectorise when compiled
    features = torch.where(is_number, features, 0.0).clamp(-FEATURE_LIMIT, FEATURE_LIMIT)
    return Observation(
        features=features.to(torch.float32),
        blueprints=torch.where(slots.empty, Blueprint.NONE, slots.blueprint),
        batch_size=features.shape[:1],
    )


def feature_names(slot_names: tuple[str, ...], settings: Sequence[str] = ()) -> tuple[str, ...]:
    """Name of every feature, in order; settings: those that the policy observes."""
    seeds = (f"{name}.{feature}" for name in slot_names for feature in SLOT_FEATURES)
    return (*ENV_FEATURES, *settings, *seeds)


def setting_feature(value: Tensor) -> Tensor:
    """Its decimal logarithm over 6, of magnitudes from 1e-6, with its sign: 0.001 reads 0.5."""
    return value.sign() * (value.abs().clamp(min=1e-6).log10() / 6 + 1)


def alpha_velocity(ramp: Ramp) -> Tensor:
    """Alpha per tick of a moving ramp [N, S], constant along it; 0 when the ramp rests."""
    speed = (ramp.target - ramp.start) / ramp.length.clamp(min=1)
    return torch.where(ramp.mode == AlphaMode.HOLD, 0.0, speed)


def env_features(
    signals: Signals, num_recorded: Tensor, stage: Tensor, max_steps: int | Tensor
) -> Tensor:
    """float64 [N, 23]: progress, losses and accuracies, stage shares, last action.

    num_recorded: int64 [N], entries of the histories that hold; older ones read UNKNOWN.
    """
    lag = torch.arange(OBSERVED_HISTORY - 1, -1, -1, device=stage.device)
    recorded = lag < num_recorded.unsqueeze(-1)
    losses = _symlog(signals.loss_history[:, -OBSERVED_HISTORY:]) / SYMLOG_SCALE
    accuracies = signals.accuracy_history[:, -OBSERVED_HISTORY:] / PERCENT
    ops = torch.arange(len(OP_NAMES), device=stage.device)
    is_frozen = stage_in(stage, (Stage.HOLDING, Stage.FOSSILIZED))
    shares = (stage == Stage.TRAINING, stage == Stage.BLENDING, is_frozen)
    loss = _symlog(signals.val_loss) / SYMLOG_SCALE
    parts = (
        torch.stack((_progress(signals.step, max_steps), loss, signals.val_accuracy / PERCENT), -1),
        torch.where(recorded, losses, UNKNOWN),
        torch.where(recorded, accuracies, UNKNOWN),
        torch.stack([share.to(losses.dtype).mean(-1) for share in shares], -1),
        signals.last_success.unsqueeze(-1).to(losses.dtype),
        (signals.last_op.unsqueeze(-1) == ops).to(losses.dtype),
    )
    return torch.cat(parts, -1)


def slot_features(
    slots: Slots, ramp: Ramp, speed: Tensor, left: Tensor, max_steps: int | Tensor
) -> Tensor:
    """float64 [N, S, 31]: stage, alpha, contribution, gradients, ages; zeros where a slot is empty.

    A contribution of 0 stands for one that was never measured; only its freshness tells them apart.
    speed: float64 [N, S], alpha per tick; left: int64 [N, S], ticks until the ramp arrives.
    """
    float_type = slots.alpha.dtype
    freshness = FRESHNESS_DECAY ** slots.contribution_age.to(float_type)
    measured = slots.gradient_measured
    norm = _symlog(slots.gradient_norm) / SYMLOG_SCALE
    features = (
        ~slots.empty,
        *(slots.stage == stage for stage in OBSERVED_STAGES),
        slots.alpha,
        _points(slots.contribution),
        _points(slots.contribution_velocity),
        slots.tempo / TEMPO_SCALE,
        ramp.target,
        ramp.mode / AlphaMode.DOWN,
        _progress(ramp.length, max_steps),
        _progress(ramp.done, max_steps),
        _progress(left, max_steps),
        speed.clamp(-1.0, 1.0),
        (slots.blend - 1) / 2.0,
        _points(slots.interaction_sum),
        torch.where(measured & torch.isfinite(slots.gradient_norm), norm, 0.0),
        torch.where(measured, slots.gradient_health.clamp(max=1.0), 0.0),
        measured & slots.gradient_vanishing,
        measured & slots.gradient_exploding,
        torch.where(slots.previous_health_known, slots.previous_health, UNKNOWN),
        _progress(slots.stage_age, max_steps),
        torch.where(slots.contribution_known, freshness, UNKNOWN),
        _progress(slots.seed_age, max_steps),
    )
    stacked = torch.stack([feature.to(float_type) for feature in features], -1)
    return torch.where(slots.empty.unsqueeze(-1), 0.0, stacked)


def _symlog(value: Tensor) -> Tensor:
    return value.sign() * value.abs().log1p()


def _points(value: Tensor) -> Tensor:
    """Percent points on a scale on which 10 reads 1, within [-1, 1]."""
    return (value / POINTS).clamp(-1.0, 1.0)


def _progress(count: Tensor, max_steps: int | Tensor) -> Tensor:
    """Env-steps or ticks as a share of the episode, at most 1."""
    return count.clamp(max=max_steps).to(torch.float64) / max_steps
