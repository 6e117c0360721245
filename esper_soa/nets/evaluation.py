"""Validation under every subset of blended seeds that the rewards need, with shared segments.

A host is a chain, so the subsets of seeds form a tree: what lies before the first slot that differs is computed once.
Envs whose ablated slots agree are evaluated together; seeds run only in the rows in which they are on. Called once per
env-step by env/step.py, after supervised.train_epoch_.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from esper_soa.nets import batched, fused
from esper_soa.nets.config import DEFAULT_ROWS, SubsetRows
from esper_soa.nets.data import ImageCrops
from esper_soa.nets.host import evaluate_forward, fold_batch_norm
from esper_soa.nets.pools import Roster, groups_of, upload
from esper_soa.nets.precision import as_input, autocast
from esper_soa.nets.seeds import ActiveGroup, fill_slot, wake
from esper_soa.nets.supervised import NetsConfig, chunks
from esper_soa.nets.workers import Call, run_pieces
from esper_soa.state import LEDGER_FLOAT
from esper_soa.vocabulary import Stage

EXACT_SLOTS = 4  # up to this many ablated seeds every subset is evaluated


class ValidationFeed(Protocol):
    """Where validation batches come from."""

    def batches(self, envs: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """Images [B, 3 or n*3, 32, 32] and labels [B, 1 or n] of env numbers `envs`; label -1 does not count."""
        ...

    @property
    def crops(self) -> Callable[[Tensor], ImageCrops] | None:
        """The images of all `batches` uncut, by env numbers; None where native kernels cannot cut them themselves."""
        ...


class ValidationReport(NamedTuple):
    """Accuracies of N envs by subset row; see state.Measurements."""

    loss: Tensor  # float64 [N], of row 0
    accuracy: Tensor  # float64 [N, R], percent
    subset: Tensor  # int64 [N, R], -1 = row not evaluated
    ablated: Tensor  # bool [N, S]


@lru_cache(maxsize=4096)
def subset_codes(
    ablated: tuple[int, ...], fossils: tuple[int, ...], rows: SubsetRows = DEFAULT_ROWS
) -> tuple[int, ...]:
    """Subsets to evaluate, as bit masks over slot numbers; the first has every ablated seed on.

    Up to EXACT_SLOTS seeds all 2^n; beyond, the full set, each leave-one-out, each alone, none, the fossils alone, and
    what `rows` asks for: n (n - 1) / 2 pairs, and its codes.
    """
    full = sum(1 << slot for slot in ablated)
    if len(ablated) <= EXACT_SLOTS:
        return tuple(code for code in range(full, -1, -1) if code & full == code)
    kept = sum(1 << slot for slot in fossils)
    wanted = [full, *(full - (1 << slot) for slot in ablated), *(1 << slot for slot in ablated), 0, kept]
    if rows.pairs:
        wanted += [1 << one | 1 << other for one, other in combinations(ablated, 2)]
    wanted += [code & full for code in rows.codes]
    return tuple(dict.fromkeys(wanted))


def max_rows(num_slots: int, rows: SubsetRows = DEFAULT_ROWS) -> int:
    """Most subset rows that an env with `num_slots` slots can need."""
    if num_slots <= EXACT_SLOTS:
        return 2**num_slots
    pairs = num_slots * (num_slots - 1) // 2 if rows.pairs else 0
    return min(2**num_slots, max(2**EXACT_SLOTS, 2 * num_slots + 3 + pairs + len(rows.codes)))


class Branch(NamedTuple):
    """What happens to the alpha rows at one slot: rows `off` pass by the seed, rows `on` take it in."""

    off: tuple[int, ...]  # rows before the slot that continue without the seed
    on: tuple[int, ...]  # rows before the slot that continue with it; both may name the same row


@lru_cache(maxsize=4096)
def branch_plan(order: tuple[int, ...], codes: tuple[int, ...]) -> tuple[dict[int, Branch], tuple[int, ...]]:
    """Branches by slot for ablated slots in execution `order`, and the final row of every code."""
    prefixes, plan, mask = [0], {}, 0
    for slot in order:
        bit = 1 << slot
        mask |= bit
        wanted = {code & mask for code in codes}
        off = tuple(row for row, prefix in enumerate(prefixes) if prefix in wanted)
        on = tuple(row for row, prefix in enumerate(prefixes) if prefix | bit in wanted)
        plan[slot] = Branch(off, on)
        prefixes = [prefixes[row] for row in off] + [prefixes[row] | bit for row in on]
    return plan, tuple(prefixes.index(code) for code in codes)


class SubsetSeeds:
    """Fills the slots of a validation pass; ablated slots split the alpha rows, the others apply to every row."""

    def __init__(self, actives: list[ActiveGroup], num_nets: int, plan: dict[int, Branch], batch: int) -> None:
        self.actives, self.num_nets, self.plan, self.batch = actives, num_nets, plan, batch

    def occupied(self, slot: int) -> bool:
        return any(active.group.slot == slot for active in self.actives)

    def fill(self, slot: int, x: Tensor, pooled: bool) -> Tensor:
        branch = self.plan.get(slot)
        if branch is None:
            return self._with_seeds(slot, x, pooled)
        on = self._with_seeds(slot, self._rows(x, branch.on), pooled)
        off = batched.max_pool(x) if pooled and branch.off else x  # pooled before rows are copied
        return torch.cat([self._rows(off, branch.off), on]) if branch.off else on

    def _rows(self, x: Tensor, rows: tuple[int, ...]) -> Tensor:
        if rows == tuple(range(x.shape[0] // self.batch)):
            return x
        return torch.cat([x[row * self.batch : (row + 1) * self.batch] for row in rows]) if rows else x[:0]

    def _with_seeds(self, slot: int, x: Tensor, pooled: bool) -> Tensor:
        here = [active for active in self.actives if active.group.slot == slot]
        return fill_slot(x, here, [active.params for active in here], self.num_nets, pooled)


def evaluate(
    nets: NetsConfig, weights: TensorDict, alpha: Tensor, roster: Roster, feed: ValidationFeed
) -> ValidationReport:
    """Accuracy of every env under every subset row it needs, and the loss with all seeds on; alpha [N, S]."""
    num_envs, num_slots = alpha.shape
    device, rows = alpha.device, max_rows(num_slots, nets.rows)
    loss = torch.zeros(num_envs, dtype=LEDGER_FLOAT, device=device)
    accuracy = torch.zeros(num_envs, rows, dtype=LEDGER_FLOAT, device=device)
    subset = torch.full((num_envs, rows), -1, dtype=torch.int64)
    jobs, measure = _jobs(nets, roster), partial(_measured, nets, weights, alpha, roster, feed)
    if nets.steps is None and feed.crops is not None and fused.suits(nets.shape, weights):
        whole = fused.WholeValidation(nets.shape, weights, alpha, fused.validation_seeds(nets.shape, roster))
        measure = partial(_measured_whole, whole, feed.crops)
    pieces = [partial(measure, job) for job in jobs]
    for job, result in zip(jobs, run_pieces(pieces, nets.workers), strict=True):
        numbers, width = upload(job.envs, device), len(job.codes)
        loss[numbers], accuracy[numbers, :width] = result
        subset[job.envs, :width] = torch.tensor(job.codes)
    return ValidationReport(loss, accuracy, subset.to(device, non_blocking=True), upload(roster.ablated, device))


class _Job(NamedTuple):
    """Some envs that are validated under the same subset rows."""

    envs: np.ndarray
    codes: tuple[int, ...]
    plan: dict[int, Branch]
    final_rows: tuple[int, ...]


def _jobs(nets: NetsConfig, roster: Roster) -> list[_Job]:
    """Every env in one of them, the most work first, so that workers end together."""
    num_slots = roster.stage.shape[1]
    weight = 1 << np.arange(num_slots)
    fossil = roster.ablated & (roster.stage == Stage.FOSSILIZED)
    ablated_bits, fossil_bits = roster.ablated @ weight, fossil @ weight
    patterns = ablated_bits << num_slots | fossil_bits
    jobs = []
    for pattern in np.unique(patterns):
        alike = np.flatnonzero(patterns == pattern)
        slots = _members(int(ablated_bits[alike[0]]), num_slots)
        codes = subset_codes(slots, _members(int(fossil_bits[alike[0]]), num_slots), nets.rows)
        plan, final_rows = branch_plan(tuple(slot for slot in nets.shape.execution_order if slot in slots), codes)
        jobs += [_Job(alike[piece], codes, plan, final_rows) for piece in chunks(alike.size, nets.env_chunk)]
    return sorted(jobs, key=lambda job: -len(job.codes) * job.envs.size)


@torch.no_grad()
def _measured(
    nets: NetsConfig, weights: TensorDict, alpha: Tensor, roster: Roster, feed: ValidationFeed, job: _Job, call: Call
) -> tuple[Tensor, Tensor]:
    """Loss [n] of the first code and accuracy [n, codes] of the envs of `job`."""
    call.check()
    chunk = _Chunk(nets, weights, alpha, roster, job.envs)
    if nets.steps is None:
        return chunk.measure(feed, job.plan, job.final_rows)
    fresh = _StillMeasure(chunk, feed, job)
    done = nets.steps.run_(fresh.key, fresh, [0])
    return done.loss.clone(), done.accuracy.clone()


def _measured_whole(
    whole: fused.WholeValidation, crops_of: Callable[[Tensor], ImageCrops], job: _Job, call: Call
) -> tuple[Tensor, Tensor]:
    """As `_measured`, of networks that the native kernels take whole."""
    call.check()
    crops = crops_of(upload(job.envs, torch.device("cpu")))
    return whole.measure(job.envs, crops, job.codes, sum(1 << slot for slot in job.plan))


def _members(bits: int, num_slots: int) -> tuple[int, ...]:
    return tuple(slot for slot in range(num_slots) if bits >> slot & 1)


class _Chunk:
    """Weights of a few envs for validation: batch norm folded, only seeds with alpha above 0."""

    def __init__(self, nets: NetsConfig, weights: TensorDict, alpha: Tensor, roster: Roster, envs: np.ndarray) -> None:
        self.nets = nets
        self.env_numbers = upload(envs, alpha.device)
        shape, host = nets.shape, weights["host"]
        params = shape.parameters.unpack(host["params"].index_select(0, self.env_numbers))
        statistics = shape.statistics.unpack(host["statistics"].index_select(0, self.env_numbers))
        self.folded = fold_batch_norm(shape, params, statistics)
        visible = roster._replace(running=roster.visible)
        groups = groups_of(visible, envs, nets.detached_stages, alpha.device)
        self.actives = [wake(weights, shape, group, alpha) for group in groups]

    def measure(
        self, feed: ValidationFeed, plan: dict[int, Branch], final_rows: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Loss [n] of the first code and accuracy [n, codes]."""
        num_nets, rows = self.env_numbers.shape[0], list(final_rows)
        loss = torch.zeros(num_nets, dtype=LEDGER_FLOAT, device=self.env_numbers.device)
        correct = torch.zeros(len(rows), num_nets, dtype=torch.int64, device=loss.device)
        counted = torch.zeros_like(loss)
        for images, labels in feed.batches(self.env_numbers, self.nets.eval_batch):
            targets = labels.expand(labels.shape[0], num_nets)
            seeds = SubsetSeeds(self.actives, num_nets, plan, labels.shape[0])
            with autocast(self.nets.precision, images.device):
                inputs = as_input(images, self.nets.precision)
                logits = evaluate_forward(self.nets.shape, self.folded, inputs, seeds)
            logits = logits.to(self.folded[0].dtype).unflatten(0, (-1, labels.shape[0]))
            hits = (logits.argmax(-1) == targets).sum(1)
            correct += torch.stack([hits[row] for row in rows])
            main = logits[rows[0]].flatten(0, 1)
            losses = F.cross_entropy(main, targets.flatten(), ignore_index=-1, reduction="none")
            # One contiguous row per network: its sum is rounded the same way whoever is validated beside it.
            loss += losses.unflatten(0, targets.shape).T.contiguous().sum(1)
            counted += (targets >= 0).sum(0)
        return loss / counted, 100.0 * correct.T.to(LEDGER_FLOAT) / counted[:, None]

    def buffers(self) -> list[Tensor]:
        """What a measurement reads."""
        return [self.env_numbers, *self.folded, *(part for active in self.actives for part in active.buffers())]


class _StillMeasure:
    """A measurement with everything it reads or gives at addresses of its own; see graphs.StaticStep."""

    def __init__(self, chunk: _Chunk, feed: ValidationFeed, job: _Job) -> None:
        self.chunk, self.feed, self.job = chunk, feed, job
        chunk.env_numbers = chunk.env_numbers.clone()  # on a CPU it is the memory of job.envs
        size, device = job.envs.size, chunk.env_numbers.device
        self.loss = torch.zeros(size, dtype=LEDGER_FLOAT, device=device)
        self.accuracy = torch.zeros(size, len(job.codes), dtype=LEDGER_FLOAT, device=device)
        self.key = ("validate", size, job.codes, *(active.signature for active in chunk.actives))

    def buffers(self) -> list[Tensor]:
        return [*self.chunk.buffers(), self.loss, self.accuracy]

    def step_(self, variant: int) -> None:
        """All validation batches under all subset rows."""
        loss, accuracy = self.chunk.measure(self.feed, self.job.plan, self.job.final_rows)
        self.loss.copy_(loss)
        self.accuracy.copy_(accuracy)
