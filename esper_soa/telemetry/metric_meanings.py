"""Every number that a run writes: name, unit, formula, what is normal, and what to do where it is
not.

docs/metrics.md is made from here by pages.py; a test holds that every key of a run's files is
listed. `<head>`, `<op>` and the like stand for each of them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from esper_soa.agent.diagnostics import IMITATION, MEANING
from esper_soa.telemetry.schema import REWARD_TERMS, SLOTS, STEPS, Column

LR = "lower `policy.ppo.lr`, or `policy.ppo.epochs`"
CRITIC = "train longer; if it stays, raise `policy.ppo.epochs` or lower `policy.ppo.lr`"
FINE = "nothing to be done"
SEEN = "compare with the control of the run"


class Metric(NamedTuple):
    """A number, and how to read it."""

    name: str
    unit: str
    formula: str
    normal: str
    remedy: str


ROUND = (
    Metric(
        "round", "", "rounds done, this one included", "1, 2, 3, ...", "a gap is a damaged file"
    ),
    Metric(
        "env_steps",
        "env-steps",
        "played so far, of all envs: round x envs x steps, fewer with `early_stop`",
        "grows evenly",
        "as `round`",
    ),
    Metric(
        "accuracy.mean",
        "percent",
        "validation accuracy at the last env-step: mean over envs",
        "above chance, rising over rounds",
        SEEN,
    ),
    Metric(
        "accuracy.min",
        "percent",
        "of the worst env",
        "within 20 points of the mean",
        "ask `events` for rollbacks in that env",
    ),
    Metric("accuracy.max", "percent", "of the best env", "above the mean", FINE),
    Metric(
        "val_loss",
        "nats",
        "cross-entropy on V images at the last env-step: mean over envs",
        "below that of guessing, ln(classes)",
        "lower `task.host_lr`; more `steps`",
    ),
    Metric(
        "train_loss",
        "nats",
        "mean of the batches of the last env-step's training",
        "below `val_loss`, falling",
        "as `val_loss`",
    ),
    Metric(
        "train_accuracy",
        "percent",
        "of the last env-step's training images",
        "above `accuracy.mean`",
        "far above it: hosts overfit; raise `train_samples` or `data.augment`",
    ),
    Metric(
        "reward.mean",
        "reward",
        "sum over the episode of raw rewards: mean over envs",
        "rising over rounds",
        "look at `reward_terms` for what is paid",
    ),
    Metric(
        "reward.min",
        "reward",
        "of the worst env",
        "not far below the mean",
        "ask `rewards` for its terms",
    ),
    Metric("reward.max", "reward", "of the best env", "above the mean", FINE),
    Metric(
        "reward_terms.<term>",
        "reward",
        "mean over envs of its sum over the episode; all terms make `reward.mean`",
        "none is far larger than all others together",
        "change its weight under `reward.`",
    ),
    Metric(
        "reward_split.<mode>.envs",
        "envs",
        "paid by this mode, with `reward.split`",
        "envs / modes",
        FINE,
    ),
    Metric(
        "reward_split.<mode>.accuracy",
        "percent",
        "as `accuracy.mean`, over these envs",
        "as `accuracy.mean`",
        SEEN,
    ),
    Metric(
        "reward_split.<mode>.reward",
        "reward",
        "as `reward.mean`, over these envs; each mode has its own scale",
        "rising over rounds",
        "as `reward.mean`",
    ),
    Metric(
        "reward_split.<mode>.parameters",
        "parameters",
        "as `parameters`, over these envs",
        "as `parameters`",
        "as `parameters`",
    ),
    Metric(
        "parameters",
        "parameters",
        "host and live seeds at the end: mean over envs",
        "between 1 and 2 hosts",
        "too large: raise `reward.rent_weight`",
    ),
    Metric(
        "train_flop",
        "FLOP",
        "all training of an episode: mean over envs; nets/model/flops.py",
        "steady",
        "as `parameters`",
    ),
    Metric(
        "outcome.success",
        "share",
        "envs that ended with at least 80 percent accuracy",
        "rising",
        "more `steps`",
    ),
    Metric(
        "outcome.stability",
        "",
        "1 / (1 + variance of the last rewards): mean over envs",
        "above 0.5",
        "look for panics in `events`",
    ),
    Metric(
        "outcome.param_ratio",
        "hosts",
        "parameters at the end over those of the host: mean over envs",
        "1 to 2",
        "as `parameters`",
    ),
    Metric(
        "outcome.compute_cost",
        "hosts",
        "1 + what the fossils cost more, by the reference's multipliers",
        "1 to 2",
        "as `parameters`",
    ),
    Metric(
        "seeds.germinated",
        "seeds",
        "germinated in all envs",
        "above 0",
        "0: the policy only waits; see `ops`",
    ),
    Metric(
        "seeds.blended",
        "seeds",
        "that began to blend",
        "a third of those germinated or more",
        "ask `events` for gates that refused (G2)",
    ),
    Metric(
        "seeds.fossilized",
        "seeds",
        "fossilised",
        "above 0 after a few rounds",
        "0: ask `events` for G3 and G5; more `steps`",
    ),
    Metric(
        "seeds.contributing",
        "seeds",
        "fossils under which accuracy rose by a point since germination",
        "most fossils",
        "raise `gates.min_fossilize_contribution` with strict gates",
    ),
    Metric(
        "seeds.pruned",
        "seeds",
        "removed, by actions or rollbacks",
        "fewer than germinated",
        "nearly all: `seed_lifecycle` says how old they were",
    ),
    Metric(
        "blueprints.<blueprint>.germinated",
        "seeds",
        "of this blueprint",
        "several blueprints are tried",
        "one alone: raise `policy.ppo.entropy_coef`",
    ),
    Metric(
        "blueprints.<blueprint>.fossilized",
        "seeds",
        "of this blueprint",
        "as `seeds.fossilized`",
        FINE,
    ),
    Metric(
        "blueprints.<blueprint>.pruned", "seeds", "of this blueprint", "as `seeds.pruned`", FINE
    ),
    Metric(
        "blueprints.<blueprint>.fossilization_rate",
        "percent",
        "fossilized / (fossilized + pruned)",
        "differs between blueprints",
        "leave out of `task.blueprints` what is never kept",
    ),
    Metric(
        "blueprints.<blueprint>.mean_gain",
        "percent points",
        "accuracy since germination, of fossils",
        "above 0",
        "as `seeds.contributing`",
    ),
    Metric(
        "blueprints.<blueprint>.mean_churn",
        "percent points",
        "accuracy since germination, of the pruned",
        "near or below 0",
        "well above 0: useful seeds are pruned",
    ),
    Metric(
        "blueprints.<blueprint>.mean_blending_gain",
        "percent points",
        "accuracy since blending began, of fossils",
        "above 0",
        "as `seeds.contributing`",
    ),
    Metric(
        "blueprints.<blueprint>.mean_contribution",
        "percent points",
        "last contribution of those that ended",
        "above 0",
        "as `seeds.contributing`",
    ),
    Metric(
        "rollbacks.total",
        "rollbacks",
        "hosts put back to a snapshot",
        "0",
        "lower `task.host_lr` or `task.seed_lr`",
    ),
    Metric(
        "rollbacks.<reason>", "rollbacks", "by what the governor saw", "0", "as `rollbacks.total`"
    ),
    Metric(
        "ops.<op>",
        "env-steps",
        "on which the op was in effect, in all envs",
        "no op has all of them",
        "as `entropy/<head>`",
    ),
    Metric(
        "ops_successful.<op>",
        "env-steps",
        "of these with success",
        "most",
        "ask `events` for refusals",
    ),
    Metric(
        "alpha_rows",
        "subsets",
        "subsets validated per env-step and env: mean",
        "1 to 2^seeds",
        "dear: lower `max_seeds`",
    ),
    Metric(
        "pareto.front_size",
        "episodes",
        "that no other one beats in accuracy, stability and size",
        "several",
        FINE,
    ),
    Metric(
        "pareto.hypervolume",
        "percent x ratio",
        "area dominated, up to twice the host's size",
        "never falls",
        FINE,
    ),
    Metric(
        "eps",
        "env-steps per second",
        "env-steps played in the round / (collect_seconds + update_seconds)",
        "steady",
        "`profile=phases` says where the time goes",
    ),
    Metric("collect_seconds", "seconds", "of playing the round", "most of the round", "as `eps`"),
    Metric(
        "update_seconds",
        "seconds",
        "of the policy update",
        "a tenth of the round or less",
        "as `eps`",
    ),
    Metric(
        "anomalies",
        "names",
        "limits of `telemetry.anomaly` that the update broke",
        "empty",
        "the log says what to do",
    ),
    Metric(
        "non_finite",
        "names",
        "numbers of this line that were not finite and stand as null",
        "absent",
        "the metric that is named",
    ),
)

# Of the update: unit, what is normal, what to do; the formula is that of agent/diagnostics.py.
READING = {
    "loss": ("", "falls over rounds, with much noise", FINE),
    "policy_loss": ("", "near 0, of either sign", "its size says little"),
    "value_loss": ("squared normalised return", "below 1 after a few rounds", CRITIC),
    "q_loss": ("squared normalised return", "as `value_loss`", CRITIC),
    "entropy_loss": ("", "negative, rising slowly to 0", "as `entropy/<head>`"),
    "floor_penalty": ("", "near 0", "raise `policy.ppo.entropy_coef`"),
    "contribution_loss": ("squared percent points", "falls", FINE),
    "approx_kl": ("nats", "0.001 to 0.02", LR),
    "kl_last": ("nats", "below the KL stop", LR),
    "kl_epoch/<epoch>": ("nats", "rises from epoch to epoch", LR),
    "kl/<head>": ("nats", "alike for all heads", LR),
    "clip_fraction": ("share", "below 0.3", LR),
    "clip_fraction/<head>": ("share", "below 0.3", LR),
    "ratio_max": ("ratio", "1 to 2", LR),
    "ratio_min": ("ratio", "0.5 to 1", LR),
    "ratio_error_first": ("ratio", "below 1e-3", "rollout and update disagree: report it"),
    "entropy/<head>": (
        "share of uniform",
        "falls slowly from 1, above 0.1",
        "raise `policy.ppo.entropy_coef`",
    ),
    "head_share/<head>": (
        "share",
        "above 0.05 for `op`",
        "masks leave no choice: see `ops_legal` in `steps`",
    ),
    "gradient_norm": ("", "steady", LR),
    "gradient_norm/<part>": ("", "none is 0 for ever", "a head that never matters has 0"),
    "explained_variance": ("", "rises towards 1; above 0 after ten rounds", CRITIC),
    "bellman_error": ("normalised return", "below 1", CRITIC),
    "calibration_slope": ("", "near 1", CRITIC),
    "calibration_intercept": ("normalised return", "near 0", CRITIC),
    "value_correlation": ("", "above 0.5", CRITIC),
    "value_mean": ("reward", "near `return_mean`", CRITIC),
    "return_mean": ("reward", "rises", "look at `reward_terms`"),
    "return_std": ("reward", "above 0", "0: all envs are alike; more `envs`"),
    "value_scale": ("", "above 0, steady", FINE),
    "reward_scale": ("reward", "above 0, steady", FINE),
    "advantage_mean": ("normalised return", "near 0", CRITIC),
    "advantage_std": ("normalised return", "above 0", "0: nothing can be learned from the round"),
    "valid_rows": (
        "env-steps",
        "envs x steps",
        "fewer: rewards that are not finite; look for panics in `events`",
    ),
    "forced_share": ("share", "below 0.5", "long embargoes or few slots: see `phase_occupancy`"),
    "vetoed_share": ("share", "below 0.1", FINE),
    "op_share/<op>": ("share", "`wait` below 0.95", "as `entropy/<head>`"),
    "lstm_rms_max": ("", "0.01 to 10", LR),
    "lstm_rms_min": ("", "above 1e-6", "the memory is dead: begin anew with another `seed`"),
    "lstm_hidden_rms": ("", "0.05 to 0.8", LR),
    "lstm_hidden_max": ("", "below 1", LR),
    "lstm_cell_rms": ("", "below 10", LR),
    "lstm_cell_max": ("", "below 50", LR),
    "lstm_saturated": ("share", "below 0.1", LR),
    "steps": ("gradient steps", "epochs x minibatches, fewer where it stopped early", FINE),
    "epochs_begun": ("epochs", "`policy.ppo.epochs` or fewer", FINE),
    "epochs_done": ("epochs", "1 or more", "below 1: " + LR),
    "not_finite_steps": ("gradient steps", "0", LR),
    "early_stop": ("0 or 1", "now and then 1", "always 1: " + LR),
    "learning_rate": ("", "as scheduled", FINE),
    "coefficient/<term>": ("", "as scheduled", FINE),
    "cross_entropy": ("nats", "falls in rounds of imitation", "more `policy.imitation.epochs`"),
    "agreement": ("share", "rises above 0.9", "more `policy.imitation.rounds`"),
    "agreement/<head>": ("share", "rises", "as `agreement`"),
}
EPISODE = (
    Metric("round", "", "round, as in metrics.jsonl", "", FINE),
    Metric("env", "", "env, from 0", "", FINE),
    Metric(
        "accuracy",
        "percent",
        "validation accuracy at the last env-step",
        "as `accuracy.mean`",
        SEEN,
    ),
    Metric(
        "param_ratio",
        "hosts",
        "parameters at the end over those of the host",
        "1 to 2",
        "as `parameters`",
    ),
    Metric(
        "stability",
        "",
        "1 / (1 + variance of the last rewards)",
        "above 0.5",
        "as `outcome.stability`",
    ),
    Metric(
        "reward", "reward", "sum of raw rewards", "as `reward.mean`", "ask `rewards` for its terms"
    ),
    Metric("reward_mode", "mode", "that paid the env, with `reward.split`", "", FINE),
    Metric("success", "true or false", "accuracy of at least 80 percent", "", FINE),
    Metric("compute_cost", "hosts", "as `outcome.compute_cost`", "1 to 2", "as `parameters`"),
    Metric(
        "seeds.<fate>",
        "seeds",
        "of the env, by fate: germinated, fossilized, contributing, pruned, unfinished",
        "as `seeds`",
        "ask `seed_lifecycle`",
    ),
    Metric(
        "rollbacks",
        "rollbacks",
        "times that the host went back to a snapshot",
        "0",
        "as `rollbacks.total`",
    ),
    Metric("env_steps", "env-steps", "recorded", "`steps`, fewer with `early_stop`", FINE),
    Metric(
        "ended_by",
        "cause",
        "`limit`, its last env-step; with `early_stop` also `plateau`, no gain in accuracy, or "
        "`diverged`, too many rollbacks: the event `ended_early`",
        "",
        FINE,
    ),
    Metric(
        "shapley",
        "percent points",
        "per slot at the last env-step: Shapley value of its seed; 0 without one",
        "above 0 for what is kept",
        "as `seeds.contributing`",
    ),
    Metric(
        "shapley_error",
        "percent points",
        "standard error of a sampled value, else 0",
        "below half the value",
        "raise `attribution.shapley_samples`",
    ),
    Metric("non_finite", "names", "as in metrics.jsonl", "absent", "the metric that is named"),
)

# Of the columns of tables that are measured: what is normal, what to do; unit and formula are those
# of the schema.
STEPS_READING = {
    "accuracy": ("rises over the episode", SEEN),
    "val_loss": ("falls over the episode", "as `val_loss` of a round"),
    "train_loss": ("falls over the episode", "as `val_loss` of a round"),
    "train_accuracy": ("above `accuracy`", "as `train_accuracy` of a round"),
    "parameters": ("1 to 2 hosts", "as `parameters` of a round"),
    "train_flop": ("steps with every seed", "as `parameters` of a round"),
    "subsets": ("1 without blended seeds, 2^n with n", "as `alpha_rows`"),
    "total_contribution": ("above 0", "below 0: the seeds together do harm"),
    "committed_accuracy": ("never above `accuracy` for long", "it is: live seeds do harm"),
    "value": ("follows the reward still to come", "as `explained_variance`"),
    "reward": ("above 0 where seeds earn", "ask `rewards` for its terms"),
} | dict.fromkeys(
    [f"reward_{name}" for name, _ in REWARD_TERMS],
    ("small beside `reward_attribution`", "its weight under `reward.`"),
)
SLOTS_READING = {
    "stage_age": ("below 20", "a seed is stuck: ask `events` for the gate that refuses"),
    "seed_age": ("below `steps`", FINE),
    "parameters": ("of the order of the host's", "as `parameters` of a round"),
    "alpha": ("0 until blending, then up to 1", FINE),
    "alpha_target": ("where `alpha` goes", FINE),
    "contribution": ("above 0 once it is blended in", "below 0 for long: prune it"),
    "contribution_velocity": ("above 0 while it learns", FINE),
    "interaction": ("near 0", "below 0: seeds do the same work"),
    "shapley": ("above 0", "as `contribution`"),
    "shapley_error": ("below half of `shapley`", "raise `attribution.shapley_samples`"),
    "accuracy_gain": (
        "above 0",
        "of all that the host learned; the seed's own share is `contribution`",
    ),
    "gradient_norm": ("1e-4 to 10", "`task.seed_lr`"),
    "gradient_ratio": ("0.1 to 10", "below: the seed does not learn"),
    "gradient_health": ("above 0.5", "as the two below"),
    "gradient_vanishing": ("false", "another blueprint for this slot"),
    "gradient_exploding": ("false", "lower `task.seed_lr`"),
    "escrow": ("above 0 in escrow mode", FINE),
}


def update_metrics() -> Iterator[Metric]:
    """The diagnostics of a policy update, as metrics.jsonl has them under `update`."""
    for name, formula in (MEANING | IMITATION).items():
        unit, normal, remedy = READING[name]
        yield Metric(name, unit, formula, normal, remedy)


def column_metrics(
    columns: tuple[Column, ...], reading: dict[str, tuple[str, str]]
) -> Iterator[Metric]:
    """The measured columns of a table."""
    for column in columns:
        if column.name in reading:
            normal, remedy = reading[column.name]
            yield Metric(column.name, column.unit, column.meaning, normal, remedy)


SECTIONS = {
    "metrics of rounds": ROUND,
    "metrics of updates": tuple(update_metrics()),
    "metrics of episodes": EPISODE,
    "metrics of steps": tuple(column_metrics(STEPS, STEPS_READING)),
    "metrics of slots": tuple(column_metrics(SLOTS, SLOTS_READING)),
}
