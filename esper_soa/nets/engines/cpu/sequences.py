"""Transformers by native kernels: layers, seeds, the tied head, all networks of a chunk in a call.

What trains and validates is the engine in torch; it gets a host whose segments and blueprints
compute by sequence.c what theirs say in torch. Those that the kernels do not know stay as they are.
"""

import ctypes
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets.batched import NORM_EPS
from esper_soa.nets.data.batches import TrainingFeed, ValidationFeed
from esper_soa.nets.engines.cpu import records
from esper_soa.nets.engines.cpu.records import (
    BYTES,
    DOUBLE,
    INTEGER,
    NUMBER,
    POINTER,
    SINGLE,
    WHOLE,
    PointingRecord,
    address,
    all_of,
    lead_to,
)
from esper_soa.nets.model.blueprints import Architecture
from esper_soa.nets.model.host import HostShape
from esper_soa.nets.model.parts import LayerSpec, Parameter
from esper_soa.nets.model.segments import Forward, Scores, Segment
from esper_soa.nets.model.sequence_parts import CausalAttention, Dense, SequencePart
from esper_soa.nets.model.transformer import LAYER_TENSORS, Layers, TiedHead
from esper_soa.nets.passes import Measure, Pass, PieceEngine, TrainChunk
from esper_soa.nets.sgd import Rules

# Numbers of a table of tokens up to which the kernels have its products; torch has larger ones.
MOST_TABLE = 2**18
SAVED_PADDING = 16  # numbers behind what is saved, which is read in whole vectors
BLOCK_TENSORS = LAYER_TENSORS // 2  # tensors of a block: of the norm, and of two linear layers


class SequenceBlock(PointingRecord):
    """sequence_block of sequence.h."""

    _fields_ = [
        *all_of(INTEGER, "nets batch length width heads inner normed gelu saves"),
        *all_of(NUMBER, "eps"),
        *all_of(POINTER, "x grad_out out grad_x statistics hidden mixed sums"),
        ("parameters", POINTER * BLOCK_TENSORS),
        ("steps", INTEGER * BLOCK_TENSORS),
        ("gradients", POINTER * BLOCK_TENSORS),
    ]
    POINTERS = lead_to(
        SINGLE,
        {
            "batch length nets width": "x grad_out out grad_x",
            "sequences length 2": "statistics",
            "sequences length inner": "hidden",
            "sequences length mixed_width": "mixed",
            "sequences length heads": "sums",
        },
    )


class SequenceHead(PointingRecord):
    """sequence_head of sequence.h."""

    _fields_ = [
        *all_of(INTEGER, "nets batch length width tokens"),
        *all_of(NUMBER, "eps"),
        *all_of(POINTER, "x scale shift table"),
        ("steps", INTEGER * 3),
        *all_of(POINTER, "labels loss correct grad_x grad_scale grad_shift grad_table"),
    ]
    POINTERS = {
        **lead_to(
            SINGLE, {"batch length nets width": "x grad_x", "nets width": "grad_scale grad_shift"}
        ),
        **lead_to(SINGLE, {"nets tokens width": "grad_table"}),
        **lead_to(WHOLE, {"nets batch length": "labels"}),
        **lead_to(DOUBLE, {"nets": "loss"}),
        **lead_to(BYTES, {"nets batch length": "correct"}),
    }


class BlockKind(NamedTuple):
    """The kind of x + f(norm(x)): f is attention between linear layers, or a perceptron."""

    heads: int  # 0 for a perceptron
    inner: int  # channels that its first linear layer gives
    gelu: bool = False


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float32)


def _memory_of(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    """Where parameters [n, ...] begin, of which each network's numbers are one after the other."""
    if tensor is None:
        return None
    return address("parameters", tensor[0], SINGLE, count=tensor.numel() // len(tensor))


def _pointers(tensors: list[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (POINTER * BLOCK_TENSORS)(*map(_pointer, tensors))


class _Block(torch.autograd.Function):
    """A block of n networks on features [B, n*C, T]; of parameters [n, ...] each network's numbers
    are one after the other.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, kind: BlockKind, *parameters: Tensor | None
    ) -> Tensor:
        tensors = list(parameters)
        rows = _memory_of(x)
        out = torch.empty_like(rows)
        batch, length, _ = rows.shape
        weight = tensors[2]
        assert weight is not None
        nets, _, width = weight.shape
        saves = any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        count = (nets * batch if saves else 1) * length
        saved = [
            rows.new_empty(count * numbers + SAVED_PADDING)[: count * numbers]
            for numbers in (2, kind.inner, width if kind.heads else 0, kind.heads)
        ]
        record = _block_record(kind, rows, tensors, saved=saved)
        records.point(record, {"out": out})
        record.saves = saves
        records.call("sequence_block_pass", record)
        ctx.save_for_backward(rows, *saved, *tensors)  # type: ignore[arg-type]
        ctx.kind = kind  # type: ignore[attr-defined]
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, *rest = ctx.saved_tensors  # type: ignore[attr-defined]
        tensors = rest[4:]
        record = _block_record(ctx.kind, rows, tensors, saved=rest[:4])  # type: ignore[attr-defined]
        record.saves = True
        out = _memory_of(grad)
        grad_x = torch.empty_like(rows)
        grads = [None if tensor is None else _zeros(tensor) for tensor in tensors]
        records.point(record, {"grad_out": out, "grad_x": grad_x})
        record.gradients = _pointers(grads)
        records.call("sequence_block_pass", record)
        return grad_x.transpose(1, 2), None, *grads


def _block_record(
    kind: BlockKind, rows: Tensor, tensors: list[Tensor | None], saved: list[Tensor]
) -> SequenceBlock:
    """The record of a pass; what it points to must outlive it."""
    batch, length, channels = rows.shape
    weight = tensors[2]
    assert weight is not None
    nets = weight.shape[0]
    record = SequenceBlock(nets, batch, length)
    record.width = channels // nets
    record.heads = kind.heads
    record.inner = kind.inner
    record.normed = tensors[0] is not None
    record.gelu = kind.gelu
    record.eps = NORM_EPS
    record.parameters = _pointers(tensors)
    record.steps = (INTEGER * BLOCK_TENSORS)(
        *[0 if tensor is None else tensor.stride(0) for tensor in tensors]
    )
    names = ("x", "statistics", "hidden", "mixed", "sums")
    held: records.Held = dict(zip(names, (rows, *saved), strict=True))
    mixed_width = record.width if kind.heads else 0
    sequences = saved[0].numel() // (2 * length)
    return records.point(record, held, sequences=sequences, mixed_width=mixed_width)


class _Head(torch.autograd.Function):
    """Sums of losses float64 [n] of the tied head, and right answers bool [n, R]."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, scale: Tensor, shift: Tensor, table: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows = _memory_of(x)
        labels = labels.contiguous()
        batch, length, _ = rows.shape
        nets, tokens, width = table.shape
        loss = torch.zeros(nets, dtype=torch.float64)
        correct = torch.empty(labels.shape, dtype=torch.bool)
        record = SequenceHead(nets, batch, length)
        record.width = width
        record.tokens = tokens
        record.eps = NORM_EPS
        held: records.Held = {"x": rows, "labels": labels, "loss": loss, "correct": correct}
        if any(ctx.needs_input_grad):  # type: ignore[attr-defined]
            grads = list(map(_zeros, (scale, shift, table)))
            grad_x = torch.empty_like(rows)
            names = ("grad_x", "grad_scale", "grad_shift", "grad_table")
            held |= dict(zip(names, (grad_x, *grads), strict=True))
            ctx.save_for_backward(grad_x, *grads)
        for name, tensor in {"scale": scale, "shift": shift, "table": table}.items():
            setattr(record, name, _pointer(tensor))
        record.steps = (INTEGER * 3)(scale.stride(0), shift.stride(0), table.stride(0))
        records.call("sequence_head_pass", records.point(record, held))
        return loss, correct

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_x, *grads = ctx.saved_tensors  # type: ignore[attr-defined]
        factor = grad.to(grad_x.dtype)
        scaled = [part * factor.view(-1, *[1] * (part.dim() - 1)) for part in grads]
        grad_x = grad_x.unflatten(2, (len(factor), -1)) * factor[:, None]
        return grad_x.flatten(2).transpose(1, 2), *scaled, None


def block(x: Tensor, kind: BlockKind, parameters: list[Tensor | None]) -> Tensor:
    """x + f(norm(x)) of features [B, n*C, T]; parameters: scale, shift, and weight and bias of two
    linear layers, None where there is none.
    """
    out: Tensor = _Block.apply(x, kind, *parameters)
    return out


@dataclass(frozen=True)
class NativeLayers(Layers):
    """Layers without dropout."""

    def infer(self, run: Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        attention = BlockKind(self.heads, 3 * self.width)
        perceptron = BlockKind(0, 4 * self.width, gelu=True)
        for first in range(0, self.count * LAYER_TENSORS, LAYER_TENSORS):
            x = block(x, attention, list(folded[first : first + BLOCK_TENSORS]))
            x = block(x, perceptron, list(folded[first + BLOCK_TENSORS : first + LAYER_TENSORS]))
        return run.fill(self.slot, x)


@dataclass(frozen=True)
class NativeHead(TiedHead):
    """The tied head, for losses."""

    def scores(self, parameters: list[Tensor], x: Tensor, targets: Tensor) -> Scores:
        scores: Scores = _Head.apply(x, *parameters, targets)
        return scores


@dataclass(frozen=True)
class NativeSeed(SequencePart):
    """x + what the parts of a seed make of it, in a call."""

    blueprint: Architecture
    kind: BlockKind

    def parameters(self, inputs: int, channels: int) -> tuple[Parameter, ...]:
        """Parameters of its parts."""
        widths = self.blueprint.part_inputs(channels)
        return tuple(chain(*(part.parameters(width, channels) for part, width in widths)))

    def products(self, inputs: int, channels: int, positions: int) -> int:
        raise NotImplementedError

    def layers(self, inputs: int, channels: int) -> tuple[LayerSpec, ...]:
        raise NotImplementedError

    def forward(self, parameters: list[Tensor], x: Tensor) -> Tensor:
        kind = self.kind._replace(inner=parameters[0].shape[1])
        if len(parameters) == BLOCK_TENSORS - 2:
            return block(x, kind, [None, None, *parameters])
        first, last = parameters  # without biases
        return block(x, kind, [None, None, first, None, last, None])


def native_seed(blueprint: Architecture) -> Architecture:
    """The blueprint as the kernels have it; as it is where they do not."""
    match blueprint.parts:
        case (CausalAttention() as only,) if blueprint.residual:
            kind = BlockKind(only.heads, 0)
        case (Dense() as first, Dense() as last) if (
            blueprint.residual and first.bias == last.bias and not last.gelu
        ):
            kind = BlockKind(0, 0, first.gelu)
        case _:
            return blueprint
    return replace(blueprint, parts=(NativeSeed(blueprint, kind),), residual=False)


def native_segment(segment: Segment) -> Segment:
    """The segment as the kernels have it; as it is where they do not."""
    if isinstance(segment, Layers) and segment.dropout == 0:
        return NativeLayers(**vars(segment))
    if isinstance(segment, TiedHead) and segment.tokens * segment.width <= MOST_TABLE:
        return NativeHead(**vars(segment))
    return segment


@lru_cache(maxsize=64)
def native_shape(shape: HostShape) -> HostShape:
    """The same hosts, which compute by the kernels."""
    segments = tuple(map(native_segment, shape.segments))
    blueprints = tuple(map(native_seed, shape.blueprints))
    return shape._replace(segments=segments, blueprints=blueprints)


def obstacle(shape: HostShape) -> str:
    """Why the kernels are of no use to the hosts; "" where they are."""
    supported = any(isinstance(part, NativeLayers) for part in native_shape(shape).segments)
    return "" if supported else "the kernels for sequences need transformer layers without dropout"


@dataclass(frozen=True)
class SequenceEngine(PieceEngine):
    """For transformers with weights in float32, on a CPU."""

    torch_engine: PieceEngine  # trains and validates what the segments compute

    def trainer(self, shared: Pass[TrainingFeed], num_batches: int, rules: Rules) -> TrainChunk:
        return self.torch_engine.trainer(_native(shared), num_batches, rules)

    def validator(self, shared: Pass[ValidationFeed]) -> Measure:
        return self.torch_engine.validator(_native(shared))


def _native(shared: Pass) -> Pass:
    setup = shared.setup
    return shared._replace(setup=setup._replace(shape=native_shape(setup.shape)))
