"""The host's 2x2 max pool behind a slot, and its way back; for one image, called by the kernels of
a slot.
"""

import triton
import triton.language as tl


@triton.jit
def pool_image(features, pooled, codes, place, shape):
    """Maxima [H/2 * W/2, C] of one image, NaN goes through; into `codes` the corner of each."""
    height: tl.constexpr = shape.height // 2
    width: tl.constexpr = shape.width // 2
    channel = tl.arange(0, shape.lanes)
    start = place * (height * width * shape.channels)
    for first in range(0, height * width, shape.tile):
        small = first + tl.arange(0, shape.tile)
        mask = (small < height * width)[:, None] & (channel < shape.channels)[None, :]
        best = tl.full((shape.tile, shape.lanes), float("-inf"), tl.float32)
        code = tl.zeros((shape.tile, shape.lanes), tl.int32)
        for corner in tl.static_range(4):
            pixel = (
                (small // width * 2 + corner // 2) * shape.width + small % width * 2 + corner % 2
            )
            source = features + pixel[:, None] * shape.channels + channel[None, :]
            values = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            better = (values > best) | (values != values)
            code = tl.where(better, corner, code)
            best = tl.where(better, values, best)
        target = start + small[:, None] * shape.channels + channel[None, :]
        tl.store(pooled + target, best, mask=mask)
        if codes is not None:
            tl.store(codes + target, code, mask=mask)


@triton.jit
def unpool_image(gradient, pooled, codes, place, shape):
    """gradient [H*W, C] of one image: that of the pool at the maximum of a window, else 0."""
    height: tl.constexpr = shape.height // 2
    width: tl.constexpr = shape.width // 2
    channel = tl.arange(0, shape.lanes)
    start = place * (height * width * shape.channels)
    for first in range(0, shape.height * shape.width, shape.tile):
        pixels = first + tl.arange(0, shape.tile)
        row = pixels // shape.width
        column = pixels % shape.width
        known = (pixels < shape.height * shape.width)[:, None] & (channel < shape.channels)[None, :]
        covered = known & ((row < 2 * height) & (column < 2 * width))[:, None]
        source = (
            start + (row // 2 * width + column // 2)[:, None] * shape.channels + channel[None, :]
        )
        code = tl.load(codes + source, mask=covered, other=4).to(tl.int32)
        chosen = covered & (code == (row % 2 * 2 + column % 2)[:, None])
        values = tl.load(pooled + source, mask=chosen, other=0.0)
        tl.store(gradient + pixels[:, None] * shape.channels + channel[None, :], values, mask=known)
