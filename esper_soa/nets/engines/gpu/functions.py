"""What nets/batched.py calls where the kernels are on; imported by switch.py alone, as it needs Triton."""

from esper_soa.nets.engines.gpu.block_autograd import Norm, conv_norm_relu_pool, evaluate_conv_relu_pool
from esper_soa.nets.engines.gpu.seed_autograd import added_seed

__all__ = ["Norm", "added_seed", "conv_norm_relu_pool", "evaluate_conv_relu_pool"]
