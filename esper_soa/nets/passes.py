"""A pass over N envs in pieces: chunks or jobs, done side by side by workers, one report.

The same for every engine, which hands in what is to be done with one piece.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from esper_soa.nets.engine import NetsConfig, TrainReport, ValidationReport
from esper_soa.nets.gradients import unmeasured
from esper_soa.nets.pools import ActiveSeeds, upload
from esper_soa.nets.subsets import Job, jobs_of, max_rows
from esper_soa.nets.workers import Call, chunks, run_pieces
from esper_soa.state import STATE_FLOAT, GradientStats

Gradients = dict[str, Tensor]  # fields of GradientStats [N, S]
# Trains the envs with these numbers and writes their rows of the gradients; loss [n] and accuracy
# (percent) [n].
TrainChunk = Callable[[np.ndarray, Gradients, Call], tuple[Tensor, Tensor]]
# Validates the envs of a job; loss [n] of its first code and accuracy (percent) [n, codes].
Measure = Callable[[Job, Call], tuple[Tensor, Tensor]]


def train_pass_(
    nets: NetsConfig, alpha: Tensor, active_seeds: ActiveSeeds, train_chunk_: TrainChunk
) -> TrainReport:
    """The report of all chunks of envs, zeros for those that are left out; alpha [N, S]."""
    gradients = unmeasured(alpha.shape, alpha.device)
    parts = [active_seeds.playing(envs) for envs in chunks(alpha.shape[0], nets.env_chunk)]
    parts = [envs for envs in parts if envs.size]
    results = run_pieces([partial(train_chunk_, envs, gradients) for envs in parts], nets.workers)
    loss, accuracy = (
        torch.zeros(alpha.shape[0], dtype=STATE_FLOAT, device=alpha.device) for _ in range(2)
    )
    for envs, result in zip(parts, results, strict=True):
        numbers = upload(envs, alpha.device)
        loss[numbers], accuracy[numbers] = (part.to(STATE_FLOAT) for part in result)
    stats = GradientStats.from_dict(gradients, batch_size=list(alpha.shape))
    return TrainReport(loss, accuracy, stats)


def validation_pass(
    nets: NetsConfig, alpha: Tensor, active_seeds: ActiveSeeds, measure: Measure
) -> ValidationReport:
    """Report of all envs under the subset rows needed, none for those left out; alpha [N, S]."""
    num_envs, num_slots = alpha.shape
    device = alpha.device
    rows = max_rows(num_slots, nets.rows)
    loss = torch.zeros(num_envs, dtype=STATE_FLOAT, device=device)
    accuracy = torch.zeros(num_envs, rows, dtype=STATE_FLOAT, device=device)
    subset = torch.full((num_envs, rows), -1, dtype=torch.int64)
    jobs = jobs_of(active_seeds, nets.shape.execution_order, nets.rows, nets.env_chunk)
    jobs = [job._replace(envs=active_seeds.playing(job.envs)) for job in jobs]
    jobs = [job for job in jobs if job.envs.size]
    pieces = [partial(measure, job) for job in jobs]
    for job, result in zip(jobs, run_pieces(pieces, nets.workers), strict=True):
        numbers = upload(job.envs, device)
        width = len(job.codes)
        loss[numbers], accuracy[numbers, :width] = result
        subset[job.envs, :width] = torch.tensor(job.codes)
    subset = subset.to(device, non_blocking=True)
    return ValidationReport(loss, accuracy, subset, upload(active_seeds.ablated, device))
