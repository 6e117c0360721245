"""The parts that hosts of users' own are made of, as data: a chain of segments, each given what the
one before gives.

`HostChain` is what nets/model/user_parts.py makes of a user's tuple, and nets/model/host.py of the
settings of the package's hosts.
"""

from dataclasses import dataclass
from typing import NamedTuple, get_args

from esper_soa.config.errors import one_line
from esper_soa.config.nets import IMAGE_SIZE, MAX_CHANNELS
from esper_soa.nets.model.blueprints import Architecture
from esper_soa.nets.model.parts import Part

PART_NAMES = ", ".join(kind.__name__ for kind in get_args(Part))


def are_parts(given: object) -> bool:
    """Whether it is a tuple of parts, of one at least."""
    return isinstance(given, tuple) and bool(given) and all(isinstance(one, Part) for one in given)


@dataclass(frozen=True)
class ConvBlock:
    """Same-padded convolution without bias, batch norm, ReLU, and a 2x2 max pool where `pool`.

    Raises ValueError for numbers that no block has.
    """

    channels: int  # that it gives
    kernel: int = 3  # pixels along a side, odd
    pool: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise ValueError(f"a block of {self.channels} channels: must be in [1, {MAX_CHANNELS}]")
        if not 1 <= self.kernel < IMAGE_SIZE or self.kernel % 2 == 0:
            told = f"must be odd and in [1, {IMAGE_SIZE - 1}]"
            raise ValueError(f"a block with a kernel of {self.kernel} pixels: {told}")


@dataclass(frozen=True)
class Residual:
    """x + parts(x), of the parts that seeds are made of; C of widths are the channels given.

    Raises ValueError where that is no such tuple, or gives other channels than it is given.
    """

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if not are_parts(self.parts):
            told = f"must be of a tuple of parts ({PART_NAMES})"
            raise ValueError(f"a residual segment of {one_line(self.parts)}: {told}")
        _ = self.architecture

    @property
    def architecture(self) -> Architecture:
        """The parts as those of a seed; refuses what none could have."""
        return Architecture(0, "of a residual segment", self.parts)


HostPart = ConvBlock | Residual


class HostChain(NamedTuple):
    """Segments in the order images meet them; last come a global mean and a linear classifier."""

    parts: tuple[HostPart, ...]

    def sides(self) -> list[int]:
        """Height and width in pixels before every segment, and behind the last."""
        found = [IMAGE_SIZE]
        for part in self.parts:
            found.append(found[-1] // 2 if isinstance(part, ConvBlock) and part.pool else found[-1])
        return found

    def fault(self) -> str:
        """What is wrong with the chain as a whole, in words; "" where nothing is."""
        if not self.parts or not isinstance(self.parts[0], ConvBlock):
            return "its first segment must be a ConvBlock: images have 3 channels"
        if len(self.parts) < 2:
            return "it has one segment: two or more make a chain"
        if 0 in self.sides():
            return f"its segment {self.sides().index(0) - 1} pools features of one pixel"
        return ""
