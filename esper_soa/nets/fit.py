"""How images of any size become the 32x32 pixels that hosts see: put on black, or scaled.

| rule | does |
|---|---|
| `auto` | `pad` where the longer side has PAD_FROM to 32 pixels, else `scale` |
| `pad` | puts the image in the middle of 32x32 black pixels, unchanged; refuses larger ones |
| `scale` | scales both sides by one factor until the longer one has 32, and pads the other |
| `stretch` | scales each side to 32 pixels |

Scaling is bilinear, and antialiased where it makes images smaller.
"""

import numpy as np
import torch
from torch.nn import functional as F

from esper_soa.errors import check
from esper_soa.nets.config import IMAGE_SIZE

# pixels of the longer side from which `auto` pads: at least half of what hosts see is image
PAD_FROM = 24
# Levels of 256 by which a half is moved up before it is rounded: more than sums of doubles differ
# from machine to machine.
NUDGE = 1e-6


def inner_size(height: int, width: int, rule: str, setting: str) -> tuple[int, int]:
    """Pixels (height, width) that images of this size take of the 32x32; raises SettingError where
    the `rule` of `setting` has no answer.
    """
    longer = max(height, width)
    size = IMAGE_SIZE
    allowed = f"auto, scale or stretch for images of {height}x{width} pixels"
    fits = rule != "pad" or longer <= size
    check(fits, setting, rule, allowed, f"Hosts see {size}x{size}.")
    if rule == "pad" or (rule == "auto" and PAD_FROM <= longer <= size):
        return height, width
    if rule == "stretch":
        return size, size
    # a half is rounded up; at least one pixel
    rows, columns = (max(1, (2 * side * size + longer) // (2 * longer)) for side in (height, width))
    return rows, columns


def fit_words(given: tuple[int, int], inner: tuple[int, int], reason: str) -> str:
    """What `fitted` does to images of the size `given`."""
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


def fitted(images: np.ndarray, inner: tuple[int, int]) -> np.ndarray:
    """uint8 [M, 32, 32, C] from uint8 [M, H, W, C], scaled to `inner` and put in the middle."""
    height, width = inner
    if images.shape[1:3] != inner:
        planes = torch.tensor(images).permute(0, 3, 1, 2).double()
        scaled = F.interpolate(planes, inner, mode="bilinear", antialias=True)
        images = (scaled + 0.5 + NUDGE).floor().byte().permute(0, 2, 3, 1).numpy()
    top = (IMAGE_SIZE - height) // 2
    left = (IMAGE_SIZE - width) // 2
    shown = np.zeros((len(images), IMAGE_SIZE, IMAGE_SIZE, images.shape[3]), np.uint8)
    shown[:, top : top + height, left : left + width] = images
    return shown
