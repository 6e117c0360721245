"""Verification of the native kernels before a run uses them.

Its records are to be as ctypes lays them out, its numbers those of torch: tiny hosts with each kind
of seed, of images or of sequences, are trained and validated by both, in some milliseconds, once
per process. Tests prove other networks.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import (
    IMAGE_SIZE,
    TaskConfig,
    TransformerConfig,
    host_slots,
    sort_slots,
)
from esper_soa.nets.data.batches import BatchSource, Draw
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.data.image_set import LABEL_FIELDS, TENSOR_FIELDS
from esper_soa.nets.data.text import text_set
from esper_soa.nets.engine import EngineChoice
from esper_soa.nets.engines.cpu import program, records
from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.cpu.host_program import host_program
from esper_soa.nets.engines.cpu.library import kernels, replace_kernels
from esper_soa.nets.engines.cpu.operations import MODULE, OPERATION
from esper_soa.nets.engines.cpu.sequences import SequenceBlock, SequenceEngine, SequenceHead
from esper_soa.nets.model.blueprints import BLUEPRINTS, SEQUENCE_BLUEPRINTS
from esper_soa.nets.model.host import IMAGE_SHAPE, HostShape, host_shape
from esper_soa.nets.passes import PieceEngine
from esper_soa.nets.seeds import pools
from esper_soa.nets.setup import Setup
from esper_soa.vocabulary import CNN_BLUEPRINTS as IMAGE_CODES
from esper_soa.vocabulary import SEQUENCE_BLUEPRINTS as SEQUENCE_CODES
from esper_soa.vocabulary import Blend, Blueprint, Stage

NATIVE_RECORDS: dict[str, type[ctypes.Structure]] = {
    "crops": records.CropsRecord,
    "sgd": records.Sgd,
    "operation": np.ctypeslib.as_ctypes_type(OPERATION),  # type: ignore[arg-type, dict-item]
    "networks": records.NativeNetworks,
    "module_seed": np.ctypeslib.as_ctypes_type(MODULE),  # type: ignore[arg-type, dict-item]
    "seed_part": program.NativePart,
    "training": records.Training,
    "validation": records.Validation,
    "sequence_block": SequenceBlock,
    "sequence_head": SequenceHead,
}
ENGINE_NAME = "native"  # in compute.engine
CPU = torch.device("cpu")
# A share of the largest number: kernels and torch differ by about 1e-6, a wrong kernel by 1.
PROOF_ROUNDING = 1e-3
PROOF_BATCH = 3
PROOF_SAMPLES = 16
NUM_TRIES = 3
NUM_SEEDS = 2  # least kinds of them with which the hosts of a run are proven


class Case(NamedTuple):
    """Tiny networks, one with each of `codes` in its slot, and what they learn from."""

    engine: Callable[[PieceEngine], PieceEngine]  # given the engine in torch
    task: TaskConfig
    shape: HostShape
    codes: tuple[int, ...]
    blends: Mapping[int, int]  # by code; all others are added to the host and see its graph
    detached: int  # learns behind the host, cut off from it
    samples: BatchSource
    spread: float  # of all weights
    moving: float = 1.0  # of momentum, in spreads


class ImageSizes(NamedTuple):
    """Sizes of hosts of images."""

    channels: int  # of the first block; those behind have twice as many each
    blocks: int
    slot: str
    left_out: tuple[int, ...] = ()  # blueprints, for the time that they take


class SequenceSizes(NamedTuple):
    """Sizes of transformers with two heads."""

    width: int
    context: int
    tokens: int
    codes: tuple[int, ...] = SEQUENCE_CODES


# The kernels work by vectors of 8 or 16 floats, of which some take two at a time, by tiles of 4x4
# or 2x2 pixels, and by 16 queries. Sizes are below each, at it and above it. Channels 6, 12, 24 and
# 48 are part of a vector, one that is not full, three of 8 and three of 16; behind three pools
# tiles are 2x2. Heads of 10 channels are copied, those of 32 are where they were; 40 positions are
# two vectors and a rest. More pixels bring more numbers to the edge of a ReLU, not more ways.
IMAGE_SIZES = (
    ImageSizes(6, blocks=2, slot="r0c1"),
    ImageSizes(12, blocks=3, slot="r1c2", left_out=(Blueprint.CONV_HEAVY,)),
)
SEQUENCE_SIZES = (
    SequenceSizes(20, context=20, tokens=13),
    SequenceSizes(64, context=40, tokens=37, codes=(Blueprint.ATTENTION, Blueprint.LORA)),
)


@cache
def proof_images(shape: tuple[int, ...] = IMAGE_SHAPE, classes: int = 10) -> BatchSource:
    """Images [C, S, S] that all hosts of so many classes learn from."""
    images = synthetic(PROOF_SAMPLES, PROOF_SAMPLES, CPU)
    colours, side, _ = shape
    tiles = -(-side // IMAGE_SIZE)
    changed = {
        name: vars(images)[name].repeat(1, tiles, tiles, 1)[:, :side, :side, :colours].contiguous()
        for name in TENSOR_FIELDS[: len(LABEL_FIELDS)]
    }
    changed |= {name: vars(images)[name] % classes for name in LABEL_FIELDS}
    return replace(images, **changed, mean=images.mean[:colours], std=images.std[:colours])


def image_case(sizes: ImageSizes, optimizer: str = "sgd") -> Case:
    """Hosts of images, each block with a pool."""
    blueprints = tuple(known for known in BLUEPRINTS if known.code not in sizes.left_out)
    task = TaskConfig(base_channels=sizes.channels, num_blocks=sizes.blocks, num_pools=sizes.blocks)
    task.blueprints = [blueprint.name for blueprint in blueprints[1:]]
    task.max_grad_norm = 0.05
    task.weight_decay = 0.01
    task.optimizer = optimizer
    engine = CpuEngine(EngineChoice(True, ""))
    return Case(
        lambda _: engine,
        task,
        shape=host_shape(task, sort_slots(task, [sizes.slot]), blueprints),
        codes=tuple(code for code in IMAGE_CODES if code not in sizes.left_out),
        blends={Blueprint.DEPTHWISE: Blend.MULTIPLY, Blueprint.BOTTLENECK: Blend.GATE},
        detached=Blueprint.CONV_SMALL,
        samples=proof_images(),
        spread=0.5,
    )


def sequence_case(sizes: SequenceSizes) -> Case:
    """Transformers of one layer."""
    context = sizes.context
    tokens = sizes.tokens
    parts = TransformerConfig(width=sizes.width, layers=1, heads=2, context=context, segments=1)
    names = [blueprint.name for blueprint in SEQUENCE_BLUEPRINTS[1:]]
    task = TaskConfig(host="transformer", num_classes=tokens, blueprints=names, transformer=parts)
    task.max_grad_norm = 0.05
    task.weight_decay = 0.01
    numbers = torch.arange(20 * context * (PROOF_SAMPLES + 2)) * 7919 % 8191 % tokens
    return Case(
        partial(SequenceEngine, EngineChoice(True, "")),
        task,
        shape=host_shape(task, host_slots(task), SEQUENCE_BLUEPRINTS),
        codes=sizes.codes,
        blends={Blueprint.LORA: Blend.MULTIPLY, Blueprint.MLP: Blend.GATE},
        detached=Blueprint.MLP_SMALL,
        samples=text_set("proof", "", numbers.to(torch.uint8), context=context, num_tokens=tokens),
        spread=0.25,
    )


def is_traced(shape: HostShape) -> bool:
    """Whether the hosts or their seeds are of more operations than chains of blocks have, or of
    other images than those of the package.
    """
    traced = shape.input_shape != IMAGE_SHAPE or host_program(shape)["together"].any()
    return bool(traced or any(blueprint.module for blueprint in shape.blueprints))


def host_case(shape: HostShape, optimizer: str) -> Case:
    """Hosts of a run, one with each seed that is a module, and some others, in all slots."""
    known = sorted(shape.blueprints, key=lambda blueprint: blueprint.module is None)
    codes = [blueprint.code for blueprint in known if blueprint.parts]
    count = max(NUM_SEEDS, sum(blueprint.module is not None for blueprint in known))
    still = image_case(IMAGE_SIZES[0], optimizer)._replace(moving=0.0)  # and gradients are seen
    chosen = tuple(codes[:count])
    samples = proof_images(shape.input_shape, shape.num_classes)
    return still._replace(
        shape=shape, codes=chosen, blends={}, detached=-1, spread=0.25, samples=samples
    )


class _Field(ctypes.Structure):
    """field of records.c."""

    _fields_ = [
        *records.all_of(ctypes.c_char_p, "record name"),
        *records.all_of(records.INTEGER, "at size"),
    ]


def choose_native(
    device: torch.device,
    exact: PieceEngine,
    dtype: torch.dtype = torch.float32,
    obstacle: str = "",
    sequences: bool = False,
    shape: HostShape | None = None,
    optimizer: str = "sgd",
) -> EngineChoice:
    """Whether the kernels compute for networks in `dtype` on `device`, else torch, and why.

    exact: the engine that they are proven against. obstacle: why the networks of this run cannot be
    left to them, where that is so. sequences: whether it is about those for sequences, not those
    for images. shape: of the hosts of this run. Kernels that are proven are taken without a timing:
    what a run computes must not depend on how busy the machine was.
    """
    if device.type != "cpu" or dtype != torch.float32:
        why = f"native kernels are for float32 on a CPU, not {dtype} on {device.type}"
        return EngineChoice(False, f"plain torch ({why})")
    try:
        if obstacle:
            raise NativeError(obstacle)
        words, sha256 = prove_or_replace(exact, sequences, optimizer)
        if shape is not None and not sequences and is_traced(shape):
            prove_hosts(exact, shape, optimizer)
    except NativeError as error:
        why = f"plain torch, slower: no native kernels, {error}"
        return EngineChoice(False, why, fallback=True)
    return EngineChoice(True, f"native, {words}", sha256=sha256, name=ENGINE_NAME)


def prove_or_replace(exact: PieceEngine, sequences: bool, optimizer: str) -> tuple[str, str]:
    """Words for logs and SHA-256 of kernels that are proven, compiled anew where they fail in any
    process; raises NativeError.
    """
    words = kernels().words
    try:
        prove(exact, sequences, optimizer)
    except NativeError as error:
        if not replace_kernels():
            raise
        prove(exact, sequences, optimizer)
        words = f"{kernels().words} anew, as {error}"
    return words, kernels().sha256


@cache
def prove(exact: PieceEngine, sequences: bool = False, optimizer: str = "sgd") -> None:
    """Raise NativeError unless the library's records are ours and its networks those of `exact`."""
    compare_records(NATIVE_RECORDS)
    images = (image_case(sizes, optimizer) for sizes in IMAGE_SIZES)
    cases = map(sequence_case, SEQUENCE_SIZES) if sequences else images
    for name, error in (pair for case in cases for pair in differences(case, exact)):
        if not error <= PROOF_ROUNDING:
            raise NativeError(
                f"{kernels().functions._name} computes {name} of a small network otherwise than "
                f"torch, by {error:.1e} (CC=<command> names another compiler)"
            )


@cache
def prove_hosts(exact: PieceEngine, shape: HostShape, optimizer: str) -> None:
    """Raise NativeError unless these hosts are those of `exact`, with any of some weights: a number
    that rounding puts on the other side of a ReLU moves others by much.
    """
    for seed in range(NUM_TRIES):
        errors = differences(host_case(shape, optimizer), exact, seed=seed)
        name, error = max(errors, key=lambda pair: pair[1])
        if error <= PROOF_ROUNDING:
            return
    wrong = f"{name} of these hosts otherwise than torch, by {error:.1e}"
    raise NativeError(f"{kernels().functions._name} computes {wrong}")


def compare_records(records: dict[str, type[ctypes.Structure]]) -> None:
    """Raise NativeError unless all records of the library have the fields of `records` in place."""
    functions = kernels().functions
    compiled_fields = functions.record_fields
    compiled_fields.argtypes = [ctypes.POINTER(ctypes.POINTER(_Field))]
    compiled_fields.restype = ctypes.c_int64
    fields = ctypes.POINTER(_Field)()
    count = compiled_fields(ctypes.byref(fields))
    expected = {
        (field.record.decode(), field.name.decode()): (field.at, field.size)
        for field in fields[:count]
    }
    for record, kind in records.items():
        places = {(record, ""): (0, ctypes.sizeof(kind))}
        for name, *_ in kind._fields_:
            descriptor = getattr(kind, name)
            places[record, name] = descriptor.offset, descriptor.size
        for place, bytes_ in places.items():
            if expected.pop(place, None) != bytes_:
                other = f"another record {'.'.join(place)}: {bytes_} bytes expected"
                raise NativeError(f"{functions._name} has {other}")
    for place in expected:
        raise NativeError(f"{functions._name} has the unknown record {'.'.join(place)}")


def differences(case: Case, exact: PieceEngine, seed: int = 1) -> Iterator[tuple[str, float]]:
    """Largest relative difference of the engines' results, by name."""
    actual = results(case.engine(exact), case, torch.float32, seed=seed)
    for name, expected in results(exact, case, torch.float64, seed=seed).items():
        scale = float(expected.abs().max().clamp(min=1e-6))
        yield name, float((actual[name] - expected).abs().max()) / scale


def results(engine: PieceEngine, case: Case, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Weights after a step, its report, and validation on samples by env and on shared samples."""
    count = len(case.codes)
    kinds = np.array(case.codes)[:, None].repeat(len(case.shape.slots), axis=1)
    setup = Setup(case.shape, case.task, (Stage.TRAINING,), env_chunk=count, eval_batch=PROOF_BATCH)
    g = torch.Generator().manual_seed(seed)
    optimizer = case.task.optimizer
    weights = pools.allocate(case.shape, count, CPU, dtype=torch.float32, optimizer=optimizer)
    for name, rows in weights.flatten_keys(".").items():
        rows.copy_(case.spread * torch.randn(rows.shape, generator=g))
        if name.endswith("momentum"):
            rows.mul_(case.moving).abs_()  # no second moment is below 0
    weights["host", "statistics"].abs_().add_(0.5).ceil_()  # counts of batches among them
    weights = weights.to(dtype)
    stage = np.where(kinds == case.detached, Stage.TRAINING, Stage.BLENDING)
    blend = np.vectorize(lambda code: case.blends.get(code, Blend.ADD), otypes=[int])(kinds)
    mask = np.ones_like(kinds, dtype=bool)
    visible = stage != Stage.TRAINING
    seeds = pools.ActiveSeeds(mask, stage, kinds, blend, ~mask, visible, visible, ~mask, ~mask)
    order = torch.randint(PROOF_SAMPLES, (count, PROOF_BATCH), generator=g)
    feed = case.samples.training(
        Draw(order, torch.arange(count), 0, batch_size=PROOF_BATCH, augment=True), dtype
    )
    alpha = torch.full(kinds.shape, 0.6, dtype=torch.float64)
    plan = engine.plan(setup, seeds)
    trained = engine.train_(setup, weights, alpha, plan, feed, 1)
    rows = weights.flatten_keys(".").items()
    outputs = {name: values for name, values in rows if values.numel()}
    outputs |= {"loss": trained.loss, "accuracy": trained.accuracy}
    outputs["gradients"] = trained.gradients.l2
    for name, order_used in (("own", order), ("shared", order[0])):
        samples = case.samples.validation(order_used, dtype)
        validation = engine.validate(setup, weights, alpha, plan, samples)
        outputs[f"{name} validation loss"] = validation.loss
        outputs[f"{name} validation"] = validation.accuracy
    return outputs


def prove_or_exit(exact: PieceEngine) -> None:
    """Prove all kernels of this process, or end it with status 1 and a line that says why not."""
    try:
        for sequences in (False, True):
            prove(exact, sequences)
    except NativeError as error:
        sys.exit(str(error))
