"""Records of the simulator: named tensors with the same leading axes, made once and never changed.

The base of every record in state.py and of those that the rewards and the rollout keep for themselves. An env-step
makes some hundred of them: with tensordict's TensorClass, which can do far more, that took longer than what was done to
the tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Self, dataclass_transform

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import register_pytree_node  # torch has no other name for it (2.11 to 2.13)


@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Fields:
    """Tells type checkers that what a class below it annotates is given to it by keyword, and stands."""


class TensorRecord(_Fields):
    """Tensors and records by name, all of which begin with the axes `batch_size`.

    A subclass lists its fields as annotations; they are given by keyword, all of them, together with batch_size.
    """

    names: ClassVar[tuple[str, ...]]  # of the fields, in order

    batch_size: Sequence[int]

    def __init_subclass__(cls) -> None:
        cls.names = tuple(cls.__annotations__)
        register_pytree_node(
            cls, lambda record: ([*map(record.get, cls.names)], (*record.batch_size,)),
            lambda values, lead: cls._made(dict(zip(cls.names, values, strict=True)), lead),
        )  # fmt: skip

    def __init__(
        self, *values: "Tensor | TensorRecord", batch_size: Sequence[int], **fields: "Tensor | TensorRecord"
    ) -> None:
        """Values go to the first fields. Raises TypeError for other names, ValueError for other leading axes."""
        fields |= zip(self.names, values, strict=False)
        if fields.keys() != {*self.names}:
            raise TypeError(f"{type(self).__name__} has {', '.join(self.names)}, not {', '.join(fields)}")
        lead = tuple(batch_size)
        for name, value in fields.items():
            if value.shape[: len(lead)] != lead:
                raise ValueError(f"{type(self).__name__}.{name} begins with {list(value.shape)}, not with {list(lead)}")
        self.__dict__.update(fields, batch_size=lead)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name} stands: replace makes another record")

    @classmethod
    def _made(cls, fields: "Mapping[str, object]", batch_size: tuple[int, ...]) -> Self:
        """The record of fields that are known to fit."""
        made = object.__new__(cls)
        made.__dict__.update(fields, batch_size=batch_size)
        return made

    @classmethod
    def from_dict(cls, fields: "Mapping[str, Tensor | TensorRecord]", batch_size: Sequence[int]) -> Self:
        """The record of these fields."""
        return cls(batch_size=batch_size, **fields)

    def replace(self, **fields: "Tensor | TensorRecord") -> Self:
        """The same but for these fields; raises TypeError for a name that is none."""
        made = object.__new__(type(self))
        values = made.__dict__
        values.update(self.__dict__)
        values.update(fields)
        if len(values) > len(self.names) + 1:
            raise TypeError(f"{type(self).__name__} has {', '.join(self.names)}, not all of {', '.join(fields)}")
        return made

    @property
    def shape(self) -> torch.Size:
        """The leading axes."""
        return torch.Size(self.batch_size)

    def get(self, name: str) -> Tensor:
        """The field of that name."""
        return self.__dict__[name]  # type: ignore[no-any-return]

    def items(self) -> "Iterator[tuple[str, Tensor]]":
        """Names and fields, in order."""
        return ((name, self.__dict__[name]) for name in self.names)

    def apply(self, function: Callable[..., Tensor], *others: Self) -> Self:
        """The record of what the function makes of every tensor and of those in its place in `others`.

        It has as many leading axes, though perhaps of other lengths.
        """
        fields = {}
        for name, value in self.items():
            beside = [other.get(name) for other in others]
            if isinstance(value, TensorRecord):
                fields[name] = value.apply(function, *beside)
            else:
                fields[name] = function(value, *beside)
        return self._made(fields, tuple(fields[self.names[0]].shape[: len(self.batch_size)]))

    def clone(self) -> Self:
        """A copy with tensors of its own."""
        return self.apply(torch.clone)

    def __getitem__(self, index: object) -> Self:
        """What an index into the leading axes leaves of every field."""
        fields = {name: value[index] for name, value in self.items()}  # type: ignore[index]
        old, new = self.get(self.names[0]), fields[self.names[0]]
        return self._made(fields, tuple(new.shape[: len(self.batch_size) + len(new.shape) - len(old.shape)]))

    def update_(self, other: Self) -> None:
        """Copy every tensor of `other` into the one here."""
        self.apply(Tensor.copy_, other)

    def to_tensordict(self) -> TensorDict:
        """A copy that tensordict's tools take."""
        fields = {
            name: value.to_tensordict() if isinstance(value, TensorRecord) else value.clone()
            for name, value in self.items()
        }
        return TensorDict(fields, batch_size=list(self.batch_size))
