"""The learner: PPO of the recurrent policy, or imitation, from one rollout of every task at a time.

Whether a gradient step is taken is decided on the device. Where several processes share the envs,
each takes the steps that one with all envs would take: gradients are summed (env/reduction.py).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.agent import diagnostics, losses, normalize, objective
from esper_soa.agent.advantages import gae, normalize_advantages
from esper_soa.agent.diagnostics import Metrics, read_diagnostics
from esper_soa.agent.lstm import full_precision, segment_starts
from esper_soa.agent.normalize import Moments, RewardStats
from esper_soa.agent.optimizer import AdamState, adam_state, adam_step, flatten, write_parameters_
from esper_soa.agent.pieces import evaluate
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.rollout import GatheredRollout, Rollout
from esper_soa.config.agent import ImitationConfig, PPOConfig
from esper_soa.env.reduction import ALL_ENVS, Reduction
from esper_soa.nets.graphs import StepCache, captured_call
from esper_soa.system.streams import DROPOUT, MINIBATCH, stream_keys, uniform
from esper_soa.system.transfers import move, move_leaves, upload

KL_MARGIN = 1.5  # times target_kl, above which the remaining epochs are dropped
MAX_SKIPPED = 3  # consecutive updates without a finite gradient before the run is given up
PASS_FLAGS = ("go", "looked_at", "not_finite")  # all zero for a pass after the update has stopped

Nested = Mapping[str, "Tensor | int | Nested"]


class UpdatePlan(NamedTuple):
    """Epochs and minibatches of an update."""

    name: str
    loss: Callable[..., tuple[Tensor, Metrics]]  # of evaluations with batches, config, weights
    epochs: int  # passes
    lr: float
    target_kl: float  # nats; epochs stop above KL_MARGIN times this, 0 = never
    weights: objective.Coefficients


class Learner:
    """The learner's state besides the policy: Adam, normalisers and counters."""

    def __init__(
        self,
        policy: RecurrentPolicy,
        config: PPOConfig,
        total_updates: int,
        seed: int,
        steps: StepCache | None = None,
        imitation: ImitationConfig | None = None,
        reduction: Reduction = ALL_ENVS,
    ) -> None:
        """steps: replays gradient steps as CUDA graphs. reduction: over the envs of the run."""
        self.policy = policy
        # the policy, and the same for the hosts of further tasks, see RecurrentPolicy.for_slots
        self.policies = [policy]
        self.reduction = reduction
        self.workers = 1  # threads of a CPU that share a gradient step; they change no bit
        # a graph cannot capture reductions over several processes
        self.steps = steps if reduction.count == 1 else None
        self.config = config
        self.imitation = imitation or ImitationConfig()
        self.total_updates = total_updates
        self.seed = seed
        self.parameters = list(policy.parameters())
        self.device = self.parameters[0].device
        self.tables = objective.head_tables(config, self.device)
        self.adam = adam_state(flatten(self.parameters))
        self.reward = normalize.reward_stats(self.device)
        self.value = normalize.value_moments(self.device)
        self.rounds = 0  # updates begun
        self.train_steps = 0  # updates that took at least one gradient step; drives the schedules
        self.skipped = 0  # consecutive updates without a finite gradient

    def scale_rewards_(self, rewards: Tensor, valid: Tensor) -> Tensor:
        """Normalised rewards float32 [N] of an env-step, 0 where not valid, after they entered."""
        self.reward = normalize.update_reward(self.reward, rewards, valid)
        scaled = normalize.normalize_reward(self.reward, rewards, self.config.reward_clip)
        return torch.where(valid, scaled, 0.0).float()

    def fill_rewards_(self, rollout: Rollout, rewards: Tensor) -> None:
        """Fill in the rewards of a rollout, normalised, from `rewards` float64 [T, n], raw.

        Statistics and scale are those of each env-step, over all envs. The penalty of a rollback,
        which ends the trajectory, is a reward as it stands, no sample of what rewards are like.
        """
        rows = rollout.rows
        limit = self.config.reward_clip
        raw, sampled = self.reduction.gather([rewards, rows.valid & ~rows.terminal], dim=1)
        steps = zip(raw, sampled, strict=True)
        scaled = torch.stack([self.scale_rewards_(*step) for step in steps])
        penalty = rewards.clamp(-limit, limit).float()
        local = self.reduction.rows_here(scaled, dim=1)
        rows.reward.copy_(torch.where(rows.terminal, penalty, local))

    def update(self, *rollouts: Rollout) -> dict[str, float]:
        """Learn from a rollout of every task by PPO; returns the diagnostics of docs/metrics.md.

        Every minibatch has envs of every rollout, and its means are over all of them. Adam starts
        afresh after imitation. RuntimeError at the third update in a row without finite gradient.
        """
        if self.rounds == self.imitation.rounds:
            self.adam = adam_state(flatten(self.parameters))
        plan = UpdatePlan(
            name="update",
            loss=partial(objective.total_loss, tables=self.tables),
            epochs=self.config.epochs,
            lr=self.config.lr,
            target_kl=self.config.target_kl,
            weights=self._weights(),
        )
        return self._learn_(rollouts, plan)

    def imitate(self, *rollouts: Rollout) -> dict[str, float]:
        """Learn the actions of each rollout's teacher; returns diagnostics.

        Schedules go on as in `update`, and so do errors. ValueError for a rollout without teacher.
        """
        if any(rollout.taught is None for rollout in rollouts):
            raise ValueError("a rollout without a teacher cannot be imitated")
        plan = UpdatePlan(
            name="imitate",
            loss=objective.imitation_loss,
            epochs=self.imitation.epochs,
            lr=self.imitation.lr,
            target_kl=0.0,
            weights=self._weights()._replace(entropy=0.0, floor_penalty=0.0),
        )
        return self._learn_(rollouts, plan)

    def _weights(self) -> objective.Coefficients:
        return objective.coefficients(self.config, self.train_steps, self.total_updates)

    def _learn_(self, rollouts: Sequence[Rollout], plan: UpdatePlan) -> dict[str, float]:
        """All passes over the rollouts, then their observations; returns the diagnostics."""
        sizes = [self.reduction.all_envs(rollout.bootstrap.shape[0]) for rollout in rollouts]
        minibatches = min(self.config.minibatches, *sizes)
        firsts = [before + self.reduction.first_env for before in accumulate([0, *sizes[:-1]])]
        resets = [self.reduction.gather([rollout.rows.reset], dim=1)[0] for rollout in rollouts]
        starts = [segment_starts(reset) for reset in resets]
        batches, summary = self.prepare_(*rollouts)
        (weights,) = upload([np.array(plan.weights, dtype=np.float32)], self.device)
        on_device = objective.Coefficients(*weights.unbind())
        step = partial(self._step_, plan, starts)
        if self.steps is not None:
            step = partial(captured_call, self.steps, (plan.name, *map(tuple, starts)), step)
        stopped = torch.zeros((), dtype=torch.bool, device=self.device)
        history: list[Metrics] = []
        for epoch in range(plan.epochs):
            for minibatch in self.minibatches(sizes, minibatches, epoch):
                if self._ended(stopped):
                    history.append(history[-1] | dict.fromkeys(PASS_FLAGS, stopped & False))
                    continue
                parts = [
                    (batch.of(envs - first), self.dropout_noise(rollout, envs, epoch))
                    for batch, rollout, first, envs in zip(
                        batches, rollouts, firsts, minibatch, strict=True
                    )
                ]
                metrics, stopped, self.adam = step(parts, on_device, stopped, self.adam)
                history.append(metrics)
        self.reduction.check_same(flatten(self.parameters))
        seen = [(rollout.rows.features, rollout.rows.valid) for rollout in rollouts]
        self.policy.update_observations_(seen, self.config.observation_momentum, self.reduction)
        passes = diagnostics.with_extremes(history, self.reduction)
        report = read_diagnostics(passes, summary, plan.epochs)
        report |= {f"coefficient/{name}": value for name, value in plan.weights._asdict().items()}
        report |= {"learning_rate": plan.lr, "epochs_done": report["steps"] / minibatches}
        self._count_(report)
        return report

    def prepare_(self, *rollouts: Rollout) -> tuple[list[objective.Batch], Metrics]:
        """Advantages with the value scale of before, targets with that of after all returns."""
        each = [self.reduction.gather(GatheredRollout.of(part), dim=1) for part in rollouts]
        all_rows = GatheredRollout(*(torch.cat(parts, 1) for parts in zip(*each, strict=True)))
        scale = normalize.value_scale(self.value).float()
        values = all_rows.value * scale
        valid = all_rows.valid
        bootstrap = torch.where(all_rows.truncated.any(0), all_rows.bootstrap[0] * scale, 0.0)
        advantages, returns, differences = gae(
            all_rows.reward,
            values,
            all_rows.terminal,
            valid=valid,
            bootstrap=bootstrap,
            gamma=self.config.gamma,
            lam=self.config.gae_lambda,
        )
        self.value = normalize.update_value(self.value, returns, valid & returns.isfinite())
        new_scale = normalize.value_scale(self.value).float()
        reward_scale = normalize.reward_scale(self.reward)
        summary = {
            "explained_variance": losses.explained_variance(values, returns, valid),
            "bellman_error": losses.weighted_mean(differences.abs(), valid.float()).value,
            "value_scale": new_scale,
            "reward_scale": reward_scale,
        }
        summary |= diagnostics.calibration(values, returns, valid, unit=reward_scale)
        summary |= diagnostics.spread("advantage", advantages, valid)
        summary |= diagnostics.action_shares(all_rows)
        sizes = [parts[0].shape[1] for parts in each]
        gains = normalize_advantages(advantages, valid).split(sizes, 1)
        targets = (returns / new_scale).split(sizes, 1)
        local = partial(self.reduction.rows_here, dim=1)
        batches = [
            objective.Batch(rollout.lesson, local(gain), local(target))
            for rollout, gain, target in zip(rollouts, gains, targets, strict=True)
        ]
        return batches, summary

    def minibatches(self, sizes: Sequence[int], count: int, epoch: int) -> list[list[Tensor]]:
        """Envs int64 of this process by minibatch and rollout, in a new order per epoch.

        Drawn on the host, where to count them makes nobody wait for a device. sizes: envs of each
        rollout; they are numbered through all rollouts.
        """
        columns = []
        for before, size in zip(accumulate([0, *sizes[:-1]]), sizes, strict=True):
            envs = before + torch.arange(size)
            keys = stream_keys(self.seed, MINIBATCH, (self.rounds, epoch), envs=envs)
            order = uniform(keys, torch.zeros_like(envs), torch.float64).argsort()
            parts = [self.reduction.local_envs(part) for part in order.tensor_split(count)]
            (local,) = move([before + torch.cat(parts)], self.device)
            columns.append(local.split([len(part) for part in parts]))
        return [list(minibatch) for minibatch in zip(*columns, strict=True)]

    def dropout_noise(self, rollout: Rollout, envs: Tensor, epoch: int) -> Tensor:
        """Uniform float32 [T, n, H / 2] for dropout of these envs; each env has its own numbers."""
        units = self.policy.lstm.hidden // 2
        keys = stream_keys(self.seed, DROPOUT, (self.rounds, epoch), envs=envs)
        counters = torch.arange(len(rollout.rows) * units, device=self.device).reshape(-1, 1, units)
        return uniform(keys.reshape(1, -1, 1), counters)

    def _ended(self, stopped: Tensor) -> bool:
        # on a GPU the host would have to wait for the answer
        return self.device.type == "cpu" and bool(stopped)

    def _step_(
        self,
        plan: UpdatePlan,
        starts: list[list[int]],
        parts: Sequence[tuple[objective.Batch, Tensor]],
        weights: objective.Coefficients,
        stopped: Tensor,
        adam: AdamState,
    ) -> tuple[Metrics, Tensor, AdamState]:
        """A gradient step, unless stopped bool [], or it is not finite, or the policy is too far.

        parts: of every rollout a batch and its noise for dropout. Changes the policy's parameters
        in place; gives diagnostics, whether to stop, and the moments afterwards.
        """
        given = zip(self.policies, parts, starts, strict=True)
        with full_precision():
            evaluations = [
                (evaluate(policy, batch.rows, at, noise=noise, workers=self.workers), batch)
                for policy, (batch, noise), at in given
            ]
            loss, metrics = plan.loss(evaluations, self.config, weights, reduction=self.reduction)
            local = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        gradients = self.reduction.total_gradients(local)
        norm = losses.gradient_norm(list(gradients))
        finite = loss.isfinite() & norm.isfinite()
        evaluated = ~stopped
        if plan.target_kl > 0:
            stopped = stopped | (metrics["approx_kl"] > KL_MARGIN * plan.target_kl)
        do_step = finite & ~stopped
        flat = flatten(gradients)
        limit = self.config.max_grad_norm
        flat = flat * (limit / (norm + 1e-6)).clamp(max=1.0) if limit > 0 else flat
        moved, adam = adam_step(
            flatten(self.parameters),
            flat,
            adam,
            lr=plan.lr,
            eps=self.config.adam_eps,
            do_step=do_step,
        )
        write_parameters_(self.parameters, moved)
        pairs = zip(self.parameters, gradients, strict=True)
        metrics |= diagnostics.gradient_norms(self.policy, dict(pairs))
        metrics |= {
            "gradient_norm": norm,
            "go": do_step,
            "looked_at": evaluated,
            "not_finite": evaluated & ~finite,
            "stopped": stopped,
        }
        return metrics, stopped, adam

    def _count_(self, report: dict[str, float]) -> None:
        self.rounds += 1
        self.train_steps += report["steps"] > 0
        no_step = report["steps"] == 0 and report["not_finite_steps"] > 0
        self.skipped = self.skipped + 1 if no_step else 0
        if self.skipped >= MAX_SKIPPED:
            problem = f"{self.skipped} updates in a row had no finite gradient, the policy can no"
            remedy = "look for values that are not finite in rewards and observations"
            raise RuntimeError(f"{problem} longer learn: {remedy}, or lower policy.ppo.lr")

    def state_dict(self) -> dict[str, Nested | int]:
        """Everything that a resumed run needs to go on bit for bit: plain tensors and ints."""
        return {
            "policy": self.policy.state_dict(),
            "adam": self.adam._asdict(),
            "reward": self.reward._asdict(),
            "value": self.value._asdict(),
            "rounds": self.rounds,
            "train_steps": self.train_steps,
            "skipped": self.skipped,
        }

    def load_pretrained(self, state: Mapping) -> None:
        """Take policy and normalisers of another learner's state; Adam and counters stay new."""
        self.policy.load_state_dict(state["policy"])
        self.reward = RewardStats(**self._to_device(state["reward"]))
        self.value = Moments(**self._to_device(state["value"]))

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from a state that `state_dict` gave, on this learner's device."""
        self.load_pretrained(state)
        self.adam = AdamState(**self._to_device(state["adam"]))
        self.rounds = state["rounds"]
        self.train_steps = state["train_steps"]
        self.skipped = state["skipped"]

    def _to_device(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return move_leaves(dict(tensors), self.device)
