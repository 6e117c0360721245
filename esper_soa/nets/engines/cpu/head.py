"""Global mean, linear classifier and cross-entropy as one native call each way; called by layers.py."""

import ctypes

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.nets.engines.cpu.sheet import call, new_activations, pixels_last


class Head(ctypes.Structure):
    """head of head.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "nets", "channels", "pixels", "classes", "x_pixel")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "labels", "mean", "slope", "loss", "hits")),
        *((name, ctypes.c_void_p) for name in ("grad", "grad_x", "grad_weight", "grad_bias")),
    ]


def _record(x: Tensor, weight: Tensor, bias: Tensor, saved: tuple[Tensor, Tensor]) -> Head:
    nets, classes, channels = weight.shape
    pixels = x.shape[2] * x.shape[3]
    record = Head(batch=x.shape[0], nets=nets, channels=channels, pixels=pixels, classes=classes, x_pixel=x.shape[1])
    record.x, record.weight, record.bias = x.data_ptr(), weight.data_ptr(), bias.data_ptr()
    record.mean, record.slope = (one.data_ptr() for one in saved)
    return record


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        x, weight, bias, labels = pixels_last(x), weight.contiguous(), bias.contiguous(), labels.contiguous()
        nets, classes, channels = weight.shape
        saved = x.new_empty(x.shape[0], nets, channels), x.new_empty(x.shape[0], nets, classes)
        loss, hits = x.new_empty(nets), labels.new_empty(nets)
        record = _record(x, weight, bias, saved)
        record.labels, record.loss, record.hits = labels.data_ptr(), loss.data_ptr(), hits.data_ptr()
        call("head_forward", record)
        ctx.save_for_backward(x, weight, bias)
        ctx.mark_non_differentiable(hits)
        ctx.saved = saved  # type: ignore[attr-defined]
        return loss, hits

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = gradient.contiguous()
        record = _record(x, weight, bias, ctx.saved)  # type: ignore[attr-defined]
        grad_x = new_activations(x, *x.shape[1:])
        grads = torch.empty_like(weight), torch.empty_like(bias)
        record.grad, record.grad_x = gradient.data_ptr(), grad_x.data_ptr()
        record.grad_weight, record.grad_bias = (grad.data_ptr() for grad in grads)
        call("head_backward", record)
        return grad_x, *grads, None


def head_loss(x: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy [n] and correct answers int64 [n] of activations x [B, n*C, H, W] and labels [B, n]; differentiable.

    weight [n, K, C], bias [n, K]; labels from 0 to K - 1.
    """
    return _Head.apply(x, weight, bias, labels)
