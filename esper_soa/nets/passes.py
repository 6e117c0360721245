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
from esper_soa.nets.seeds.pools import ActiveSeeds, SlotSeeds, claim_, read_active_seeds
from esper_soa.nets.seeds.seed_plan import SeedPlan, seed_plan
from esper_soa.nets.seeds.subsets import Job, jobs_of, max_rows
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import Rules, rules_of
from esper_soa.state import STATE_FLOAT, GradientStats, initial
from esper_soa.system.threads import Call, chunks, run_pieces
from esper_soa.system.transfers import upload

Feed = TypeVar("Feed")
Gradients = dict[str, Tensor]  # fields of GradientStats [N, S]
# Trains these envs, writes their rows of the gradients; loss [n] and accuracy (percent) [n].
TrainChunk = Callable[[np.ndarray, Gradients, Call], tuple[Tensor, Tensor]]
# Validates the envs of a job; loss [n] of its first code and accuracy (percent) [n, codes].
Measure = Callable[[Job, Call], tuple[Tensor, Tensor]]


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

    def needs(self, setup: Setup) -> list[Need]:
        """Needs of a pass, which frees its memory."""
        return training_needs(setup, in_place=False)

    def claim_(
        self, setup: Setup, weights: TensorDict, seeds: SlotSeeds, keys: Tensor
    ) -> ActiveSeeds:
        """On the host, as only seeds that run cost time."""
        active_seeds = read_active_seeds(seeds)
        claim_(weights, setup.shape, active_seeds, keys=keys)
        return active_seeds

    def train_(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: TrainingFeed,
        num_batches: int,
        rules: Rules | None = None,
    ) -> TrainReport:
        """The report of all chunks of envs, zeros for those that are left out; alpha [N, S]."""
        plan = seed_plan(active_seeds, active_seeds.running, setup.detached_stages)
        shared = Pass(setup, weights, alpha, plan=plan, feed=feed)
        train_chunk_ = self.trainer(shared, num_batches, rules or rules_of(setup.task))
        device = alpha.device
        stats = initial(GradientStats, alpha.shape, device)
        gradients = dict(stats.items())
        parts = [active_seeds.playing(envs) for envs in chunks(alpha.shape[0], setup.env_chunk)]
        parts = [envs for envs in parts if envs.size]
        pieces = [partial(train_chunk_, envs, gradients) for envs in parts]
        loss = torch.zeros(alpha.shape[0], dtype=STATE_FLOAT, device=device)
        accuracy = torch.zeros_like(loss)
        placed = upload(parts, device)
        for numbers, result in zip(placed, run_pieces(pieces, setup.workers), strict=True):
            loss[numbers], accuracy[numbers] = (part.to(STATE_FLOAT) for part in result)
        return TrainReport(loss, accuracy, stats)

    def validate(
        self,
        setup: Setup,
        weights: TensorDict,
        alpha: Tensor,
        active_seeds: ActiveSeeds,
        feed: ValidationFeed,
        answers: Tensor | None = None,
    ) -> ValidationReport:
        """Report of all envs under the subset rows needed, none for those left out."""
        plan = seed_plan(active_seeds, active_seeds.visible, setup.detached_stages)
        shared = Pass(setup, weights, alpha, plan=plan, feed=feed, answers=answers)
        measure = self.validator(shared)
        num_envs, num_slots = alpha.shape
        device = alpha.device
        rows = max_rows(num_slots, setup.rows)
        loss = torch.zeros(num_envs, dtype=STATE_FLOAT, device=device)
        accuracy = torch.zeros(num_envs, rows, dtype=STATE_FLOAT, device=device)
        jobs = jobs_of(active_seeds, setup.shape.execution_order, setup.rows, size=setup.env_chunk)
        jobs = [job._replace(envs=active_seeds.playing(job.envs)) for job in jobs]
        jobs = [job for job in jobs if job.envs.size]
        pieces = [partial(measure, job) for job in jobs]
        subset = np.full((num_envs, rows), -1)
        for job in jobs:
            subset[job.envs, : len(job.codes)] = job.codes
        envs = [job.envs for job in jobs]
        *placed, subsets, ablated = upload([*envs, subset, active_seeds.ablated], device)
        for numbers, job, result in zip(
            placed, jobs, run_pieces(pieces, setup.workers), strict=True
        ):
            loss[numbers], accuracy[numbers, : len(job.codes)] = result
        return ValidationReport(loss, accuracy, subsets, ablated=ablated)
