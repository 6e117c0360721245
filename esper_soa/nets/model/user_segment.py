"""Hosts of users that are an nn.Sequential: every child is a segment, the last one the head."""

import threading
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from esper_soa.config.nets import IMAGE_CHANNELS, IMAGE_SIZE
from esper_soa.config.registry import HOST, reference_to
from esper_soa.nets.model import segments, user_module
from esper_soa.nets.model.head import Classifier
from esper_soa.nets.model.parts import Arguments, LayerSpec, Parameter


@dataclass(frozen=True)
class UserSegment(segments.SlotBehind):
    """A child of a user's host."""

    host: "UserHost"
    number: int  # in the host
    name: str
    parameters: tuple[Parameter, ...]  # shapes; `initial_rows` says how they begin
    statistics: tuple[Parameter, ...]  # its buffers, whose numbers rows hold as weights'
    dtypes: tuple[torch.dtype, ...]  # of the buffers; floating-point numbers keep the rows' format
    input_shape: segments.FeatureShape
    output_shape: segments.FeatureShape
    products: int
    use: user_module.InputUse  # of features
    slot: int = -1

    kind = "user_module"
    borrowed = ()

    @property
    def slot_shapes(self) -> tuple[segments.FeatureShape, ...]:
        """A seed can stand behind a segment that gives features [C, H, H]."""
        square = len(self.output_shape) == 3 and self.output_shape[1] == self.output_shape[2]
        return (self.output_shape,) if square else ()

    def train(self, run: segments.Forward, values: segments.Values, x: Tensor) -> Tensor:
        # copies: a batch norm keeps its buffers for the backward pass, which must not see them move
        rows = zip(values.statistics, self.statistics, strict=True)
        buffers = [row.view(run.num_nets, *like.shape).clone() for row, like in rows]
        out, moved = self._call(run.num_nets, values.parameters, buffers, x=x, training=True)
        for target, buffer in zip(values.statistics, moved, strict=True):
            target.copy_(buffer.reshape(-1))
        return run.fill(self.slot, out)

    def fold(self, values: segments.Values) -> list[Tensor]:
        return values.parameters + values.statistics

    def infer(self, run: segments.Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        count = len(self.parameters)
        out, _ = self._call(run.num_nets, folded[:count], folded[count:], x=x, training=False)
        return run.fill(self.slot, out)

    def _call(
        self, num_nets: int, weights: list[Tensor], buffers: list[Tensor], x: Tensor, training: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        module = user_module.skeleton(
            self.host.make, self.host.classes, training, thread=threading.get_ident()
        )
        assert isinstance(module, nn.Sequential)
        rows = zip(buffers, self.dtypes, strict=True)
        typed = [row if dtype.is_floating_point else row.to(dtype) for row, dtype in rows]
        # Modules compute in the format of their weights, without autocast.
        floats = [tensor.dtype for tensor in (*weights, *typed) if tensor.is_floating_point()]
        features = x.to((*floats, x.dtype)[0]).unflatten(1, (-1, self.input_shape[0]))
        features = features.expand(-1, num_nets, *features.shape[2:]).transpose(0, 1)
        child = module[self.number]
        return user_module.call_networks(child, weights, typed, x=features, use=self.use)

    def plain_parts(self) -> list[segments.PlainPart]:
        """The module by the name of what makes the host."""
        arguments: Arguments = {"classes": self.host.classes, "segment": self.number}
        layer = LayerSpec("own", reference_to(HOST, self.host.make), arguments)
        return [segments.PlainPart(self.name, [layer], slot=self.slot, counts_batches=True)]


@dataclass(frozen=True)
class UserHead(UserSegment, Classifier):
    """The last child of a user's host, which gives the logits."""

    def train(self, run: segments.Forward, values: segments.Values, x: Tensor) -> Tensor:
        return super().train(run, values, x).unflatten(1, (-1, self.host.classes))

    def infer(self, run: segments.Forward, folded: list[Tensor], x: Tensor) -> Tensor:
        return super().infer(run, folded, x).unflatten(1, (-1, self.host.classes))


@dataclass(frozen=True)
class UserHost:
    """A host: modules one after the other, images [B, 3, 32, 32] to logits [B, classes]."""

    make: user_module.Factory  # of the number of classes
    classes: int
    inputs: segments.FeatureShape = (IMAGE_CHANNELS, IMAGE_SIZE, IMAGE_SIZE)  # of an image

    def segments(self, slots: segments.SlotNumbers) -> tuple[UserSegment, ...]:
        """The segments with their slots; the last is the head."""
        *body, last = children_of(self)
        slotted = (replace(part, slot=slots.get((0, part.number), -1)) for part in body)
        return *slotted, UserHead(**vars(last))

    def initial_rows(self, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return user_module.initial_rows(self.make, self.classes, keys, dtype=dtype)


@lru_cache(maxsize=256)
def children_of(host: UserHost) -> tuple[UserSegment, ...]:
    """The segments of the host without slots, in order; the last gives the logits."""
    module = user_module.make_module(host.make, host.classes, user_module.SKELETON_SEED)
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"{type(module).__name__} is no nn.Sequential")
    x = torch.zeros(1, *host.inputs)  # in eval mode, one image
    children = []
    for number, (name, child) in enumerate(module.eval().named_children()):
        out, products = user_module.count_products(child, x)
        segment = UserSegment(
            host,
            number,
            name,
            parameters=tuple(Parameter(tuple(tensor.shape)) for tensor in child.parameters()),
            statistics=tuple(Parameter(tuple(buffer.shape)) for buffer in child.buffers()),
            dtypes=tuple(buffer.dtype for buffer in child.buffers()),
            input_shape=tuple(x.shape[1:]),
            output_shape=tuple(out.shape[1:]),
            products=products,
            use=user_module.input_use(child, x),
        )
        children.append(segment)
        x = out
    return tuple(children)
