"""Ten networks of the field, as plain modules in examples/, are programs of operations or are told
what keeps them from that.
"""

import pytest
import torch
from torch import nn

from esper_soa.config.nets import TaskConfig
from esper_soa.nets.engines.cpu.host_program import host_obstacle
from esper_soa.nets.model.user_parts import task_shape
from examples import networks

MISSING = {  # the operation in torch.ops.aten, and where it is called
    "resnet18": "",
    "wide_resnet": "",
    "regnet": "",
    "mobilenet_v3_small": "",
    "densenet": "",
    "squeezenet": "max_pool2d",
    "shufflenet": "unflatten in forward, examples/networks.py:",
    "convnext": "mul in forward, examples/networks.py:",
    "mlp_mixer": "linear in forward, examples/networks.py:",
    "vit": "expand in forward, examples/networks.py:",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_network_of_the_field_is_a_program_or_what_is_missing_is_named(name: str) -> None:
    network: nn.Module = vars(networks)[name](10)
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    task = TaskConfig(name="own", host=f"examples.networks:{name}")
    obstacle = host_obstacle(task_shape(task, ["r0c0"]))
    assert bool(obstacle) == bool(MISSING[name])
    assert MISSING[name] in obstacle
