"""What every seed module is, told once: a tuple of parts.

A seed maps features of C channels to features of the same shape. Everything else follows from its entry here: table of
parameters, initial values, counts (below), training FLOP (flops.py), the forward pass (nets/forward.py). Deliberate
difference from the reference: where a zero initialisation would give a seed zero gradients for ever (conv_small;
MULTIPLY with depthwise, conv_light or conv_heavy), the default initialisation stands.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_soa.nets.model.parameters import Table
from esper_soa.nets.model.parts import NARROW, REDUCED, ZEROS, Conv, Depthwise, Excite, Part, SoftNorm, Squeeze, Start
from esper_soa.vocabulary import BLUEPRINT_NAMES, NUM_BLUEPRINTS, Blueprint


@dataclass(frozen=True)
class Architecture:
    """One blueprint. Raises ValueError for parts that do not give as many channels as they are given."""

    code: int  # in the env state and the action; those of the reference are below NUM_BLUEPRINTS
    name: str
    parts: tuple[Part, ...]
    residual: bool = True  # a seed is x + parts(x), else parts(x)

    def __post_init__(self) -> None:
        for channels in (1, 24, 64):
            given = self.widths(channels)[-1]
            if given != channels:
                raise ValueError(
                    f"blueprint {self.name}: its parts turn {channels} channels into {given}; the last must give as "
                    "many as the first is given"
                )

    def widths(self, channels: int) -> list[int]:
        """Channels before every part, and behind the last, in a slot of C = `channels`."""
        found = [channels]
        for part in self.parts:
            found.append(part.outputs_of(found[-1], channels))
        return found

    def given(self, channels: int) -> list[tuple[Part, int]]:
        """Every part with the number of channels that it is given."""
        return list(zip(self.parts, self.widths(channels)[:-1], strict=True))

    @property
    def single_layer(self) -> Conv | None:
        """The one convolution with its norm that is all of the residual, where it is."""
        first = self.parts[0] if len(self.parts) == 1 and self.residual else None
        return first if isinstance(first, Conv) and first.norm else None


Blueprints = tuple[Architecture, ...]
BLUEPRINTS: Blueprints = (
    Architecture(Blueprint.NOOP, "noop", (), residual=False),
    Architecture(Blueprint.CONV_LIGHT, "conv_light", (Conv(),)),
    Architecture(
        Blueprint.ATTENTION,
        "attention",
        (Excite(Squeeze(REDUCED, hidden_bias=False, start=ZEROS, bias_start=Start(3.0, cleared=True))),),
        residual=False,
    ),
    Architecture(Blueprint.NORM, "norm", (SoftNorm(),), residual=False),
    Architecture(Blueprint.DEPTHWISE, "depthwise", (Depthwise(), Conv(kernel=1))),
    Architecture(
        Blueprint.BOTTLENECK,
        "bottleneck",
        (
            Conv(NARROW, kernel=1, norm=False),
            Conv(NARROW, norm=False),
            Conv(kernel=1, relu=False, start=ZEROS),
        ),
    ),
    Architecture(Blueprint.CONV_SMALL, "conv_small", (Conv(kernel=1),)),
    Architecture(Blueprint.CONV_HEAVY, "conv_heavy", (Conv(), Conv())),
)
GATE = Squeeze(NARROW)  # the network that GATE adds to a seed, with one output


def of_code(blueprints: Blueprints, code: int) -> Architecture:
    """The blueprint with this code; LookupError where there is none."""
    for one in blueprints:
        if one.code == code:
            return one
    raise LookupError(f"no blueprint has the code {code}: {', '.join(f'{one.code} {one.name}' for one in blueprints)}")


def check_codes(blueprints: Blueprints) -> None:
    """Raise ValueError unless every blueprint has a code of its own, from 0 on."""
    owners: dict[int, str] = {}
    for one in blueprints:
        if one.code < 0 or one.code in owners:
            raise ValueError(
                f"blueprint {one.name}: its code {one.code} must be 0 or more and its own; taken are "
                + ", ".join(f"{code} by {name}" for code, name in owners.items())
            )
        owners[one.code] = one.name


def num_codes(blueprints: Blueprints) -> int:
    """Rows of a table that is read by code: one per code of the reference and of `blueprints`."""
    return max(NUM_BLUEPRINTS, *(one.code + 1 for one in blueprints))


def seed_products(blueprint: Architecture, channels: int, pixels: int) -> int:
    """Multiplications of a seed's forward pass on features of one image with `pixels`."""
    return sum(part.products(inputs, channels, pixels) for part, inputs in blueprint.given(channels))


def seed_table(blueprint: Architecture, channels: int) -> Table:
    """Parameters of a seed in a slot of C = `channels`, part by part."""
    tables = [part.parameters(inputs, channels) for part, inputs in blueprint.given(channels)]
    return Table(tuple(parameter for table in tables for parameter in table))


def gate_table(channels: int) -> Table:
    """Parameters of the gate network that GATE adds."""
    return Table(GATE.parameters(channels, 1, channels))


def initial_seeds(blueprint: Architecture, channels: int, keys: Tensor, multiply: Tensor, dtype: torch.dtype) -> Tensor:
    """Fresh rows [m, parameters] of seeds from streams `keys` (int64 [m]); multiply: bool [m], blended by MULTIPLY."""
    table = seed_table(blueprint, channels)
    flags = [torch.full((size,), one.cleared) for one, size in zip(table.parameters, table.sizes, strict=True)]
    cleared = torch.cat(flags).to(keys.device)
    rows = table.initial(keys, dtype)
    return torch.where(multiply[:, None] & cleared, torch.zeros_like(rows), rows)


def parameter_counts(blueprints: Blueprints, channels: int) -> list[int]:
    """Trainable parameters by code; 0 for codes of no blueprint."""
    counts = [0] * num_codes(blueprints)
    for one in blueprints:
        counts[one.code] = seed_table(one, channels).total
    return counts


def blueprint_codes(names: list[str]) -> tuple[int, ...]:
    """Codes of blueprint names."""
    return tuple(BLUEPRINT_NAMES.index(name) for name in names)
