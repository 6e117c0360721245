"""The layout that kernels share: where activations of a network lie, and how tiles are loaded.

A tile of a convolution is a matrix with one row per pixel and one column per (tap, input channel),
never written to memory (implicit GEMM). Used by the kernels of blocks and slots: the upper half
runs on the host, the helpers below on the device. There a `span` is (pixels int [M], which of them
exist bool [M]).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from esper_soa.nets.engines.gpu import slot_flags
from esper_soa.nets.engines.gpu.tile_sizes import TileSizes, lanes_of, padded

NORM_EPS = tl.constexpr(1e-5)
ENDED = tl.constexpr(slot_flags.ENDED)
NOWHERE = tl.constexpr(-(1 << 16))  # row of a pixel that does not exist
# Options of a launch whose products and sums are rounded one by one, as torch does.
EXACT = {"enable_fp_fusion": False}


class Plane(NamedTuple):
    """Activations of n networks: pixel p of B*H*W of network e is at base + e * env + p * pixel.

    `pixel` is known when a kernel is compiled, so that channels are loaded as vectors.
    """

    base: Tensor
    env: int
    pixel: tl.constexpr


class Rows(NamedTuple):
    """Parameters of n networks: those of network e start at base + e * env and lie in a row."""

    base: Tensor
    env: int


class KernelLayer(NamedTuple):
    """Sizes of a same-padded convolution; all but num_pixels are compile-time constants."""

    num_pixels: int  # B * H * W
    height: tl.constexpr
    width: tl.constexpr
    inputs: tl.constexpr
    stored: tl.constexpr  # channels of the input in memory, at least `inputs`; zeros beyond those
    outputs: tl.constexpr
    size: tl.constexpr  # of the kernel, 1 or 3
    pool: tl.constexpr  # side of the pooling window, 1 = none
    words: Rows | None = None  # int32 [n, S], see slot_flags.py; None in validation


class KernelTile(NamedTuple):
    """How much one program does at a time: compile-time constants, powers of two."""

    pixels: tl.constexpr
    columns: tl.constexpr  # of the implicit matrix, taken up per step
    group: tl.constexpr  # of its columns, whose gradients are summed together
    inputs: tl.constexpr  # input channels, padded
    outputs: tl.constexpr  # output channels, padded
    precision: tl.constexpr  # of float32 products: ieee or tf32
    widened: tl.constexpr  # whether products are taken in float32


def plane(x: Tensor, shared: bool = False) -> Plane:
    """x [n, B, H*W, C]; shared: n = 1, the same for every network."""
    if not x.is_contiguous():
        raise ValueError(f"activations of shape {tuple(x.shape)} must lie without gaps")
    return Plane(x, 0 if shared else x[0].numel(), tl.constexpr(x.shape[-1]))


def rows(values: Tensor) -> Rows:
    """values [n, ...], every network's own numbers without gaps; networks may be apart."""
    if not values[0].is_contiguous():
        raise ValueError(
            f"parameters of shape {tuple(values.shape)} must lie without gaps within a network"
        )
    return Rows(values, values.stride(0))


def constants(**numbers: float | str) -> dict[str, tl.constexpr]:
    """Fields of a record that are known when a kernel is compiled."""
    return {name: tl.constexpr(number) for name, number in numbers.items()}


def tile_of(layer: KernelLayer, dtype: torch.dtype, sizes: TileSizes) -> KernelTile:
    """Tiles of a layer; float32 products are of the `product_precision`."""
    numbers = constants(
        pixels=min(sizes.pixels, padded(layer.num_pixels)),
        columns=sizes.columns,
        group=sizes.group,
        inputs=lanes_of(layer.stored.value),
        outputs=lanes_of(layer.outputs.value),
        **product_precision(dtype),
    )
    return KernelTile(**numbers)


def product_precision(dtype: torch.dtype) -> dict[str, str | bool]:
    """Precision of products in `dtype`, tf32 or ieee as torch's switch says; and whether they
    are taken in float32, as Triton's interpreter has no others.
    """
    tf32 = dtype == torch.float32 and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    widened = dtype == torch.bfloat16 and triton.knobs.runtime.interpret
    return {"precision": "tf32" if tf32 else "ieee", "widened": widened}


@triton.jit
def start_of(source, env):
    """Pointer to the numbers of a network."""
    return source.base + env.to(tl.int64) * source.env


@triton.jit
def span_of(first, count, tile):
    """A tile of `count` pixels, from `first` on."""
    pixels = first + tl.arange(0, tile.pixels)
    return pixels, pixels < count


@triton.jit
def load_map(source, span, channel, stride: tl.constexpr):
    """float32 [M, K] of a map, or features, with `stride` numbers per pixel; zero outside."""
    place = source + span[0][:, None] * stride + channel[None, :]
    mask = span[1][:, None] & (channel < stride)[None, :]
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_map(target, span, values, stride: tl.constexpr):
    """values [M, lanes] into a map, or features, with `stride` numbers per pixel."""
    channel = tl.arange(0, values.shape[1])
    place = target + span[0][:, None] * stride + channel[None, :]
    tl.store(place, values, mask=span[1][:, None] & (channel < stride)[None, :])


@triton.jit
def has_ended(words, env):
    """Whether passes leave a network out; words: Rows of int32 [n, S]."""
    return (tl.load(start_of(words, env)) & ENDED) != 0


@triton.jit
def at(source, env, place, channel, mask):
    """Values [M, K] at pixels [M, K] and channels [K] of a network."""
    numbers = start_of(source, env) + place.to(tl.int64) * source.pixel + channel[None, :]
    return tl.load(numbers, mask=mask, other=0.0)


@triton.jit
def taps(source, env, span, columns, channels: tl.constexpr, size: tl.constexpr, layer):
    """Tile [M, K]: pixels of `span`, columns [K] = (tap, channel) of `source`; zero outside."""
    tap = columns // channels
    down = tap // size - size // 2
    right = tap % size - size // 2
    row = tl.where(span[1], span[0] // layer.width % layer.height, NOWHERE)
    down = tl.where(tap < size * size, down, NOWHERE)
    row = row[:, None] + down[None, :]
    column = (span[0] % layer.width)[:, None] + right[None, :]
    inside = (row.to(tl.uint32) < layer.height) & (column.to(tl.uint32) < layer.width)
    place = (down * layer.width + right) * source.pixel + columns % channels
    start = start_of(source, env) + span[0].to(tl.int64)[:, None] * source.pixel
    return tl.load(start + place.to(tl.int64)[None, :], mask=inside, other=0.0)


@triton.jit
def weight_places(columns, layer, tile, back: tl.constexpr):
    """(places [K, O] of weights [O, I, k, k], which there are); columns [K] = (tap, stored input
    channel); back: [K, I] of the transposed convolution, and (tap, output channel).
    """
    num_taps: tl.constexpr = layer.size * layer.size
    if back:
        tap = columns // layer.outputs
        output = columns % layer.outputs
        channel = tl.arange(0, tile.inputs)
        first = output * (layer.inputs * num_taps) + num_taps - 1 - tap
        place = first[:, None] + channel[None, :] * num_taps
        known = (columns < layer.outputs * num_taps)[:, None] & (channel < layer.inputs)[None, :]
    else:
        tap = columns // layer.stored
        channel = columns % layer.stored
        output = tl.arange(0, tile.outputs)
        place = output[None, :] * (layer.inputs * num_taps) + (channel * num_taps + tap)[:, None]
        inside = (channel < layer.inputs) & (columns < layer.stored * num_taps)
        known = (output < layer.outputs)[None, :] & inside[:, None]
    return place, known


@triton.jit
def add_product(left, right, result, tile):
    """result [M, O] + left [M, K] @ right [K, O], summed in float32."""
    if tile.widened:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, result, input_precision=tile.precision)


@triton.jit
def conv_tile(x, unit, weight, span, layer, tile, back: tl.constexpr):
    """float32 [M, O]: `unit` at the pixels of `span`, convolved; back: transposed, [M, I]."""
    lanes: tl.constexpr = tile.inputs if back else tile.outputs
    channels: tl.constexpr = layer.outputs if back else layer.stored
    result = tl.zeros((tile.pixels, lanes), tl.float32)
    for first in range(0, channels * layer.size * layer.size, tile.columns):
        columns = first + tl.arange(0, tile.columns)
        values = taps(x, unit, span, columns, channels, layer.size, layer)
        place, known = weight_places(columns, layer, tile, back)
        weights = tl.load(weight + place, mask=known, other=0.0)
        result = add_product(values, weights.to(values.dtype), result, tile)
    return result


@triton.jit
def store_pixels(target, env, span, channels: tl.constexpr, values, width: tl.constexpr):
    """Write values [M, width] to the first `channels` of the pixels of `span` of a network."""
    channel = tl.arange(0, width)
    place = start_of(target, env) + span[0].to(tl.int64)[:, None] * target.pixel
    mask = span[1][:, None] & (channel < channels)[None, :]
    tl.store(place + channel[None, :], values, mask=mask)


@triton.jit
def load_pixels(source, env, span, channels: tl.constexpr, width: tl.constexpr):
    """Values [M, width] of the pixels of `span` of a network, zero beyond `channels`."""
    channel = tl.arange(0, width)
    mask = span[1][:, None] & (channel < channels)[None, :]
    return at(source, env, span[0][:, None], channel, mask)


@triton.jit
def load_row(source, env, channels: tl.constexpr, width: tl.constexpr):
    """float32 [width] of a network's row of numbers, zero beyond `channels`."""
    channel = tl.arange(0, width)
    numbers = start_of(source, env) + channel
    return tl.load(numbers, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def store_rows(target, values, layer, tile):
    """Each [O] of `values`, one behind the other."""
    channel = tl.arange(0, tile.outputs)
    for number in tl.static_range(len(values)):
        place = target + number * layer.outputs + channel
        tl.store(place, values[number], mask=channel < layer.outputs)
