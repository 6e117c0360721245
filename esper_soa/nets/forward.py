"""Seeds and gates in torch, for m networks at once.

Features are [B, m*C, ...]; parameters are tensors with a leading [m] axis. Given a blueprint and
the unpacked rows of its seeds.
"""

from torch import Tensor

from esper_soa.nets.model.blueprints import GATE, Architecture
from esper_soa.nets.model.parts import num_tensors
from esper_soa.nets.model.user_module import UserModule


def seed_forward(blueprint: Architecture, parameters: list[Tensor], x: Tensor) -> Tensor:
    """Output of m seeds, shaped as x [B, m*C, ...]; `parameters` as unpacked by `seed_table`."""
    if blueprint.module is not None:
        return blueprint.module.forward(parameters, x)
    out = x
    rest = parameters
    for part in blueprint.parts:
        assert not isinstance(part, UserModule)  # which stands alone
        count = num_tensors(part)
        out = part.forward(rest[:count], out)
        rest = rest[count:]
    return x + out if blueprint.residual else out


def gate_forward(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Gate [B, m] in (0, 1) of features x [B, m*C, ...]; `parameters` as of `gate_table`."""
    return GATE.forward(parameters, x).squeeze(-1)
