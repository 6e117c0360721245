"""Operations of hosts as the native kernels know them, their rows, and traces of modules as such.

Places of parameters and statistics are columns of the rows that all engines share. Where a
convolution (or none), a batch norm, something that is added, an activation and a pool follow each
other, and nothing else takes what is between them, they are one operation. A linear layer is a
convolution of all pixels of what it takes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from esper_soa.nets.model.tracing import BUFFER, PARAMETER, Trace, TracedCall, Value

# kinds of layers, as in kernels.h; the last operation is the head
BLOCK, POOL, SEED, _, _, NORMED, _, _, WINDOW, PRODUCT, BESIDE, PIXELS, MIXED = range(13)
RECTIFY, IDENTITY = range(2)  # activations, as in activation.h
IMAGES = NONE = -1
GIVEN = -2  # what a seed is given, as the second that an operation takes
INTEGERS = (
    *("kind", "first", "second", "outputs", "side", "kernel", "stride", "padding"),
    *("depthwise", "split", "activation", "pooled", "together", "before", "after"),
    *("weight", "scale", "shift", "mean", "variance", "count"),
)
OPERATION = np.dtype(
    [*((name, np.int64) for name in INTEGERS), ("eps", np.float64), ("momentum", np.float64)]
)  # operation of chain.h
MODULE = np.dtype([(name, np.int64) for name in ("begin", "end", "numel")])  # module_seed
PLAIN: dict[str, float] = {
    **dict.fromkeys(INTEGERS[INTEGERS.index("kernel") : INTEGERS.index("before")], 0),
    **{"kind": BLOCK, "stride": 1, "split": 1, "together": 1, "activation": IDENTITY},
}  # of an operation that does nothing
UNUSED = dict.fromkeys(INTEGERS[INTEGERS.index("before") :], NONE)
ACTIVATIONS = (  # in the order of activation.h
    *("relu", "", "silu", "sigmoid", "tanh", "gelu", "hardswish", "hardsigmoid", "relu6"),
)
RESHAPES = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten", "contiguous")
IMAGE = ("c", "h", "w")  # axes of features: channels, lines, columns; "hw": these in a row
WHOLE = 8  # channels of a vector, as in vec.h; groups of a convolution must be such
MOST_WINDOW = 15  # pixels along a side of a pool; a byte says which of them is the largest


class UnknownOperationError(ValueError):
    """The message says for what there are no kernels, and where it is."""


def require(fits: object, what: str) -> None:
    """Raise UnknownOperationError unless it fits."""
    if not fits:
        raise UnknownOperationError(what)


@dataclass(eq=False)
class Operation:
    """An operation of a host."""

    first: "Operation | None"  # whose result it takes; None: what is given is no operation
    numbers: dict[str, float]  # by the other fields of OPERATION
    second: "Operation | None" = None
    num_reads: int = 0

    @property
    def size(self) -> int:
        """Pixels along a side of what it gives."""
        return int(self.numbers["side"]) // (2 if self.numbers.get("pooled") else 1)

    def __getitem__(self, name: str) -> int:
        return int(self.numbers[name])

    def has(self, *names: str) -> bool:
        return any(name in self.numbers for name in names)


def table(operations: Sequence[Operation]) -> np.ndarray:
    """OPERATION [operations] in this order; what none of them gives is given to them.

    UnknownOperationError where an operation but the last gives what none takes.
    """
    require(all(each.num_reads for each in operations[:-1]), "operations that give to nothing")
    rows = np.zeros(len(operations), dtype=OPERATION)
    places: dict[Operation | None, int] = {each: at for at, each in enumerate(operations)}
    for row, operation in zip(rows, operations, strict=True):
        for name, value in (UNUSED | operation.numbers).items():
            row[name] = value
        row["first"] = places.get(operation.first, IMAGES)
        given = NONE if operation.second is None else GIVEN
        row["second"] = places.get(operation.second, given)
    return rows


def counts(call: TracedCall) -> bool:
    """Whether a batch norm counts its batches, in a number of its own."""
    return call.name == "add_" and call.values["self"].shape == () and call.arguments["other"] == 1


class Program:
    """The operations of traces as they are added."""

    def __init__(self) -> None:
        self.operations = list[Operation]()
        self.values = dict[Value, Operation]()
        self.axes = dict[Value, tuple[str, ...]]()  # behind the batch, "" where there is one number
        self.shown: tuple[str, ...] = IMAGE  # axes of what the last trace gave
        self.starts = [0, 0]  # columns of the parameters and statistics of the segment
        self.used = set[int]()  # columns of the parameters that an operation has
        self.moved = set[int]()  # columns of the statistics that a norm has
        self.counter: Value | None = None  # of the batches that the next norm counts
        self.steps: dict[str, Callable[[TracedCall], Operation]] = {
            "conv2d": self._convolution,
            "linear": self._linear,
            "batch_norm": self._norm,
            "group_norm": self._group_norm,
            "add": self._sum,
            "mul": self._product,
            "cat": self._beside,
            "max_pool2d": self._largest,
            "avg_pool2d": self._average,
            "adaptive_avg_pool2d": self._mean,
            "mean": self._mean,
            "layer_norm": self._layer_norm,
            **dict.fromkeys(("transpose", "permute"), self._permuted),
            **dict.fromkeys(RESHAPES, self._reshaped),
            **dict.fromkeys([*ACTIVATIONS, "hardtanh"], self._activation),
        }

    def add(self, first: Operation, numbers: dict[str, float]) -> Operation:
        """An operation on the result of another."""
        first.num_reads += 1
        self.operations.append(Operation(first, numbers))
        return self.operations[-1]

    def extend(self, traced: Trace, value: Operation) -> Operation:
        """The operation that the calls of a module make of the one that it is given."""
        self.values = {traced.features: value}
        self.axes = {traced.features: self.shown}
        for call in traced.calls:
            if counts(call) and self.counter is None:
                self.counter = call.values["self"]
            else:
                require(call.name in self.steps, call.place)
                self.values[call.result] = self.steps[call.name](call)
                several = call.result.shape[1:2] != (1,)
                shown = ("c", "h", "w") if several else ("c", "", "")
                self.axes.setdefault(call.result, shown[: len(call.result.shape)])
        used = sum(self.starts[0] <= column for column in self.used)
        takes_all = self.counter is None and used == traced.num_parameters
        require(takes_all and traced.result in self.values, "tensors that take part in nothing")
        self.shown = self.axes[traced.result]
        return self.values[traced.result]

    def put_slot(self, value: Operation, slot: int) -> Operation:
        """The operation behind which the slot is, which nothing has read yet."""
        require(value.has("kind"), "a slot behind what does nothing")
        require(self.shown[0] == "c", "a slot behind features whose channels stand last")
        if value.num_reads or value.has("after"):
            value = self._append(value, value["outputs"], value.size)
        value.numbers["after"] = slot
        return value

    def end(self, value: Operation) -> None:
        """Add the head: what gives the logits, with a linear layer and a mean before it."""
        require(value.size == 1 and not value.num_reads, "modules that give more than logits")
        numbers = dict[str, float]()
        before = value.first
        is_linear = self._takes(value) and value["kernel"] == 1 and not value["depthwise"]
        is_linear = is_linear and not value.second and not value.has("scale")
        if before and before.size == 1 and is_linear:
            self.operations.remove(value)
            numbers = {name: value[name] for name in ("weight", "shift") if value.has(name)}
            value = before
            source = before.first
            is_mean = before["kind"] == WINDOW and before["activation"] == IDENTITY
            alone = before.num_reads == 1 and not before.has("after")
            if source and is_mean and alone and source.size == before["kernel"]:
                self.operations.remove(before)
                value = source
        self.add(value, numbers)

    def _append(self, first: Operation, channels: int, side: int, **numbers: float) -> Operation:
        return self.add(first, PLAIN | {"outputs": channels, "side": side, **numbers})

    def _new(self, call: TracedCall, first: Operation, **numbers: float) -> Operation:
        """An operation that gives the result of a call."""
        channels, *axes = call.result.shape
        side, width = axes or (1, 1)
        require(side == width, call.place)
        return self._append(first, channels, side, **numbers)

    def _paired(self, operation: Operation, second: Operation) -> Operation:
        operation.second = second
        second.num_reads += 1
        return operation

    def _given(self, call: TracedCall, name: str) -> Operation:
        """The operation that gives an argument."""
        value = call.values.get(name)
        operation = None if value is None else self.values.get(value)
        if operation is None:
            raise UnknownOperationError(call.place)
        return operation

    def _features(self, call: TracedCall, name: str, images: bool = False) -> Operation:
        """The same of images, or vectors; the images of the data set where they may be."""
        operation = self._given(call, name)
        stands = self.axes[call.values[name]] in (IMAGE, ("c", "", ""), ("c",))
        require(stands and (images or operation.has("kind")), call.place)
        return operation

    def _same(self, call: TracedCall, name: str) -> Operation:
        """The same of whatever axes, which the result of the call has too."""
        operation = self._given(call, name)
        axes = self.axes.setdefault(call.result, self.axes[call.values[name]])
        require(operation.has("kind") and axes == self.axes[call.values[name]], call.place)
        return operation

    def _takes(self, operation: Operation, *more: int) -> bool:
        """Whether another step can follow within an operation, of a block or of `more` kinds."""
        free = operation.num_reads == 0 and operation["activation"] == IDENTITY
        known = operation["kind"] in (BLOCK, *more)
        return free and known and not operation["pooled"] and not operation.has("after")

    def _parameters(self, call: TracedCall, **fields: str) -> dict[str, float]:
        """The columns of parameters, by the fields of operations; nothing where there is none."""
        columns = dict[str, float]()
        for name, field in fields.items():
            if name in call.values:
                value = call.values[name]
                column = self.starts[0] + value.column
                is_new = value.kind == PARAMETER and column not in self.used
                require(is_new, f"a {name} that is no parameter of its own: {call.place}")
                self.used.add(column)
                columns[field] = column
        return columns

    def _convolution(self, call: TracedCall) -> Operation:
        outputs, inputs, kernel, width = call.values["weight"].shape
        first = self._features(call, "input", images=True)
        groups = cast(int, call.arguments["groups"])
        depthwise = groups == outputs and inputs == 1 and first.has("kind")
        split = 1 if depthwise else groups
        stride, padding, dilation = (
            _single(call.arguments[name]) for name in ("stride", "padding", "dilation")
        )
        if padding == "same" and kernel % 2:
            padding = kernel // 2
        padding = 0 if padding == "valid" else padding
        whole = split == 1 or (inputs % WHOLE == 0 and outputs // split % WHOLE == 0)
        plain = kernel == width and isinstance(stride, int) and dilation == 1
        fits = isinstance(padding, int) and padding < kernel
        require(whole and plain and fits, call.place)
        sizes = {"kernel": kernel, "stride": stride, "padding": padding, "split": split}
        sizes |= self._parameters(call, weight="weight", bias="shift")
        return self._new(call, first, depthwise=depthwise, **cast(dict[str, int], sizes))

    def _linear(self, call: TracedCall) -> Operation:
        operation = self._given(call, "input")
        axes = self.axes[call.values["input"]]
        outputs = call.result.shape[-1]
        weights = self._parameters(call, weight="weight", bias="shift")
        if axes == ("chw",) and operation.has("kind"):
            return self._append(operation, outputs, 1, kernel=operation.size, **weights)
        operation = self._same(call, "input")
        if axes[-1] == "c":
            return self._append(operation, outputs, operation.size, kernel=1, **weights)
        side = math.isqrt(outputs)
        require(axes[-1] == "hw" and side**2 == outputs, call.place)
        return self._append(operation, operation["outputs"], side, kind=MIXED, **weights)

    def _layer_norm(self, call: TracedCall) -> Operation:
        operation = self._same(call, "input")
        channels = operation["outputs"]
        whole = self.axes[call.result][-1] == "c" and {"weight", "bias"} <= {*call.values}
        require(whole and call.arguments["normalized_shape"] == [channels], call.place)
        columns = self._parameters(call, weight="scale", bias="shift")
        eps = cast(float, call.arguments["eps"])
        return self._append(operation, channels, operation.size, kind=PIXELS, eps=eps, **columns)

    def _norm(self, call: TracedCall) -> Operation:
        operation = self._features(call, "input")
        names = {"running_mean": "mean", "running_var": "variance"}
        affine = {"weight", "bias", *names} <= {*call.values}
        require(affine and call.arguments["training"], call.place)
        alone = call.values["input"].num_uses == 1 and self._takes(operation)
        if not alone or operation.second is not None or operation.has("shift"):
            operation = self._append(operation, operation["outputs"], operation.size)
        if self.counter is not None:
            operation.numbers["count"] = self.starts[1] + self.counter.column
            self.counter = None
        moved = {to: self.starts[1] + call.values[name].column for name, to in names.items()}
        are_free = {call.values[name].kind for name in names} == {BUFFER}
        are_free = are_free and not self.moved & {*moved.values()}
        require(are_free, f"statistics that two norms have: {call.place}")
        self.moved |= {*moved.values()}
        operation.numbers |= {
            **self._parameters(call, weight="scale", bias="shift"),
            **moved,
            **{name: cast(float, call.arguments[name]) for name in ("eps", "momentum")},
        }
        return operation

    def _group_norm(self, call: TracedCall) -> Operation:
        operation = self._features(call, "input")
        require({"weight", "bias"} <= {*call.values}, call.place)
        groups, eps = (cast(float, call.arguments[name]) for name in ("num_groups", "eps"))
        columns = {"split": groups, "eps": eps}
        columns |= self._parameters(call, weight="scale", bias="shift")
        alone = call.values["input"].num_uses == 1 and self._takes(operation)
        plain = operation["split"] == operation["stride"] == 1 and not operation["depthwise"]
        plain = plain and 2 * operation["padding"] + 1 == operation["kernel"]
        if not (alone and plain) or operation.second or operation.has("scale", "shift"):
            return self._new(call, operation, kind=NORMED, **columns)
        operation.numbers |= columns | {"kind": SEED}
        return operation

    def _sum(self, call: TracedCall) -> Operation:
        left, right = (self._same(call, name) for name in ("self", "other"))
        shapes = {value.shape for value in call.values.values()}
        require(call.arguments["alpha"] == 1 and len(shapes) == 1, call.place)
        for name, term, added in (("self", left, right), ("other", right, left)):
            alone = call.values[name].num_uses == 1 and self._takes(term)
            if alone and term.second is None and term is not added:
                self.operations.remove(term)  # behind what is added
                self.operations.append(term)
                return self._paired(term, added)
        return self._paired(self._append(left, left["outputs"], left.size), right)

    def _activation(self, call: TracedCall) -> Operation:
        name = "self" if "self" in call.values else "input"
        operation = self._same(call, name)
        bounds = [call.arguments.get(bound) for bound in ("min_val", "max_val")]
        kind = "relu6" if bounds == [0, 6] else call.name
        is_exact = call.arguments.get("approximate", "none") == "none"
        require(is_exact and kind in ACTIVATIONS, call.place)
        more = (SEED,) if kind == "relu" else ()
        if call.values[name].num_uses > 1 or not self._takes(operation, *more):
            operation = self._append(operation, operation["outputs"], operation.size)
        operation.numbers["activation"] = ACTIVATIONS.index(kind)
        return operation

    def _window(self, call: TracedCall) -> dict[str, int]:
        """Sizes of a pool."""
        given = call.arguments
        each = given["kernel_size"], given["stride"] or given["kernel_size"], given["padding"]
        sizes = dict(zip(("kernel", "stride", "padding"), map(_single, each), strict=True))
        require(None not in sizes.values() and not given["ceil_mode"], call.place)
        return cast(dict[str, int], sizes)

    def _largest(self, call: TracedCall) -> Operation:
        operation = self._features(call, "self")
        sizes = self._window(call)
        plain = sizes["kernel"] <= MOST_WINDOW and _single(call.arguments["dilation"]) == 1
        require(plain, call.place)
        free = call.values["self"].num_uses == 1 and operation.num_reads == 0
        free = free and not operation["pooled"] and not operation.has("after")
        block = operation["kind"] == BLOCK and operation["kernel"] > 0
        rising = operation["activation"] <= IDENTITY and operation.second is None
        halves = sizes == {"kernel": 2, "stride": 2, "padding": 0}
        if halves and operation.size % 2 == 0 and free and block and rising:
            operation.numbers["pooled"] = 1
            return operation
        sizes |= {"kind": WINDOW, "depthwise": 1, "activation": RECTIFY}
        return self._new(call, operation, **sizes)

    def _average(self, call: TracedCall) -> Operation:
        sizes = self._window(call)
        plain = not sizes["padding"] or call.arguments["count_include_pad"]
        require(plain and not call.arguments["divisor_override"], call.place)
        sizes |= {"kind": WINDOW, "depthwise": 1}
        return self._new(call, self._features(call, "self"), **sizes)

    def _mean(self, call: TracedCall) -> Operation:
        operation = self._given(call, "self")
        axes = ("", *self.axes[call.values["self"]])
        found = cast(list[int], call.arguments.get("dim") or [])
        gone = [place % len(axes) for place in found]
        if call.name == "adaptive_avg_pool2d" and _single(call.arguments["output_size"]) == 1:
            gone = [2, 3]
        over = sorted("".join(axes[place] for place in gone))
        pixels = ["h", "w"] if operation.size > 1 else []
        require(operation.has("kind") and gone and 0 not in gone and over == pixels, call.place)
        keeps = len(call.result.shape) + 1 == len(axes)
        kept = ["" if place in gone else axis for place, axis in enumerate(axes)]
        rest = [axis for place, axis in enumerate(kept) if keeps or place not in gone]
        self.axes[call.result] = tuple(rest[1:])
        sizes = {"kind": WINDOW, "depthwise": 1, "kernel": operation.size}
        return self._append(operation, operation["outputs"], 1, **sizes)

    def _reshaped(self, call: TracedCall) -> Operation:
        """The same numbers in the same order."""
        source = call.values["self"]
        operation = self._given(call, "self")
        sizes = {"c": operation["outputs"], "h": operation.size, "w": operation.size}
        rest = [letter for letter in "".join(self.axes[source]) if sizes[letter] > 1]
        axes = list[str]()
        for numel in call.result.shape:
            axes.append("")
            while rest and math.prod(sizes[letter] for letter in axes[-1]) < numel:
                axes[-1] += rest.pop(0)
            require(math.prod(sizes[letter] for letter in axes[-1]) == numel, call.place)
        require(not rest, call.place)
        return self._viewed(call, axes)

    def _permuted(self, call: TracedCall) -> Operation:
        """The same numbers in another order of their axes."""
        axes = ["", *self.axes[call.values["self"]]]
        order = cast(list[int], call.arguments.get("dims") or [*range(len(axes))])
        if call.name == "transpose":
            places = [cast(int, call.arguments[name]) for name in ("dim0", "dim1")]
            order[places[0]], order[places[1]] = order[places[1]], order[places[0]]
        require(order[0] == 0, call.place)
        return self._viewed(call, [axes[place] for place in order][1:])

    def _viewed(self, call: TracedCall, axes: Sequence[str]) -> Operation:
        self.axes[call.result] = tuple(axes)
        call.result.num_uses += call.values["self"].num_uses - 1
        return self._given(call, "self")

    def _product(self, call: TracedCall) -> Operation:
        both = [(self._features(call, name), call.values[name].shape) for name in ("self", "other")]
        (term, shape), (factor, size) = sorted(both, key=lambda pair: -math.prod(pair[1]))
        require(shape == call.result.shape and size in (shape, (shape[0], 1, 1)), call.place)
        return self._paired(self._new(call, term, kind=PRODUCT), factor)

    def _beside(self, call: TracedCall) -> Operation:
        whole, *rest = [self._features(call, name) for name in call.values]
        axes = len(call.result.shape) + 1
        require(cast(int, call.arguments["dim"]) % axes == 1, call.place)
        for part in rest:
            channels = whole["outputs"] + part["outputs"]
            both = self._append(whole, channels, part.size, kind=BESIDE)
            whole = self._paired(both, part)
        return whole


def _single(numbers: object) -> object:
    """The number that all of a list are; None where there is none."""
    first, *different = {*numbers} if isinstance(numbers, list | tuple) else {numbers}
    return None if different else first
