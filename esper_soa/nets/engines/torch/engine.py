"""The engine in torch: what a network means, on any device; every other one is tested against it.

In training a chunk is as many envs as suit the device: all N on a GPU, a few on a CPU, where caches
decide and workers run them side by side. The losses of a chunk are summed, so one backward gives
every host its own gradient. In validation seeds run only in the rows in which they are on
(subsets.py).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets import precision
from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.engine import EngineChoice
from esper_soa.nets.gradients import gradient_statistics
from esper_soa.nets.model.host import evaluate_loss, fold_batch_norm, train_loss
from esper_soa.nets.passes import Gradients, Measure, Pass, Piece, PieceEngine, TrainChunk
from esper_soa.nets.seeds.seeds import SeedFiller, TrainingSeeds, gather_rows, scatter_rows_
from esper_soa.nets.seeds.subsets import Branch, Job
from esper_soa.nets.sgd import Rules, update_
from esper_soa.state import STATE_FLOAT
from esper_soa.system.threads import Call


class TrainingChunk:
    """Weights of a few envs in training: copies, as other chunks of the memory may train too."""

    def __init__(self, shared: Pass[TrainingFeed], rules: Rules, piece: Piece) -> None:
        self.shared = shared
        weights = shared.weights
        shape = shared.setup.shape
        device = shared.alpha.device
        envs, self.env_numbers, groups = piece
        self.rules = [rule.of(self.env_numbers) for rule in rules]
        host = weights["host"]
        self.params = host["params"].index_select(0, self.env_numbers)
        self.momentum = host["momentum"].index_select(0, self.env_numbers)
        rows = shape.statistics.unpack(host["statistics"].index_select(0, self.env_numbers))
        self.statistics = [row.reshape(-1).clone() for row in rows]
        self.actives = [gather_rows(weights, shape, group, alpha=shared.alpha) for group in groups]
        self.trained = [active for active in self.actives if not active.group.frozen]
        scaled = precision.SCALE_KEY in weights
        self.scales = precision.LossScales(weights, self.env_numbers) if scaled else None
        self.loss = torch.zeros(envs.size, dtype=self.params.dtype, device=device)
        self.correct = torch.zeros(envs.size, dtype=torch.int64, device=device)
        self.seen = 0  # targets of each network

    def step_(self, step: int, gradients: Gradients | None, call: Call) -> None:
        """One optimiser step, on all of its batches; writes gradient statistics where asked for.

        Under loss scales, networks of envs whose gradient overflows are left as they are.
        """
        before = self._copies() if self.scales is not None else []
        count = self.shared.setup.accumulate
        batches = range(step * count, (step + 1) * count)
        grads, *others = [self._gradients(batch, call) for batch in batches]
        for more in others:
            grads = [grad + other for grad, other in zip(grads, more, strict=True)]
        grads = [grad / (1 + len(others)) for grad in grads] if others else grads
        finite = torch.ones_like(self.loss, dtype=torch.bool)
        if self.scales is not None:
            places = [None, *(active.group.nets for active in self.trained)]
            both = zip(grads, places, strict=True)
            grads = [self.scales.unscaled(grad, nets) for grad, nets in both]
            finite = precision.all_finite(grads, places)
        host_grad, *seed_grads = grads
        if gradients is not None:
            self._measure_(gradients, host_grad, seed_grads, finite=finite)
        host_rule, seed_rule = self.rules
        update_(self.params, self.momentum, host_grad, rule=host_rule)
        for active, grad in zip(self.trained, seed_grads, strict=True):
            update_(active.params, active.momentum, grad, rule=seed_rule.of(active.group.nets))
        for nets, rows, old in before:
            precision.where_finite_(precision.of_nets(finite, nets), rows, old)
        if self.scales is not None:
            self.scales.update_(finite)

    def _gradients(self, batch: int, call: Call) -> list[Tensor]:
        """Gradients of hosts [n, P], then of `trained`; adds up losses and correct answers."""
        call.check()
        feed = self.shared.feed
        inputs, labels = feed.batch(self.env_numbers, batch)

        def noise() -> Tensor:
            return feed.draw.noise(self.env_numbers, batch)

        shape = self.shared.setup.shape
        dtype = self.shared.setup.precision
        leaf = self.params.detach().requires_grad_()
        seeds = TrainingSeeds(self.actives, labels.shape[1])
        with precision.autocast(dtype, inputs.device):
            losses, correct = train_loss(
                shape,
                shape.parameters.unpack(leaf),
                self.statistics,
                batch=(precision.as_input(inputs, dtype), labels),
                filler=seeds,
                noise=noise,
            )
        self.loss += losses.detach()
        self.correct += correct
        self.seen += labels[:, 0].numel()
        leaves = [leaf, *(seed for seed in seeds.leaves if seed.requires_grad)]
        scaled = losses if self.scales is None else losses * self.scales.scale
        return list(torch.autograd.grad(scaled.sum(), leaves))

    def _copies(self) -> list[tuple[Tensor | None, Tensor, Tensor]]:
        places: list[tuple[Tensor | None, Tensor]]
        places = [(None, part) for part in (self.params, self.momentum, *self.statistics)]
        for active in self.actives:
            places += [(active.group.nets, part) for part in (active.params, active.momentum)]
        return [(nets, part, part.clone()) for nets, part in places]

    def _measure_(
        self, gradients: Gradients, host_grad: Tensor, seed_grads: list[Tensor], finite: Tensor
    ) -> None:
        """Write the statistics of networks with `finite` gradients; without loss scales of all."""
        for active, grad in zip(self.trained, seed_grads, strict=True):
            group = active.group
            if group.measured:
                host = precision.of_nets(host_grad, group.nets)
                valid = precision.of_nets(finite, group.nets)
                for name, values in gradient_statistics(host, grad, active.sizes).items():
                    gradient = gradients[name][group.rows, group.slot]
                    gradients[name][group.rows, group.slot] = torch.where(valid, values, gradient)

    def write_back_(self) -> None:
        """Return the rows of hosts and seeds to the pools."""
        weights = self.shared.weights
        host = weights["host"]
        envs = self.env_numbers
        host["params"].index_copy_(0, envs, self.params)
        host["momentum"].index_copy_(0, envs, self.momentum)
        if self.statistics:
            rows = torch.cat([part.view(envs.shape[0], -1) for part in self.statistics], dim=1)
            host["statistics"].index_copy_(0, envs, rows)
        for active in self.actives:
            scatter_rows_(weights, self.shared.setup.shape, active)
        if self.scales is not None:
            self.scales.write_back_(envs)


@dataclass
class SubsetSeeds(SeedFiller):
    """Fills the slots of a validation pass; ablated slots split alpha rows, others apply to all."""

    plan: dict[int, Branch]  # of the ablated slots
    batch: int  # B

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


@torch.no_grad()
def measure(
    shared: Pass[ValidationFeed], job: Job, piece: Piece, call: Call
) -> tuple[Tensor, Tensor]:
    """Loss [n] of the first code and accuracy [n, codes] of the envs of `job`."""
    setup = shared.setup
    shape = setup.shape
    device = shared.alpha.device
    _, envs, groups = piece
    host = shared.weights["host"]
    params = shape.parameters.unpack(host["params"].index_select(0, envs))
    statistics = shape.statistics.unpack(host["statistics"].index_select(0, envs))
    folded = fold_batch_norm(shape, params, statistics)
    actives = [gather_rows(shared.weights, shape, group, alpha=shared.alpha) for group in groups]
    num_nets = job.envs.size
    rows = job.final_rows
    loss = torch.zeros(num_nets, dtype=STATE_FLOAT, device=device)
    correct = torch.zeros(len(rows), num_nets, dtype=torch.int64, device=device)
    counts = torch.zeros_like(loss)
    seen = 0
    for inputs, labels in shared.feed.batches(envs, setup.eval_batch):
        targets = labels.expand(-1, num_nets, *labels.shape[2:])
        seeds = SubsetSeeds(actives, num_nets, job.plan, batch=labels.shape[0])
        with precision.autocast(setup.precision, inputs.device):
            batch = precision.as_input(inputs, setup.precision), targets
            losses, right = evaluate_loss(shape, folded, batch, filler=seeds, row=rows[0])
        loss += losses
        correct += torch.stack([right[row].sum(1) for row in rows])
        if shared.answers is not None:
            part = slice(seen, seen + labels.shape[0])
            shared.answers[envs, part] = right[rows[0]].to(shared.answers.dtype)
            seen = part.stop
        counts += (targets >= 0).transpose(0, 1).flatten(1).sum(1)
    return loss / counts, 100.0 * correct.T.to(STATE_FLOAT) / counts[:, None]


@dataclass(frozen=True)
class TorchEngine(PieceEngine):
    """A backward pass for all networks of a chunk; subset rows along the batch of a validation."""

    chosen: EngineChoice = EngineChoice(False, "plain torch")

    def trainer(self, shared: Pass[TrainingFeed], num_batches: int, rules: Rules) -> TrainChunk:
        setup = shared.setup

        def train_chunk_(piece: Piece, gradients: Gradients, call: Call) -> tuple[Tensor, Tensor]:
            chunk = TrainingChunk(shared, rules, piece)
            for step in range(num_batches // setup.accumulate):
                measured = step % setup.task.gradient_stride == 0
                chunk.step_(step, gradients if measured else None, call)
            chunk.write_back_()
            return chunk.loss / num_batches, 100.0 * chunk.correct.to(STATE_FLOAT) / chunk.seen

        return train_chunk_

    def validator(self, shared: Pass[ValidationFeed]) -> Measure:
        return partial(measure, shared)
