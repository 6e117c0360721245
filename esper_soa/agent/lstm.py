"""The memory of the policy: layers of LSTM, env-step by env-step and over whole sequences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper_soa.agent.products import Product, linear
from esper_soa.agent.protocol import Memory


class ResidualLSTM(nn.Module):
    """Layers of x + LayerNorm(LSTM(x)); the memory is (hidden, cell), each [N, L, H]."""

    def __init__(self, num_inputs: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.project = Product(num_inputs, hidden) if num_inputs != hidden else nn.Identity()
        self.layers = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(num_layers))
        self.layer_norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(num_layers))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ResidualLSTM":
        """On a GPU the parameters of a layer are views of one buffer, in the order of cuDNN, which
        would else copy them together at every call.
        """
        super()._apply(fn, recurse)
        for layer in self.layers:
            parameters = lstm_parameters(layer)
            if parameters[0].is_cuda:
                buffer = torch.cat([part.detach().flatten() for part in parameters])
                pieces = buffer.split([part.numel() for part in parameters])
                for part, piece in zip(parameters, pieces, strict=True):
                    part.data = piece.view_as(part)
        return self

    def step(self, inputs: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """One env-step: [N, inputs] to [N, H], and the new memory."""
        x = self.project(inputs)
        after = []
        for i, (layer, norm) in enumerate(zip(self.layers, self.layer_norms, strict=True)):
            after.append(self._cell(layer, x, *(part[:, i] for part in memory)))
            x = norm(after[-1][0]) + x
        return x, tuple(torch.stack(part, dim=1) for part in zip(*after, strict=True))

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
                weights = lstm_parameters(layer)
                part, *memory = torch.lstm(
                    x[start:end], begin, weights, True, 1, 0.0, self.training, False, False
                )
                parts.append(part)
                cells.append(memory[1])
            h = torch.cat(parts)
            x = norm(h) + x
            hidden.append(h.detach())
            cell.append(torch.cat(cells).detach())
        return x, (torch.stack(hidden, dim=2), torch.stack(cell, dim=2))

    def _cell(self, layer: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Memory [N, H] of a layer after one env-step."""
        if x.device.type != "cpu":
            return layer(x, (h, c))  # type: ignore[no-any-return]
        input_weight, recurrent_weight, *biases = lstm_parameters(layer)
        gates = linear(x, input_weight, biases[0]).add_(linear(h, recurrent_weight, biases[1]))
        i, f, g, o = gates.chunk(4, dim=-1)
        # tanh by the sigmoid: torch's own takes nine times as long
        cell = f.sigmoid() * c + i.sigmoid() * (2 * (2 * g).sigmoid() - 1)
        return o.sigmoid() * (2 * (2 * cell).sigmoid() - 1), cell


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it `ResidualLSTM.sequence`, whose backward pass must be inside too, multiplies in
    float32 on CUDA, as the rollout does.
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
    return [t for t, restart in enumerate(reset.any(1).tolist()) if restart or t == 0]
