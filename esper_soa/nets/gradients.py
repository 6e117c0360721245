"""Statistics of the gradients of seeds beside the host's, as engines and kernels measure them."""

import torch
from torch import Tensor

from esper_soa.state import STATE_FLOAT

VANISHING_NORM = 1e-7  # norm of a parameter tensor's gradient
EXPLODING_NORM = 10.0
SMALLEST_NORM = 1e-8


def gradient_statistics(host: Tensor, seed: Tensor, sizes: list[int]) -> dict[str, Tensor]:
    """Fields of GradientStats of m networks from gradients [m, P] of tensors of `sizes`. Health is
    1 - 0.5 (share of vanishing tensors) - 0.8 (of exploding tensors), within [0, 1].
    """
    parts = seed.split(sizes, dim=1)
    each = [torch.linalg.vector_norm(part, dim=1, dtype=STATE_FLOAT) for part in parts]
    norms = torch.stack(each, dim=1)
    vanishing = norms < VANISHING_NORM
    exploding = ~(norms <= EXPLODING_NORM)
    total = torch.linalg.vector_norm(norms, dim=1)
    health = 1.0 - 0.5 * vanishing.double().mean(1) - 0.8 * exploding.double().mean(1)
    host_norm = torch.linalg.vector_norm(host, dim=1, dtype=STATE_FLOAT)
    ratio = (total / seed.shape[1] ** 0.5) / (host_norm / host.shape[1] ** 0.5 + SMALLEST_NORM)
    zero = torch.zeros_like(total)
    return {
        "l2": total,
        "health": torch.where(total.isfinite(), health.clamp(0, 1), zero),
        "vanishing": vanishing.any(1),
        "exploding": exploding.any(1),
        "ratio": torch.where(
            ratio.isfinite() & (total >= SMALLEST_NORM) & (host_norm >= SMALLEST_NORM), ratio, zero
        ),
        "measured": torch.ones_like(total, dtype=torch.bool),
    }
