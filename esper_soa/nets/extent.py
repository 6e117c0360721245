"""How large tensors of a pass get: what decides how many networks and samples go through together.

Many kernels index with 32 bits: no tensor of a pass on a GPU may have more than INDEXED elements.
"""

from esper_soa.nets.model.host import HostShape

INDEXED = 2**31 - 1


def activation_elements(shape: HostShape, inputs: int, rows: int = 1) -> int:
    """Elements of the largest tensor of a forward pass, per network and sample.

    inputs: elements of a sample. rows: alpha rows at the end, at most; each slot may double them.
    """
    now = 1
    largest = inputs
    for segment in shape.segments:
        largest = max(largest, now * segment.activations)
        for slot in segment.slots:
            if slot >= 0:
                now = min(2 * now, rows)
                spec = shape.slots[slot]
                fitting = (one for one in shape.blueprints if one.fits(spec))
                widest = max(max(one.widths(spec.channels)) for one in fitting)
                largest = max(largest, now * spec.positions * widest)
    return largest
