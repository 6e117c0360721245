"""Metrics of a round, summed on the device and read by the host once, for metrics.jsonl,
episodes.jsonl and the final table; `read_progress` is the one small copy per env-step that the
progress bar reads late.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.config.env import REWARD_MODE, TERM_NAMES, USER_TERM
from esper_soa.config.ranges import NO_SETTINGS, EnvSettings
from esper_soa.env.early_stop import CAUSE_NAMES
from esper_soa.env.governor import REASON_NAMES
from esper_soa.env.outcome import (
    STABILITY_WINDOW,
    BlueprintStats,
    Outcomes,
    count_blueprints,
    empty_blueprint_stats,
    outcomes,
)
from esper_soa.env.parameters import flop_per_image, total_params
from esper_soa.env.reduction import ALL_ENVS, Reduction
from esper_soa.env.signals import push
from esper_soa.env.step import EAGER, EnvRules, EnvView, StepKernels, StepResult
from esper_soa.env.topology import HostStates, Topology, host_states, topology_of
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.nets.model.flops import PASSES_PER_STEP
from esper_soa.state import STATE_FLOAT, EnvState, Slots, select
from esper_soa.system.json_lines import Json
from esper_soa.vocabulary import OP_NAMES

ENDED_BY_LENGTH = "limit"  # cause of the end of an episode that does not end early
# figures of the progress bar: means over envs, of the episode so far
PROGRESS_FIGURES = ("accuracy", "reward")
# means over envs, at the last env-step
TRAINING_FIGURES = ("val_loss", "train_loss", "train_accuracy")
MEAN_OUTCOMES = ("success", "stability", "param_ratio", "compute_cost")  # fields of Outcomes
# counts of seeds: of a round, an episode and a blueprint
SEED_COUNTS = ("germinated", "blended", "fossilized", "contributing", "pruned")
SEED_OUTCOMES = ("germinated", "fossilized", "contributing", "pruned", "unfinished")
BLUEPRINT_COUNTS = ("germinated", "fossilized", "pruned")
# Parts that `_sums` adds up over envs; then the others, by the dimension of the envs. `terms` are
# over env-steps.
SUMMED_PARTS = ("env_steps", "left_out", "ops", "successes", "rows", "blueprints")
PARTS_PER_ENV = (
    ("rollbacks", "blended", "cause", "parameters", "flop", "all_flop", *HostStates._fields),
    ("training", "ended", "shapley", "topology", "not_finite"),
)


class RoundResult(NamedTuple):
    """One round on the host."""

    accuracies: list[float]  # validation accuracy per env at the last env-step, percent
    parameters: list[float]  # per env at the last env-step
    rewards: list[float]  # per env, sum of raw rewards
    train_flop: list[float]  # per env, FLOP of all training of the episode; see nets/model/flops.py
    all_flop: list[float]  # per env, with those of validation
    seeds: dict[str, int]  # by SEED_COUNTS, and "rollbacks", over all envs
    env_steps: int  # over all envs: fewer than N T where episodes ended early
    num_steps: list[int]  # per env
    points: list[list[float]]  # per env: accuracy, stability, parameter ratio
    record: dict[str, Json]  # the round's part of a line of metrics.jsonl
    episodes: list[dict[str, Json]]  # per env, its part of a line of episodes.jsonl
    topology: Topology  # final topology of every host
    hosts: HostStates  # every host as it was last measured
    test_accuracies: Sequence[float] = ()  # per env, percent; none where not measured
    test_losses: Sequence[float] = ()  # per env, nats; likewise
    answers: Tensor | None = None  # int8 or int16 [N, J], see final_test.py; likewise
    # By dotted name of each setting that differs by env: its values.
    settings: EnvSettings = NO_SETTINGS
    warning: str = ""  # about rewards that are not finite, where there are any

    @property
    def validation_losses(self) -> list[float]:
        """Per env, nats; NaN where the host was rolled back."""
        return list(self.hosts.loss.tolist())


class Sums(NamedTuple):
    """Sums over the env-steps of a round, on the device."""

    terms: Tensor  # float64 [terms], of means over envs
    ops: Tensor  # float64 [ops], how often each took effect
    successes: Tensor  # float64 [ops]
    rows: Tensor  # float64 [1], alpha rows that were validated
    validation: Tensor  # float64 [N], FLOP of validation on one image, as if by whole networks
    rewards: Tensor  # float64 [N, STABILITY_WINDOW], the last ones
    not_finite: Tensor  # float64 [2, N], env-steps whose reward is not: how many, and the first
    blueprints: BlueprintStats


class MetricsAccumulator:
    """Sums over the env-steps of a round of `num_envs` envs, on the device."""

    def __init__(
        self, rules: EnvRules, num_envs: int, train_samples: int, kernels: StepKernels = EAGER
    ) -> None:
        """train_samples: T per env-step."""
        device = rules.blueprints.device
        zeros = partial(torch.zeros, dtype=STATE_FLOAT, device=device)
        self.reward = rules.reward
        self.terms_by_name = {name: name for name in TERM_NAMES}
        if self.reward.user_name:
            self.terms_by_name[self.reward.user_name] = USER_TERM
        self.names = names_by_code(rules.setup.shape.blueprints)
        count = len(OP_NAMES)
        self.sums = Sums(
            terms=zeros(len(self.terms_by_name)),
            ops=zeros(count),
            successes=zeros(count),
            rows=zeros(1),
            validation=zeros(num_envs),
            rewards=zeros(num_envs, STABILITY_WINDOW),
            not_finite=zeros(2, num_envs),
            blueprints=empty_blueprint_stats(device, len(self.names)),
        )
        self.env_steps = 0
        self.left_out = zeros(1)  # env-steps of envs whose episode was over
        self.train_samples = train_samples
        self.val_samples = rules.setup.val_samples
        self.kernels = kernels
        self.shapley = zeros(2, num_envs, 0)  # values and standard errors at the newest env-step
        self.newest: tuple[EnvState, EnvState] | None = None  # before and after the newest actions

    def add_(self, observed: EnvView, result: StepResult) -> None:
        """Count one env-step of all envs but those whose episode has ended before it."""
        state = observed.view.state
        subset = observed.measured.subset
        ended = observed.ended
        self.sums = self.kernels.call(
            "count", self._count_actions, self.sums, subset, state.slots, result, ended
        )
        self.env_steps += subset.shape[0]
        shapley = torch.stack((observed.attribution.shapley, observed.attribution.shapley_error))
        if ended is not None and self.newest is not None:
            self.left_out = self.left_out + ended.sum()
            shapley = torch.where(ended[:, None], self.shapley, shapley)
            state = select(ended, self.newest[0], state)
        self.shapley = shapley
        self.newest = state, result.state

    def skip_env_steps(self, env_steps: int) -> None:
        """Count env-steps, over all envs, that are not played, as every episode has ended early."""
        self.env_steps += env_steps
        self.left_out = self.left_out + env_steps

    def _count_actions(
        self, sums: Sums, subset: Tensor, before: Slots, result: StepResult, ended: Tensor | None
    ) -> Sums:
        terms = result.terms
        outcome = result.outcome
        choices = torch.arange(len(OP_NAMES), device=subset.device)
        matches = outcome.effective_op[:, None] == choices
        rewards = push(sums.rewards, terms.total)
        fails = ~terms.total.isfinite()
        if ended is not None:
            fails = fails & ~ended
            matches = matches & ~ended[:, None]
            rewards = torch.where(ended[:, None], sums.rewards, rewards)
        failed, first = sums.not_finite
        first = torch.where(fails & (failed == 0), result.state.signals.step, first)
        rows = (subset >= 0).sum(1)
        validation = rows * flop_per_image(before, self.reward.flop) / PASSES_PER_STEP
        if ended is not None:
            validation = torch.where(ended, 0.0, validation)
        means = torch.stack([terms.get(name).mean() for name in self.terms_by_name.values()])
        return Sums(
            terms=sums.terms + means,
            ops=sums.ops + matches.sum(0),
            successes=sums.successes + (matches & outcome.success[:, None]).sum(0),
            rows=sums.rows + rows.sum(),
            validation=sums.validation + validation,
            rewards=rewards,
            not_finite=torch.stack((failed + fails, first)),
            blueprints=count_blueprints(sums.blueprints, before, result.state.slots),
        )

    def read(
        self, state: EnvState, reduction: Reduction = ALL_ENVS, settings: EnvSettings = NO_SETTINGS
    ) -> RoundResult:
        """One packed copy to the host at the end of a round (`state`), of all envs of the run."""
        values = _reduce_values(copy_to_host(self._sums(state)), reduction)
        episodes = Outcomes(*values["ended"])
        modes = list(map(str, settings.get(REWARD_MODE, ())))
        seed_counts = episodes._asdict() | {"blended": values["blended"]}
        seeds = {
            name: int(count.sum()) for name, count in seed_counts.items() if name in SEED_COUNTS
        }
        record = self._record(values, episodes, seeds)
        if modes:
            record["reward_split"] = split_record(modes, episodes, values["parameters"])
        points = torch.stack((episodes.accuracy, episodes.stability, episodes.param_ratio), 1)
        blueprint, blend, alpha = values["topology"]
        hosts = HostStates(
            stage=values["stage"].long(),
            blueprint=values["blueprint"].long(),
            blend=values["blend"].long(),
            alpha=values["alpha"],
            accuracy=values["accuracy"],
            loss=values["loss"],
        )
        return RoundResult(
            accuracies=episodes.accuracy.tolist(),
            parameters=values["parameters"].tolist(),
            rewards=episodes.reward.tolist(),
            train_flop=values["flop"].tolist(),
            all_flop=values["all_flop"].tolist(),
            seeds=seeds | {"rollbacks": int(values["rollbacks"].sum())},
            env_steps=int(values["env_steps"] - values["left_out"]),
            num_steps=episodes.num_steps.long().tolist(),
            points=points.tolist(),
            record=record,
            episodes=episode_records(episodes, values, modes, settings=settings),
            topology=Topology(blueprint.long(), blend.long(), alpha),
            hosts=hosts,
            settings=settings,
            warning=self._warning(values["not_finite"]),
        )

    def _warning(self, not_finite: Tensor) -> str:
        """The first reward that is not finite, and how many there are; "" where all are finite.

        not_finite: float64 [2, N], see Sums.
        """
        counts, first = not_finite
        if not counts.any():
            return ""
        env = int(torch.where(counts > 0, first, math.inf).argmin())
        total = f"{int(counts.sum())} env-steps of {int((counts > 0).sum())} envs in all"
        return f"the reward of env {env} is not finite at env-step {int(first[env])} ({total})"

    def _sums(self, state: EnvState) -> dict[str, Tensor]:
        sums = self.sums
        counts = self.reward.counts
        totals = state.totals
        signals = state.signals
        before, after = self.newest or (state, state)
        return {
            "terms": sums.terms,
            "env_steps": sums.rows.new_full((1,), self.env_steps),
            "ops": sums.ops,
            "successes": sums.successes,
            "rows": sums.rows,
            "rollbacks": totals.rollbacks,
            "blended": totals.blended,
            "cause": state.ending.cause,
            "left_out": self.left_out,
            "training": torch.stack([signals.val_loss, signals.train_loss, signals.train_accuracy]),
            "parameters": total_params(state.slots, counts),
            "ended": torch.stack(outcomes(state, sums.rewards, counts, costs=self.reward.flop)),
            "blueprints": torch.stack(sums.blueprints),
            "shapley": self.shapley,
            "not_finite": sums.not_finite,
            "flop": self.train_samples * totals.train_flop,
            "all_flop": (
                self.train_samples * totals.train_flop + self.val_samples * sums.validation
            ),
            "topology": torch.stack(topology_of(state)),
            **host_states(before, after)._asdict(),
        }

    def _record(
        self, stats: Mapping[str, Tensor], episodes: Outcomes, seeds: Mapping[str, int]
    ) -> dict[str, Json]:
        by_reason = dict(zip(REASON_NAMES, map(int, stats["rollbacks"].sum(0)), strict=True))
        rollbacks = {name: by_reason[name] for name in REASON_NAMES[1:]}
        return {
            "accuracy": spread_of(episodes.accuracy),
            **dict(zip(TRAINING_FIGURES, stats["training"].mean(1).tolist(), strict=True)),
            "reward": spread_of(episodes.reward),
            "rewards_not_finite": int(stats["not_finite"][0].sum()),
            "reward_terms": dict(zip(self.terms_by_name, stats["terms"].tolist(), strict=True)),
            "parameters": float(stats["parameters"].mean()),
            "train_flop": float(stats["flop"].mean()),
            "outcome": {name: float(episodes._asdict()[name].mean()) for name in MEAN_OUTCOMES},
            "seeds": {name: seeds[name] for name in SEED_COUNTS},
            "blueprints": blueprint_record(BlueprintStats(*stats["blueprints"]), self.names),
            "rollbacks": {"total": sum(by_reason.values())} | rollbacks,
            "ops": dict(zip(OP_NAMES, stats["ops"].tolist(), strict=True)),
            "ops_successful": dict(zip(OP_NAMES, stats["successes"].tolist(), strict=True)),
            "alpha_rows": float(stats["rows"]) / float(stats["env_steps"] - stats["left_out"]),
        }


def split_record(modes: Sequence[str], episodes: Outcomes, parameters: Tensor) -> dict[str, Json]:
    """By mode of reward: its envs, and means over them; modes: of every env."""
    record: dict[str, Json] = {}
    for mode in dict.fromkeys(modes):
        in_mode = torch.tensor([env_mode == mode for env_mode in modes])
        means = {"accuracy": episodes.accuracy, "reward": episodes.reward, "parameters": parameters}
        means_in_mode = {name: float(values[in_mode].mean()) for name, values in means.items()}
        record[mode] = {"envs": int(in_mode.sum()), **means_in_mode}
    return record


def _reduce_values(values: dict[str, Tensor], reduction: Reduction) -> dict[str, Tensor]:
    """The same of all envs of the run: sums added, means weighted, what is per env joined."""
    if reduction.count == 1:
        return values
    summed = {name: values[name] for name in SUMMED_PARTS}
    summed["terms"] = values["terms"] * values["env_steps"]
    sums = {name: torch.stack(reduction.all_gather(part)).sum(0) for name, part in summed.items()}
    sums["terms"] = sums["terms"] / sums["env_steps"]
    for dim, names in enumerate(PARTS_PER_ENV):
        gathered_rows = reduction.gather([values[name] for name in names], dim)
        sums |= dict(zip(names, gathered_rows, strict=True))
    return sums


def copy_to_host(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same on the host, as float64, by one copy."""
    flat_values = torch.cat([part.flatten() for part in parts.values()]).cpu()
    pieces = flat_values.split([part.numel() for part in parts.values()])
    views = (piece.view(part.shape) for piece, part in zip(pieces, parts.values(), strict=True))
    return dict(zip(parts, views, strict=True))


def episode_records(
    episodes: Outcomes, totals: Mapping[str, Tensor], modes: Sequence[str], settings: EnvSettings
) -> list[dict[str, Json]]:
    """Lines of episodes.jsonl, one per env; modes: that paid each, where they are split."""
    values = episodes._asdict()
    seed_counts = torch.stack([values[name] for name in SEED_OUTCOMES], 1).long().tolist()
    plain = ("accuracy", "param_ratio", "stability", "reward")
    columns = {name: values[name].tolist() for name in plain} | {
        "success": episodes.success.bool().tolist(),
        "compute_cost": episodes.compute_cost.tolist(),
        "seeds": [dict(zip(SEED_OUTCOMES, counts, strict=True)) for counts in seed_counts],
        "rollbacks": totals["rollbacks"].sum(1).long().tolist(),
        "env_steps": episodes.num_steps.long().tolist(),
        "shapley": totals["shapley"][0].tolist(),
        "shapley_error": totals["shapley"][1].tolist(),
        "ended_by": [
            CAUSE_NAMES[code] or ENDED_BY_LENGTH for code in totals["cause"].long().tolist()
        ],
    }
    if modes:
        columns["reward_mode"] = modes
    if settings:
        rows = zip(*settings.values(), strict=True)
        columns["settings"] = [dict(zip(settings, values, strict=True)) for values in rows]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def blueprint_record(stats: BlueprintStats, names: Sequence[str]) -> dict[str, Json]:
    """Counts and means of each blueprint that was born or ended; a mean of nothing is None."""
    counts = {key: getattr(stats, key).tolist() for key in BLUEPRINT_COUNTS}
    means = {key: mean.tolist() for key, mean in stats.means().items()}
    record: dict[str, Json] = {}
    for code, name in enumerate(names):
        seed_counts = {key: int(count[code]) for key, count in counts.items()}
        if any(seed_counts.values()):
            seed_means = {key: mean[code] for key, mean in means.items()}
            record[name] = seed_counts | {
                key: None if math.isnan(mean) else mean for key, mean in seed_means.items()
            }
    return record


def spread_of(values: Tensor) -> dict[str, float]:
    return {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}


class PendingCopy(NamedTuple):
    """An asynchronous copy to the host; read it only once it is ready."""

    numbers: Tensor  # float64: PROGRESS_FIGURES, where asked for a count, what else was packed
    copied: torch.cuda.Event | None  # happens once they are there; None: they are

    @property
    def here(self) -> bool:
        return self.copied is None or self.copied.query()

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()


def read_progress(
    state: EnvState, packed: Tensor | None = None, ended: Tensor | None = None
) -> PendingCopy:
    """PROGRESS_FIGURES, with `ended` bool [N] how many of it are true, then the numbers of
    `packed`, float64, by a copy that nobody waits for.
    """
    figures = [state.signals.val_accuracy.mean(), state.totals.reward.mean()]
    if ended is not None:
        figures.append(ended.sum(dtype=STATE_FLOAT))
    values = torch.stack(figures)
    if packed is not None:
        values = torch.cat((values, packed.flatten()))
    numbers = values.to("cpu", non_blocking=True)
    copied = None
    if values.is_cuda:
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(values.device))
    return PendingCopy(numbers, copied)
