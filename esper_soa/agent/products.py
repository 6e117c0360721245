"""Large matrix products of the policy on a CPU: by oneDNN, on several threads.

torch multiplies by MKL, which uses vectors of 512 bits on processors of Intel alone; oneDNN, which
torch brings too, uses them wherever they are. A large product is the one operation of the policy
that threads pay for: small ones mostly wait for each other. Each number of a product is added up on
one thread in the order that one thread has, so the bits are the same, which the learner proves in
its first gradient step (agent/ppo.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

WORK = 8_000_000  # multiplications of a large product, a tenth of a ms
NARROW = 32  # outputs below which none is large
SHARE = 64  # inputs per thread, at least: oneDNN adds up gradients of smaller weights in pieces


class Product(nn.Linear):
    """A linear layer whose products take `threads` threads where they are large, see `linear`."""

    threads = 0

    def forward(self, inputs: Tensor) -> Tensor:
        """As of nn.Linear."""
        return linear(self.threads, inputs, self.weight, self.bias)


def linear(threads: int, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's function of that name; by oneDNN, which takes so many threads, where it is large.

    threads: 0, never by oneDNN; 1, on as many as torch's operations take.
    """
    num_outputs = weight.shape[0]
    if threads == 0 or num_outputs < NARROW or inputs.numel() * num_outputs < WORK:
        return nn.functional.linear(inputs, weight, bias)
    given = (inputs, weight) if bias is None else (inputs, weight, bias)
    threads = max(1, min(threads, weight.shape[1] // SHARE))
    return on_threads(threads, _onednn_linear, *given)[0]


def _onednn_linear(inputs: Tensor, *parameters: Tensor) -> Tensor:
    return nn.functional.linear(inputs.to_mkldnn(), *parameters).to_dense()


def on_threads(
    number: int, function: Callable[..., Tensor | Sequence[Tensor]], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The tensors of function(*inputs), which takes `number` threads, and so does its gradient.

    1: as many as torch's operations take.
    """
    if number == 1:
        return as_tuple(function(*inputs))
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
