"""How large tensors of a pass get: what decides how many networks and samples go through together.

Many kernels index with 32 bits: no tensor of a pass on a GPU may have more than INDEXED elements.
"""

from esper_soa.nets.model.host import HostShape

INDEXED = 2**31 - 1


def activation_elements(shape: HostShape, inputs: int, rows: int = 1) -> int:
    """Elements of the largest tensor of a forward pass, per network and sample.

    inputs: elements of a sample. rows: alpha rows at the end, at most; each slot may double them.
    """
    current = 1
    largest = inputs
    for segment in shape.segments:
        largest = max(largest, current * segment.activations)
        for slot in segment.slots:
            if slot >= 0:
                current = min(2 * current, rows)
                spec = shape.slots[slot]
                blueprints = (one for one in shape.blueprints if one.fits(spec))
                widest = max(max(one.widths(spec.channels)) for one in blueprints)
                largest = max(largest, current * spec.positions * widest)
    return largest
