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
    """torch's function of that name; by oneDNN on a CPU where it is large."""
    num_outputs = weight.shape[0]
    small = num_outputs < NARROW or inputs.numel() * num_outputs < WORK
    if small or inputs.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return nn.functional.linear(inputs, weight, bias)
    return nn.functional.linear(inputs.to_mkldnn(), weight, bias).to_dense()
