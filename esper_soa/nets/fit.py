"""How images of any size become the 32x32 pixels that hosts see: put on black, or scaled; the rule
`data.resize`.

`plan_fit` decides from the size and says in words what will be done, `fitted` does it. All sums are
of whole numbers, so that the same images give the same bytes on every machine. Called by
image_preparation.py. Needs no torch.

| rule | does |
|---|---|
| `auto` | `pad` where the longer side has PAD_FROM to 32 pixels, else `scale` |
| `pad` | puts the image in the middle of 32x32 black pixels, itself unchanged; refuses larger ones |
| `scale` | scales both sides by one factor, so that the longer one has 32 pixels, and pads the shorter one |
| `stretch` | scales each side to 32 pixels |

Scaling is bilinear and, where it makes images smaller, antialiased: a pixel is the mean of the
pixels around its place, weighted by a triangle as wide as the factor, as Pillow and torch
(antialias=True) have it.
"""  # noqa: E501

from typing import NamedTuple

import numpy as np

from esper_soa.errors import check
from esper_soa.nets.config import IMAGE_SIZE

# pixels of the longer side from which `auto` pads: at least half of what hosts see is image
PAD_FROM = 24
WEIGHT_BITS = 14  # of a weight
AT_ONCE = 1 << 22  # pixels scaled at a time, to bound memory


class Fit(NamedTuple):
    """Where an image goes within the 32x32 pixels."""

    height: int  # of the image as it comes, pixels
    width: int
    inner_height: int  # of the image as it is shown, at most 32
    inner_width: int
    top: int  # black lines above it
    left: int  # black columns beside it
    words: str  # what is done

    @property
    def scaled(self) -> bool:
        """Whether pixels change."""
        return (self.height, self.width) != (self.inner_height, self.inner_width)


def plan_fit(height: int, width: int, rule: str, setting: str) -> Fit:
    """What the `rule` of `setting` does with images of this size; raises SettingError where it can
    do nothing.
    """
    longer = max(height, width)
    size = IMAGE_SIZE
    if rule == "pad":
        check(
            longer <= size,
            setting,
            rule,
            f"auto, scale or stretch for images of {height}x{width} pixels",
            f"Hosts see {size}x{size}.",
        )
    padded = rule == "pad" or (rule == "auto" and PAD_FROM <= longer <= size)
    if padded:
        inner = height, width
    elif rule == "stretch":
        inner = size, size
    else:
        inner = _share(height, longer), _share(width, longer)
    top = (size - inner[0]) // 2
    left = (size - inner[1]) // 2
    words = _words((height, width), inner, f"{setting}={rule}")
    return Fit(height, width, *inner, top, left, words)


def _share(side: int, longer: int) -> int:
    """Pixels of a side, at least one, where the longer one gets 32; a half is rounded up."""
    return max(1, (2 * side * IMAGE_SIZE + longer) // (2 * longer))


def _words(given: tuple[int, int], inner: tuple[int, int], reason: str) -> str:
    size = IMAGE_SIZE
    if given == (size, size):
        return f"{size}x{size} pixels, taken as they are"
    text = f"{given[0]}x{given[1]} pixels"
    if inner != given:
        smaller = " and antialiased" if given[0] > inner[0] or given[1] > inner[1] else ""
        text += f", scaled to {inner[0]}x{inner[1]} (bilinear{smaller})"
    if inner != (size, size):
        text += f", put in the middle of {size}x{size} black pixels"
    return f"{text} ({reason})"


def fitted(images: np.ndarray, fit: Fit) -> np.ndarray:
    """uint8 [M, 32, 32, C] from uint8 [M, H, W, C] by the plan for H and W."""
    count = len(images)
    channels = images.shape[3]
    shown = np.zeros((count, IMAGE_SIZE, IMAGE_SIZE, channels), np.uint8)
    place = shown[:, fit.top : fit.top + fit.inner_height, fit.left : fit.left + fit.inner_width]
    if not fit.scaled:
        place[:] = images
        return shown
    # Sums of bytes by one side's weights are whole numbers below 2**24, which float32 holds, and by
    # both below 2**53.
    rows = weights(fit.height, fit.inner_height).astype(np.float32)
    columns = weights(fit.width, fit.inner_width).astype(np.float64).T
    at_once = max(1, AT_ONCE // (fit.height * fit.width * channels))
    for first in range(0, count, at_once):
        part = (
            images[first : first + at_once]
            .reshape(-1, fit.height, fit.width * channels)
            .astype(np.float32)
        )
        lines = (
            (rows @ part)
            .reshape(len(part), fit.inner_height, fit.width, channels)
            .astype(np.float64)
        )
        sums = (lines.swapaxes(2, 3) @ columns).swapaxes(2, 3)  # [m, h, w, C]
        place[first : first + at_once] = np.floor(sums / 4.0**WEIGHT_BITS + 0.5)
    return shown


def weights(given: int, wanted: int) -> np.ndarray:
    """Whole numbers int64 [wanted, given] by which `given` pixels in a line become `wanted`; rows
    add up to 2**14.

    Row i weighs the pixels by a triangle around (i + 1/2) given / wanted, whose sides end max(1,
    given / wanted) away.
    """
    places = (2 * np.arange(given) + 1) * wanted  # of pixels, in units of 1 / (2 wanted)
    centres = (2 * np.arange(wanted) + 1) * given
    shares = np.maximum(0, 2 * max(given, wanted) - abs(places - centres[:, None]))
    sums = shares.sum(1, keepdims=True)
    whole = (2 * shares * 2**WEIGHT_BITS + sums) // (2 * sums)
    whole[np.arange(wanted), whole.argmax(1)] += 2**WEIGHT_BITS - whole.sum(1)
    return whole
