"""The network over a rollout in pieces of envs, which threads of a CPU share.

How the envs are cut depends on the work alone, and gradients are added in the order of the pieces,
so the number of threads changes no bit.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from esper_soa.agent.policy import Evaluation, RecurrentPolicy
from esper_soa.agent.rollout import Row
from esper_soa.system.threads import Call, chunks, run_pieces

ENVS = 16  # of a piece, at most; with fewer, products are slower
WORK = 1_000_000_000  # multiplications of a forward pass; one of less is not cut


def evaluate(
    policy: RecurrentPolicy, rows: Row, starts: list[int], noise: Tensor, workers: int
) -> Evaluation:
    """`RecurrentPolicy.evaluate` of rows [T, n]; on a CPU and where there is much to do, it and its
    backward pass are by so many threads.
    """
    envs = rows.shape[1]
    work = rows.numel() * sum(one.numel() for one in policy.parameters())
    if noise.device.type != "cpu" or work < WORK or envs == 1:
        return policy.evaluate(rows, starts, noise)
    cuts = [slice(own[0], own[-1] + 1) for own in chunks(envs, min(ENVS, -(-envs // 2)))]
    pieces = [partial(policy.evaluate, rows[:, cut], starts, noise[:, cut]) for cut in cuts]
    return Evaluation(*Pieces.apply(workers, pieces, *policy.parameters()))  # type: ignore[no-untyped-call]


class Kept(FunctionCtx):
    """What the backward pass of Pieces is given."""

    workers: int
    parameters: tuple[Tensor, ...]
    evaluations: list[Evaluation]


class Pieces(torch.autograd.Function):
    """A graph per piece within the graph, so that each thread can go through both passes of one."""

    @staticmethod
    def forward(
        ctx: Kept, workers: int, pieces: Sequence[Callable[[], Evaluation]], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        """The fields of the evaluation of all envs."""

        def run(piece: Callable[[], Evaluation], call: Call) -> Evaluation:
            with torch.enable_grad():
                return piece()

        ctx.set_materialize_grads(False)
        ctx.workers = workers
        ctx.parameters = parameters
        ctx.evaluations = run_pieces([partial(run, piece) for piece in pieces], workers)
        outputs = tuple(torch.cat(parts, 1) for parts in zip(*ctx.evaluations, strict=True))
        first = zip(outputs, ctx.evaluations[0], strict=True)
        ctx.mark_non_differentiable(*(one for one, part in first if not part.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: Kept, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the parameters, those of the pieces added in their order."""
        known = {place: one for place, one in enumerate(gradients) if one is not None}
        sizes = [evaluation.value.shape[1] for evaluation in ctx.evaluations]
        cut = zip(*(one.split(sizes, 1) for one in known.values()), strict=True)

        def run(evaluation: Evaluation, own: Sequence[Tensor], call: Call) -> Sequence[Tensor]:
            outputs = [evaluation[place] for place in known]
            return torch.autograd.grad(outputs, ctx.parameters, own, materialize_grads=True)

        pieces = [partial(run, *pair) for pair in zip(ctx.evaluations, cut, strict=True)]
        by_piece = run_pieces(pieces, ctx.workers)
        return None, None, *(reduce(torch.add, each) for each in zip(*by_piece, strict=True))
