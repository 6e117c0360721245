"""Layers of n networks by the Triton kernels: hosts' blocks, and seeds of one convolution that are added to them.

Held by the engine in torch. The kernels are handed in, as their modules need Triton, which is not always there.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from esper_soa.errors import SettingError
from esper_soa.nets.engines.gpu.support import unavailable_reason
from esper_soa.nets.layers import GroupNorm, Layers
from esper_soa.nets.sgd import Rule

FUNCTIONS = "esper_soa.nets.engines.gpu.functions"


def takes(x: Tensor) -> bool:
    """True where the kernels are made for activations x."""
    made_for = x.dim() == 4 and x.dtype in (torch.float32, torch.bfloat16)
    return made_for and x.is_contiguous(memory_format=torch.channels_last)


class TritonLayers(Layers):
    """Those of Layers that have a kernel, for activations that it is made for; all others as `beneath` has them."""

    def __init__(self, kernels: ModuleType, beneath: Layers) -> None:
        """kernels: the module functions.py."""
        super().__init__(beneath.convolutions)
        self.kernels, self.beneath = kernels, beneath

    def train_block(
        self, x: Tensor, weight: Tensor, norm: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor], pooled: bool
    ) -> Tensor:
        """One kernel for each of forward pass, statistics and backward passes."""
        if not takes(x):
            return self.beneath.train_block(x, weight, norm, running, pooled)
        return self.kernels.conv_norm_relu_pool(x, weight, self.kernels.Norm(*norm, *running), 2 if pooled else 1)

    def infer_block(self, x: Tensor, weight: Tensor, bias: Tensor, pooled: bool) -> Tensor:
        """One kernel."""
        if not takes(x):
            return self.beneath.infer_block(x, weight, bias, pooled)
        return self.kernels.evaluate_conv_relu_pool(x, weight, bias, 2 if pooled else 1)

    def seed_layer(self, x: Tensor, weight: Tensor, norm: GroupNorm, residual: Tensor | None = None) -> Tensor:
        """As beneath."""
        return self.beneath.seed_layer(x, weight, norm, residual)

    def added_layer(
        self, x: Tensor, weight: Tensor, norm: GroupNorm, alpha: Tensor, detached: bool, pooled: bool = False
    ) -> Tensor:
        """One kernel where a ReLU follows the norm, and the pool behind it."""
        if not (takes(x) and norm.relu):
            return self.beneath.added_layer(x, weight, norm, alpha, detached, pooled)
        out = self.kernels.added_seed(x, weight, (norm.scale, norm.shift), norm.groups, alpha, detached)
        return self.max_pool(out) if pooled else out

    def max_pool(self, x: Tensor) -> Tensor:
        """As beneath."""
        return self.beneath.max_pool(x)

    def classifier_loss(self, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """As beneath."""
        return self.beneath.classifier_loss(x, weight, bias, labels)

    def sgd_(self, params: Tensor, momentum: Tensor, grad: Tensor, rule: Rule) -> None:
        """As beneath."""
        self.beneath.sgd_(params, momentum, grad, rule)


def chosen_layers(setting: str, device: torch.device, beneath: Layers) -> Layers:
    """What compute.triton stands for on `device`: layers by the kernels, or `beneath`.

    Raises SettingError for `on` where the kernels cannot run.
    """
    reason = unavailable_reason(device) if setting != "off" else None
    if setting == "on" and reason is not None:
        raise SettingError("compute.triton", setting, "auto or off here", f"{reason[0].upper()}{reason[1:]}.")
    if setting == "on" or (setting == "auto" and reason is None and device.type == "cuda"):
        return TritonLayers(importlib.import_module(FUNCTIONS), beneath)
    return beneath
