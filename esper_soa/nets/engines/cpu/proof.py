"""Verification of the native kernels before a run uses them.

Its records are to be as ctypes lays them out, its numbers those of torch: tiny hosts with each kind
of seed, of images or of sequences, are trained and validated by both, in some milliseconds, once
per process. Tests prove other networks.
"""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_soa.config.nets import TaskConfig, TransformerConfig, host_slots, sort_slots
from esper_soa.nets.data.batches import BatchSource, Draw
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.data.text import text_set
from esper_soa.nets.engine import Engine, EngineChoice
from esper_soa.nets.engines.cpu import program, records
from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.engine import CpuEngine
from esper_soa.nets.engines.cpu.library import kernels
from esper_soa.nets.engines.cpu.sequences import SequenceBlock, SequenceEngine, SequenceHead
from esper_soa.nets.model.blueprints import SEQUENCE_BLUEPRINTS
from esper_soa.nets.model.host import HostShape, host_shape
from esper_soa.nets.passes import PieceEngine
from esper_soa.nets.seeds import pools
from esper_soa.nets.setup import Setup
from esper_soa.vocabulary import CNN_BLUEPRINTS as IMAGE_CODES
from esper_soa.vocabulary import SEQUENCE_BLUEPRINTS as SEQUENCE_CODES
from esper_soa.vocabulary import Blend, Blueprint, Stage

NATIVE_RECORDS: dict[str, type[ctypes.Structure]] = {
    "crops": records.CropsRecord,
    "sgd": records.Sgd,
    "networks": records.NativeNetworks,
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


def image_case(channels: int) -> Case:
    """Hosts of images, whose first block gives `channels`."""
    task = TaskConfig(base_channels=channels, num_blocks=2, num_pools=2, max_grad_norm=0.05)
    task.weight_decay = 0.01
    shape = host_shape(task, sort_slots(task, ["r0c1"]))
    engine = CpuEngine(EngineChoice(True, ""))
    return Case(
        lambda _: engine,
        task,
        shape,
        codes=IMAGE_CODES,
        blends={Blueprint.DEPTHWISE: Blend.MULTIPLY, Blueprint.BOTTLENECK: Blend.GATE},
        detached=Blueprint.CONV_SMALL,
        samples=synthetic(PROOF_SAMPLES, PROOF_SAMPLES, CPU),
        spread=0.5,
    )


def sequence_case(width: int) -> Case:
    """Transformers with two heads, of this width."""
    sizes = TransformerConfig(width=width, layers=1, heads=2, context=20, segments=1)
    names = [blueprint.name for blueprint in SEQUENCE_BLUEPRINTS[1:]]
    task = TaskConfig(host="transformer", num_classes=13, blueprints=names, transformer=sizes)
    task.max_grad_norm = 0.05
    task.weight_decay = 0.01
    shape = host_shape(task, host_slots(task), SEQUENCE_BLUEPRINTS)
    tokens = torch.arange(20 * 20 * (PROOF_SAMPLES + 2)) * 7919 % 8191 % 13
    text = text_set("proof", "", tokens.to(torch.uint8), context=20, num_tokens=13)
    return Case(
        partial(SequenceEngine, EngineChoice(True, "")),
        task,
        shape,
        codes=SEQUENCE_CODES,
        blends={Blueprint.LORA: Blend.MULTIPLY, Blueprint.MLP: Blend.GATE},
        detached=Blueprint.MLP_SMALL,
        samples=text,
        spread=0.25,
    )


# Widths for the kernels of either width in kernels.h, and for vectors that are not full.
IMAGE_SIZES = (4, 8)
SEQUENCE_SIZES = (12, 32)


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
) -> EngineChoice:
    """Whether the kernels compute for networks in `dtype` on `device`, else torch, and why.

    exact: the engine that they are proven against. obstacle: why the networks of this run cannot be
    left to them, where that is so. sequences: whether it is about those for sequences, not those
    for images. Kernels that are proven are taken without a timing: what a run
    computes must not depend on how busy the machine was.
    """
    if device.type != "cpu" or dtype != torch.float32:
        why = f"native kernels are for float32 on a CPU, not {dtype} on {device.type}"
        return EngineChoice(False, f"plain torch ({why})")
    try:
        if obstacle:
            raise NativeError(obstacle)
        prove(exact, sequences)
    except NativeError as error:
        why = f"plain torch, slower: no native kernels, {error}"
        return EngineChoice(False, why, fallback=True)
    return EngineChoice(
        True, f"native, {kernels().words}", sha256=kernels().sha256, name=ENGINE_NAME
    )


@cache
def prove(exact: PieceEngine, sequences: bool = False) -> None:
    """Raise NativeError unless the library's records are ours and its networks those of `exact`."""
    compare_records(NATIVE_RECORDS)
    cases = map(sequence_case, SEQUENCE_SIZES) if sequences else map(image_case, IMAGE_SIZES)
    for name, error in (pair for case in cases for pair in differences(case, exact)):
        if not error <= PROOF_ROUNDING:
            raise NativeError(
                f"{kernels().functions._name} computes {name} of a small network otherwise than "
                f"torch, by {error:.1e} (delete it to have it built again, by another compiler "
                "where this one fails)"
            )


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


def results(engine: Engine, case: Case, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Weights after a step, its report, and validation on samples by env and on shared samples."""
    count = len(case.codes)
    kinds = np.array(case.codes)[:, None]
    setup = Setup(case.shape, case.task, (Stage.TRAINING,), env_chunk=count, eval_batch=PROOF_BATCH)
    g = torch.Generator().manual_seed(seed)
    weights = pools.allocate(case.shape, count, CPU, dtype=torch.float32)
    for rows in weights.flatten_keys(".").values():
        rows.copy_(case.spread * torch.randn(rows.shape, generator=g))
    weights["host", "statistics"].abs_().add_(0.5)
    weights = weights.to(dtype)
    stage = np.where(kinds == case.detached, Stage.TRAINING, Stage.BLENDING)
    blend = np.array([[case.blends.get(code, Blend.ADD)] for code in case.codes])
    mask = np.ones_like(kinds, dtype=bool)
    visible = stage != Stage.TRAINING
    seeds = pools.ActiveSeeds(mask, stage, kinds, blend, ~mask, visible, visible, ~mask, ~mask)
    order = torch.randint(PROOF_SAMPLES, (count, PROOF_BATCH), generator=g)
    feed = case.samples.training(
        Draw(order, torch.arange(count), 0, batch_size=PROOF_BATCH, augment=True), dtype
    )
    alpha = torch.full(kinds.shape, 0.6, dtype=torch.float64)
    trained = engine.train_(setup, weights, alpha, seeds, feed, 1)
    rows = weights.flatten_keys(".").items()
    outputs = {name: values for name, values in rows if values.numel()}
    outputs |= {"loss": trained.loss, "accuracy": trained.accuracy}
    outputs["gradients"] = trained.gradients.l2
    for name, order_used in (("own", order), ("shared", order[0])):
        samples = case.samples.validation(order_used, dtype)
        validation = engine.validate(setup, weights, alpha, seeds, samples)
        outputs[f"{name} validation loss"] = validation.loss
        outputs[f"{name} validation"] = validation.accuracy
    return outputs
