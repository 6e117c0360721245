"""Matrix products of the policy on several threads of a CPU, everything else on one.

A large product is the one operation of the policy that threads pay for: small ones mostly wait for
each other. Each number of a product is added up on one thread in the order that one thread has, so
the bits are the same, which the learner proves in its first gradient step (agent/ppo.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

WORK = 8_000_000  # multiplications below which a product stays on one thread, a fifth of a ms
NARROW = 32  # outputs below which it does: a gradient of so few rows may be added in pieces


class Product(nn.Linear):
    """A linear layer whose products, where they are large, take `threads` threads."""

    threads = 1

    def forward(self, inputs: Tensor) -> Tensor:
        """As of nn.Linear."""
        work = inputs.numel() * self.out_features
        if self.threads == 1 or work < WORK or self.out_features < NARROW:
            return super().forward(inputs)
        given = (inputs, self.weight) if self.bias is None else (inputs, self.weight, self.bias)
        return on_threads(self.threads, nn.functional.linear, *given)[0]


def on_threads(
    number: int, function: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The tensors of function(*inputs), which takes `number` threads, and so does its gradient."""
    if torch.is_grad_enabled():
        return OnThreads.apply(number, function, *inputs)  # type: ignore[no-any-return]
    with threads_of_operations(number):
        return as_tuple(function(*inputs))


@contextmanager
def threads_of_operations(number: int) -> Iterator[None]:
    """Operations of this thread take `number` threads in the context, then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_tuple(results: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """One tensor or several as a tuple."""
    return (results,) if isinstance(results, Tensor) else tuple(results)


class Kept(FunctionCtx):
    """What the backward pass of OnThreads is given."""

    needs_input_grad: tuple[bool, ...]
    number: int
    inputs: list[Tensor]
    results: tuple[Tensor, ...]


class OnThreads(torch.autograd.Function):
    """A graph within the graph, so that both of its passes can have threads of their own."""

    @staticmethod
    def forward(
        ctx: Kept, number: int, function: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """See `on_threads`."""
        ctx.set_materialize_grads(False)
        ctx.number = number
        ctx.inputs = [
            one.detach().requires_grad_(wanted)
            for one, wanted in zip(inputs, ctx.needs_input_grad[2:], strict=True)
        ]
        with torch.enable_grad(), threads_of_operations(number):
            ctx.results = as_tuple(function(*ctx.inputs))
        return tuple(one.detach() for one in ctx.results)

    @staticmethod
    def backward(ctx: Kept, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs."""
        known = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        results = [ctx.results[i] for i in known]
        wanted = [one for one in ctx.inputs if one.requires_grad]
        with threads_of_operations(ctx.number):
            found = iter(torch.autograd.grad(results, wanted, [*known.values()]))
        return None, None, *(next(found) if one.requires_grad else None for one in ctx.inputs)
