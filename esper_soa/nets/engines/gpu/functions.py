"""The kernels that layers.py calls; imported there where they can run, as it needs Triton."""

from esper_soa.nets.engines.gpu.block_autograd import Norm, conv_norm_relu_pool, evaluate_conv_relu_pool
from esper_soa.nets.engines.gpu.seed_autograd import added_seed

__all__ = ["Norm", "added_seed", "conv_norm_relu_pool", "evaluate_conv_relu_pool"]
