"""Large matrix products of the policy on a CPU: by oneDNN.

torch multiplies by MKL, which uses vectors of 512 bits on processors of Intel alone; oneDNN, which
torch brings too, uses them wherever they are.
"""

import torch
from torch import Tensor, nn

WORK = 8_000_000  # multiplications of a large product, a tenth of a ms
NARROW = 32  # outputs below which none is large


class Product(nn.Linear):
    """A linear layer whose products are by oneDNN where they are large, see `linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """As of nn.Linear."""
        return linear(inputs, self.weight, self.bias)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's function of that name, float32; by oneDNN where it is large or the input's copy is
    given, see `shared`.
    """
    copy = inputs if inputs.is_mkldnn else shared(inputs, weight.shape[0])
    return nn.functional.linear(copy, weight, bias).to_dense()


def shared(inputs: Tensor, num_outputs: int) -> Tensor:
    """The copy of the inputs for oneDNN, for several products of at least so many outputs each; the
    inputs as they are where such a product is not large, or oneDNN is not there.
    """
    small = num_outputs < NARROW or inputs.numel() * num_outputs < WORK
    if small or inputs.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return inputs
    return inputs.to_mkldnn()
