"""Clipping and SGD of rows of parameters as one native call; called by nets/engines/torch/training.py."""

import ctypes
from typing import NamedTuple

from torch import Tensor

from esper_soa.nets.engines.cpu.sheet import call


class Descent(ctypes.Structure):
    """descent of sgd.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_double) for name in ("most", "eps", "rate", "momentum", "decay")),
        *((name, ctypes.c_void_p) for name in ("params", "speed", "grad")),
    ]


class Rule(NamedTuple):
    """How a row moves."""

    max_norm: float  # of its gradient; 0 for no limit
    eps: float  # beside that norm
    lr: float
    momentum: float
    weight_decay: float


def sgd_(params: Tensor, momentum: Tensor, grad: Tensor, rule: Rule) -> None:
    """Clip each row's gradient to its own norm, then SGD with momentum, in place; contiguous tensors [n, P]."""
    grad = grad.contiguous()
    record = Descent(rows=params.shape[0], width=params.shape[1], most=rule.max_norm, eps=rule.eps, rate=rule.lr,
                     momentum=rule.momentum, decay=rule.weight_decay)  # fmt: skip
    record.params, record.speed, record.grad = params.data_ptr(), momentum.data_ptr(), grad.data_ptr()
    call("sgd_step", record)
