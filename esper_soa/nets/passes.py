"""Engines that read on the host which seeds run, and do a pass over N envs in pieces: chunks of
envs, or jobs, are done side by side by workers and make one report.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.engine import EngineChoice, TrainReport, ValidationReport
from esper_soa.nets.needs import Need, training_needs
from esper_soa.nets.seeds.pools import ActiveSeeds, SlotSeeds, claim_, claims_of, read_active_seeds
from esper_soa.nets.seeds.seed_plan import Group, SeedPlan, groups_of, seed_plan
from esper_soa.nets.seeds.subsets import Job, jobs_of, max_rows
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import Rules, rules_of
from esper_soa.state import STATE_FLOAT, GradientStats, initial
from esper_soa.system.threads import Call, chunks, run_pieces
from esper_soa.system.transfers import move_records, staged

Feed = TypeVar("Feed")
Gradients = dict[str, Tensor]  # fields of GradientStats [N, S]


class Piece(NamedTuple):
    """Envs that are done in a call."""

    envs: np.ndarray  # numbers
    rows: Tensor  # int64 [n], the same where the networks lie
    groups: list[Group]  # of their running seeds


class StepPlan(NamedTuple):
    """The pieces of an env-step's passes."""

    training: SeedPlan
    chunks: list[Piece]  # of the training
    validation: SeedPlan
    jobs: list[tuple[Job, Piece]]  # of the validation
    subset: Tensor  # int64 [N, R], see ValidationReport
    ablated: Tensor  # bool [N, S]


# Trains these envs, writes their rows of the gradients; loss [n] and accuracy (percent) [n].
TrainChunk = Callable[[Piece, Gradients, Call], tuple[Tensor, Tensor]]
# Validates the envs of a job; loss [n] of its first code and accuracy (percent) [n, codes].
Measure = Callable[[Job, Piece, Call], tuple[Tensor, Tensor]]


class Pass(NamedTuple, Generic[Feed]):
    """State shared by the pieces of a pass."""

    setup: Setup
    weights: TensorDict
    alpha: Tensor
    plan: SeedPlan
    feed: Feed
    answers: Tensor | None = None  # of a validation, see nets/engine.py; pieces fill their rows


@dataclass(frozen=True)
class PieceEngine(ABC):
    """See nets/engine.py; subclasses do the pieces, of different envs at the same time."""

    chosen: EngineChoice

    @abstractmethod
    def trainer(self, shared: Pass[TrainingFeed], num_batches: int, rules: Rules) -> TrainChunk: ...

    @abstractmethod
    def validator(self, shared: Pass[ValidationFeed]) -> Measure: ...

    def groups(self, plan: SeedPlan, envs: np.ndarray) -> list[Group]:
        """The seeds of these envs that run together, where the engine needs to know."""
        return groups_of(plan, envs)

    def needs(self, setup: Setup) -> list[Need]:
        """Needs of a pass, which frees its memory."""
        return training_needs(setup, in_place=False)

    def claim_(self, setup: Setup, weights: TensorDict, seeds: SlotSeeds, keys: Tensor) -> StepPlan:
        """On the host, as only seeds that run cost time; all that it uploads goes by one copy."""
        active = read_active_seeds(seeds)
        given = self.plan(setup, active), claims_of(setup.shape, active)
        plan, claims = move_records(given, keys.device)
        claim_(weights, setup.shape, claims, keys=keys)
        return plan

    def plan(self, setup: Setup, seeds: ActiveSeeds) -> StepPlan:
        """The passes of an env-step with these seeds, all on the host."""
        num_envs, num_slots = seeds.running.shape
        training = seed_plan(seeds, seeds.running, setup.detached_stages)
        validation = seed_plan(seeds, seeds.visible, setup.detached_stages)

        def piece(plan: SeedPlan, envs: np.ndarray) -> Piece:
            return Piece(envs, staged(envs), self.groups(plan, envs))

        parts = [seeds.playing(envs) for envs in chunks(num_envs, setup.env_chunk)]
        jobs = jobs_of(seeds, setup.shape.execution_order, setup.rows, size=setup.env_chunk)
        jobs = [job._replace(envs=seeds.playing(job.envs)) for job in jobs]
        jobs = [job for job in jobs if job.envs.size]
        subset = np.full((num_envs, max_rows(num_slots, setup.rows)), -1)
        for job in jobs:
            subset[job.envs, : len(job.codes)] = job.codes
        return StepPlan(
            training=training,
            chunks=[piece(training, envs) for envs in parts if envs.size],
            validation=validation,
            jobs=[(job, piece(validation, job.envs)) for job in jobs],
            subset=staged(subset),
            ablated=staged(seeds.ablated),
        )

    def train_(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: StepPlan,
        feed: TrainingFeed,
        num_batches: int,
        rules: Rules | None = None,
    ) -> TrainReport:
        """The report of all chunks of envs, zeros for those that are left out; alpha [N, S]."""
        shared = Pass(setup, weights, alpha, plan=active_seeds.training, feed=feed)
        train_chunk_ = self.trainer(shared, num_batches, rules or rules_of(setup.task))
        device = alpha.device
        stats = initial(GradientStats, alpha.shape, device)
        gradients = dict(stats.items())
        parts = active_seeds.chunks
        pieces = [partial(train_chunk_, part, gradients) for part in parts]
        loss = torch.zeros(alpha.shape[0], dtype=STATE_FLOAT, device=device)
        accuracy = torch.zeros_like(loss)
        for part, result in zip(parts, run_pieces(pieces, setup.workers), strict=True):
            loss[part.rows], accuracy[part.rows] = (each.to(STATE_FLOAT) for each in result)
        return TrainReport(loss, accuracy, stats)

    def validate(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: StepPlan,
        feed: ValidationFeed,
        answers: Tensor | None = None,
    ) -> ValidationReport:
        """Report of all envs under the subset rows needed, none for those left out."""
        plan = active_seeds
        shared = Pass(setup, weights, alpha, plan=plan.validation, feed=feed, answers=answers)
        measure = self.validator(shared)
        loss = torch.zeros(alpha.shape[0], dtype=STATE_FLOAT, device=alpha.device)
        accuracy = torch.zeros(plan.subset.shape, dtype=STATE_FLOAT, device=alpha.device)
        pieces = [partial(measure, job, piece) for job, piece in plan.jobs]
        results = run_pieces(pieces, setup.workers)
        for (job, piece), result in zip(plan.jobs, results, strict=True):
            loss[piece.rows], accuracy[piece.rows, : len(job.codes)] = result
        return ValidationReport(loss, accuracy, plan.subset, ablated=plan.ablated)
