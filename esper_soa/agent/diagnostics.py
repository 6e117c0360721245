"""Diagnostics of a policy update: computation on the device, and the copy to the host.

docs/metrics.md tells of each. Everything stays on the device until `read_diagnostics`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from esper_soa.agent.losses import Mean, Means, gradient_norm, largest_of
from esper_soa.agent.rollout import GatheredRollout
from esper_soa.env.reduction import Reduction
from esper_soa.vocabulary import HEAD_NAMES, OP_NAMES

Metrics = dict[str, Tensor]

SATURATED = 0.99  # |h| above which a unit of the memory counts as saturated
SMALL = 1e-8  # standard deviation below which values count as constant

LARGEST = ("ratio_max", "lstm_rms_max", "lstm_hidden_max", "lstm_cell_max")
SMALLEST = ("ratio_min", "lstm_rms_min")


def by_head(prefix: str, values: Tensor) -> Metrics:
    """One diagnostic per head from values [8]."""
    pairs = zip(HEAD_NAMES, values.unbind(), strict=True)
    return {f"{prefix}/{name}": value for name, value in pairs}


def memory_means(hidden: Tensor, cell: Tensor, valid: Tensor) -> Means:
    """Mean squares of the memory, hidden [T, N, L, H] and cell [P, N, L, H], and saturated share.

    valid: bool [T, N], the env-steps whose hidden state counts.
    """
    units = hidden.shape[2:].numel()
    squares = _rms(cell).square()
    saturated = hidden.abs().gt_(SATURATED).sum((-2, -1))
    return {
        "hidden_square": Mean(torch.where(valid, _rms(hidden), 0.0).square().sum(), valid.sum()),
        "cell_square": Mean(squares.sum(), squares.new_full((), squares.numel())),
        "saturated": Mean(torch.where(valid, saturated, 0.0).sum(), valid.sum() * units),
    }


def memory_health(means: Means, memories: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Metrics:
    """State of the memory: `memory_means` over all processes, and the extremes in this one.

    memories: hidden, cell and valid of rollouts, as there.
    """
    rows = [(_rms(hidden), valid) for hidden, _, valid in memories]
    hidden_rms = [torch.where(valid, rms, 0.0) for rms, valid in rows]
    cells = [cell for _, cell, _ in memories]
    hidden_max = [torch.where(valid, _largest(hidden), 0.0) for hidden, _, valid in memories]
    return {
        "lstm_rms_max": largest_of([*hidden_rms, *map(_rms, cells)]),
        "lstm_rms_min": -largest_of([torch.where(valid, -rms, -torch.inf) for rms, valid in rows]),
        "lstm_hidden_rms": means["hidden_square"].value.sqrt(),
        "lstm_hidden_max": largest_of(hidden_max),
        "lstm_cell_rms": means["cell_square"].value.sqrt(),
        "lstm_cell_max": largest_of([*map(_largest, cells)]),
        "lstm_saturated": means["saturated"].value,
    }


def _rms(memory: Tensor) -> Tensor:
    """Root of the mean square [T, N] of memory [T, N, L, H]."""
    return torch.linalg.vector_norm(memory, dim=(-2, -1)) / memory.shape[2:].numel() ** 0.5


def _largest(memory: Tensor) -> Tensor:
    """Largest absolute value [T, N] in memory [T, N, L, H]."""
    return torch.maximum(memory.amax((-2, -1)), -memory.amin((-2, -1)))


def gradient_norms(policy: nn.Module, gradients: Mapping[Tensor, Tensor]) -> Metrics:
    """L2 norm of the gradient of every action head and every other part of the network."""
    parts = dict(policy.named_children())
    parts |= dict(parts.pop("heads").named_children())
    return {
        f"gradient_norm/{name}": gradient_norm([gradients[weight] for weight in part.parameters()])
        for name, part in parts.items()
    }


def spread(name: str, x: Tensor, valid: Tensor) -> Metrics:
    """Mean and population standard deviation of x [T, N] where valid."""
    mean = _mean(x, valid)
    return {f"{name}_mean": mean, f"{name}_std": _mean((x - mean).square(), valid).sqrt()}


def calibration(values: Tensor, returns: Tensor, valid: Tensor, unit: Tensor) -> Metrics:
    """How returns [T, N] relate to the predicted values; means are multiplied by `unit` [].

    The line is least squares of returns on values; where the values are constant its slope is 0.
    """
    values = values.double()
    returns = returns.double()
    value_mean = _mean(values, valid)
    return_mean = _mean(returns, valid)
    value_offset = values - value_mean
    return_offset = returns - return_mean
    value_var = _mean(value_offset.square(), valid)
    return_var = _mean(return_offset.square(), valid)
    covariance = _mean(value_offset * return_offset, valid)
    defined = value_var.sqrt() > SMALL
    slope = torch.where(defined, covariance / value_var, 0.0)
    deviations = (value_var * return_var).sqrt()
    both_defined = defined & (return_var.sqrt() > SMALL)
    correlation = torch.where(both_defined, covariance / deviations, 0.0)
    return {
        "calibration_slope": slope,
        "calibration_intercept": return_mean - slope * value_mean,
        "value_correlation": correlation.clamp(-1, 1),
        "value_mean": value_mean * unit,
        "return_mean": return_mean * unit,
        "return_std": return_var.sqrt() * unit,
    }


def action_shares(rollout: GatheredRollout) -> Metrics:
    """Shares of forced and vetoed env-steps and of each op in the rollout."""
    op = rollout.effective_op
    ops = {f"op_share/{name}": op == code for code, name in enumerate(OP_NAMES)}
    shares = {"forced_share": rollout.forced, "vetoed_share": op != rollout.op} | ops
    means = {name: _mean(where.float(), rollout.valid) for name, where in shares.items()}
    return {"valid_rows": rollout.valid.sum()} | means


def with_extremes(history: list[Metrics], reduction: Reduction) -> list[Metrics]:
    """Every pass with its extremes over all envs; the means are over all of them already."""
    largest = {name: _column(history, name) for name in LARGEST if name in history[0]}
    smallest = {name: _column(history, name) for name in SMALLEST if name in history[0]}
    highest, lowest = reduction.extremes([*largest.values()], [*smallest.values()])
    extremes = dict(zip([*largest, *smallest], [*highest, *lowest], strict=True))
    return [
        metrics | {name: column[place] for name, column in extremes.items()}
        for place, metrics in enumerate(history)
    ]


def _column(history: list[Metrics], name: str) -> Tensor:
    return torch.stack([metrics[name] for metrics in history])


def read_diagnostics(history: list[Metrics], summary: Metrics, epochs: int) -> dict[str, float]:
    """Diagnostics as numbers, in one device-to-host copy.

    `history` holds every pass of every one of `epochs`; those after the stop are left out. Means
    are over the gradient steps taken, NaN for none.
    """
    columns = {name: _column(history, name).double() for name in history[0]}
    stepped = columns.pop("go") > 0
    evaluated = columns.pop("looked_at") > 0
    non_finite = columns.pop("not_finite")
    stopped = columns.pop("stopped")
    norm = columns.pop("gradient_norm")
    result = _divergence(columns, evaluated, epochs) if "approx_kl" in columns else {}
    for sign, names in ((1, LARGEST), (-1, SMALLEST)):
        for name in filter(columns.__contains__, names):
            most = torch.where(evaluated, sign * columns.pop(name), -torch.inf).amax()
            result[name] = sign * most
    result |= {name: _mean(values, stepped) / stepped.any() for name, values in columns.items()}
    result |= {
        "gradient_norm": torch.where(stepped, norm, 0.0).amax(),
        "steps": stepped.sum(),
        "not_finite_steps": non_finite.sum(),
        "early_stop": stopped.amax(),
    }
    result |= summary
    result["epochs_begun"] = torch.stack([mask.any() for mask in evaluated.chunk(epochs)]).sum()
    numbers = torch.stack([value.double() for value in result.values()]).tolist()
    report = dict(zip(result, numbers, strict=True))
    for epoch in range(int(report["epochs_begun"]) + 1, epochs + 1):
        report.pop(f"kl_epoch/{epoch}", None)
    return report


def _divergence(columns: Metrics, evaluated: Tensor, epochs: int) -> Metrics:
    """Distance from the policy that played, over passes [passes]; takes out `approx_kl`."""
    kl = columns.pop("approx_kl")
    passes = zip(kl.chunk(epochs), evaluated.chunk(epochs), strict=True)
    first = ((columns[name][0] - 1).abs() for name in ("ratio_max", "ratio_min"))
    return {
        "approx_kl": _mean(kl, evaluated),
        "kl_last": kl.gather(0, evaluated.sum(0, keepdim=True) - 1).squeeze(0),
        "ratio_error_first": torch.maximum(*first),
    } | {f"kl_epoch/{epoch}": _mean(*pair) for epoch, pair in enumerate(passes, start=1)}


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean [] of x over the entries of mask; 0 for none."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)
