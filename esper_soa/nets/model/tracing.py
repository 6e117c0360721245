"""The operations that a user's module calls, in their order, with the tensors that they take."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

TRACED_BATCH = 2
TORCH_FOLDER = str(Path(torch.__file__).parent)
FRAME = re.compile(r'File "(.+)", line (\d+), in (\w+)')
FEATURES, PARAMETER, BUFFER = range(3)  # kinds of tensors
NONE = -1


@dataclass(eq=False)
class Value:
    """A tensor that operations take."""

    kind: int
    shape: tuple[int, ...]  # of features without the batch
    column: int = -1  # of a parameter or a buffer, among the numbers of its kind
    num_uses: int = 0  # operations that take it, and the module's return


class TracedCall(NamedTuple):
    """A call of an operation of torch.ops.aten."""

    name: str  # without the _ of one in place, but for those of buffers
    values: dict[str, Value]  # tensors by argument; those of a list by their place in it
    arguments: dict[str, object]  # all others
    result: Value
    place: str  # the operation and the user's line that calls it, in words
    function: Callable[..., Tensor | list[Tensor]]
    item: int = NONE  # of what the function returns

    def moved(self, numbers: Tensor) -> Tensor:
        """The result of the function for other numbers in place of "self"."""
        result = self.function(**{**self.arguments, "self": numbers})
        return result if isinstance(result, Tensor) else result[self.item]


class Trace(NamedTuple):
    """The calls by which a module makes its result of features."""

    features: Value
    calls: list[TracedCall]
    result: Value
    num_parameters: int


def trace(module: nn.Module, shape: tuple[int, ...], training: bool) -> Trace:
    """The trace of a call on features of this shape, in this mode, in which the module stays. What
    is changed in place is another value from there on. Raises what the call raises, and
    RuntimeError where numbers decide what is called.
    """
    tensors = [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())]
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]

    def call(values: Sequence[Tensor], features: Tensor) -> Tensor:
        output: Tensor = functional_call(module, dict(zip(names, values, strict=True)), (features,))
        return output

    module.train(training)
    x = torch.zeros(TRACED_BATCH, *shape)
    graph = make_fx(call, pre_dispatch=True, record_stack_traces=True)(tensors, x).graph
    columns = _columns(PARAMETER, module.parameters()) + _columns(BUFFER, module.buffers())
    return _read(graph, [*columns, Value(FEATURES, shape)])


def _columns(kind: int, tensors: Iterable[Tensor]) -> list[Value]:
    shapes = [tuple(tensor.shape) for tensor in tensors]
    starts = accumulate(map(math.prod, shapes), initial=0)
    return [Value(kind, shape, start) for shape, start in zip(shapes, starts, strict=False)]


def _read(graph: fx.Graph, inputs: list[Value]) -> Trace:
    calls = list[TracedCall]()
    *nodes, output = graph.nodes
    values = dict(zip(nodes, inputs, strict=False))
    for node in nodes[len(inputs) :]:
        if isinstance(node.meta["val"], list | tuple):
            continue  # its items are calls
        call = _call_of(node, values)
        calls.append(call)
        values[node] = call.result
        if _name_of(node).endswith("_"):
            values[node.args[0]] = call.result
    (returned,) = output.args
    result = values[returned[0] if isinstance(returned, list) else returned]
    result.num_uses += 1
    num_parameters = sum(value.kind == PARAMETER for value in inputs)
    return Trace(inputs[-1], calls, result, num_parameters=num_parameters)


def _call_of(node: fx.Node, values: dict[fx.Node, Value]) -> TracedCall:
    example = node.meta["val"]
    result = Value(FEATURES, tuple(example.shape[1:]) if isinstance(example, Tensor) else ())
    item = NONE
    if node.target is operator.getitem:
        node, item = cast(tuple[fx.Node, int], node.args)
    arguments = dict[str, object]()
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        arguments = {each.name: each.default_value for each in schema} | node.kwargs
        arguments |= {each.name: given for each, given in zip(schema, node.args, strict=False)}
    arguments |= {str(at): each for at, each in enumerate(cast(list, arguments.pop("tensors", [])))}
    taken = {name: values[node] for name, node in arguments.items() if isinstance(node, fx.Node)}
    for value in taken.values():
        value.num_uses += 1
    others = {name: value for name, value in arguments.items() if name not in taken}
    name = _name_of(node)
    if taken.get("self", result).kind != BUFFER:
        name = name.removesuffix("_")
    function = cast(Callable[..., Tensor], node.target)
    return TracedCall(
        name, taken, others, result=result, place=_place(node), function=function, item=item
    )


def _name_of(node: fx.Node) -> str:
    name = str(node.target)
    return name.split(".")[1] if name.startswith("aten.") else name


def _place(node: fx.Node) -> str:
    words = _name_of(node)
    for path, line, function in FRAME.findall(node.stack_trace or ""):
        if not path.startswith(TORCH_FOLDER):
            words = f"{_name_of(node)} in {function}, {'/'.join(Path(path).parts[-2:])}:{line}"
    return words
