"""Ten networks of the field, as plain modules in examples/, are programs of operations."""

import pytest
import torch
from torch import nn

from esper_soa.config.nets import TaskConfig
from esper_soa.nets.engines.cpu.host_program import host_obstacle
from esper_soa.nets.model.user_parts import task_shape
from examples import networks

NAMES = (
    *("resnet18", "wide_resnet", "regnet", "mobilenet_v3_small", "densenet"),
    *("squeezenet", "shufflenet", "convnext", "mlp_mixer", "vit"),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_network_of_the_field_is_a_program_of_operations(name: str) -> None:
    network: nn.Module = vars(networks)[name](10)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    task = TaskConfig(name="own", host=f"examples.networks:{name}")
    assert host_obstacle(task_shape(task, ["r0c0"])) == ""
