"""Pictures of any size and depth, as files and cameras have them, to images that networks take.

Imports torch alone, as the export of a network as code has a copy of this file too; Pillow is
asked where there is a file or a picture of it.
"""

import warnings
from importlib import import_module
from os import PathLike

import torch
from torch import Tensor
from torch.nn import functional as F

# Files that are read; for others Pillow may start programs.
FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "GIF", "WEBP", "PPM")
WIDE_MODES = ("I;16", "I;16L", "I;16B", "I;16N")  # Pillow's names for grey levels of 16 bits
CLEAR_MODES = ("RGBA", "LA", "PA", "RGBa", "La")  # and for levels with transparency
GREY_MODES = ("1", "L", "LA", "La")
GREY_WEIGHTS = (0.299, 0.587, 0.114)  # of red, green and blue in grey, ITU-R BT.601
MOST_PIXELS = 1 << 26  # of a picture, which takes as many bytes and more while it is read
MOST_SIDE = 1024  # pixels, above which pictures are first averaged down by a whole factor
PAD_FROM = 24 / 32  # share of the images' side from which `auto` pads: most of it is picture
# Levels by which a half is moved up before it is rounded, as sums differ from machine to machine.
ROUNDING_NUDGE = 1e-6


class TooManyPixelsError(ValueError):
    """A picture has more than MOST_PIXELS."""


class NoLevelsError(ValueError):
    """A picture holds numbers that are no levels of 8 or 16 bits."""


def levels_of_file(file: object) -> Tensor:
    """Levels uint8 [H, W, 1 or 3] of a path or an open file, of the first picture in it.

    TooManyPixelsError before they are unpacked, and errors of Pillow for what it cannot read.
    """
    image = import_module("PIL.Image")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of many pixels, and of tags that are broken
        try:
            picture = image.open(file, formats=FORMATS)
        except image.DecompressionBombError as error:
            raise TooManyPixelsError(str(error)) from error
        with picture:
            if picture.width * picture.height > MOST_PIXELS:
                size = f"{picture.width}x{picture.height}"
                raise TooManyPixelsError(f"a picture of {size} pixels, more than {MOST_PIXELS:,}")
            return levels_of_picture(picture)


def levels_of_picture(picture) -> Tensor:  # type: ignore[no-untyped-def]
    """Levels uint8 [H, W, 1 or 3] of a picture of Pillow: upright, in 8 bits, on black where it is
    transparent.
    """
    is_wide = picture.mode in WIDE_MODES or (picture.mode == "I" and picture.format == "PNG")
    if picture.mode in ("I", "F") and not is_wide:
        raise NoLevelsError(f"Pillow's mode {picture.mode} has no levels of 8 or 16 bits")
    is_grey = picture.mode in GREY_MODES
    is_clear = picture.mode in CLEAR_MODES or "transparency" in picture.info
    turned = import_module("PIL.ImageOps").exif_transpose(picture)
    turned = turned.convert("I" if is_wide else "RGBA" if is_clear else "L" if is_grey else "RGB")
    longer = max(turned.size)
    if longer > MOST_SIDE:
        turned = turned.reduce(-(-longer // MOST_SIDE))
    kind = torch.int32 if is_wide else torch.uint8
    levels = torch.frombuffer(bytearray(turned.tobytes()), dtype=kind)
    levels = levels.view(turned.height, turned.width, -1)
    if is_wide:
        return ((levels + 128) // 257).clamp(0, 255).byte()
    if is_clear:
        share = levels[..., 3:].int()
        levels = ((levels[..., :3] * share + 127) // 255).byte()
    return levels[..., :1] if is_grey else levels


def levels_of_array(image: object) -> Tensor:
    """Levels uint8 [H, W, 1 or 3] of an array or tensor [H, W] or [H, W, 1 or 3]: bytes, or floats
    from 0 to 1; ValueError for others.
    """
    values = torch.as_tensor(image)
    values = values[..., None] if values.dim() == 2 else values
    if values.dim() != 3 or values.shape[2] not in (1, 3) or 0 in values.shape:
        shape = list(values.shape)
        raise ValueError(f"the image has shape {shape}: must be [H, W] or [H, W, 1 or 3]")
    if values.is_floating_point() and bool(((values >= 0) & (values <= 1)).all()):
        return (values.double() * 255).round().byte()
    if values.dtype != torch.uint8:
        raise ValueError(f"the image is {values.dtype}: must be uint8, or floats from 0 to 1")
    return values


def as_channels(levels: Tensor, channels: int) -> Tensor:
    """Images uint8 [..., channels] of levels [..., 1 or 3]: grey is repeated, colours weighed."""
    if levels.shape[-1] == channels:
        return levels
    if channels > 1:
        return levels.expand(*levels.shape[:-1], channels)
    grey = levels.double() @ torch.tensor(GREY_WEIGHTS, dtype=torch.float64)
    return (grey + 0.5 + ROUNDING_NUDGE).floor().byte()[..., None]


def inner_size(height: int, width: int, rule: str, size: int) -> tuple[int, int]:
    """Pixels of an image of `size` that a picture takes by the rule "auto", "pad", "scale" or
    "stretch"; ValueError where it is too large to pad.
    """
    longer = max(height, width)
    if rule == "pad" and longer > size:
        raise ValueError(f"a picture of {height}x{width} pixels is too large for {size}x{size}")
    if rule == "pad" or (rule == "auto" and PAD_FROM * size <= longer <= size):
        return height, width
    if rule == "stretch":
        return size, size
    # a half is rounded up; at least one pixel
    rows, columns = (max(1, (2 * side * size + longer) // (2 * longer)) for side in (height, width))
    return rows, columns


def fit(levels: Tensor, inner: tuple[int, int], size: int) -> Tensor:
    """Images uint8 [M, size, size, C] of levels [M, H, W, C], scaled to `inner`, in the middle."""
    height, width = inner
    if levels.shape[1:3] != inner:
        planes = levels.permute(0, 3, 1, 2).double()
        scaled = F.interpolate(planes, inner, mode="bilinear", antialias=True)
        levels = (scaled + 0.5 + ROUNDING_NUDGE).floor().byte().permute(0, 2, 3, 1)
    top = (size - height) // 2
    left = (size - width) // 2
    result = levels.new_zeros(len(levels), size, size, levels.shape[3])
    result[:, top : top + height, left : left + width] = levels
    return result


def preprocess(inputs: dict, image: object) -> Tensor:
    """The tensor float32 [1, C, S, S] in [0, 1] of an image, as a network with this `input` in its
    description takes it, fitted as those that it was grown on. image: the path of a file, a picture
    of Pillow, or an array as of `levels_of_array`. ValueError where that cannot be.
    """
    if inputs.get("channels") not in ("RGB", "grey"):
        raise ValueError("preprocess: this network takes no images")
    channels, size, _ = inputs["shape"]
    if isinstance(image, str | PathLike):
        levels = levels_of_file(image)
    elif hasattr(image, "getexif"):
        levels = levels_of_picture(image)
    else:
        levels = levels_of_array(image)
    height, width, _ = levels.shape
    inner = inner_size(height, width, inputs.get("resize", "auto"), size=size)
    pixels = fit(as_channels(levels, channels)[None], inner, size)
    return pixels.permute(0, 3, 1, 2).float() / 255
