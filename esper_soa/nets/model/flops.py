"""FLOP of training, of hosts and of every seed and gate that can stand in their slots.

Counted from the description of hosts and blueprints, whichever kernels compute them: convolutions
and matrix products, padding counted as pixels; norms, activations and pools are not counted.
"""

import torch

from esper_soa.nets.model.blueprints import GATE, counts_by_code, seed_products
from esper_soa.nets.model.host import HostShape
from esper_soa.state import STATE_FLOAT, Costs

# Training over forward pass: the gradients of inputs and of weights take a forward pass each
# (Kaplan et al. 2020, Scaling laws for neural language models, 2.1; Amodei and Hernandez 2018, AI
# and compute). The same for all, though the first layer and a detached seed need no gradient of
# their input, and a frozen seed none of its weights.
PASSES_PER_STEP = 3
FLOP_PER_PRODUCT = 2  # a multiplication and an addition


def training_flop(shape: HostShape, device: torch.device) -> Costs:
    """FLOP of training on one image, of hosts of `shape` and of what can grow in them."""
    seeds = [counts_by_code(shape.blueprints, slot, seed_products) for slot in shape.slots]
    gates = [GATE.products(spec.channels, 1, spec.channels) for spec in shape.slots]
    each = PASSES_PER_STEP * FLOP_PER_PRODUCT
    return Costs(
        float(each * shape.products),
        each * torch.tensor(seeds, dtype=STATE_FLOAT, device=device),
        each * torch.tensor(gates, dtype=STATE_FLOAT, device=device),
    )
