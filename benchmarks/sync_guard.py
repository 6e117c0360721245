"""Finds what makes the host wait for the device, on a machine that has none.

Inside a SyncGuard every operation raises that would read a device tensor into Python, whose
result's size depends on tensor values, or that would copy Python numbers to the device; except in
the functions named as allowed, where it is logged. What is made without naming a device is on the
host, from where it may be moved without waiting. On a CPU such operations cost nothing, which is
why nothing else would notice them; functions that make use of that, and look at values on a CPU
alone, are told in ON_CPU_ALONE. What Triton's interpreter does is the work of a kernel, on the
device.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import esper_soa

PACKAGE = Path(esper_soa.__file__).parent
aten = torch.ops.aten
VALUE_NAMES = (
    "_local_scalar_dense nonzero masked_select equal is_nonzero bincount _unique _unique2 "
    "unique_dim unique_consecutive repeat_interleave allclose"
)
VALUE_DEPENDENT = tuple(getattr(aten, name) for name in VALUE_NAMES.split())
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
# Of state.py, nets/seeds/snapshot.py and agent/ppo.py.
ON_CPU_ALONE = ("known_false", "_copy_where_", "_ended", "minibatches")
INTERPRETER = str(Path("triton", "runtime", "interpreter.py"))
READ_NAMES = (
    "item tolist numpy cpu __array__ __bool__ __int__ __float__ __index__ __complex__ __repr__"
)
READS = tuple(getattr(Tensor, name) for name in READ_NAMES.split())
UPLOADS = (torch.tensor, torch.as_tensor, torch.asarray)
ITEMS = (Tensor.__getitem__, Tensor.__setitem__)
MADE = (torch.from_numpy, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange)
FACTORIES = (*UPLOADS, *MADE)


class HostSyncError(AssertionError):
    """The host would have to wait for the device here."""


class Sync(NamedTuple):
    """One logged operation."""

    function: str  # of esper_soa
    operation: str


class SyncGuard:
    """HostSyncError at every sync outside the functions in `allowed`; blocking uploads count."""

    moves = True  # whether a move counts whose source may be on the host or on the device

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self.allowed = frozenset(allowed)
        self.log: list[Sync] = []
        # Results of copies to the host: reading them waits for nothing.
        self._on_host: list[Tensor] = []
        self._modes: tuple[_Dispatch, _Functions] = (_Dispatch(self), _Functions(self))

    def __enter__(self) -> "SyncGuard":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *ending: object) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*ending)

    def report(self, operation: str) -> None:
        """An operation for which a device would be waited for has been met."""
        function = calling_function()
        if function.split(".")[-1] not in ON_CPU_ALONE and not in_kernel():
            self.note(function, operation)

    def note(self, function: str, operation: str) -> None:
        """Log the operation where it is allowed, raise HostSyncError elsewhere."""
        if self.allowed.isdisjoint(function.split(".")):
            raise HostSyncError(f"{operation} in {function}")
        self.log.append(Sync(function, operation))

    def is_on_host(self, tensor: object) -> bool:
        """The result of a copy to the host."""
        return any(tensor is known for known in self._on_host)

    def now_on_device(self, moved: object) -> None:
        """Forget what was on the host, and has been moved."""
        self._on_host = [known for known in self._on_host if known is not moved]

    def now_on_host(self, tensor: Tensor) -> None:
        """Remember the result of a copy to the host."""
        self._on_host.append(tensor)


def calling_function() -> str:
    """Qualified name of the innermost function of esper_soa (or of the test) now running."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) or path.name.startswith("test_"):
            return frame.f_code.co_qualname
        frame = frame.f_back
    return "?"


def in_kernel() -> bool:
    """Whether a kernel of Triton is being interpreted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(INTERPRETER):
            return True
        frame = frame.f_back
    return False


class _Dispatch(TorchDispatchMode):
    """Sees operators, also those that other operators and autograd call."""

    def __init__(self, guard: SyncGuard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        packet = func.overloadpacket
        by_mask = packet in INDEXING and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if (packet in VALUE_DEPENDENT or by_mask) and not self.guard.is_on_host(args[0]):
            self.guard.report(func.name() + (" with a mask" if by_mask else ""))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Sees calls from Python; a copy from CPU to CPU never reaches the operators."""

    def __init__(self, guard: SyncGuard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        kwargs = kwargs or {}
        on_host = bool(args) and self.guard.is_on_host(args[0])
        copies = _goes_to_host(func, args, kwargs)
        moves = self.guard.moves and _names_device(func, args, kwargs)
        reads = any(func is read for read in READS)
        if (copies or reads or moves) and not on_host:
            self.guard.report(f"Tensor.{func.__name__}")
        if moves and on_host and not copies and not kwargs.get("non_blocking"):
            self.guard.report("Tensor.to of what is on the host, which waits for the copy")
        if self._uploads(func, args, kwargs):
            self.guard.report(f"{func.__name__} of what is on the host, into what is on a device")
        result = func(*args, **kwargs)
        made = (
            func in FACTORIES
            and kwargs.get("device") is None
            and calling_function() != "staged"  # to be moved, of which a CPU makes no copy
            and not (args and isinstance(args[0], Tensor))
        )
        if (copies or made) and isinstance(result, Tensor):
            self.guard.now_on_host(result)
        elif moves and on_host:  # of which a CPU makes no copy
            self.guard.now_on_device(result)
        return result

    def _uploads(self, func: Callable[..., object], args: tuple, kwargs: dict) -> bool:
        """Whether the host waits until numbers, lists or a tensor of its own are on the device."""
        if func in UPLOADS:
            return kwargs.get("device") is not None and not isinstance(args[0], Tensor)
        if func in (Tensor.new_tensor, Tensor.new):
            return True
        if self.guard.is_on_host(args[0] if args else None):
            return func is Tensor.to and isinstance(args[-1], Tensor) and len(args) > 1
        if func is Tensor.copy_:
            waits = not (kwargs.get("non_blocking") or True in args[2:])
            return waits and self.guard.is_on_host(args[1])
        if func not in ITEMS:
            return False
        places = args[1] if isinstance(args[1], tuple) else (args[1],)
        tensors = [place for place in places if isinstance(place, Tensor) and place.ndim]
        on_host = any(map(self.guard.is_on_host, tensors))
        lists = any(isinstance(place, list | range | np.ndarray) for place in places)
        if lists or on_host or len(args) == 2:
            return lists or on_host
        if isinstance(args[2], Tensor):
            return self.guard.is_on_host(args[2])
        # torch fills slices with a number; one item, or places in a tensor, get a copy of it
        item = len(places) == args[0].ndim and all(isinstance(place, int) for place in places)
        return item or bool(tensors)


def _goes_to_host(func: Callable[..., object], args: tuple, kwargs: dict) -> bool:
    return func is Tensor.cpu or (func is Tensor.to and "cpu" in (*args[1:], kwargs.get("device")))


def _names_device(func: Callable[..., object], args: tuple, kwargs: dict) -> bool:
    """A move to a device given as an object: on a CPU none tells the host's from the tensors'."""
    return func is Tensor.to and any(
        isinstance(given, torch.device) for given in (*args[1:], kwargs.get("device"))
    )
