"""Steps of fixed shape on static buffers: captured once as a CUDA graph, then replayed.

A step is kept under a key that says everything about it that is not in its buffers; the next step
with that key is copied into the buffers of the step that is kept. Steps are those of an engine that
replays, and calls of pure functions.
"""

import logging
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from esper_soa.system.errors import error_text

# torch has no public name for the pytrees above (2.13); tensordict registers its classes with these
# and no others.
LOGGER = logging.getLogger("esper_soa")
WARM_UPS = 2  # steps before a capture: what is made at first use must be there by then
MOST_GRAPHS = 32  # graphs kept; each holds its own copy of the weights of its networks
CURRENT_GPU = torch.device("cuda")  # whichever is current
CAPTURE_MODE = "thread_local"  # what other threads ask of the driver breaks no capture
EMPTY_WARNING = "CUDA Graph is empty"  # in the words of torch's warning


class EmptyGraphError(RuntimeError):
    """A capture has seen no work: its replay would change nothing, and nobody would notice."""


@torch.no_grad()
def copy_all_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Every source into its target; those of one dtype are one launch for some dozens on a GPU.

    What has gaps, or another shape or dtype than its target, goes alone: it would part all others.
    """
    by_dtype = defaultdict[torch.dtype, list[tuple[Tensor, Tensor]]](list)
    for target, source in zip(targets, sources, strict=True):
        same = target.dtype == source.dtype and target.shape == source.shape
        if same and target.is_contiguous() and source.is_contiguous():
            by_dtype[target.dtype].append((target, source))
        else:
            target.copy_(source)
    for pairs in by_dtype.values():
        target, source = (
            TensorDict({str(place): tensor for place, tensor in enumerate(column)})
            for column in zip(*pairs, strict=True)
        )
        target.update_(source)


class StaticStep(Protocol):
    """A step with all inputs and results in its buffers; depends on nothing else but `variant`."""

    def buffers(self) -> list[Tensor]:
        """Everything that outlives the step, ordered and shaped by the key; memory of its own."""

    def step_(self, variant: int) -> None:
        """Change the buffers in place; no host sync, no allocation that depends on values."""


Step = TypeVar("Step", bound=StaticStep)
Result = TypeVar("Result")


@dataclass(eq=False)
class CachedStep(Generic[Step]):
    """A step, how often each variant has run, and the graphs of those that were captured."""

    step: Step
    runs: Counter[int] = field(default_factory=Counter)
    graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)


@dataclass(eq=False)
class CapturedCall:
    """A function of nested tensors or None, with arguments in its own memory, as a StaticStep."""

    function: Callable[..., object]
    arguments: list[Tensor | None]
    spec: TreeSpec
    result: object = None  # in a graph's memory once it is captured

    def buffers(self) -> list[Tensor]:
        return [argument for argument in self.arguments if argument is not None]

    def step_(self, variant: int) -> None:
        """The call; its results stay until the next."""
        self.result = self.function(*tree_unflatten(self.arguments, self.spec))


class GraphRecorder:
    """Captures work on one GPU, whichever is current, into graphs that share memory.

    Unlike torch.cuda.graph it leaves the cached memory of the allocator as it is: giving it all
    back before each of many captures would have the steps between them ask the driver for it again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()
            self.pool = torch.cuda.graph_pool_handle()

    def recorded(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """The graph of `work`, recorded, not done; EmptyGraphError where this GPU does nothing."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                graph.capture_begin(self.pool, CAPTURE_MODE)
                try:
                    work()
                finally:
                    graph.capture_end()
        for warning in caught:
            if EMPTY_WARNING in str(warning.message):
                raise EmptyGraphError(f"a graph captured on {self.device} is empty")
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
        return graph


class StepCache(Generic[Step]):
    """Steps by key, the one not used for longest dropped first; `counts` tells what was done.

    capture=False runs every step as it is, on any device: the same buffers, the same order, without
    graphs. device: the GPU whose work is captured.

    part: whose steps they are, where it goes on without captures, and says so, once one has failed:
    memory may be short, or the work one that no graph takes. Else what a capture raises is raised.
    """

    def __init__(self, capture: bool, device: torch.device = CURRENT_GPU, part: str = "") -> None:
        self.capture = capture
        self.device = device
        self.capacity = MOST_GRAPHS
        self.part = part
        self.counts: Counter[str] = Counter()  # plain, captured, replayed, dropped
        self._cached: OrderedDict[Hashable, CachedStep[Step]] = OrderedDict()
        self._recorder = GraphRecorder(device) if capture else None

    def run_(self, key: Hashable, fresh: Step, variants: Sequence[int]) -> Step:
        """Do `fresh` once for each of `variants`; the step that is returned has the results."""
        entry = self._cached.setdefault(key, CachedStep(fresh))
        self._cached.move_to_end(key)
        if entry.step is not fresh:
            copy_all_(entry.step.buffers(), fresh.buffers())
        for variant in variants:
            self.advance_(entry, variant)
        while len(self._cached) > self.capacity:
            self._cached.popitem(last=False)
            self.counts["dropped"] += 1
        return entry.step

    def empty(self) -> "StepCache[Step]":
        """A cache of the same kind that keeps no step yet."""
        return StepCache(self.capture, self.device, self.part)

    def is_cached(self, key: Hashable) -> bool:
        """Whether a step is kept under this key."""
        return key in self._cached

    def advance_(self, entry: CachedStep[Step], variant: int) -> None:
        done = "replayed"
        step = partial(entry.step.step_, variant)
        if self._recorder and variant not in entry.graphs and entry.runs[variant] >= WARM_UPS:
            done = "captured"
            try:  # what is recorded is not done
                entry.graphs[variant] = self._recorder.recorded(step)
            except Exception as error:  # noqa: BLE001 (whatever compilers or the driver raise)
                if not self.part:
                    raise
                reason = error_text(error)
                LOGGER.warning("graphs   %s: no longer captured, as %s", self.part, reason)
                self._recorder = None
        if variant in entry.graphs:
            entry.graphs[variant].replay()
        else:
            done = "plain"
            step()
            entry.runs[variant] += 1
        self.counts[done] += 1


def captured_call(
    steps: StepCache[CapturedCall], name: Hashable, function: Callable[..., Result], *inputs: object
) -> Result:
    """A copy of function(*inputs), which is done as a kept step.

    Inputs and results are nested tensors, or records of them. Everything that decides the
    function's work beside the shapes of its inputs has to be in `name`; tensors that it changes
    stay in place.
    """
    leaves, spec = tree_flatten(inputs)
    key = (name, *(None if leaf is None else leaf.shape for leaf in leaves))
    if not steps.is_cached(key):  # a step that is kept has inputs for itself
        leaves = [None if leaf is None else leaf.clone() for leaf in leaves]
    done = steps.run_(key, CapturedCall(function, leaves, spec), [0])
    flat, result = tree_flatten(done.result)
    copies = [torch.empty_like(tensor) for tensor in flat]
    copy_all_(copies, flat)
    return tree_unflatten(copies, result)  # type: ignore[no-any-return]


class Replay(NamedTuple):
    """The parts of a run that are kept as steps and replayed as CUDA graphs, and why, for logs."""

    parts: tuple[str, ...] = ()
    reason: str = "nobody asked for it"
    left_out: tuple[str, ...] = ()  # why a run goes on without the others, a clause each
    insists: bool = True  # a capture that fails during the run ends it

    def steps(self, part: str, device: torch.device) -> StepCache | None:
        """Where `part` keeps its steps; None: they run as they are written."""
        if part not in self.parts:
            return None
        return StepCache(capture=True, device=device, part="" if self.insists else part)

    def facts(self) -> dict[str, str]:
        """For versions.json."""
        facts = {"replayed": ", ".join(self.parts), "reason": self.reason}
        return facts | {"left_out": "; ".join(self.left_out)}
