"""What a library must show before a run takes it: records as ctypes lays them out, and the numbers
of plain torch.

A tiny network with each kind of seed is trained for a step and validated by the entry points that
runs call and, in double precision, by torch's own functions, written out here so that nothing but
torch vouches for them. It takes some milliseconds and is asked for once per process, by support.py.
Tests prove networks of other sizes.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper_soa.nets.engines.cpu import program, records
from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.images import Crops, crops_of, cut
from esper_soa.nets.engines.cpu.library import library
from esper_soa.nets.model.blueprints import BLUEPRINTS
from esper_soa.nets.sgd import Rule

RECORDS: dict[str, type[ctypes.Structure]] = {
    "crops": Crops,
    "sgd": records.Sgd,
    "networks": records.Networks,
    "seed_part": program.Part,
    "training": records.Training,
    "validation": records.Validation,
}
EPS = 1e-5
MOMENTUM = 0.1
ALPHA = 0.6
# of the largest number; kernels and torch differ by about 1e-6, a wrong kernel by about 1
ROUNDING = 1e-3
WEIGHTS = ("host", "host_momentum", "statistics", "seed", "seed_momentum")
Shapes = tuple[tuple[int, ...], ...]
KINDS = ("conv_light", "conv_small", "conv_heavy", "depthwise", "bottleneck", "norm", "attention")
# Beside their kind; the others are added to the host and see its graph.
FLAGS = {
    "conv_small": records.THROUGH | records.DETACHED,
    "depthwise": records.MULTIPLIED,
    "bottleneck": records.GATED,
}
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
    for name, error in (found for size in PROVEN for found in differences(size)):
        if not error <= ROUNDING:
            raise NativeError(
                f"{library()._name} computes {name} of a small network otherwise than torch, by "
                f"{error:.1e} (delete it "
                "to have it built again, by another compiler where this one fails)"
            )


def compare_records(records: dict[str, type[ctypes.Structure]]) -> None:
    """Raise NativeError unless all records of the library have the fields of `records` in place."""
    listed = library().record_fields
    listed.argtypes = [ctypes.POINTER(ctypes.POINTER(_Field))]
    listed.restype = ctypes.c_int64
    fields = ctypes.POINTER(_Field)()
    count = listed(ctypes.byref(fields))
    theirs = {
        (one.record.decode(), one.name.decode()): (one.at, one.size) for one in fields[:count]
    }
    for place, bytes_ in _ours(records):
        if theirs.pop(place, None) != bytes_:
            raise NativeError(
                f"{library()._name} has another record {'.'.join(place)}: {bytes_} bytes expected"
            )
    if theirs:
        raise NativeError(
            f"{library()._name} has the unknown record {'.'.join(next(iter(theirs)))}"
        )


def _ours(
    records: dict[str, type[ctypes.Structure]],
) -> Iterator[tuple[tuple[str, str], tuple[int, int]]]:
    for record, kind in records.items():
        yield (record, ""), (0, ctypes.sizeof(kind))
        for name in (field[0] for field in kind._fields_):
            place = getattr(kind, name)
            yield (record, name), (place.offset, place.size)


class Size(NamedTuple):
    """Of a host of two blocks, with a slot before the pool of the first."""

    channels: tuple[int, int] = (8, 8)
    side: int = 8  # of images, in pixels
    kernel: int = 3
    pooled: tuple[bool, bool] = (True, False)
    groups: int = 2  # of the norms in seeds
    classes: int = 3
    batch: int = 3

    @property
    def host(self) -> Shapes:
        """Shapes of the host's parameters."""
        (c, d), k = self.channels, self.kernel
        return (
            (c, 3, k, k),
            (c,),
            (c,),
            (d, c, k, k),
            (d,),
            (d,),
            (self.classes, d),
            (self.classes,),
        )

    @property
    def seeds(self) -> dict[str, Shapes]:
        """Shapes of the parameters of a seed of each kind."""
        c = self.channels[0]
        narrow = max(8, c // 4)
        reduced = max(1, c // 4)
        conv = ((c, c, 3, 3), (c,), (c,))
        point = ((c, c, 1, 1), (c,), (c,))
        shapes: tuple[Shapes, ...] = (
            conv,
            point,
            conv + conv,
            ((c, 1, 3, 3), *point),
            ((narrow, c, 1, 1), (narrow, narrow, 3, 3), (c, narrow, 1, 1), (c,), (c,)),
            ((), (c,), (c,)),
            ((reduced, c), (c, reduced), (c,)),
        )
        return dict(zip(KINDS, shapes, strict=True))

    @property
    def gate(self) -> Shapes:
        """Shapes of the parameters of a gate."""
        hidden = max(8, self.channels[0] // 4)
        return ((hidden, self.channels[0]), (hidden,), (1, hidden), (1,))

    @property
    def gate_at(self) -> int:
        """Where a gate begins in a seed's row."""
        return max(_numbers(shapes) for shapes in self.seeds.values())


PROVEN = (Size(), Size((16, 32), side=4, batch=2))  # for the kernels of either width in kernels.h


class Trial(NamedTuple):
    """One network per kind of seed, the input of both sides; rows of parameters as in chain.h."""

    host: Tensor  # [n, host]
    host_momentum: Tensor
    statistics: Tensor  # [n, 2 * channels of both blocks]
    seed: Tensor  # [n, widest + gate]
    seed_momentum: Tensor
    lines: Tensor  # uint8 [1, rows, 3, columns], an image bank
    first: Tensor  # int64 [n, B], where images begin in it
    values: Tensor  # float32 [3, 256]
    labels: Tensor  # int64 [n, B]


def _numbers(shapes: Shapes) -> int:
    return sum(int(np.prod(shape)) for shape in shapes)


def draw(size: Size, seed: int = 1) -> Trial:
    """The same numbers everywhere."""
    g = torch.Generator().manual_seed(seed)
    n = len(KINDS)

    def around(middle: float, spread: float, *shape: int) -> Tensor:
        return middle + spread * (2 * torch.rand(*shape, generator=g, dtype=torch.float32) - 1)

    host = _numbers(size.host)
    widest = size.gate_at + _numbers(size.gate)
    bytes_ = torch.randint(
        256, (1, size.side + 4, 3, size.side + 4), dtype=torch.uint8, generator=g
    )
    row, column = torch.randint(5, (2, n, size.batch), generator=g)
    return Trial(
        around(0.1, 0.5, n, host),
        around(0, 0.1, n, host),
        around(1, 0.5, n, 2 * sum(size.channels)),
        around(0.1, 0.6, n, widest),
        around(0, 0.1, n, widest),
        bytes_,
        row * bytes_.stride(1) + column,
        around(0, 1.5, 3, 256),
        torch.randint(size.classes, (n, size.batch), generator=g),
    )


def differences(size: Size, seed: int = 1) -> Iterator[tuple[str, float]]:
    """What kernels and torch both compute, by name, and the largest difference over the largest."""
    trial = draw(size, seed)
    ours = native_results(size, trial)
    theirs = torch_results(size, trial)
    for name, wanted in theirs.items():
        scale = float(wanted.abs().max().clamp(min=1e-6))
        yield name, float((ours[name].double() - wanted.double()).abs().max()) / scale


def native_results(size: Size, given: Trial) -> dict[str, Tensor]:
    """Weights after one step, loss and right answers of it, then loss and right answers with and
    without the seed.

    The networks validate images of their own, and those of the first network, which all share.
    """
    trial = Trial(*(part.clone() for part in given))
    flags = np.array([[FLAGS.get(name, 0)] for name in KINDS], dtype=np.int64)
    nets = networks(size, trial, flags)
    crops = crops_of(trial.lines, trial.first, trial.values)
    loss, correct = train_(size, trial, nets, crops)
    flags &= ~records.THROUGH  # which has no part in validation
    images = cut(crops_of(trial.lines, trial.first[0], trial.values), size.batch, 1, size.side)
    own, first = (_validated(size, trial, nets, crops, shared) for shared in (False, True))
    weights = {name: trial._asdict()[name] for name in WEIGHTS}
    return weights | {
        "loss": loss,
        "correct": correct,
        "images": images,
        "validation loss": own[0],
        "validation correct": own[1],
        "shared validation loss": first[0],
        "shared validation correct": first[1],
    }


def networks(size: Size, trial: Trial, flags: np.ndarray) -> records.Networks:
    """One with a seed of each kind; flags: of the seeds, int64 [n, 1]."""
    names = [blueprint.name for blueprint in BLUEPRINTS]
    kinds = np.array([[1 + names.index(name)] for name in KINDS], dtype=np.int64)
    gates = np.array([[size.gate_at], [size.gate[0][0]]], dtype=np.int64)
    programs = program.programs(BLUEPRINTS, [size.channels[0]])
    programs[..., program.FIELDS.index("groups")] = size.groups
    blocks = np.array(
        [size.channels, [size.kernel] * 2, size.pooled, [0, -1], [-1, -1]], dtype=np.int64
    )
    layout = records.Layout(size.classes, size.side, blocks, gates, programs)
    pools = records.Pools(
        trial.host, trial.host_momentum, trial.statistics, [trial.seed], [trial.seed_momentum]
    )
    alpha = torch.full((len(KINDS), 1), ALPHA, dtype=torch.float32)
    return records.networks(layout, pools, records.Seeds(kinds, flags), alpha, (MOMENTUM, EPS))


def train_(size: Size, trial: Trial, nets: records.Networks, crops: Crops) -> tuple[Tensor, Tensor]:
    """Loss [n] and right answers [n] of a step of all networks, whose weights move in place."""
    n = len(KINDS)
    envs = np.arange(n, dtype=np.int64)
    correct = torch.zeros(n, dtype=torch.int64)
    loss = torch.zeros(n, dtype=torch.float32)
    records.train_(
        records.Training(
            nets=nets,
            count=n,
            batch=size.batch,
            accumulate=1,
            envs=envs.ctypes.data,
            host=records.sgd_of(HOST_RULE),
            seed=records.sgd_of(SEED_RULE),
            images=crops,
            labels=trial.labels.data_ptr(),
            loss=loss.data_ptr(),
            correct=correct.data_ptr(),
        )
    )
    return loss, correct


def _validated(
    size: Size, trial: Trial, nets: records.Networks, crops: Crops, shared: bool
) -> tuple[Tensor, Tensor]:
    """Mean loss [n] with the seed, and right answers [n, 2] with and without it."""
    n = len(KINDS)
    envs = np.arange(n, dtype=np.int64)
    code = np.array([1, 0], dtype=np.int64)
    loss = torch.zeros(n, dtype=torch.float64)
    correct = torch.zeros(n, 2, dtype=torch.int64)
    counted = torch.zeros(n, dtype=torch.int64)
    record = records.Validation(
        nets=nets,
        count=n,
        images=size.batch,
        envs=envs.ctypes.data,
        shared=shared,
        images_of=crops,
        labels=trial.labels.data_ptr(),
        codes=2,
        ablated=1,
        code=code.ctypes.data,
        loss=loss.data_ptr(),
        correct=correct.data_ptr(),
        counted=counted.data_ptr(),
    )
    records.validate(record)
    return loss / counted, correct


@torch.enable_grad()
def torch_results(size: Size, given: Trial) -> dict[str, Tensor]:
    """The same in double precision, by torch alone."""
    trial = Trial(*(part.double() if part.is_floating_point() else part.clone() for part in given))
    rows: dict[str, list[Tensor]] = {}
    shared = _images(size, trial, 0)
    for place, kind in enumerate(KINDS):
        images = _images(size, trial, place)
        labels = trial.labels[place]
        statistics = trial.statistics[place]
        host = trial.host[place].clone().requires_grad_()
        seed = trial.seed[place].clone().requires_grad_()
        logits = _logits(size, kind, (host, seed, statistics), images, ALPHA, training=True)
        loss = F.cross_entropy(logits, labels)
        grads = torch.autograd.grad(loss, [host, seed])
        _move_(trial.host[place], trial.host_momentum[place], grads[0], HOST_RULE)
        _move_(
            trial.seed[place], trial.seed_momentum[place], grads[1], SEED_RULE, _used(size, kind)
        )
        found = {"loss": loss.detach(), "correct": (logits.argmax(1) == labels).sum()}
        after = trial.host[place], trial.seed[place], statistics
        for name, seen, wanted in (("", images, labels), ("shared ", shared, trial.labels[0])):
            tested = [_logits(size, kind, after, seen, alpha) for alpha in (ALPHA, 0.0)]
            found[f"{name}validation loss"] = F.cross_entropy(tested[0], wanted)
            found[f"{name}validation correct"] = torch.stack(
                [(one.argmax(1) == wanted).sum() for one in tested]
            )
        for name, value in found.items():
            rows.setdefault(name, []).append(value)
    weights = {name: trial._asdict()[name] for name in WEIGHTS}
    results = {name: torch.stack(values) for name, values in rows.items()}
    return weights | results | {"images": shared.permute(0, 2, 3, 1)}


def _images(size: Size, trial: Trial, place: int) -> Tensor:
    line = torch.arange(size.side)[:, None] * trial.lines.stride(1) + torch.arange(size.side)
    at = (
        trial.first[place][:, None, None, None]
        + line
        + (torch.arange(3) * trial.lines.stride(2))[:, None, None]
    )
    bytes_ = trial.lines.flatten()[at].long()  # [B, 3, side, side]
    return torch.stack([trial.values[colour][bytes_[:, colour]] for colour in range(3)], dim=1)


def _move_(
    params: Tensor, momentum: Tensor, grad: Tensor, rule: Rule, used: Tensor | None = None
) -> None:
    factor = (rule.max_norm / (grad.norm() + rule.eps)).clamp(max=1.0)
    moved = rule.momentum * momentum + factor * grad + rule.weight_decay * params
    momentum.copy_(moved if used is None else torch.where(used, moved, momentum))
    params.sub_(rule.lr * (momentum if used is None else momentum * used))


def _used(size: Size, kind: str) -> Tensor:
    """bool: the numbers of a seed's row that a seed of this kind has."""
    gated = FLAGS.get(kind, 0) & records.GATED != 0
    at = torch.arange(size.gate_at + _numbers(size.gate))
    return (at < _numbers(size.seeds[kind])) | ((at >= size.gate_at) & gated)


def _unpack(row: Tensor, shapes: Shapes) -> list[Tensor]:
    parts = row[: _numbers(shapes)].split([int(np.prod(shape)) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _conv(x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
    return F.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=groups)


def _logits(
    size: Size,
    kind: str,
    rows: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    alpha: float,
    training: bool = False,
) -> Tensor:
    host, seed, statistics = rows
    conv0, scale0, shift0, conv1, scale1, shift1, weight, bias = _unpack(host, size.host)
    mean0, var0, mean1, var1 = statistics.split(
        [channels for channels in size.channels for _ in range(2)]
    )
    x = F.relu(F.batch_norm(_conv(x, conv0), mean0, var0, scale0, shift0, training, MOMENTUM, EPS))
    x = _with_seed(size, kind, seed, x, training, alpha)
    x = F.max_pool2d(x, 2) if size.pooled[0] else x
    x = F.relu(F.batch_norm(_conv(x, conv1), mean1, var1, scale1, shift1, training, MOMENTUM, EPS))
    x = F.max_pool2d(x, 2) if size.pooled[1] else x
    return F.linear(x.mean((2, 3)), weight, bias)


def _with_seed(
    size: Size, kind: str, row: Tensor, x: Tensor, training: bool, alpha: float
) -> Tensor:
    flags = FLAGS.get(kind, 0)
    parts = _unpack(row, size.seeds[kind])
    if flags & records.THROUGH and training:
        seen = x.detach()
        seed = seen + _residual(kind, parts, seen, size.groups)
        return x + seed - seed.detach()
    residual = _residual(kind, parts, x, size.groups)
    if flags & records.MULTIPLIED:
        return x * (1 + alpha * torch.tanh(residual))
    if flags & records.GATED:
        first, first_bias, second, second_bias = _unpack(row[size.gate_at :], size.gate)
        hidden = F.relu(F.linear(x.mean((2, 3)), first, first_bias))
        residual = residual * torch.sigmoid(F.linear(hidden, second, second_bias))[..., None, None]
    return x + alpha * residual


def _residual(kind: str, parts: list[Tensor], x: Tensor, groups: int) -> Tensor:
    if kind == "norm":
        return torch.tanh(parts[0]) * (F.group_norm(x, groups, parts[1], parts[2], EPS) - x)
    if kind == "attention":
        hidden = F.relu(F.linear(x.mean((2, 3)), parts[0]))
        return x * torch.sigmoid(F.linear(hidden, parts[1], parts[2]))[..., None, None] - x
    if kind == "bottleneck":
        x = F.relu(_conv(F.relu(_conv(x, parts[0])), parts[1]))
        return F.group_norm(_conv(x, parts[2]), groups, parts[3], parts[4], EPS)
    if kind == "depthwise":
        x = _conv(x, parts[0], groups=x.shape[1])
        parts = parts[1:]
    for at in range(0, len(parts), 3):
        x = F.relu(F.group_norm(_conv(x, parts[at]), groups, parts[at + 1], parts[at + 2], EPS))
    return x
