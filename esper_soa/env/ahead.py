"""The kernels of an env-step as libraries compiled ahead of time, called as the eager ones.

A library takes the tensors of its records in a fixed order and gives those of the results. Numbers
that may differ by env are among them, so that runs which differ in these share a library. Whoever
loads one compares it with the eager kernel on an empty state: only what is equal to the bit is
taken. runtime/step_cache.py keeps libraries, runtime/compile_step.py makes them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from tensordict import TensorClass
from torch import Tensor

from esper_soa.config.env import ENV_NUMBERS, REWARD_MODE
from esper_soa.env.env_settings import config_of_envs
from esper_soa.env.reward import settings_of_envs
from esper_soa.env.step import (
    EnvRules,
    StepKernels,
    Values,
    apply_action,
    initial_state,
    record_and_observe,
)
from esper_soa.state import (
    STATE_FLOAT,
    Action,
    EnvState,
    GradientStats,
    Measurements,
    same_bits,
    unchecked,
)
from esper_soa.system import streams
from esper_soa.vocabulary import HEAD_NAMES, Stage

Record: TypeAlias = Tensor | TensorClass | tuple["Record", ...]
Result = TypeVar("Result", bound=Record)
KERNELS: dict[str, Callable[..., Record]] = {
    "record_and_observe": record_and_observe,
    "apply_action": apply_action,
}


# Settings whose numbers libraries are given, of every env, whether they differ or not.
GIVEN_NUMBERS = tuple(
    name for name in ENV_NUMBERS if name.startswith(("reward.", "gates.", "lifecycle."))
)


def structure_of(rules: EnvRules) -> EnvRules:
    """The rules that libraries are compiled for: the same for all that differ in GIVEN_NUMBERS."""
    nothing = dict.fromkeys(GIVEN_NUMBERS, torch.ones(()))
    given = {*rules.kernel_settings, *GIVEN_NUMBERS}
    return rules._replace(
        reward=settings_of_envs(rules.reward, nothing),
        gates=config_of_envs(rules.gates, nothing),
        lifecycle=config_of_envs(rules.lifecycle, nothing),
        kernel_settings=tuple(sorted(given)),
    )


class Structure(NamedTuple):
    """Parts of a record, or of a tuple of records: how it is taken apart and put together.

    Both are done at every call of a library, so they look nothing up twice.
    """

    kind: type
    names: tuple[str, ...]  # of the fields of a record, in the order of state.py; () for a tuple
    parts: tuple["Structure | None", ...]  # of its fields, or of the tuple; None: a tensor
    flat: bool  # all of them are tensors
    dims: int  # of the batch of a record

    @classmethod
    def of(cls, record: TensorClass | tuple[Record, ...]) -> "Structure":
        """The structure of a record."""
        names = () if isinstance(record, tuple) else tuple(field.name for field in fields(record))
        dims = 0 if isinstance(record, tuple) else len(record.batch_size)
        parts = tuple(
            None if isinstance(part, Tensor) else cls.of(part) for part in _parts(names, record)
        )
        return cls(type(record), names, parts, flat=not any(parts), dims=dims)

    def leaves(self, record: Record) -> Iterable[Tensor]:
        """The tensors of a record of this structure."""
        values = _parts(self.names, record)  # type: ignore[arg-type]
        if self.flat:
            return values  # type: ignore[return-value]
        return chain.from_iterable(
            (value,) if part is None else part.leaves(value)  # type: ignore[misc]
            for part, value in zip(self.parts, values, strict=True)
        )

    def build(self, tensors: Iterator[Tensor]) -> Record:
        """A record of this structure, of the tensors that `leaves` gives, whatever N they have."""
        values = [next(tensors) if part is None else part.build(tensors) for part in self.parts]
        if self.names:
            size = values[0].shape[: self.dims]  # type: ignore[union-attr]
            return unchecked(self.kind, dict(zip(self.names, values, strict=True)), size)  # type: ignore[arg-type]
        return self.kind(*values) if hasattr(self.kind, "_fields") else tuple(values)


def _parts(names: tuple[str, ...], record: TensorClass | tuple[Record, ...]) -> Iterable[Record]:
    """The parts of a record of these fields, or of a tuple, in order."""
    return record if isinstance(record, tuple) else map(dict(record.items()).__getitem__, names)


def leaves(record: Record) -> list[Tensor]:
    """The tensors of a record, or of several, by the order of their fields in state.py."""
    return [record] if isinstance(record, Tensor) else [*Structure.of(record).leaves(record)]


def rebuild(like: Result, tensors: Iterator[Tensor]) -> Result:
    """A record as `like` of the tensors that `leaves` gives, whatever N they have."""
    if isinstance(like, Tensor):
        return next(tensors)  # type: ignore[return-value]
    return Structure.of(like).build(tensors)  # type: ignore[return-value]


def can_load() -> bool:
    """Whether this torch has the loader of libraries.

    Its one public name takes archives, which it unpacks into a temporary folder at every start.
    """
    return hasattr(torch._C, "_aoti") and hasattr(torch._C._aoti, "AOTIModelContainerRunnerCpu")


class LibraryError(Exception):
    """A library cannot be loaded, or computes other results than the eager kernel."""


class LibraryKernel:
    """A kernel of a library, for the rules it was compiled for and inputs as its first ones."""

    def __init__(self, path: Path, inputs: tuple[Record, ...], like: Record) -> None:
        """inputs, like: what the eager kernel takes and gives. RuntimeError where nothing loads."""
        self.runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
        self.like = like
        self.inputs = Structure.of(inputs)
        self.results = Structure.of(like)  # type: ignore[arg-type]
        self.layout = _layout(leaves(inputs))

    def __call__(self, rules: EnvRules, *inputs: Record) -> Record:
        """The results; LibraryError for other dtypes or shapes, which it would misread."""
        tensors = [*map(Tensor.contiguous, self.inputs.leaves(inputs))]
        if _layout(tensors) != self.layout:
            raise LibraryError("inputs of other dtypes or shapes than the kernels were loaded for")
        return self.results.build(iter(self.runner.run(tensors)))


def _layout(tensors: list[Tensor]) -> tuple[list[torch.dtype], list[torch.Size]]:
    return [*map(attrgetter("dtype"), tensors)], [*map(attrgetter("shape"), tensors)]


def load_kernels(folder: Path, rules: EnvRules, num_envs: int) -> StepKernels:
    """Kernels of the libraries in `folder`, which were compiled for `structure_of` these rules.

    LibraryError where they cannot be loaded or differ from the eager ones, by a bit.
    """
    rules = structure_of(rules)
    examples = example_inputs(rules, num_envs)
    try:
        kernels = []
        for (name, eager), inputs in zip(KERNELS.items(), examples, strict=True):
            kernel = LibraryKernel(folder / f"{name}.so", inputs, eager(rules, *inputs))
            if not same_bits(leaves(kernel(rules, *inputs)), leaves(kernel.like)):
                raise LibraryError(f"the libraries of {folder} do not compute what they should")
            kernels.append(kernel)
    except RuntimeError as error:
        raise LibraryError(f"the libraries of {folder} cannot be loaded: {error}") from error
    record, respond = kernels
    return StepKernels(record, respond, settings=rules.kernel_settings)  # type: ignore[arg-type]


def example_inputs(
    rules: EnvRules, num_envs: int
) -> tuple[tuple[EnvState, Measurements, Values], tuple[Record, ...]]:
    """Inputs of the two kernels in the first env-step, with every env waiting."""
    state = initial_state(rules, num_envs, rules.blueprints.device)
    measured = made_up(rules, state, 0)
    values = example_values(rules, num_envs)
    state_after, attribution, masks, _ = record_and_observe(rules, state, measured, values=values)
    wait = {name: torch.zeros_like(state.signals.step) for name in HEAD_NAMES}
    action = Action.from_dict(wait, batch_size=masks.batch_size)
    return (state, measured, values), (state_after, attribution, action, values)


def example_values(rules: EnvRules, num_envs: int) -> Values:
    """Values of settings that differ by env: another number in every env, the modes in turn."""
    envs = torch.arange(num_envs, dtype=STATE_FLOAT, device=rules.blueprints.device)
    numbers = {name: place / (1 + envs) for place, name in enumerate(rules.kernel_settings, 1)}
    if REWARD_MODE in numbers:
        numbers[REWARD_MODE] = envs % len(rules.reward.by_mode)
    return tuple(numbers.values())


def made_up(rules: EnvRules, state: EnvState, step: int) -> Measurements:
    """Random measurements of every subset of the seeds; a hundredth of losses is not finite."""
    slots = state.slots
    num_envs, num_slots = slots.stage.shape
    envs = torch.arange(num_envs)
    keys = streams.stream_keys(0, streams.POLICY_SAMPLE, (step,), envs=envs).unsqueeze(1)

    def draw(start: int, count: int) -> Tensor:
        return streams.uniform(keys, start + torch.arange(count), STATE_FLOAT)

    loss = 0.5 + draw(0, 1).squeeze(1)
    accuracy = 100 * draw(1, 2**num_slots)
    health = draw(1000, num_slots)
    settled = slots.stage == Stage.FOSSILIZED
    ablated = slots.running & (slots.alpha > 0)
    if rules.reward.config.drip_fraction == 0:
        ablated = ablated & ~settled
    full = torch.where(ablated, 1 << torch.arange(num_slots), 0).sum(1, keepdim=True)
    off = torch.arange(2**num_slots)
    return Measurements(
        train_loss=loss,
        train_accuracy=accuracy[:, 0],
        val_loss=torch.where(draw(500, 1).squeeze(1) < 0.01, torch.nan, loss),
        accuracy=accuracy,
        subset=torch.where((off & ~full) == 0, full & ~off, -1),
        ablated=ablated,
        gradients=GradientStats(
            l2=3 * draw(2000, num_slots),
            health=health,
            vanishing=health < 0.3,
            exploding=health < 0.1,
            ratio=2 * draw(3000, num_slots),
            measured=slots.running & ~settled,
            batch_size=ablated.shape,
        ),
        batch_size=[num_envs],
    )
