"""What a library must show before a run takes it: records as ctypes lays them out, and the numbers of plain torch.

A tiny network with each kind of seed is trained for a step and validated by the kernels and, in double precision, by
torch's own functions, written out here because the networks' own code goes through the kernels. It takes some
milliseconds and is asked for once per process, by support.py.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets.engines.cpu import program, whole
from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.head import Head
from esper_soa.nets.engines.cpu.images import Crops
from esper_soa.nets.engines.cpu.library import Sheet, library
from esper_soa.nets.engines.cpu.sgd import Descent, descent_of
from esper_soa.nets.model.blueprints import BLUEPRINTS
from esper_soa.nets.sgd import Rule

RECORDS: dict[str, type[ctypes.Structure]] = {
    "sheet": Sheet, "head": Head, "crops": Crops, "descent": Descent, "networks": whole.Networks,
    "seed_part": program.Part, "training": whole.Training, "validation": whole.Validation,
}  # fmt: skip
C, NARROW, SIDE, CLASSES, BATCH, GROUPS = 8, 8, 8, 3, 3, 2  # channels, of a bottleneck; images; groups of a norm
EPS, MOMENTUM, ALPHA = 1e-5, 0.1, 0.6
ROUNDING = 1e-3  # of the largest number; kernels and torch differ by about 1e-6, a wrong kernel by about 1
HOST = ((C, 3, 3, 3), (C,), (C,), (C, C, 3, 3), (C,), (C,), (CLASSES, C), (CLASSES,))
CONV, POINT = ((C, C, 3, 3), (C,), (C,)), ((C, C, 1, 1), (C,), (C,))
SEEDS = {
    "conv_light": CONV,
    "conv_small": POINT,
    "conv_heavy": CONV + CONV,
    "depthwise": ((C, 1, 3, 3), *POINT),
    "bottleneck": ((NARROW, C, 1, 1), (NARROW, NARROW, 3, 3), (C, NARROW, 1, 1), (C,), (C,)),
    "norm": ((), (C,), (C,)),
    "attention": ((C // 4, C), (C, C // 4), (C,)),
}
GATE = ((8, C), (8,), (1, 8), (1,))
# Beside their kind; the others are added to the host and see its graph.
FLAGS = {"conv_small": whole.THROUGH | whole.DETACHED, "depthwise": whole.MULTIPLIED, "bottleneck": whole.GATED}
HOST_RULE = Rule(max_norm=0.5, eps=1e-6, lr=0.1, momentum=0.9, weight_decay=0.01)
SEED_RULE = HOST_RULE._replace(max_norm=0.05, weight_decay=0.0)


class _Field(ctypes.Structure):
    """field of records.c."""

    _fields_ = [
        *((name, ctypes.c_char_p) for name in ("record", "name")),
        *((name, ctypes.c_int64) for name in ("at", "size")),
    ]


@cache
def prove() -> None:
    """Raise NativeError unless the library's records are ours and its networks those of torch."""
    compare_records(RECORDS)
    for name, error in differences():
        if not error <= ROUNDING:
            raise NativeError(
                f"{library()._name} computes {name} of a small network otherwise than torch, by {error:.1e} (delete it "
                "to have it built again, by another compiler where this one fails)"
            )


def compare_records(records: dict[str, type[ctypes.Structure]]) -> None:
    """Raise NativeError unless every record of the library has the fields of `records` at the same bytes."""
    listed = library().record_fields
    listed.argtypes, listed.restype = [ctypes.POINTER(ctypes.POINTER(_Field))], ctypes.c_int64
    fields = ctypes.POINTER(_Field)()
    count = listed(ctypes.byref(fields))
    theirs = {(one.record.decode(), one.name.decode()): (one.at, one.size) for one in fields[:count]}
    for place, bytes_ in _ours(records):
        if theirs.pop(place, None) != bytes_:
            raise NativeError(f"{library()._name} has another record {'.'.join(place)}: {bytes_} bytes expected")
    if theirs:
        raise NativeError(f"{library()._name} has the unknown record {'.'.join(next(iter(theirs)))}")


def _ours(records: dict[str, type[ctypes.Structure]]) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
    for record, kind in records.items():
        yield (record, ""), (0, ctypes.sizeof(kind))
        for name in (field[0] for field in kind._fields_):
            place = getattr(kind, name)
            yield (record, name), (place.offset, place.size)


class Trial(NamedTuple):
    """One network per kind of seed, with what both sides are given; rows of parameters as in chain.h."""

    host: Tensor  # [n, host]
    host_speed: Tensor
    statistics: Tensor  # [n, 4 C]
    seed: Tensor  # [n, widest + gate]
    seed_speed: Tensor
    lines: Tensor  # uint8 [1, rows, 3, columns], an image bank
    first: Tensor  # int64 [n, BATCH], where images begin in it
    values: Tensor  # float32 [3, 256]
    labels: Tensor  # int64 [n, BATCH]


def _numbers(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(int(np.prod(shape)) for shape in shapes)


GATE_AT = max(_numbers(shapes) for shapes in SEEDS.values())


def draw(seed: int = 1) -> Trial:
    """The same numbers everywhere."""
    g, n = torch.Generator().manual_seed(seed), len(SEEDS)

    def around(middle: float, spread: float, *shape: int) -> Tensor:
        return middle + spread * (2 * torch.rand(*shape, generator=g, dtype=torch.float32) - 1)

    bytes_ = torch.randint(256, (1, SIDE + 4, 3, SIDE + 4), dtype=torch.uint8, generator=g)
    row, column = torch.randint(5, (2, n, BATCH), generator=g)
    return Trial(
        around(0.1, 0.5, n, _numbers(HOST)), around(0, 0.1, n, _numbers(HOST)), around(1, 0.5, n, 4 * C),
        around(0.1, 0.6, n, GATE_AT + _numbers(GATE)), around(0, 0.1, n, GATE_AT + _numbers(GATE)), bytes_,
        row * bytes_.stride(1) + column, around(0, 1.5, 3, 256), torch.randint(CLASSES, (n, BATCH), generator=g),
    )  # fmt: skip


def differences(seed: int = 1) -> Iterator[tuple[str, float]]:
    """What kernels and torch both compute, by name, and the largest difference over the largest number."""
    trial = draw(seed)
    ours, theirs = native_results(trial), torch_results(trial)
    for name, wanted in theirs.items():
        scale = float(wanted.abs().max().clamp(min=1e-6))
        yield name, float((ours[name].double() - wanted.double()).abs().max()) / scale


def native_results(given: Trial) -> dict[str, Tensor]:
    """Weights after one step, loss and hits of the step, then loss and hits with and without the seed."""
    trial, n = Trial(*(part.clone() for part in given)), len(SEEDS)
    names = [blueprint.name for blueprint in BLUEPRINTS]
    kinds = np.array([[1 + names.index(name)] for name in SEEDS], dtype=np.int64)
    flags = np.array([[FLAGS.get(name, 0)] for name in SEEDS], dtype=np.int64)
    gates = np.array([[GATE_AT], [GATE[0][0]]], dtype=np.int64)
    programs = program.programs(BLUEPRINTS, [C])
    programs[..., program.FIELDS.index("groups")] = GROUPS
    blocks = np.array([[C, C], [1, 0], [0, -1], [-1, -1]], dtype=np.int64)
    layout = whole.Layout(CLASSES, 3, SIDE, blocks, gates, programs)
    pools = whole.Pools(trial.host, trial.host_speed, trial.statistics, [trial.seed], [trial.seed_speed])
    alpha = torch.full((n, 1), ALPHA, dtype=torch.float32)
    envs, hits = np.arange(n, dtype=np.int64), torch.zeros(n, dtype=torch.int64)
    loss = torch.zeros(n, dtype=torch.float32)
    nets = whole.networks(layout, pools, whole.Seeds(kinds, flags), alpha, (MOMENTUM, EPS))
    crops = whole.crops_of(trial.lines, trial.first, trial.values)
    whole.train_(whole.Training(
        nets=nets, count=n, batch=BATCH, envs=envs.ctypes.data, host=descent_of(HOST_RULE),
        seed=descent_of(SEED_RULE), images=crops, labels=trial.labels.data_ptr(), loss=loss.data_ptr(),
        hits=hits.data_ptr(),
    ))  # fmt: skip
    code, tested = np.array([1, 0], dtype=np.int64), torch.zeros(n, dtype=torch.float64)
    found, counted = torch.zeros(n, 2, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    flags &= ~whole.THROUGH  # which has no part in validation
    whole.validate(whole.Validation(
        nets=nets, count=n, images=BATCH, envs=envs.ctypes.data, own=crops, labels=trial.labels.data_ptr(), codes=2,
        ablated=1, code=code.ctypes.data, loss=tested.data_ptr(), hits=found.data_ptr(), counted=counted.data_ptr(),
    ))  # fmt: skip
    weights = {name: trial._asdict()[name] for name in ("host", "host_speed", "statistics", "seed", "seed_speed")}
    return weights | {"loss": loss, "hits": hits, "validation loss": tested / BATCH, "validation hits": found}


@torch.enable_grad()
def torch_results(given: Trial) -> dict[str, Tensor]:
    """The same in double precision, by torch alone."""
    trial = Trial(*(part.double() if part.is_floating_point() else part.clone() for part in given))
    rows: dict[str, list[Tensor]] = {name: [] for name in ("loss", "hits", "validation loss", "validation hits")}
    for place, kind in enumerate(SEEDS):
        images, labels = _images(trial, place), trial.labels[place]
        statistics = trial.statistics[place]
        host, seed = trial.host[place].clone().requires_grad_(), trial.seed[place].clone().requires_grad_()
        logits = _logits(kind, (host, seed, statistics), images, True, ALPHA)
        loss = F.cross_entropy(logits, labels)
        grads = torch.autograd.grad(loss, [host, seed])
        _move_(trial.host[place], trial.host_speed[place], grads[0], HOST_RULE)
        _move_(trial.seed[place], trial.seed_speed[place], grads[1], SEED_RULE, _used(kind))
        after = trial.host[place], trial.seed[place], statistics
        tested = [_logits(kind, after, images, False, alpha) for alpha in (ALPHA, 0.0)]
        rows["loss"].append(loss.detach())
        rows["hits"].append((logits.argmax(1) == labels).sum())
        rows["validation loss"].append(F.cross_entropy(tested[0], labels))
        rows["validation hits"].append(torch.stack([(one.argmax(1) == labels).sum() for one in tested]))
    weights = {name: trial._asdict()[name] for name in ("host", "host_speed", "statistics", "seed", "seed_speed")}
    return weights | {name: torch.stack(values) for name, values in rows.items()}


def _images(trial: Trial, place: int) -> Tensor:
    line = torch.arange(SIDE)[:, None] * trial.lines.stride(1) + torch.arange(SIDE)
    at = trial.first[place][:, None, None, None] + line + (torch.arange(3) * trial.lines.stride(2))[:, None, None]
    bytes_ = trial.lines.flatten()[at].long()  # [BATCH, 3, SIDE, SIDE]
    return torch.stack([trial.values[colour][bytes_[:, colour]] for colour in range(3)], dim=1)


def _move_(params: Tensor, speed: Tensor, grad: Tensor, rule: Rule, used: Tensor | None = None) -> None:
    share = min(1.0, rule.max_norm / (float(grad.norm()) + rule.eps))
    moved = rule.momentum * speed + share * grad + rule.weight_decay * params
    speed.copy_(moved if used is None else torch.where(used, moved, speed))
    params.sub_(rule.lr * (speed if used is None else speed * used))


def _used(kind: str) -> Tensor:
    """bool: the numbers of a seed's row that a seed of this kind has."""
    gated = FLAGS.get(kind, 0) & whole.GATED != 0
    at = torch.arange(GATE_AT + _numbers(GATE))
    return (at < _numbers(SEEDS[kind])) | ((at >= GATE_AT) & gated)


def _unpack(row: Tensor, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    parts = row[: _numbers(shapes)].split([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _conv(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    return F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=groups)


def _logits(kind: str, rows: tuple[Tensor, Tensor, Tensor], x: Tensor, training: bool, alpha: float) -> Tensor:
    host, seed, statistics = rows
    conv0, scale0, shift0, conv1, scale1, shift1, weight, bias = _unpack(host, HOST)
    mean0, var0, mean1, var1 = statistics.split(C)
    x = F.relu(F.batch_norm(_conv(x, conv0), mean0, var0, scale0, shift0, training, MOMENTUM, EPS))
    x = F.max_pool2d(_with_seed(kind, seed, x, training, alpha), 2)
    x = F.relu(F.batch_norm(_conv(x, conv1), mean1, var1, scale1, shift1, training, MOMENTUM, EPS))
    return F.linear(x.mean((2, 3)), weight, bias)


def _with_seed(kind: str, row: Tensor, x: Tensor, training: bool, alpha: float) -> Tensor:
    flags, parts = FLAGS.get(kind, 0), _unpack(row, SEEDS[kind])
    if flags & whole.THROUGH and training:
        seen = x.detach()
        seed = seen + _residual(kind, parts, seen)
        return x + seed - seed.detach()
    residual = _residual(kind, parts, x)
    if flags & whole.MULTIPLIED:
        return x * (1 + alpha * torch.tanh(residual))
    if flags & whole.GATED:
        first, first_bias, second, second_bias = _unpack(row[GATE_AT:], GATE)
        hidden = F.relu(F.linear(x.mean((2, 3)), first, first_bias))
        residual = residual * torch.sigmoid(F.linear(hidden, second, second_bias))[..., None, None]
    return x + alpha * residual


def _residual(kind: str, parts: list[Tensor], x: Tensor) -> Tensor:
    if kind == "norm":
        return torch.tanh(parts[0]) * (F.group_norm(x, GROUPS, parts[1], parts[2], EPS) - x)
    if kind == "attention":
        hidden = F.relu(F.linear(x.mean((2, 3)), parts[0]))
        return x * torch.sigmoid(F.linear(hidden, parts[1], parts[2]))[..., None, None] - x
    if kind == "bottleneck":
        x = F.relu(_conv(F.relu(_conv(x, parts[0])), parts[1]))
        return F.group_norm(_conv(x, parts[2]), GROUPS, parts[3], parts[4], EPS)
    if kind == "depthwise":
        x, parts = _conv(x, parts[0], groups=C), parts[1:]
    for at in range(0, len(parts), 3):
        x = F.relu(F.group_norm(_conv(x, parts[at]), GROUPS, parts[at + 1], parts[at + 2], EPS))
    return x
