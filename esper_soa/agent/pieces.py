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

PIECE_ENVS = 16  # of a piece, at most; with fewer, products are slower
# Multiplications of a forward pass from which on it is cut.
MIN_CUT_WORK = 1_000_000_000


def evaluate(
    policy: RecurrentPolicy, rows: Row, starts: list[int], noise: Tensor, workers: int
) -> Evaluation:
    """`RecurrentPolicy.evaluate` of rows [T, n]. A large one on a CPU, and its backward pass, are
    spread over `workers` threads.
    """
    envs = rows.shape[1]
    work = rows.numel() * sum(weight.numel() for weight in policy.parameters())
    if noise.device.type != "cpu" or work < MIN_CUT_WORK or envs == 1:
        return policy.evaluate(rows, starts, noise)
    members = chunks(envs, min(PIECE_ENVS, -(-envs // 2)))
    cuts = [slice(piece[0], piece[-1] + 1) for piece in members]
    pieces = [partial(policy.evaluate, rows[:, cut], starts, noise[:, cut]) for cut in cuts]
    return Evaluation(*Pieces.apply(workers, pieces, *policy.parameters()))  # type: ignore[no-untyped-call]


class PiecesContext(FunctionCtx):
    """Values that the forward pass of Pieces keeps for the backward pass."""

    workers: int
    parameters: tuple[Tensor, ...]
    evaluations: list[Evaluation]


class Pieces(torch.autograd.Function):
    """A graph per piece within the graph, so that each thread can go through both passes of one."""

    @staticmethod
    def forward(
        ctx: PiecesContext,
        workers: int,
        pieces: Sequence[Callable[[], Evaluation]],
        *parameters: Tensor,
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
        pairs = zip(outputs, ctx.evaluations[0], strict=True)
        ctx.mark_non_differentiable(*(whole for whole, part in pairs if not part.requires_grad))
        return outputs

    @staticmethod
    def backward(ctx: PiecesContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the parameters, those of the pieces added in their order."""
        known = {place: part for place, part in enumerate(gradients) if part is not None}
        sizes = [evaluation.value.shape[1] for evaluation in ctx.evaluations]
        cut = zip(*(gradient.split(sizes, 1) for gradient in known.values()), strict=True)

        def run(evaluation: Evaluation, cut: Sequence[Tensor], call: Call) -> Sequence[Tensor]:
            outputs = [evaluation[place] for place in known]
            return torch.autograd.grad(outputs, ctx.parameters, cut, materialize_grads=True)

        pieces = [partial(run, *pair) for pair in zip(ctx.evaluations, cut, strict=True)]
        by_piece = run_pieces(pieces, ctx.workers)
        return None, None, *(reduce(torch.add, each) for each in zip(*by_piece, strict=True))
