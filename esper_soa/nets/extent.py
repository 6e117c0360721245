"""How large the tensors of a pass get, per network and image: what decides how many of both go
through one together.

Many kernels of libraries index with 32 bits, so no tensor of a pass on a GPU may have more than
INDEXED elements.
"""

from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.nets.model.host import HostShape

INDEXED = 2**31 - 1


def activation_elements(shape: HostShape, rows: int = 1) -> int:
    """Elements of the largest tensor of a forward pass, per network and image.

    rows: alpha rows at its end, at most; every slot on the way may double them.
    """
    held = 1
    largest = IMAGE_CHANNELS * IMAGE_SIZE**2
    for segment in shape.segments:
        largest = max(largest, held * segment.activations)
        for slot in segment.slots:
            if slot >= 0:
                held = min(2 * held, rows)
                spec = shape.slots[slot]
                fitting = (one for one in shape.blueprints if one.fits(spec))
                widest = max(max(one.widths(spec.channels)) for one in fitting)
                largest = max(largest, held * spec.positions * widest)
    return largest
