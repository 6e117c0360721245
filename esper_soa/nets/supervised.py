"""One training pass of N hosts and their seeds: forward, backward, clipping, SGD and gradient statistics, in place.

Runs over chunks of envs, a measured setting of the device: all N on a GPU, a few on a CPU, where caches decide and
workers.py runs them side by side. The losses of a chunk are summed, so one backward gives every host its own gradient.
Called once per env-step by step.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets import fused
from esper_soa.nets.config import DEFAULT_ROWS, SubsetRows, TaskConfig
from esper_soa.nets.data import ImageCrops
from esper_soa.nets.graphs import StepCache
from esper_soa.nets.host import HostShape, train_loss
from esper_soa.nets.native import sgd, switch
from esper_soa.nets.pools import Roster, groups_of, upload
from esper_soa.nets.precision import SCALE, LossScales, all_finite, as_input, autocast, of_nets, where_finite_
from esper_soa.nets.seeds import ActiveGroup, TrainingSeeds, put_to_bed_, wake
from esper_soa.nets.workers import Call, run_pieces
from esper_soa.state import LEDGER_FLOAT, GradientStats

VANISHING = 1e-7  # norm of a parameter tensor's gradient
EXPLODING = 10.0
TINY = 1e-8
CLIP_EPS = 1e-6


class LearningRates(NamedTuple):
    """Of one env-step; numbers, or tensors [] where steps are kept on fixed memory."""

    host: float | Tensor
    seed: float | Tensor

    @classmethod
    def of(cls, task: TaskConfig, factor: float = 1.0) -> "LearningRates":
        """Those of the task, times `factor`."""
        return cls(task.host_lr * factor, task.seed_lr * factor)


class NetsConfig(NamedTuple):
    """What the training and validation of a run's networks have in common."""

    shape: HostShape
    task: TaskConfig
    detached_stages: tuple[int, ...]
    env_chunk: int  # networks per forward pass
    eval_batch: int  # validation images per forward pass
    rows: SubsetRows = DEFAULT_ROWS
    workers: int = 1  # threads that chunks of envs are shared among
    precision: torch.dtype = torch.float32  # of activations, where it has 16 bits; see precision.py
    steps: StepCache | None = None  # keeps steps at fixed addresses and replays them as CUDA graphs


class CountedFeed(Protocol):
    """Training batches from fixed memory, one after the other; see data.CountedBatches."""

    def buffers(self) -> list[Tensor]: ...

    def next_(self) -> tuple[Tensor, Tensor]: ...


class TrainingFeed(Protocol):
    """Where training batches come from."""

    def batch(self, envs: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Images [B, n*3, 32, 32] (channels_last) and labels [B, n] of batch `index` for env numbers `envs`."""
        ...

    @property
    def crops(self) -> Callable[[Tensor, int], ImageCrops] | None:
        """The images of `batch` uncut, by the same arguments; None where native kernels cannot cut them themselves."""
        ...

    def counted(self, envs: Tensor) -> CountedFeed:
        """The same batches, picked by a counter on the device."""
        ...


class TrainReport(NamedTuple):
    """Results of a training pass over N envs."""

    loss: Tensor  # float64 [N], mean of batch means
    accuracy: Tensor  # float64 [N], percent
    gradients: GradientStats  # [N, S]


def chunks(num_envs: int, size: int) -> list[np.ndarray]:
    """Env numbers of as few chunks as hold at most `size` each, all as large as each other or one smaller."""
    return np.array_split(np.arange(num_envs), -(-num_envs // size))


def train_epoch_(
    nets: NetsConfig, weights: TensorDict, alpha: Tensor, roster: Roster, feed: TrainingFeed, num_batches: int,
    lr_factor: float = 1.0,
) -> TrainReport:  # fmt: skip
    """Train every host and every running seed on `num_batches` batches; alpha [N, S] stays fixed meanwhile.

    lr_factor: what the learning rates of the task are multiplied by at this env-step.
    """
    gradients, lr = _unmeasured(alpha.shape, alpha.device), LearningRates.of(nets.task, lr_factor)
    job = _Pass(nets, weights, alpha, roster, feed, num_batches, gradients, lr)
    train_ = job.train_chunk_
    if nets.steps is None and feed.crops is not None and fused.suits(nets.shape, weights):
        seeds = fused.training_seeds(nets.shape, roster, nets.detached_stages)
        whole = fused.WholeTraining(nets.shape, weights, alpha, seeds, _rules(nets.task, lr))
        train_ = partial(job.train_whole_, whole, feed.crops)
    pieces = [partial(train_, envs) for envs in chunks(alpha.shape[0], nets.env_chunk)]
    loss, accuracy = zip(*run_pieces(pieces, nets.workers), strict=True)
    stats = GradientStats.from_dict(gradients, batch_size=list(alpha.shape))
    return TrainReport(torch.cat(loss).to(LEDGER_FLOAT), torch.cat(accuracy), stats)


def _rules(task: TaskConfig, lr: LearningRates) -> tuple[sgd.Rule, sgd.Rule, fused.StatisticsRule]:
    host = sgd.Rule(task.max_grad_norm, CLIP_EPS, float(lr.host), task.momentum, task.weight_decay)
    bounds = fused.StatisticsRule(VANISHING, EXPLODING, TINY)
    return host, host._replace(lr=float(lr.seed), weight_decay=0.0), bounds


class _Pass(NamedTuple):
    """What the chunks of a training pass share; each writes the rows of its own envs alone."""

    nets: NetsConfig
    weights: TensorDict
    alpha: Tensor
    roster: Roster
    feed: TrainingFeed
    num_batches: int
    gradients: dict[str, Tensor]  # fields of GradientStats [N, S]
    lr: LearningRates

    def train_chunk_(self, envs: np.ndarray, call: Call) -> tuple[Tensor, Tensor]:
        """Loss [n] and accuracy (percent, float64 [n]) of the envs with these numbers."""
        chunk, seen = _Chunk(self.nets, self.weights, self.alpha, self.roster, envs, self.lr), 0
        if self.nets.steps is not None:
            return self._train_still_(chunk, self.nets.steps)
        for index in range(self.num_batches):
            call.check()
            images, labels = self.feed.batch(chunk.env_numbers, index)
            chunk.step_(images, labels, self.gradients if index % self.nets.task.gradient_stride == 0 else None)
            seen += labels.shape[0]
        chunk.write_back_()
        return chunk.loss / self.num_batches, 100.0 * chunk.correct.to(LEDGER_FLOAT) / seen

    def train_whole_(
        self,
        whole: fused.WholeTraining,
        crops_of: Callable[[Tensor, int], ImageCrops],
        envs: np.ndarray,
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """As `train_chunk_`, of networks that the native kernels take whole."""
        numbers, seen = upload(envs, self.alpha.device), 0
        loss, hits = torch.zeros(envs.size), torch.zeros(envs.size, dtype=torch.int64)
        for index in range(self.num_batches):
            call.check()
            crops = crops_of(numbers, index)
            measured = index % self.nets.task.gradient_stride == 0
            whole.step_(envs, crops, loss, hits, self.gradients if measured else None)
            seen += crops.labels.shape[1]
        return loss / self.num_batches, 100.0 * hits.to(LEDGER_FLOAT) / seen

    def _train_still_(self, chunk: "_Chunk", steps: StepCache["_StillSteps"]) -> tuple[Tensor, Tensor]:
        """The same as `train_chunk_` on memory that stays from one env-step to the next."""
        fresh = _StillSteps(
            chunk, self.feed.counted(chunk.env_numbers), _unmeasured(self.alpha.shape, self.alpha.device)
        )
        stride = self.nets.task.gradient_stride
        done = steps.run_(fresh.key, fresh, [int(index % stride == 0) for index in range(self.num_batches)])
        done.chunk.write_back_()
        for name, values in done.gradients.items():
            self.gradients[name].index_copy_(0, done.chunk.env_numbers, values[done.chunk.env_numbers])
        seen = done.seen * self.num_batches
        return done.chunk.loss / self.num_batches, 100.0 * done.chunk.correct.to(LEDGER_FLOAT) / seen


def _unmeasured(size: torch.Size, device: torch.device) -> dict[str, Tensor]:
    kinds = dict.fromkeys(("l2", "health", "ratio"), LEDGER_FLOAT)
    kinds |= dict.fromkeys(("vanishing", "exploding", "measured"), torch.bool)
    return {name: torch.zeros(size, dtype=dtype, device=device) for name, dtype in kinds.items()}


class _Chunk:
    """Weights of a few envs while they train: copies, as other chunks of the same memory may train at the same time."""

    def __init__(
        self, nets: NetsConfig, weights: TensorDict, alpha: Tensor, roster: Roster, envs: np.ndarray, lr: LearningRates
    ) -> None:
        self.nets, self.weights, self.lr = nets, weights, lr
        self.env_numbers = upload(envs, alpha.device)
        host = weights["host"]
        self.params = host["params"].index_select(0, self.env_numbers)
        self.momentum = host["momentum"].index_select(0, self.env_numbers)
        rows = nets.shape.statistics.unpack(host["statistics"].index_select(0, self.env_numbers))
        self.statistics = [row.reshape(-1).clone() for row in rows]
        groups = groups_of(roster, envs, nets.detached_stages, alpha.device)
        self.actives = [wake(weights, nets.shape, group, alpha) for group in groups]
        self.scales = LossScales(weights, self.env_numbers) if SCALE in weights else None
        self.loss = torch.zeros(envs.size, dtype=self.params.dtype, device=alpha.device)
        self.correct = torch.zeros(envs.size, dtype=torch.int64, device=alpha.device)

    def step_(self, images: Tensor, labels: Tensor, gradients: dict[str, Tensor] | None) -> None:
        """One optimiser step of every network; writes gradient statistics where asked for.

        Under loss scales, networks of envs whose gradient overflows are left as they are.
        """
        task, before = self.nets.task, self._copies() if self.scales is not None else []
        host_grad, grads = self._gradients(images, labels)
        finite = torch.ones_like(self.loss, dtype=torch.bool)
        if self.scales is not None:
            host_grad = self.scales.unscaled(host_grad, None)
            grads = [(active, self.scales.unscaled(grad, active.group.nets)) for active, grad in grads]
            finite = all_finite(host_grad, [(active.group.nets, grad) for active, grad in grads])
        if gradients is not None:
            self._measure_(gradients, host_grad, grads, finite)
        sgd_(self.params, self.momentum, host_grad, task, self.lr.host, task.weight_decay)
        for active, grad in grads:
            sgd_(active.params, active.momentum, grad, task, self.lr.seed, 0.0)
        for nets, now, old in before:
            where_finite_(of_nets(finite, nets), now, old)
        if self.scales is not None:
            self.scales.update_(finite)

    def _gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[tuple[ActiveGroup, Tensor]]]:
        """Gradients of the hosts [n, P] and of the seeds that train; adds up losses and hits on the way."""
        num_nets, shape, precision = labels.shape[1], self.nets.shape, self.nets.precision
        seeds = TrainingSeeds(self.actives, num_nets)
        leaf = self.params.detach().requires_grad_()
        with autocast(precision, images.device):
            inputs = as_input(images, precision)
            parameters = shape.parameters.unpack(leaf)
            losses, hits = train_loss(shape, parameters, self.statistics, (inputs, labels), seeds)
        self.loss += losses.detach()
        self.correct += hits
        leaves = [leaf, *(seed for seed in seeds.leaves if seed.requires_grad)]
        scaled = losses if self.scales is None else losses * self.scales.scale
        host_grad, *seed_grads = torch.autograd.grad(scaled.sum(), leaves)
        trained = [active for active, seed in zip(self.actives, seeds.leaves, strict=True) if seed.requires_grad]
        return host_grad, list(zip(trained, seed_grads, strict=True))

    def _copies(self) -> list[tuple[Tensor | None, Tensor, Tensor]]:
        """Everything that a step changes in a network, and what it is now; with the networks whose rows it holds."""
        own = [(None, part) for part in (self.params, self.momentum, *self.statistics)]
        seeds = [(active.group.nets, part) for active in self.actives for part in (active.params, active.momentum)]
        return [(nets, part, part.clone()) for nets, part in own + seeds]

    def _measure_(
        self,
        gradients: dict[str, Tensor],
        host_grad: Tensor,
        grads: list[tuple[ActiveGroup, Tensor]],
        finite: Tensor,
    ) -> None:
        """Write the statistics of networks with `finite` gradients; without loss scales all count as such."""
        for active, grad in grads:
            group = active.group
            if group.measured:
                host, valid = of_nets(host_grad, group.nets), of_nets(finite, group.nets)
                for name, values in gradient_statistics(host, grad, active.sizes).items():
                    kept = gradients[name][group.rows, group.slot]
                    gradients[name][group.rows, group.slot] = torch.where(valid, values, kept)

    def write_back_(self) -> None:
        """Return the rows of hosts and seeds to the pools."""
        host, envs = self.weights["host"], self.env_numbers
        host["params"].index_copy_(0, envs, self.params)
        host["momentum"].index_copy_(0, envs, self.momentum)
        rows = torch.cat([part.view(envs.shape[0], -1) for part in self.statistics], dim=1)
        host["statistics"].index_copy_(0, envs, rows)
        for active in self.actives:
            put_to_bed_(self.weights, self.nets.shape, active)
        if self.scales is not None:
            self.scales.write_back_(envs)

    def buffers(self) -> list[Tensor]:
        """What a step reads or changes."""
        own = [self.env_numbers, self.params, self.momentum, *self.statistics, self.loss, self.correct]
        own += self.scales.buffers() if self.scales is not None else []
        return own + [part for active in self.actives for part in active.buffers()]


class _StillSteps:
    """The steps of a chunk with everything they read or change at addresses of their own; see graphs.StaticStep."""

    def __init__(self, chunk: _Chunk, feed: CountedFeed, gradients: dict[str, Tensor]) -> None:
        chunk.env_numbers = chunk.env_numbers.clone()  # on a CPU it is the caller's memory
        device = chunk.params.device
        chunk.lr = LearningRates(*(torch.full((), float(lr), dtype=torch.float64, device=device) for lr in chunk.lr))
        self.chunk, self.feed, self.gradients = chunk, feed, gradients
        self.seen = 0  # images per batch
        self.key = ("train", chunk.env_numbers.shape[0], *(active.signature for active in chunk.actives))

    def buffers(self) -> list[Tensor]:
        rates = [lr for lr in self.chunk.lr if isinstance(lr, Tensor)]
        return [*self.chunk.buffers(), *rates, *self.feed.buffers(), *self.gradients.values()]

    def step_(self, variant: int) -> None:
        """One batch; with variant 1 gradient statistics are taken."""
        images, labels = self.feed.next_()
        self.seen = labels.shape[0]
        self.chunk.step_(images, labels, self.gradients if variant == 1 else None)


def sgd_(
    params: Tensor, momentum: Tensor, grad: Tensor, task: TaskConfig, lr: float | Tensor, weight_decay: float
) -> None:
    """Clip each row's gradient to its own norm, then SGD with momentum, in place; all [n, P], a tensor lr []."""
    if switch.takes(params, dims=2):
        rule = sgd.Rule(task.max_grad_norm, CLIP_EPS, float(lr), task.momentum, weight_decay)
        sgd.sgd_(params, momentum, grad, rule)
        return
    if task.max_grad_norm > 0:
        norm = torch.linalg.vector_norm(grad, dim=1, keepdim=True)
        grad = grad * (task.max_grad_norm / (norm + CLIP_EPS)).clamp(max=1.0)
    if weight_decay > 0:
        grad = grad.add(params, alpha=weight_decay)
    momentum.mul_(task.momentum).add_(grad)
    params.sub_(momentum * lr)  # not with alpha=lr, which rounds once less than a rate on the device can


def gradient_statistics(host_grad: Tensor, seed_grad: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    """Fields of GradientStats for m networks from gradients [m, P]; `sizes` splits the seed's into its tensors.

    Health is 1 - 0.5 (share of vanishing tensors) - 0.8 (share of exploding tensors), clamped to [0, 1].
    """
    parts = [torch.linalg.vector_norm(part, dim=1, dtype=LEDGER_FLOAT) for part in seed_grad.split(sizes, dim=1)]
    norms = torch.stack(parts, dim=1)
    vanishing, exploding = norms < VANISHING, ~(norms <= EXPLODING)
    total = torch.linalg.vector_norm(norms, dim=1)
    health = 1.0 - 0.5 * vanishing.double().mean(1) - 0.8 * exploding.double().mean(1)
    host_norm = torch.linalg.vector_norm(host_grad, dim=1, dtype=LEDGER_FLOAT)
    ratio = (total / seed_grad.shape[1] ** 0.5) / (host_norm / host_grad.shape[1] ** 0.5 + TINY)
    zero = torch.zeros_like(total)
    return {
        "l2": total,
        "health": torch.where(total.isfinite(), health.clamp(0, 1), zero),
        "vanishing": vanishing.any(1),
        "exploding": exploding.any(1),
        "ratio": torch.where(ratio.isfinite() & (total >= TINY) & (host_norm >= TINY), ratio, zero),
        "measured": torch.ones_like(total, dtype=torch.bool),
    }
