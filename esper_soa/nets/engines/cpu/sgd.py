"""Clipping and SGD of rows of parameters as one native call; called by layers.py; whole.py takes its record."""

import ctypes

from torch import Tensor

from esper_soa.nets.engines.cpu.sheet import call
from esper_soa.nets.sgd import Rule


class Descent(ctypes.Structure):
    """descent of sgd.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "width")),
        *((name, ctypes.c_double) for name in ("most", "eps", "rate", "momentum", "decay")),
        *((name, ctypes.c_void_p) for name in ("params", "speed", "grad")),
    ]


def sgd_(params: Tensor, momentum: Tensor, grad: Tensor, rule: Rule) -> None:
    """Clip each row's gradient to its own norm, then SGD with momentum, in place; contiguous tensors [n, P]."""
    grad, record = grad.contiguous(), descent_of(rule._replace(lr=float(rule.lr)))
    record.rows, record.width = params.shape
    record.params, record.speed, record.grad = params.data_ptr(), momentum.data_ptr(), grad.data_ptr()
    call("sgd_step", record)


def descent_of(rule: Rule) -> Descent:
    """The record of a rule whose rate is a number, without the rows that it moves."""
    return Descent(most=rule.max_norm, eps=rule.eps, rate=rule.lr, momentum=rule.momentum, decay=rule.weight_decay)
