"""Every seed module as data: a tuple of parts.

A seed maps features of C channels to features of the same shape; everything else follows from its
entry here. Deliberate difference from the reference: where a zero initialisation would give a seed
zero gradients for ever (conv_small; MULTIPLY with depthwise, conv_light or conv_heavy), the default
initialisation stands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from esper_soa.config.nets import IMAGES, SEQUENCES, SlotSpec, blueprint_names
from esper_soa.nets.model import parts
from esper_soa.nets.model.parts import ZEROS, Conv, Excite, Part, SoftNorm, Squeeze, Table, Width
from esper_soa.nets.model.sequence_parts import CausalAttention, Dense, SoftLayerNorm
from esper_soa.nets.model.user_module import UserModule
from esper_soa.vocabulary import BLUEPRINT_NAMES, NUM_BLUEPRINTS, Blueprint


@dataclass(frozen=True)
class Architecture:
    """One blueprint; ValueError for parts that change the number of channels, or that cannot be
    together, as a user's nn.Module, which stands alone.
    """

    code: int  # in the env state and the action; those of the reference are below NUM_BLUEPRINTS
    name: str
    parts: tuple[Part, ...]
    residual: bool = True  # a seed is x + parts(x), else parts(x)

    def __post_init__(self) -> None:
        if len(self.parts) > 1 and any(isinstance(part, UserModule) for part in self.parts):
            raise ValueError(f"blueprint {self.name}: a module must be its only part")
        if len({part.topology for part in self.parts}) > 1:
            raise ValueError(f"blueprint {self.name}: its parts take different kinds of features")
        for channels in (1, 24, 64):
            last = self.widths(channels)[-1]
            if last != channels:
                raise ValueError(
                    f"blueprint {self.name}: its parts turn {channels} channels into {last}; the "
                    "last must give as many as the first takes"
                )

    def widths(self, channels: int) -> list[int]:
        """Channels before every part, and behind the last, in a slot of C = `channels`."""
        widths = [channels]
        for part in self.parts:
            widths.append(part.outputs_of(widths[-1], channels))
        return widths

    def part_inputs(self, channels: int) -> list[tuple[Part, int]]:
        """Every part with the number of channels of its input."""
        return list(zip(self.parts, self.widths(channels)[:-1], strict=True))

    @property
    def topology(self) -> str:
        """Kind of features that it takes (config/nets.py); "" where it takes all."""
        return self.parts[0].topology if self.parts else ""

    def fits(self, slot: SlotSpec) -> bool:
        """Whether it can stand in the slot."""
        return self.topology in ("", slot.topology)

    @property
    def module(self) -> UserModule | None:
        """The nn.Module that is all of it, where it is one."""
        first = self.parts[0] if self.parts else None
        return first if isinstance(first, UserModule) else None


Blueprints = tuple[Architecture, ...]
BEGINS_OPEN = parts.Start(3.0, cleared=True)
OPEN_SQUEEZE = Squeeze(parts.REDUCED, hidden_bias=False, start=ZEROS, bias_start=BEGINS_OPEN)
NARROWED_CONVS = (Conv(parts.NARROW, kernel=1, norm=False), Conv(parts.NARROW, norm=False))
WIDENED_CONV = Conv(kernel=1, relu=False, start=ZEROS)
PART_KINDS = (Conv, parts.Depthwise, SoftNorm, Excite, Dense, CausalAttention, SoftLayerNorm)
PART_NAMES = ", ".join(kind.__name__ for kind in PART_KINDS)
NOOP = Architecture(Blueprint.NOOP, "noop", (), residual=False)
BLUEPRINTS: Blueprints = (
    NOOP,
    Architecture(Blueprint.CONV_LIGHT, "conv_light", (Conv(),)),
    Architecture(Blueprint.ATTENTION, "attention", (Excite(OPEN_SQUEEZE),), residual=False),
    Architecture(Blueprint.NORM, "norm", (SoftNorm(),), residual=False),
    Architecture(Blueprint.DEPTHWISE, "depthwise", (parts.Depthwise(), Conv(kernel=1))),
    Architecture(Blueprint.BOTTLENECK, "bottleneck", (*NARROWED_CONVS, WIDENED_CONV)),
    Architecture(Blueprint.CONV_SMALL, "conv_small", (Conv(kernel=1),)),
    Architecture(Blueprint.CONV_HEAVY, "conv_heavy", (Conv(), Conv())),
)


def low_rank(rank: int) -> tuple[Dense, Dense]:
    """Two linear layers without bias by way of so few channels (Hu et al. 2021, LoRA)."""
    return Dense(Width(times=0, least=rank), bias=False), Dense(bias=False, start=ZEROS)


def perceptron(times: int) -> tuple[Dense, Dense]:
    """A hidden layer of so many times the channels."""
    return Dense(Width(times=times), gelu=True), Dense(start=ZEROS)


SEQUENCE_BLUEPRINTS: Blueprints = (
    NOOP,
    Architecture(Blueprint.ATTENTION, "attention", (CausalAttention(),)),
    Architecture(Blueprint.NORM, "norm", (SoftLayerNorm(),), residual=False),
    Architecture(Blueprint.LORA, "lora", low_rank(8)),
    Architecture(Blueprint.LORA_LARGE, "lora_large", low_rank(32)),
    Architecture(Blueprint.MLP_SMALL, "mlp_small", perceptron(2)),
    Architecture(Blueprint.MLP, "mlp", perceptron(4)),
    Architecture(Blueprint.FLEX_ATTENTION, "flex_attention", (CausalAttention(),)),
)
# The blueprints of the package for slots of a kind of features.
PACKAGED_BLUEPRINTS = {IMAGES: BLUEPRINTS, SEQUENCES: SEQUENCE_BLUEPRINTS}
GATE = Squeeze(parts.NARROW)  # the network that GATE adds to a seed, with one output


def num_codes(blueprints: Blueprints) -> int:
    """Rows of a table that is read by code: one per code of the reference and of `blueprints`."""
    return max(NUM_BLUEPRINTS, *(blueprint.code + 1 for blueprint in blueprints))


def counts_by_code(
    blueprints: Blueprints, slot: SlotSpec, count: Callable[[Architecture, int, int], int]
) -> list[int]:
    """count(blueprint, channels, positions) for the slot by code; 0 for codes that do not fit."""
    counts = {
        blueprint.code: count(blueprint, slot.channels, slot.positions)
        for blueprint in blueprints
        if blueprint.fits(slot)
    }
    return [counts.get(code, 0) for code in range(num_codes(blueprints))]


def seed_products(blueprint: Architecture, channels: int, positions: int) -> int:
    """Multiplications of a seed's forward pass on features of one sample with `positions`."""
    inputs_of = blueprint.part_inputs(channels)
    return sum(part.products(inputs, channels, positions) for part, inputs in inputs_of)


def seed_table(blueprint: Architecture, channels: int) -> Table:
    """Parameters of a seed in a slot of C = `channels`, part by part."""
    tables = [part.parameters(inputs, channels) for part, inputs in blueprint.part_inputs(channels)]
    return Table(tuple(parameter for table in tables for parameter in table))


def gate_table(channels: int) -> Table:
    """Parameters of the gate network that GATE adds."""
    return Table(GATE.parameters(channels, 1, channels))


def seed_layers(blueprint: Architecture, channels: int) -> list[parts.LayerSpec]:
    """The residual, or all, of a seed in a slot of C = `channels`: modules by kind and part."""
    return [
        layer._replace(name=f"{layer.name}{place}")
        for place, (part, inputs) in enumerate(blueprint.part_inputs(channels))
        for layer in part.layers(inputs, channels)
    ]


def initial_seeds(
    blueprint: Architecture, channels: int, keys: Tensor, multiply: Tensor, dtype: torch.dtype
) -> Tensor:
    """Fresh rows [m, parameters] from streams `keys` (int64 [m]); multiply: bool [m], the blend."""
    if blueprint.module is not None:
        return blueprint.module.initial_rows(channels, keys, dtype)
    table = seed_table(blueprint, channels)
    cleared = table.spread([parameter.cleared for parameter in table.parameters], keys.device)
    return table.initial(keys, dtype).masked_fill(multiply[:, None] & cleared, 0.0)


def parameter_counts(blueprints: Blueprints, slot: SlotSpec) -> list[int]:
    """Trainable parameters of a seed in the slot by code."""
    return counts_by_code(blueprints, slot, lambda part, size, _: seed_table(part, size).total)


def blueprint_codes(names: list[str]) -> tuple[int, ...]:
    """Codes of the blueprints that a setting lists, those of users among them."""
    return tuple(map(blueprint_names(names).index, names))


def names_by_code(blueprints: Blueprints) -> tuple[str, ...]:
    """Names of blueprints in records by code; those of the reference without a host keep theirs."""
    names = dict(enumerate(BLUEPRINT_NAMES))
    names |= {blueprint.code: blueprint.name for blueprint in blueprints}
    return tuple(names.get(code, f"blueprint {code}") for code in range(num_codes(blueprints)))


def seed_forward(blueprint: Architecture, parameters: list[Tensor], x: Tensor) -> Tensor:
    """Output of m seeds, shaped as x [B, m*C, ...]; `parameters` as unpacked by `seed_table`."""
    if blueprint.module is not None:
        return blueprint.module.forward(parameters, x)
    out = x
    rest = iter(parameters)
    for part in blueprint.parts:
        count = len(part.parameters(1, 1))  # the same in every slot
        out = part.forward(list(islice(rest, count)), out)
    return x + out if blueprint.residual else out
