"""Grown networks as plain torch modules, by a description: layers in order of the forward pass.

Imports torch and pictures.py alone: the export of a network as code is a copy of these two files,
with its description and its weights below. grown/build.py makes descriptions from hosts and their
seeds.
"""

import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from esper_soa.nets.model.pictures import preprocess


class Normalise(nn.Module):
    """Images [B, C, H, W], floats from 0 to 1, less the mean of their channel, over its standard
    deviation. ValueError for whole numbers and another C.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: list[float], std: list[float]) -> None:
        """mean, std: of values in [0, 1], a number per channel."""
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if not images.is_floating_point() or images.shape[1] != len(self.mean):
            allowed = f"floats from 0 to 1 [B, {len(self.mean)}, H, W]"
            given = f"{str(images.dtype).removeprefix('torch.')} {[*images.shape]}"
            raise ValueError(f"images are {allowed}, not {given}: `net.preprocess` makes them")
        return (images - self.mean) / self.std


class SoftNormModule(nn.Module):
    """x + tanh(strength) (group norm(x) - x)."""

    def __init__(self, num_groups: int, num_channels: int, eps: float) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(()))
        self.norm = nn.GroupNorm(num_groups, num_channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.strength) * (self.norm(x) - x)


class SqueezeModule(nn.Module):
    """Numbers in (0, 1) [B, outputs, 1, 1] of x [B, C, H, W]: the mean of its pixels, linear, ReLU,
    linear, sigmoid. Other axes of x [B, C, ...] likewise, an axis of length 1 for each.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, hidden_bias: bool) -> None:
        super().__init__()
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.first = nn.Linear(inputs, hidden, bias=hidden_bias)
        self.second = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        axes = x.dim() - 2
        mean = self.mean(x[(..., *[None] * (2 - axes))])
        hidden = torch.relu(self.first(mean.flatten(1)))
        return torch.sigmoid(self.second(hidden))[(..., *[None] * axes)]


class ExciteModule(SqueezeModule):
    """x times a number in (0, 1) per channel and image."""

    def forward(self, x: Tensor) -> Tensor:
        return x * super().forward(x)


class DenseModule(nn.Linear):
    """Linear layer of the channels [B, C, T] of every position, then GELU where asked for."""

    def __init__(self, inputs: int, outputs: int, bias: bool, gelu: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.transpose(1, 2)).transpose(1, 2)
        return nn.functional.gelu(out) if self.gelu else out


class CausalAttentionModule(nn.Module):
    """Self-attention of the positions of x [B, C, T] to themselves and those before them."""

    def __init__(self, channels: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x.transpose(1, 2)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=rate, is_causal=True
        )
        return self.proj(out.transpose(1, 2).flatten(2)).transpose(1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm of the channels of x [B, C, T]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class SoftLayerNormModule(nn.Module):
    """x + tanh(strength) (layer norm(x) - x)."""

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.zeros(1))
        self.norm = ChannelNorm(channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.strength) * (self.norm(x) - x)


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)), of x [B, C, T]."""

    def __init__(self, width: int, heads: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.norm1 = ChannelNorm(width, eps=eps)
        self.attention = CausalAttentionModule(width, heads, dropout)
        self.norm2 = ChannelNorm(width, eps=eps)
        self.hidden = DenseModule(width, 4 * width, bias=True, gelu=True)
        self.output = DenseModule(4 * width, width, bias=True, gelu=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.output(self.hidden(self.norm2(x))))


class TokenEmbedding(nn.Module):
    """Features [B, width, T] of tokens int64 [B, T], with T up to `context`."""

    def __init__(self, tokens: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.drop(features).transpose(1, 2)


class TiedHeadModule(nn.Module):
    """Logits [B, T, V] of x [B, C, T]: layer norm, products with the embeddings of the tokens."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.embeddings: list[nn.Embedding] = []  # in a list, as it is no part of this module

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x.transpose(1, 2)), self.embeddings[0].weight)


class CopyingModule(nn.Sequential):
    """Layers of a user, which may write into what they are given: a copy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class ResidualModule(nn.Sequential):
    """x + layers(x)."""

    copies = False  # whether the layers are given a copy

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x.clone() if self.copies else x)


class BlendModule(nn.Module):
    """How a host's features take on those of a seed; alpha in [0, 1] says how much."""

    alpha: Tensor

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.tensor(alpha))


class Add(BlendModule):
    """host + alpha (seed - host)."""

    def forward(self, host: Tensor, seed: Tensor) -> Tensor:
        return torch.lerp(host, seed, self.alpha)


class Multiply(BlendModule):
    """host (1 + alpha tanh(seed - host))."""

    def forward(self, host: Tensor, seed: Tensor) -> Tensor:
        return host * (1 + self.alpha * torch.tanh(seed - host))


class Gate(BlendModule):
    """host + alpha g (seed - host), g in (0, 1) for each image."""

    def __init__(self, alpha: float, gate: nn.Module) -> None:
        super().__init__(alpha)
        self.gate = gate

    def forward(self, host: Tensor, seed: Tensor) -> Tensor:
        return torch.lerp(host, seed, self.alpha * self.gate(host))


class Slot(nn.Module):
    """A seed in its slot: features [B, C, ...] to features of the same shape."""

    def __init__(self, seed: nn.Module, blend: BlendModule) -> None:
        super().__init__()
        self.seed = seed
        self.blend = blend

    def forward(self, x: Tensor) -> Tensor:
        return self.blend(x, self.seed(x))


LAYER_CLASSES: tuple[type[nn.Module], ...] = (
    *(nn.Conv2d, nn.BatchNorm2d, nn.GroupNorm, nn.ReLU),
    *(nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear),
    *(SoftNormModule, SqueezeModule, ExciteModule, DenseModule, CausalAttentionModule),
    *(SoftLayerNormModule, TiedHeadModule, TransformerLayer, TokenEmbedding),
)
LAYER_KINDS = {kind.__name__.removesuffix("Module"): kind for kind in LAYER_CLASSES}
ROLE_MARK = "_esper_soa_"  # with a role behind it, what the decorators of users' parts set
USER_ARGUMENTS = {"blueprint": ("channels",), "host": ("classes", "segment")}  # in a spec
LAYER_ROLE = "layer"  # the role of users' modules that are called with the arguments of the spec
BLEND_KINDS = {"add": Add, "multiply": Multiply, "gate": Gate}


class GrownNetwork(nn.Sequential):
    """A host with its seeds, named in the order in which images meet them: input, block0, r0c0,
    pool0, ... classifier.

    Images float32 [B, 3, 32, 32], RGB in [0, 1], to logits [B, classes]; tokens int64 [B, T] to
    logits [B, T, V]; other samples as `spec["input"]` says. `net.r0c0.seed` and `net.r0c0.blend`
    are there where a seed stands in the slot r0c0. `spec` is what it was made from: plain values,
    as JSON has them.
    """

    # SHA-256 of the tensors of which the figures of `spec` are; "" where nobody knows
    measured = ""

    def __init__(self, spec: dict) -> None:
        """Fresh weights. ValueError, LookupError or TypeError for a `spec` of no network."""
        super().__init__()
        self.spec = spec
        inputs = spec["input"]
        begin = Normalise(inputs["mean"], inputs["std"]) if "mean" in inputs else nn.Identity()
        self.add_module("input", begin)
        for part in spec["host"]:
            first = part is spec["host"][0]
            segment = sequence(part["layers"], bool(part.get("residual")), "host", first=first)
            self.add_module(part["name"], segment)
            for seed in spec["seeds"]:
                if seed["after"] == part["name"]:
                    grown = sequence(seed["layers"], seed["residual"], "blueprint")
                    gate = [layer_of(seed["gate"])] if seed["gate"] else []
                    blend = BLEND_KINDS[seed["blend"]](seed["alpha"], *gate)
                    self.add_module(seed["slot"], Slot(grown, blend))
        embeddings = [
            module.tokens for module in self.modules() if isinstance(module, TokenEmbedding)
        ]
        for module in self.modules():
            if isinstance(module, TiedHeadModule):
                module.embeddings = embeddings[:1]

    def preprocess(self, image: object) -> Tensor:
        """The input [1, C, H, W] of an image: the path of a file, a picture of Pillow or an array;
        see pictures.preprocess.
        """
        return preprocess(self.spec["input"], image)

    @torch.no_grad()
    def generate(self, prompt: str | Tensor, count: int, temperature: float = 1.0) -> str | Tensor:
        """`prompt` (text, where tokens are bytes, or int64 [B, t]) with `count` more tokens, each
        drawn by torch's generator from what the network says; the likeliest at a temperature of 0.
        ValueError for a network that does not take tokens, and for an empty prompt.
        """
        inputs = self.spec["input"]
        words = isinstance(prompt, str)
        if inputs.get("name") != "tokens" or (words and inputs["tokenizer"] != "bytes"):
            accepted = "tokens int64 [B, t]" if inputs.get("name") == "tokens" else "no tokens"
            raise ValueError(f"generate: this network takes {accepted}")
        if isinstance(prompt, str):
            device = next(self.parameters()).device
            tokens = torch.tensor([list(prompt.encode())], device=device)
        else:
            tokens = prompt
        if tokens.shape[-1] == 0:
            raise ValueError("generate: the prompt is empty")
        for _ in range(count):
            logits = self(tokens[:, -inputs["shape"][0] :])[:, -1]
            if temperature > 0:
                drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                drawn = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, drawn], dim=1)
        if not words:
            return tokens
        # a host may have more tokens than there are bytes
        return bytes(tokens[0].clamp(max=255).tolist()).decode(errors="replace")


def sequence(
    layers: list[dict], residual: bool = False, role: str = "", first: bool = False
) -> nn.Sequential:
    """Layers one after the other, by their names, or x + layers(x); `role` as in `layer_of`.

    first: they are given what the network is given.
    """
    by_user = any(":" in str(layer["kind"]) for layer in layers)
    module = CopyingModule() if by_user and (first or role == "blueprint") else nn.Sequential()
    if residual:
        module = ResidualModule()
        module.copies = by_user
    for layer in layers:
        module.add_module(layer["name"], layer_of(layer, role))
    return module


def layer_of(layer: dict, role: str = "") -> nn.Module:
    """The layer that a spec describes: one of LAYER_KINDS, or `module:name`, a user's part.

    role: which user parts may stand here: "blueprint", "host", or none where empty. Raises
    ValueError for a kind that may not stand here and for arguments that are not numbers.
    """
    kind = layer["kind"]
    arguments = dict(layer["arguments"])
    if role and isinstance(kind, str) and ":" in kind:
        return _user_layer(kind, role, arguments)
    if not isinstance(kind, str) or kind not in LAYER_KINDS:
        raise ValueError(f"a layer of the kind {kind}, which is none of {', '.join(LAYER_KINDS)}")
    return LAYER_KINDS[kind](**_numbers(kind, arguments))


def _numbers(kind: str, arguments: dict) -> dict:
    for name, value in arguments.items():
        if name == "device" or not isinstance(value, int | float):
            fault = f"{name}={value!r}, which is no number of a layer"
            raise ValueError(f"a layer of the kind {kind} with {fault}")
    return arguments


def _user_layer(kind: str, role: str, arguments: dict) -> nn.Module:
    """The module of a user's part `kind`: a seed for `channels`, a host `segment` for `classes`, or
    a layer of its arguments; ValueError for others.
    """
    layers = _marked(kind, LAYER_ROLE)
    if layers:
        return layers[0](**_numbers(kind, arguments))
    num_arguments = USER_ARGUMENTS[role]
    counts: list[int] = [value for value in map(arguments.get, num_arguments) if type(value) is int]
    if set(arguments) != set(num_arguments) or len(counts) < len(num_arguments) or min(counts) < 0:
        fault = f"it takes {' and '.join(num_arguments)}, whole numbers"
        raise ValueError(f"a part of the kind {kind} with {arguments}: {fault}")
    matches = _marked(kind, role)
    if len(matches) != 1:
        place, _, name = kind.partition(":")
        fault = f"{place} has {len(matches)} parts marked as the {role} {name}, not one"
        raise ValueError(f"a part that {kind} makes: {fault}")
    module = matches[0](counts[0])
    if len(counts) == 1:
        return module
    if not isinstance(module, nn.Sequential) or counts[1] >= len(module):
        raise ValueError(f"a part that {kind} makes: it has no segment {counts[1]}")
    return module[counts[1]]


def _marked(kind: str, role: str) -> list[Callable[..., nn.Module]]:
    """Parts that the decorator of this role has marked with the name of `kind`, `module:name`. A
    file may say anything, so nothing is imported or called; ValueError where the module is not
    imported.
    """
    place, _, name = kind.partition(":")
    if place not in sys.modules:
        remedy = f"import {place} first (esper-export: import={place})"
        raise ValueError(f"a part that {kind} makes: {remedy}")
    there = (part for part in vars(sys.modules[place]).values() if hasattr(part, "__dict__"))
    return list(
        {id(part): part for part in there if vars(part).get(ROLE_MARK + role) == name}.values()
    )


def network_of(spec: dict, tensors: Mapping[str, Tensor]) -> GrownNetwork:
    """The network of a `spec` in eval mode with `tensors` by name, which it takes over without a
    copy; RuntimeError where these do not fit, and the errors of GrownNetwork.
    """
    with torch.device("meta"):
        net = GrownNetwork(spec)
    net.load_state_dict(dict(tensors), assign=True)
    return net.eval()
