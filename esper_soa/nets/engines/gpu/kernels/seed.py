"""The memory that kernels of a slot share: where an image of a network keeps maps and vectors.

A work place belongs to one image in one network. It holds maps [H*W, stride] (map 0 is the seed's
input x, the others what its parts give before norm and ReLU), a gradient map per part, and float32
vectors [parts + 2, 8, lanes]: those of x, of every part, of the gate. Channels beyond a map's own
hold zeros throughout.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from esper_soa.nets.engines.gpu import program, slot_flags
from esper_soa.nets.engines.gpu.kernels.tiles import NORM_EPS, NOWHERE, Rows, load_map

FIELDS = tl.constexpr(len(program.FIELDS))
KIND, INPUTS, OUTPUTS, KERNEL, GROUPS, HIDDEN, FLAGS, OFFSET, MAP, SOURCE, SOURCE_RELU = (
    tl.constexpr(place) for place in range(len(program.FIELDS))
)
COUNT, REPLACING, PARAMETERS = (tl.constexpr(place) for place in range(len(program.HEAD)))
END, CONV, DEPTH, SOFT_NORM, EXCITE = map(tl.constexpr, program.KINDS)
NORMED, RELU, BIASED = map(tl.constexpr, program.FLAGS)
RUNNING, THROUGH, MULTIPLIED, GATED, DETACHED, FROZEN, MEASURED, ABLATED, _ = map(
    tl.constexpr, slot_flags.FLAGS
)
CODE_SHIFT = tl.constexpr(slot_flags.CODE_SHIFT)
FLAG_BITS = tl.constexpr((1 << slot_flags.CODE_SHIFT) - 1)
FEW_LANES = tl.constexpr(32)
TAP_SCALE = tl.constexpr(1 << 16)
VECTORS = tl.constexpr(8)  # per part; what they hold:
# value = act((map - centre) gain + shift)
CENTRE, GAIN, SHIFT, INVERSE = (tl.constexpr(place) for place in range(4))
MEAN = tl.constexpr(3)  # of a squeeze, in place of INVERSE: the mean of the pixels
# gradients of shift, of scale, of a strength
TOTAL, PRODUCT, STRENGTH = (tl.constexpr(place) for place in (4, 5, 6))
# hidden units of a squeeze; gradients
UNITS, LOGIT, UNIT_GRADIENT = (tl.constexpr(place) for place in (4, 5, 6))


class SlotShape(NamedTuple):
    """Sizes of a slot; all are compile-time constants."""

    height: tl.constexpr
    width: tl.constexpr
    channels: tl.constexpr
    stride: tl.constexpr  # numbers per pixel of a map: a multiple of 8
    lanes: tl.constexpr  # channels of a tile: a power of two, at least 8
    units: tl.constexpr  # hidden units of a squeeze: likewise
    tile: tl.constexpr  # pixels of a tile
    columns: tl.constexpr  # of a convolution's implicit matrix, per product
    taps: tl.constexpr  # that begin in them
    group: tl.constexpr  # of them, whose gradients are summed together
    group_taps: tl.constexpr
    whole: tl.constexpr  # whether the last tile of an image is full
    parts: tl.constexpr  # most that a blueprint has
    maps: tl.constexpr
    gate_at: tl.constexpr  # column at which the gate's parameters begin
    gate_hidden: tl.constexpr
    pool: tl.constexpr  # 2 where a pool follows, else 1
    precision: tl.constexpr  # of float32 products: ieee or tf32
    widened: tl.constexpr  # whether products are taken in float32


class KernelSlot(NamedTuple):
    """A slot of N networks and its work places."""

    slot_flags: Tensor  # int32 [N, S]
    alpha: Tensor  # float32 [N, S]
    number: tl.constexpr  # of the slot
    num_slots: tl.constexpr  # S
    programs: Tensor  # int32 [codes, 1 + parts, FIELDS]
    rows: Rows  # parameters
    maps: Tensor  # [places, maps, H*W, stride]
    vectors: Tensor  # float32 [places, parts + 2, VECTORS, lanes]
    gradients: Tensor  # [places, parts, H*W, stride]
    area: int  # pixels of a map, where the compiler is not to know them
    shape: SlotShape


@triton.jit
def member(slot, env):
    """(flags, pointer to the program) of a network's seed."""
    word = tl.load(slot.slot_flags + env * slot.num_slots + slot.number)
    flags = word & FLAG_BITS
    head = slot.programs + (word >> CODE_SHIFT).to(tl.int64) * ((1 + slot.shape.parts) * FIELDS)
    return flags, head


@triton.jit
def alpha_of(slot, env):
    """How far a network's seed is blended in."""
    return tl.load(slot.alpha + env * slot.num_slots + slot.number)


@triton.jit
def work_place(slot, env, place):
    """(parameter row, maps, vectors, gradient maps): pointers of one image; pixels of a map."""
    area: tl.constexpr = slot.shape.height * slot.shape.width * slot.shape.stride
    return (
        slot.rows.base + env * slot.rows.env,
        slot.maps + place * (slot.shape.maps * area),
        of_image(slot.vectors, place, slot.shape),
        slot.gradients + place * (slot.shape.parts * area),
        slot.area,
    )


@triton.jit
def area_of(work, shape):
    """Pixels of a map: beyond 32 lanes a loop over a known number would be unrolled, and its loads
    ahead would take more registers than there are.
    """
    return work[4] if shape.lanes > 32 else shape.height * shape.width


@triton.jit
def map_at(work, number, shape):
    """Pointer to a map."""
    return work[1] + number * (shape.height * shape.width * shape.stride)


@triton.jit
def gradient_at(work, number, shape):
    """Pointer to the gradient map of a part."""
    return work[3] + number * (shape.height * shape.width * shape.stride)


@triton.jit
def vectors_at(work, number, shape):
    """Pointer to the vectors of x (0), of part p (p + 1) or of the gate (parts + 1)."""
    return work[2] + number * (VECTORS * shape.lanes)


@triton.jit
def of_image(vectors, image, shape):
    """Pointer to the same vectors of an image that many places on."""
    return vectors + image * ((shape.parts + 2) * VECTORS * shape.lanes)


@triton.jit
def save_vector(vectors, which: tl.constexpr, values, shape):
    """values float32 [lanes], or those of fewer hidden units."""
    tl.store(vectors + which * shape.lanes + tl.arange(0, values.shape[0]), values)


@triton.jit
def saved_vector(vectors, which: tl.constexpr, shape):
    """float32 [lanes]."""
    return tl.load(vectors + which * shape.lanes + tl.arange(0, shape.lanes))


@triton.jit
def parameters_at(row, first, count, width: tl.constexpr):
    """float32 [width]: `count` numbers of a row from `first` on, then zeros."""
    lane = tl.arange(0, width)
    return tl.load(row + first + lane, mask=lane < count, other=0.0)


@triton.jit
def pixels_from(first, shape):
    """(pixels int [tile] from `first` on, which of them exist bool [tile])."""
    pixels = first + tl.arange(0, shape.tile)
    return pixels, pixels < shape.height * shape.width


@triton.jit
def affine_of(vectors, relu, channel, shape):
    """The meaning of a map's numbers: (centre, gain, shift [K], whether a ReLU follows)."""
    return (
        tl.load(vectors + CENTRE * shape.lanes + channel),
        tl.load(vectors + GAIN * shape.lanes + channel),
        tl.load(vectors + SHIFT * shape.lanes + channel),
        relu != 0,
    )


@triton.jit
def activated_values(raw, affine, inside):
    """act((raw - centre) gain + shift), float32 [M, K], zero outside."""
    values = (raw - affine[0][None, :]) * affine[1][None, :] + affine[2][None, :]
    values = tl.where((values < 0) & affine[3], 0.0, values)
    return tl.where(inside, values, 0.0)


@triton.jit
def part_input(work, part, number, shape):
    """Input of part `number`: (map, its vectors, whether a ReLU follows, the map's number)."""
    source = tl.load(part + SOURCE)
    relu = tl.load(part + SOURCE_RELU)
    return map_at(work, source, shape), vectors_at(work, number, shape), relu, source


@triton.jit
def part_output(work, part, number, shape):
    """Output of part `number`: (map, its affine)."""
    source = map_at(work, tl.load(part + MAP), shape)
    relu = tl.load(part + FLAGS) & RELU
    vectors = vectors_at(work, number + 1, shape)
    return source, affine_of(vectors, relu, tl.arange(0, shape.lanes), shape)


@triton.jit
def map_values(source, affine, span, shape):
    """float32 [M, lanes]: the features that a map stands for."""
    raw = load_map(source, span, tl.arange(0, shape.lanes), shape.stride)
    return activated_values(raw, affine, span[1][:, None])


@triton.jit
def shift_pixels(pixels, tap, kernel, shape):
    """(pixels [M] under a tap of a kernel around `pixels`, which of them lie in the image)."""
    down = tap // kernel - kernel // 2
    right = tap % kernel - kernel // 2
    row = pixels // shape.width + down
    column = pixels % shape.width + right
    inside = (row >= 0) & (row < shape.height) & (column >= 0) & (column < shape.width)
    return pixels + down * shape.width + right, inside & (pixels < shape.height * shape.width)


@triton.jit
def columns_from(tap, channel, count: tl.constexpr, shape):
    """(taps, channels), int [count]: columns of a convolution's implicit matrix from there on."""
    column = tl.arange(0, count)
    return tap + column // shape.lanes, channel + column % shape.lanes


@triton.jit
def map_taps(source, pixels, tap, channel, kernel, shape):
    """(numbers [M, K] of a map under taps [K] around pixels [M], which of them there are)."""
    down = tap * (TAP_SCALE // kernel + 1) // TAP_SCALE  # tap // kernel, of numbers below 1,000
    right = tap - down * kernel - kernel // 2
    down -= kernel // 2
    place = (down * shape.width + right) * shape.stride + channel
    row = pixels // shape.width
    if not shape.whole:
        row = tl.where(pixels < shape.height * shape.width, row, NOWHERE)
    known = (tap < kernel * kernel) & (channel < shape.stride)
    row = row[:, None] + tl.where(known, down, NOWHERE)[None, :]
    column = (pixels % shape.width)[:, None] + right[None, :]
    inside = (row.to(tl.uint32) < shape.height) & (column.to(tl.uint32) < shape.width)
    start = source + (pixels * shape.stride).to(tl.int64)[:, None]
    return tl.load(start + place.to(tl.int64)[None, :], mask=inside, other=0.0), inside


@triton.jit
def input_taps(given, pixels, tap, channel, kernel, shape):
    """The features of a `part_input`, [M, K] in the maps' format: x itself as it is."""
    values, inside = map_taps(given[0], pixels, tap, channel, kernel, shape)
    if given[3] != 0:
        affine = affine_of(given[1], given[2], channel, shape)
        values = activated_values(values.to(tl.float32), affine, inside).to(values.dtype)
    return values


@triton.jit
def kernel_size(part, outputs):
    """Numbers of a convolution's kernel, before the columns of its norm."""
    kernel = tl.load(part + KERNEL)
    return outputs * tl.load(part + INPUTS) * kernel * kernel


@triton.jit
def group_sum(values, per_group, count, shape):
    """float32 [lanes]: for each of `count` channels the sum of values [lanes] over its group."""
    channel = tl.arange(0, shape.lanes)
    if shape.lanes <= FEW_LANES:
        same = channel[:, None] // per_group == channel[None, :] // per_group
        same = same & (channel < count)[None, :]
        result = tl.sum(tl.where(same, values[None, :], 0.0), axis=1)
    else:
        result = tl.zeros((shape.lanes,), tl.float32)
        for number in range(0, count // per_group):
            same = channel // per_group == number
            result += tl.where(same, tl.sum(tl.where(same, values, 0.0), axis=0), 0.0)
    return result


@triton.jit
def no_moments(shape):
    """Moments before the first tile; see join_moments."""
    zeros = tl.zeros((shape.tile, shape.lanes), tl.float32)
    return zeros, zeros, tl.zeros((shape.tile,), tl.float32)


@triton.jit
def join_moments(moments, values, inside):
    """(mean, centred square sum [M, lanes], pixels [M]) of each place in a tile, with one tile more
    (Welford 1962): threads need each other only once, in all_moments.
    """
    count = moments[2] + inside.to(tl.float32)
    delta = tl.where(inside[:, None], values - moments[0], 0.0)
    mean = moments[0] + delta * (1.0 / tl.maximum(count, 1.0))[:, None]
    return mean, moments[1] + delta * (values - mean), count


@triton.jit
def all_moments(moments, shape):
    """(mean, centred square sum) [lanes] over all pixels (Chan's rule)."""
    count = moments[2][:, None]
    mean = tl.sum(moments[0] * count, axis=0) / (shape.height * shape.width)
    delta = moments[0] - mean[None, :]
    return mean, tl.sum(moments[1] + delta * delta * count, axis=0)


@triton.jit
def group_moments(moments, part, shape):
    """(mean, 1 / deviation) [lanes] by channel of the group norm of a part."""
    outputs = tl.load(part + OUTPUTS)
    per_group = outputs // tl.load(part + GROUPS)
    area: tl.constexpr = shape.height * shape.width
    group_mean = group_sum(moments[0], per_group, outputs, shape) / per_group
    centred = moments[0] - group_mean
    squares = group_sum(moments[1] + centred * centred * area, per_group, outputs, shape)
    return group_mean, 1.0 / tl.sqrt(squares / (per_group * area) + NORM_EPS)


@triton.jit
def tanh(x):
    """Below 0.625 a polynomial (S. Moshier's Cephes library, tanhf), where 1 - exp would cancel."""
    square = x * x
    small = -5.70498872745e-3 * square + 2.06390887954e-2
    small = (small * square - 5.37397155531e-2) * square + 1.33314422036e-1
    small = x + x * square * (small * square - 3.33332819422e-1)
    size = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    return tl.where(size < 0.625, small, tl.where(x < 0, -large, large))
