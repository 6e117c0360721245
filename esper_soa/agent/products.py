"""Large matrix products of the policy on a CPU: by oneDNN.

torch multiplies by MKL, which uses vectors of 512 bits on processors of Intel alone; oneDNN, which
torch brings too, uses them wherever they are.
"""

import torch
from torch import Tensor, nn

# Multiplications of a large product, a tenth of a ms; an eighth without a graph: nothing is copied.
LARGE_WORK = 8_000_000
NARROW = 32  # outputs below which none is large


class Product(nn.Linear):
    """A linear layer whose products are by oneDNN where they are large, see `linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of nn.Linear."""
        return linear(inputs, self.weight, self.bias)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's function of that name, float32; by oneDNN where it is large or the input's copy is
    given, see `shared`. Without a graph there is no need of copies.
    """
    if not torch.is_grad_enabled() and _is_large(inputs, len(weight)):
        return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    copy = inputs if inputs.is_mkldnn else shared(inputs, len(weight))
    return nn.functional.linear(copy, weight, bias).to_dense()


def shared(inputs: Tensor, num_outputs: int) -> Tensor:
    """The copy of the inputs for oneDNN, for several products of at least so many outputs each; the
    inputs as they are where such a product is not large, or oneDNN is not there.
    """
    copied = torch.is_grad_enabled() and _is_large(inputs, num_outputs)
    return inputs.to_mkldnn() if copied else inputs


def _is_large(inputs: Tensor, num_outputs: int) -> bool:
    work = inputs.numel() * num_outputs * (1 if torch.is_grad_enabled() else 8)
    small = num_outputs < NARROW or work < LARGE_WORK
    other = inputs.device.type != "cpu" or inputs.dtype != torch.float32
    return not (small or other) and torch.backends.mkldnn.is_available()
