"""Operations of n networks on sequences: features [B, n*C, T], and rows [n, B*T, C], in which every
position of every sequence is a row.

Products are batched over networks; attention has network x head as its batch. Features lie in
memory as [B, T, n*C], so that one network's features and rows are views of each other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from esper_soa.nets.batched import NORM_EPS
from esper_soa.system import streams


def rows_of(x: Tensor, num_nets: int) -> Tensor:
    """Rows [n, B*T, C] of features [B, n*C, T]."""
    return x.transpose(1, 2).unflatten(2, (num_nets, -1)).permute(2, 0, 1, 3).flatten(1, 2)


def features_of(rows: Tensor, length: int) -> Tensor:
    """Features [B, n*C, T] of rows [n, B*T, C]; length: T."""
    return rows.unflatten(1, (-1, length)).permute(1, 2, 0, 3).flatten(2).transpose(1, 2)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows [n, R, I] with weight [n, O, I] and bias [n, O]: [n, R, O]."""
    if rows.shape[0] == 1:  # the same, in one call
        return F.linear(rows[0], weight[0], None if bias is None else bias[0])[None]
    columns = weight.transpose(1, 2)
    if bias is None:
        return torch.bmm(rows, columns)
    return torch.baddbmm(bias.unsqueeze(1), rows, columns)


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm of rows [n, R, C]; weight, bias [n, C]."""
    shape = rows.shape[-1:]
    if rows.shape[0] == 1:
        return F.layer_norm(rows, shape, weight[0], bias[0], NORM_EPS)
    normalised = F.layer_norm(rows, shape, None, None, NORM_EPS)
    return torch.addcmul(bias.unsqueeze(1), normalised, weight.unsqueeze(1))


def causal_attention(rows: Tensor, heads: int, length: int, drops: Tensor | None = None) -> Tensor:
    """Rows [n, R, C] of queries, keys and values [n, R, 3*C], in this order, heads in turn in each.

    length: T. drops: factors [n*B, heads, T, T] of the attention weights, for dropout.
    """
    num_nets = rows.shape[0]
    parts = rows.unflatten(1, (-1, length)).unflatten(3, (3, heads, -1))
    query, key, value = parts.flatten(0, 1).permute(2, 0, 3, 1, 4)
    if drops is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=rows.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        out = (weights * drops) @ value
    return out.transpose(1, 2).flatten(2).unflatten(0, (num_nets, -1)).flatten(1, 2)


def dropout_factors(keys: Tensor, site: int, shape: tuple[int, ...], rate: float) -> Tensor:
    """Factors [n, *shape], by streams `keys` (int64 [n]) of a batch, at place number `site` of the
    network: 0 with probability `rate`, else 1 / (1 - rate).
    """
    counters = torch.arange(torch.Size(shape).numel(), device=keys.device)
    mask = streams.uniform(streams.fold(keys, site)[:, None], counters) >= rate
    return mask.unflatten(1, shape) / (1 - rate)


class SummedTokenLoss(torch.autograd.Function):
    """Sum of the cross-entropies [n] of rows [n, R, C], whose logits are products with the rows of
    table [n, V, C]; and whether the largest logit is that of the label, bool [n, R].

    labels: int64 [n, R]; -1, in validation, has loss 0 and is never right. most: logits that may be
    made at the same time. They are made piece by piece, and the gradients of the sum of all losses
    along with them, as nothing else reads the logits.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, table: Tensor, labels: Tensor, most: int
    ) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        learns = any(ctx.needs_input_grad[:2])  # type: ignore[attr-defined]
        losses = torch.empty(labels.shape, dtype=table.dtype, device=rows.device)
        right = torch.empty_like(labels, dtype=torch.bool)
        row_grad = torch.empty_like(rows) if learns else rows
        table_grad = torch.zeros_like(table) if learns else table
        for nets, places in logit_pieces(labels.shape, table.shape[1], most):
            piece = rows[nets, places]
            logits = linear(piece, table[nets]).to(table.dtype)
            targets = labels[nets, places, None]
            right[nets, places] = logits.argmax(-1) == targets.squeeze(-1)
            logs = logits.log_softmax(-1)
            chosen = logs.gather(-1, targets.clamp(min=0))
            losses[nets, places] = torch.where(targets < 0, 0.0, -chosen).squeeze(-1)
            if learns:
                gradient = logs.exp_()
                gradient.scatter_add_(-1, targets, torch.full_like(chosen, -1.0))
                gradient = gradient.to(rows.dtype)
                row_grad[nets, places] = torch.bmm(gradient, table[nets].to(rows.dtype))
                table_grad[nets] += torch.bmm(gradient.transpose(1, 2), piece)
        ctx.save_for_backward(row_grad, table_grad)
        ctx.mark_non_differentiable(right)
        return losses.sum(1), right

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, gradient: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        row_grad, table_grad = ctx.saved_tensors  # type: ignore[attr-defined]
        factor = gradient[:, None, None]
        return row_grad * factor.to(row_grad.dtype), table_grad * factor, None, None


def logit_pieces(shape: tuple[int, ...], num_tokens: int, most: int) -> list[tuple[slice, slice]]:
    """Networks and rows of `shape` [n, R], of which at most `most` logits are made at once, at
    least those of a row. The cut of rows, and so results, do not depend on the number of networks.
    """
    num_nets, num_rows = shape
    rows = max(1, min(num_rows, most // num_tokens))
    nets = max(1, most // (num_tokens * rows))
    return [
        (slice(first, first + nets), slice(place, place + rows))
        for first in range(0, num_nets, nets)
        for place in range(0, num_rows, rows)
    ]
