"""The memory of the policy: layers of LSTM, env-step by env-step and over whole sequences."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper_soa.agent.protocol import Memory


class ResidualLSTM(nn.Module):
    """Layers of x + LayerNorm(LSTM(x)); the memory is (hidden, cell), each [N, L, H]."""

    def __init__(self, num_inputs: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.project = nn.Linear(num_inputs, hidden) if num_inputs != hidden else nn.Identity()
        self.layers = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(num_layers))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(num_layers))

    def step(self, inputs: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """One env-step: [N, inputs] to [N, H], and the new memory."""
        x = self.project(inputs)
        hidden = []
        cell = []
        for i, (layer, norm) in enumerate(zip(self.layers, self.layer_norms, strict=True)):
            h, c = layer(x, (memory[0][:, i], memory[1][:, i]))
            x = norm(h) + x
            hidden.append(h)
            cell.append(c)
        return x, (torch.stack(hidden, dim=1), torch.stack(cell, dim=1))

    def sequence(self, inputs: Tensor, reset: Tensor, starts: list[int]) -> tuple[Tensor, Memory]:
        """Whole sequences [T, N, inputs] to [T, N, H] from zero memory.

        `starts` holds, in order and with 0, every t at which some env has reset[t, n]; that env's
        memory is cleared there. Between two starts the fused kernel runs over all env-steps at
        once. Also returns the memory, without gradient: hidden [T, N, L, H] after every env-step,
        cell [P, N, L, H] at the end of each of P stretches.
        """
        x = self.project(inputs)
        hidden = []
        cell = []
        for layer, norm in zip(self.layers, self.layer_norms, strict=True):
            memory = [x.new_zeros(1, x.shape[1], self.hidden)] * 2
            parts = []
            cells = []
            for start, end in zip(starts, [*starts[1:], x.shape[0]], strict=True):
                fresh = reset[start].reshape(1, -1, 1)
                begin = [torch.where(fresh, 0.0, m) for m in memory]
                with full_precision():
                    part, *memory = torch.lstm(
                        x[start:end],
                        begin,
                        lstm_parameters(layer),
                        True,
                        1,
                        0.0,
                        self.training,
                        False,
                        False,
                    )
                parts.append(part)
                cells.append(memory[1])
            h = torch.cat(parts)
            x = norm(h) + x
            hidden.append(h.detach())
            cell.append(torch.cat(cells).detach())
        return x, (torch.stack(hidden, dim=2), torch.stack(cell, dim=2))


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it the fused kernel multiplies in float32 on CUDA too, as the rollout does, not in
    TensorFloat-32.

    The backward pass must be inside the context, too.
    """
    kernel = torch.backends.cudnn.rnn
    before = kernel.fp32_precision  # type: ignore[attr-defined]
    kernel.fp32_precision = "ieee"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kernel.fp32_precision = before  # type: ignore[attr-defined]


def lstm_parameters(layer: nn.Module) -> list[Tensor]:
    """Weights [4H, H] of input and recurrence, both biases [4H] of a layer; gates i, f, g, o."""
    return [layer.get_parameter(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def segment_starts(reset: Tensor) -> list[int]:
    """Every t at which some env of reset bool [T, N] is restarted, and 0. Reads from the device."""
    restarts = reset.any(1).tolist()
    return [t for t, restart in enumerate(restarts) if restart or t == 0]
