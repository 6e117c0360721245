"""Operations of hosts as the native kernels know them, their rows, and traces of modules as such.

Places of parameters and statistics are columns of the rows that all engines share. Where a
convolution (or none), a batch norm, something that is added, an activation and a pool follow each
other, and nothing else takes what is between them, they are one operation. A linear layer is a
convolution of all pixels of what it takes. Views cost nothing: of each tensor is known where its
numbers stand in the result of an operation.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from esper_soa.nets.model.host import IMAGE_SHAPE
from esper_soa.nets.model.tracing import (
    BUFFER,
    PARAMETER,
    TRACED_BATCH,
    Trace,
    TracedCall,
    Value,
)

# kinds of layers, as in kernels.h; the last operation is the head
BLOCK, POOL, SEED, _, _, NORMED, _, _, WINDOW, PRODUCT, BESIDE, PIXELS, MIXED = range(13)
WEIGHED, PICK, LEAD, ATTEND = range(13, 17)
RECTIFY, IDENTITY = range(2)  # activations, as in activation.h
IMAGES = NONE = -1
GIVEN = -2  # what a seed is given, as the second that an operation takes
INTEGERS = (
    *("kind", "first", "second", "outputs", "height", "width", "kernel", "stride", "padding"),
    *("depthwise", "split", "begin", "by_channel", "by_pixel"),
    *("activation", "pooled", "together", "before", "after"),
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
MOVES = (  # give the numbers that they are given, or some of them, by another order of axes
    *("flatten", "unflatten", "view", "reshape", "squeeze", "unsqueeze", "transpose", "permute"),
    *("chunk", "split", "split_with_sizes", "unbind", "select", "slice", "expand"),
)
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
    def size(self) -> tuple[int, int]:
        """Pixels of lines and columns of what it gives."""
        part = 2 if self.numbers.get("pooled") else 1
        return self["height"] // part, self["width"] // part

    @property
    def pixels(self) -> int:
        return math.prod(self.size)

    def places(self) -> Tensor:
        """Where the numbers [2, C, H, W] of its result stand in [2, H, W, C]."""
        shape = (TRACED_BATCH, *self.size, self["outputs"])
        return torch.arange(math.prod(shape), device="cpu").view(shape).permute(0, 3, 1, 2)

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
        self.places = dict[Value, Tensor]()  # of its numbers, see Operation.places
        self.shown: Tensor | None = None  # those of what the last trace gave
        self.weights = dict[Value, Value]()  # the parameters that moved ones are
        self.starts = [0, 0]  # columns of the parameters and statistics of the segment
        self.used = set[int]()  # columns of the parameters that an operation has
        self.moved = set[int]()  # columns of the statistics that a norm has
        self.counter: Value | None = None  # of the batches that the next norm counts
        self.steps: dict[str, Callable[[TracedCall], Operation]] = {
            "conv2d": self._convolution,
            "linear": self._linear,
            "batch_norm": self._norm,
            "group_norm": self._group_norm,
            **dict.fromkeys(("add", "sub"), self._sum),
            **dict.fromkeys(("rsub", "neg"), self._constant),
            **dict.fromkeys(("mul", "div"), self._product),
            "scaled_dot_product_attention": self._attention,
            "cat": self._beside,
            "max_pool2d": self._largest,
            "avg_pool2d": self._average,
            "adaptive_avg_pool2d": self._mean,
            "mean": self._mean,
            "layer_norm": self._layer_norm,
            **dict.fromkeys(MOVES, self._moved),
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
        self.places = {traced.features: value.places() if self.shown is None else self.shown}
        for call in traced.calls:
            if counts(call) and self.counter is None:
                self.counter = call.values["self"]
            elif self._weight_of(call.values.get("self")) and call.name in MOVES:
                self._moved_weight(call)
            else:
                require(call.name in self.steps, call.place)
                self.values[call.result] = operation = self.steps[call.name](call)
                if call.result not in self.places:
                    shape = TRACED_BATCH, *call.result.shape
                    self.places[call.result] = operation.places().reshape(shape)
        used = sum(self.starts[0] <= column for column in self.used)
        takes_all = self.counter is None and used == traced.num_parameters
        require(takes_all and traced.result in self.values, "tensors that take part in nothing")
        is_image = len(traced.result.shape) == len(IMAGE_SHAPE)
        if is_image and self.values[traced.result].has("kind"):
            self._ordered(traced.result, "an order of channels that a module gives")
        self.shown = self.places[traced.result]
        return self.values[traced.result]

    def gives_images(self, value: Operation) -> bool:
        """Whether what the last trace gave, `value`, is channels of pixels."""
        return self.shown is None or (
            self.shown.dim() == 4 and torch.equal(self.shown, value.places())
        )

    def put_slot(self, value: Operation, slot: int) -> Operation:
        """The operation behind which the slot is, which nothing has read yet."""
        require(value.has("kind"), "a slot behind what does nothing")
        require(self.gives_images(value), "a slot behind features whose channels stand last")
        if value.num_reads or value.has("after"):
            value = self._append(value)
        value.numbers["after"] = slot
        return value

    def end(self, value: Operation) -> None:
        """Add the head: what gives the logits, with a linear layer and a mean before it."""
        require(value.pixels == 1 and not value.num_reads, "modules that give more than logits")
        numbers = dict[str, float]()
        before = value.first
        is_linear = self._takes(value) and value["kernel"] == 1 and not value["depthwise"]
        is_linear = is_linear and not value.second and not value.has("scale")
        if before and before.pixels == 1 and is_linear:
            self.operations.remove(value)
            numbers = {name: value[name] for name in ("weight", "shift") if value.has(name)}
            value = before
            source = before.first
            is_mean = before["kind"] == WINDOW and before["activation"] == IDENTITY
            alone = before.num_reads == 1 and not before.has("after")
            if source and is_mean and alone and source.pixels == before.numbers["eps"]:
                self.operations.remove(before)
                value = source
        self.add(value, numbers)

    def _append(self, first: Operation, **numbers: float) -> Operation:
        """An operation that gives as many numbers, but for those that are named."""
        height, width = first.size
        kept = {"outputs": first["outputs"], "height": height, "width": width}
        return self.add(first, PLAIN | kept | numbers)

    def _new(self, call: TracedCall, first: Operation, **numbers: float) -> Operation:
        """An operation that gives the result of a call, channels of pixels."""
        channels, height, width = (*call.result.shape, 1, 1)[:3]
        return self._append(first, outputs=channels, height=height, width=width, **numbers)

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
        value = call.values[name]
        if operation.has("kind"):
            operation = self._ordered(value, call.place)
        stands = torch.equal(self.places[value].flatten(1), operation.places().flatten(1))
        stands = stands and value.shape in (
            (operation["outputs"], *operation.size),
            (operation["outputs"],),
        )
        require(stands and (images or operation.has("kind")), call.place)
        return operation

    def _whole(self, call: TracedCall, name: str) -> Operation:
        """The operation that gives an argument, and no number beside it."""
        operation = self._given(call, name)
        require(operation.has("kind"), call.place)
        places = self.places[call.values[name]]
        met = torch.zeros(math.prod(operation.places().shape), dtype=torch.bool)
        met[places.flatten()] = True
        is_whole = places.numel() == met.numel() and bool(met.all())
        return operation if is_whole else self._ordered(call.values[name], call.place)

    def _same(self, call: TracedCall, name: str) -> Operation:
        """The same where the result of the call stands as it does."""
        operation = self._whole(call, name)
        self.places[call.result] = self.places[call.values[name]]
        return operation

    def _ordered(self, value: Value, place: str) -> Operation:
        """An operation that gives these numbers and no others, channels of pixels in order."""
        source = self.values[value]
        places = self.places[value]
        channels_last = places.dim() == 3
        pixels = places.transpose(1, 2).unsqueeze(2) if channels_last else places
        if pixels.dim() == 2:
            pixels = pixels[:, :, None, None]
        require(pixels.dim() == 4, place)
        if pixels.shape == source.places().shape and torch.equal(pixels, source.places()):
            return source
        among = source["outputs"]
        channels = pixels[0, :, 0, 0] % among
        begin = int(channels[0])
        pixel = int(pixels[0, 0, 0, 0]) // among
        (second,) = (channels[1:] == begin + 1).nonzero()[:1, 0].tolist() or [0]
        ways = 1 + second  # how many stand between neighbours
        apart = int(channels[1]) - begin if second else 0
        _, outputs, height, width = pixels.shape
        sizes = {"outputs": outputs, "height": height, "width": width}
        picked = {"begin": begin, "split": ways, "by_channel": apart, "by_pixel": pixel}
        operation = Operation(source, PLAIN | sizes | {"kind": PICK} | picked)
        numbers = operation.places()
        sample = numbers // (operation.pixels * outputs)
        at = numbers // outputs % operation.pixels + pixel + sample * source.pixels
        number = begin + numbers % outputs % ways * apart + numbers % outputs // ways
        require(torch.equal(pixels, at * among + number), place)
        source.num_reads += 1
        self.operations.append(operation)
        self.values[value] = operation
        self.places[value] = tokens_of(numbers) if channels_last else numbers.view(places.shape)
        return operation

    def _takes(self, operation: Operation, *more: int) -> bool:
        """Whether another step can follow within an operation, of a block or of `more` kinds."""
        free = operation.num_reads == 0 and operation["activation"] == IDENTITY
        known = operation["kind"] in (BLOCK, *more)
        return free and known and not operation["pooled"] and not operation.has("after")

    def _parameters(self, call: TracedCall, /, **fields: str) -> dict[str, float]:
        """The columns of parameters, by the fields of operations; nothing where there is none."""
        columns = dict[str, float]()
        for name, field in fields.items():
            if name in call.values:
                value = self._weight_of(call.values[name]) or call.values[name]
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
        is_whole = split == 1 or (inputs % WHOLE == 0 and outputs // split % WHOLE == 0)
        stride, padding, dilation = (
            _single(call.arguments[name]) for name in ("stride", "padding", "dilation")
        )
        if padding == "same" and kernel % 2:
            padding = kernel // 2
        padding = 0 if padding == "valid" else padding
        plain = kernel == width and isinstance(stride, int) and dilation == 1
        fits = isinstance(padding, int) and padding < kernel
        require(plain and fits, call.place)
        sizes = {"kernel": kernel, "stride": stride, "padding": padding}
        sizes |= {"split": split} if is_whole else {"begin": split}
        sizes |= self._parameters(call, weight="weight", bias="shift")
        return self._new(call, first, depthwise=depthwise, **cast(dict[str, int], sizes))

    def _linear(self, call: TracedCall) -> Operation:
        operation = self._given(call, "input")
        outputs = call.result.shape[-1]
        weights = self._parameters(call, weight="weight", bias="shift")
        places = self.places[call.values["input"]]
        height, width = operation.size
        if height * width > 1 and torch.equal(places, operation.places().flatten(1)):
            require(operation.has("kind") and height == width, call.place)
            sizes = {"outputs": outputs, "height": 1, "width": 1, "kernel": height}
            return self._append(operation, **sizes, **weights)
        operation = self._whole(call, "input")
        places = self.places[call.values["input"]]
        channels = operation["outputs"]
        pixels = pixels_of(places, channels)
        if pixels is not None:
            self.places[call.result] = pixels * outputs + torch.arange(outputs)
            return self._append(operation, outputs=outputs, kernel=1, **weights)
        first = places[..., :1]
        require(torch.equal(places, first + channels * torch.arange(operation.pixels)), call.place)
        sample = first // (channels * operation.pixels) * outputs
        self.places[call.result] = (sample + torch.arange(outputs)) * channels + first % channels
        side = math.isqrt(outputs)
        height, width = (side, side) if side**2 == outputs else (1, outputs)
        return self._append(operation, kind=MIXED, height=height, width=width, **weights)

    def _layer_norm(self, call: TracedCall) -> Operation:
        operation = self._same(call, "input")
        channels = operation["outputs"]
        stands = pixels_of(self.places[call.values["input"]], channels) is not None
        whole = stands and {"weight", "bias"} <= {*call.values}
        require(whole and call.arguments["normalized_shape"] == [channels], call.place)
        columns = self._parameters(call, weight="scale", bias="shift")
        eps = cast(float, call.arguments["eps"])
        return self._append(operation, kind=PIXELS, eps=eps, **columns)

    def _norm(self, call: TracedCall) -> Operation:
        operation = self._features(call, "input")
        names = {"running_mean": "mean", "running_var": "variance"}
        affine = {"weight", "bias", *names} <= {*call.values}
        require(affine and call.arguments["training"], call.place)
        alone = call.values["input"].num_uses == 1 and self._takes(operation)
        if not alone or operation.second is not None or operation.has("shift"):
            operation = self._append(operation)
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

    def _constant(self, call: TracedCall) -> Operation:
        """Numbers times a constant, plus a constant."""
        other, alpha = (cast(float, call.arguments.get(each, 1)) for each in ("other", "alpha"))
        require(not call.arguments.get("rounding_mode"), call.place)
        factors = {"mul": other, "div": 1 / (other or math.inf), "neg": -1, "rsub": -alpha}
        addends = {"add": alpha * other, "sub": -alpha * other, "rsub": other}
        numbers = {"eps": factors.get(call.name, 1), "momentum": addends.get(call.name, 0)}
        return self._append(self._same(call, "self"), kind=WEIGHED, **numbers)

    def _weighed(self, call: TracedCall, field: str) -> Operation | None:
        """Numbers times or plus parameters, of channels, of pixels or of both, where it is such."""
        names = [name for name in ("self", "other") if not self._weight_of(call.values[name])]
        if len(names) != 1:
            return None
        (weight,) = {"self", "other"} - {*names}
        operation = self._same(call, names[0])
        places = self.places[call.values[names[0]]]
        channels = operation["outputs"]
        pixels = operation.pixels
        taken = self._weight_places(call.values[weight]).broadcast_to(places.shape)
        table = torch.zeros(pixels, channels, dtype=torch.int64)
        table.view(-1)[places.flatten() % table.numel()] = taken.flatten()
        ways = {
            "by_channel": int(table[0, 1]) if channels > 1 else 0,
            "by_pixel": int(table[1, 0]) if pixels > 1 else 0,
        }
        lines = torch.arange(pixels)[:, None] * ways["by_pixel"]
        plain = torch.equal(table, lines + torch.arange(channels) * ways["by_channel"])
        met = (pixels if ways["by_pixel"] else 1) * (channels if ways["by_channel"] else 1)
        whole = met == math.prod(cast(Value, self._weight_of(call.values[weight])).shape)
        require(plain and whole and call.result.shape == call.values[names[0]].shape, call.place)
        column = self._parameters(call, **{weight: field})
        return self._append(operation, kind=WEIGHED, eps=1, **ways, **column)

    def _sum(self, call: TracedCall) -> Operation:
        if "other" not in call.values:
            return self._constant(call)
        require(call.name == "add" and call.arguments["alpha"] == 1, call.place)
        weighed = self._weighed(call, "shift")
        if weighed:
            return weighed
        left, right = (self._same(call, name) for name in ("self", "other"))
        both = (self.places[call.values[name]] for name in ("self", "other"))
        require(torch.equal(*both) and left.size == right.size, call.place)
        for name, term, added in (("self", left, right), ("other", right, left)):
            alone = call.values[name].num_uses == 1 and self._takes(term)
            if alone and term.second is None and term is not added:
                self.operations.remove(term)  # behind what is added
                self.operations.append(term)
                return self._paired(term, added)
        return self._paired(self._append(left), right)

    def _activation(self, call: TracedCall) -> Operation:
        name = "self" if "self" in call.values else "input"
        operation = self._same(call, name)
        bounds = [call.arguments.get(bound) for bound in ("min_val", "max_val")]
        kind = "relu6" if bounds == [0, 6] else call.name
        is_exact = call.arguments.get("approximate", "none") == "none"
        require(is_exact and kind in ACTIVATIONS, call.place)
        more = (SEED,) if kind == "relu" else ()
        if call.values[name].num_uses > 1 or not self._takes(operation, *more):
            operation = self._append(operation)
        operation.numbers["activation"] = ACTIVATIONS.index(kind)
        return operation

    def _window(self, call: TracedCall) -> dict[str, int]:
        """Sizes of a pool."""
        given = call.arguments
        each = given["kernel_size"], given["stride"] or given["kernel_size"], given["padding"]
        sizes = dict(zip(("kernel", "stride", "padding"), map(_single, each), strict=True))
        require(None not in sizes.values(), call.place)
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
        whole = all(side % 2 == 0 for side in operation.size)
        if halves and whole and free and block and rising:
            operation.numbers["pooled"] = 1
            return operation
        sizes |= {"kind": WINDOW, "depthwise": 1, "activation": RECTIFY}
        return self._new(call, operation, **sizes)

    def _average(self, call: TracedCall) -> Operation:
        sizes = self._window(call)
        plain = not sizes["padding"] or call.arguments["count_include_pad"]
        plain = plain and not call.arguments["ceil_mode"]
        require(plain and not call.arguments["divisor_override"], call.place)
        sizes |= {"kind": WINDOW, "depthwise": 1, "eps": sizes["kernel"] ** 2}
        return self._new(call, self._features(call, "self"), **sizes)

    def _mean(self, call: TracedCall) -> Operation:
        """The mean of all pixels."""
        operation = self._whole(call, "self")
        dims = cast(list[int], call.arguments.get("dim") or [])
        if call.name == "adaptive_avg_pool2d" and _single(call.arguments["output_size"]) == 1:
            dims = [2, 3]
        places = self._of_means(operation, self.places[call.values["self"]])
        require(dims, call.place)
        least = places.amin(dims, keepdim=True)
        largest = places.amax(dims, keepdim=True)
        of_all = places.numel() == least.numel() * operation.pixels
        require(of_all and torch.equal(least, largest), call.place)
        self.places[call.result] = least.reshape(TRACED_BATCH, *call.result.shape)
        sizes = {"kind": WINDOW, "depthwise": 1, "kernel": max(operation.size), "height": 1}
        return self._append(operation, **sizes, width=1, eps=operation.pixels)

    def _of_means(self, operation: Operation, places: Tensor) -> Tensor:
        """The places of the means over all pixels of these numbers."""
        channels = operation["outputs"]
        return places // (operation.pixels * channels) * channels + places % channels

    def _moved(self, call: TracedCall) -> Operation:
        source = call.values["self"]
        self.places[call.result] = call.moved(self.places[source])
        call.result.num_uses += source.num_uses - 1
        return self._given(call, "self")

    def _weight_of(self, value: Value | None) -> Value | None:
        """The parameter whose numbers these are."""
        if value is None or value.kind == PARAMETER:
            return value
        return self.weights.get(value)

    def _moved_weight(self, call: TracedCall) -> None:
        source = call.values["self"]
        self.places[call.result] = call.moved(self._weight_places(source))
        self.weights[call.result] = cast(Value, self._weight_of(source))

    def _weight_places(self, value: Value) -> Tensor:
        numbers = torch.arange(math.prod(value.shape), device="cpu").view(value.shape)
        return self.places.get(value, numbers)

    def _product(self, call: TracedCall) -> Operation:
        if "other" not in call.values:
            return self._constant(call)
        require(call.name == "mul", call.place)
        weighed = self._weighed(call, "scale")
        if weighed:
            return weighed
        names = sorted(("self", "other"), key=lambda name: -math.prod(call.values[name].shape))
        require(call.result.shape == call.values[names[0]].shape, call.place)
        term, factor = (self._whole(call, name) for name in names)
        places, others = (self.places[call.values[name]] for name in names)
        expected = self._of_means(term, places) if factor.pixels == 1 else places
        stands = torch.equal(expected, others.broadcast_to(places.shape))
        require(term["outputs"] == factor["outputs"] and stands, call.place)
        self.places[call.result] = places
        return self._paired(self._append(term, kind=PRODUCT), factor)

    def _beside(self, call: TracedCall) -> Operation:
        """Channels side by side; or parameters as tokens in front of others."""
        axis = cast(int, call.arguments["dim"])
        if self._weight_of(call.values["0"]):
            return self._led(call)
        whole, *rest = [self._whole(call, name) for name in call.values]
        places = [self.places[value].movedim(axis, -1) for value in call.values.values()]
        pixels = pixels_of(places[0], whole["outputs"])
        for part, others in zip(rest, places[1:], strict=True):
            order = pixels_of(others, part["outputs"])
            stands = pixels is not None and order is not None and torch.equal(order, pixels)
            require(stands and part.size == whole.size, call.place)
            whole = self._joined(whole, part)
        channels = whole["outputs"]
        numbers = cast(Tensor, pixels) * channels + torch.arange(channels)
        self.places[call.result] = numbers.movedim(-1, axis)
        return whole

    def _joined(self, first: Operation, second: Operation) -> Operation:
        channels = first["outputs"] + second["outputs"]
        return self._paired(self._append(first, outputs=channels, kind=BESIDE), second)

    def _led(self, call: TracedCall) -> Operation:
        """Parameters as tokens, and behind them the pixels of features."""
        require({*call.values} == {"0", "1"} and call.arguments["dim"] == 1, call.place)
        operation = self._whole(call, "1")
        first = self._weight_places(call.values["0"])[0].flatten()
        stands = torch.equal(self.places[call.values["1"]], tokens_of(operation.places()))
        require(stands and torch.equal(first, torch.arange(len(first))), call.place)
        column = self._parameters(call, **{"0": "weight"})
        led = self._append(operation, kind=LEAD, height=1, width=call.result.shape[0], **column)
        self.places[call.result] = tokens_of(led.places())
        return led

    def _attention(self, call: TracedCall) -> Operation:
        """Attention of heads of channels."""
        shape = call.result.shape
        others = call.arguments["is_causal"] or call.arguments["dropout_p"]
        plain = len(call.values) == 3 and {value.shape for value in call.values.values()} == {shape}
        require(plain and len(shape) == 3 and not others, call.place)
        channels = shape[0] * shape[2]
        whole, *rest = [self._given(call, name) for name in call.values]
        is_joint = all(part is whole for part in rest)
        joint = headed(shape, 3 * channels if is_joint else channels)
        for number, (name, value) in enumerate(call.values.items()):
            part = self._given(call, name)
            start = number * channels if is_joint else 0
            stands = torch.equal(self.places[value], joint + start)
            among = part["outputs"] == channels * (3 if is_joint else 1)
            require(stands and among and part.pixels == shape[1], call.place)
        for part in [] if is_joint else rest:
            whole = self._joined(whole, part)
        self.places[call.result] = headed(shape, channels)
        scale = cast(float, call.arguments["scale"] or shape[2] ** -0.5)
        return self._append(whole, outputs=channels, kind=ATTEND, split=shape[0], eps=scale)


def tokens_of(places: Tensor) -> Tensor:
    """Images [B, C, H, W] as tokens [B, H W, C]."""
    return places.flatten(2).transpose(1, 2)


def headed(shape: tuple[int, ...], channels: int) -> Tensor:
    """The places of heads [B, H, T, D], the first among so many channels of T pixels."""
    heads, pixels, each = shape
    numbers = torch.arange(TRACED_BATCH * pixels * channels).view(TRACED_BATCH, pixels, channels)
    return numbers[..., : heads * each].unflatten(2, (heads, each)).transpose(1, 2)


def pixels_of(places: Tensor, channels: int) -> Tensor | None:
    """The pixels [..., 1] whose channels the last axis is; None where it is something else."""
    pixels = places[..., :1] // channels
    stands = torch.equal(places, pixels * channels + torch.arange(channels))
    return pixels if stands else None


def _single(numbers: object) -> object:
    """The number that all of a list are; None where there is none."""
    first, *different = {*numbers} if isinstance(numbers, list | tuple) else {numbers}
    return None if different else first
