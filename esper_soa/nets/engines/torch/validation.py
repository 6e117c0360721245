"""A validation pass in torch: chunks of networks under every subset of blended seeds.

Seeds run only in the rows in which they are on (subsets.py).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets.data.batches import ValidationFeed
from esper_soa.nets.model.host import evaluate_loss, fold_batch_norm
from esper_soa.nets.passes import Pass
from esper_soa.nets.precision import as_input, autocast
from esper_soa.nets.seeds.pools import upload
from esper_soa.nets.seeds.seed_plan import groups_of
from esper_soa.nets.seeds.seeds import ActiveGroup, SeedFiller, gather_rows
from esper_soa.nets.seeds.subsets import Branch, Job
from esper_soa.nets.workers import Call
from esper_soa.state import STATE_FLOAT


@torch.no_grad()
def measure(shared: Pass[ValidationFeed], job: Job, call: Call) -> tuple[Tensor, Tensor]:
    """Loss [n] of the first code and accuracy [n, codes] of the envs of `job`."""
    call.check()
    return ValidationChunk(shared, job.envs).measure(job.plan, job.final_rows)


class SubsetSeeds(SeedFiller):
    """Fills the slots of a validation pass; ablated slots split alpha rows, others apply to all."""

    def __init__(
        self, actives: list[ActiveGroup], num_nets: int, plan: dict[int, Branch], batch: int
    ) -> None:
        super().__init__(actives, num_nets)
        self.plan = plan
        self.batch = batch

    def fill(self, slot: int, x: Tensor, pooled: bool) -> Tensor:
        branch = self.plan.get(slot)
        if branch is None:
            return super().fill(slot, x, pooled)
        on = super().fill(slot, self._rows(x, branch.on), pooled)
        off = F.max_pool2d(x, 2) if pooled and branch.off else x  # pooled before rows are copied
        return torch.cat([self._rows(off, branch.off), on]) if branch.off else on

    def _rows(self, x: Tensor, rows: tuple[int, ...]) -> Tensor:
        if rows == tuple(range(x.shape[0] // self.batch)):
            return x
        parts = [x[row * self.batch : (row + 1) * self.batch] for row in rows]
        return torch.cat(parts) if rows else x[:0]


class ValidationChunk:
    """Weights of a few envs for validation: batch norm folded, only seeds with alpha above 0."""

    def __init__(self, shared: Pass[ValidationFeed], envs: np.ndarray) -> None:
        self.shared = shared
        device = shared.alpha.device
        self.env_numbers = upload(envs, device)
        shape = shared.nets.shape
        host = shared.weights["host"]
        params = shape.parameters.unpack(host["params"].index_select(0, self.env_numbers))
        statistics = shape.statistics.unpack(host["statistics"].index_select(0, self.env_numbers))
        self.folded = fold_batch_norm(shape, params, statistics)
        groups = groups_of(shared.plan, envs, device)
        self.actives = [gather_rows(shared.weights, shape, group, shared.alpha) for group in groups]

    def measure(
        self, plan: dict[int, Branch], final_rows: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Loss [n] of the first code and accuracy [n, codes]."""
        nets = self.shared.nets
        num_nets = self.env_numbers.shape[0]
        rows = list(final_rows)
        loss = torch.zeros(num_nets, dtype=STATE_FLOAT, device=self.env_numbers.device)
        correct = torch.zeros(len(rows), num_nets, dtype=torch.int64, device=loss.device)
        correct_counts = torch.zeros_like(loss)
        for inputs, labels in self.shared.feed.batches(self.env_numbers, nets.eval_batch):
            targets = labels.expand(-1, num_nets, *labels.shape[2:])
            seeds = SubsetSeeds(self.actives, num_nets, plan, labels.shape[0])
            with autocast(nets.precision, inputs.device):
                x = as_input(inputs, nets.precision)
                batch = x, targets
                losses, right = evaluate_loss(nets.shape, self.folded, batch, seeds, rows[0])
            loss += losses
            correct += torch.stack([right[row] for row in rows])
            correct_counts += (targets >= 0).transpose(0, 1).flatten(1).sum(1)
        return loss / correct_counts, 100.0 * correct.T.to(STATE_FLOAT) / correct_counts[:, None]
