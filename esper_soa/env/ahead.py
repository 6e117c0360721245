"""The kernels of an env-step as libraries compiled ahead of time, called as the eager ones.

A library takes the tensors of its records in a fixed order, and all numbers of the rules; it gives
those of the results. So its code follows from the structure of the rules alone, and serves all runs
of that structure. Whoever loads one compares it with the eager kernel on an empty state: only what
is equal to the bit is taken. runtime/step_cache.py keeps libraries, runtime/compile_step.py makes
them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch._inductor as inductor
from tensordict import TensorClass
from torch import Tensor

from esper_soa.config.env import ENV_NUMBERS, EPISODE_LENGTH, REWARD_MODE
from esper_soa.config.ranges import Settings
from esper_soa.env.env_settings import config_of_envs
from esper_soa.env.reward_records import RewardSettings
from esper_soa.env.step import (
    EnvRules,
    StepKernels,
    Values,
    apply_action,
    initial_state,
    record_and_observe,
    rules_given,
)
from esper_soa.state import (
    STATE_FLOAT,
    Action,
    Costs,
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
ENDING = ".pt2"  # of the archive of a library
# Inductor makes no vectors; it would have a compiler try out, at every start, which it could make.
NO_VECTORS = {"cpp.vec_isa_ok": False}
KERNELS: dict[str, Callable[..., Record]] = {
    "record_and_observe": record_and_observe,
    "apply_action": apply_action,
}

# Settings whose numbers libraries are given of every env, whether they differ or not.
GIVEN_BY_ENV = tuple(
    name for name in ENV_NUMBERS if name.startswith(("reward.", "gates.", "lifecycle."))
)
OPTIONAL = "reward.drip_fraction"  # 0: without drips, and their code
UNREAD = ("reward.mode", "reward.episode_end", "lifecycle.detached_stages", "governor.enabled")


def given_by_env(rules: EnvRules) -> EnvRules:
    """The rules whose kernels are given GIVEN_BY_ENV, and lengths where episodes end early."""
    length = (EPISODE_LENGTH,) * rules.early_stop.enabled
    given = {*rules.kernel_settings, *GIVEN_BY_ENV, *length}
    return rules._replace(kernel_settings=tuple(sorted(given)))


def _settings(rules: EnvRules) -> tuple[Settings, ...]:
    reward = rules.reward.config
    ends = (rules.early_stop,) * rules.early_stop.enabled
    return rules.lifecycle, rules.gates, rules.signals, rules.governor, reward, reward.loss, *ends


def plain_numbers(rules: EnvRules) -> tuple[dict[str, float], dict[str, int]]:
    """The numbers of settings that are the same for all envs, by name: floats, integers."""
    floats: dict[str, float] = {}
    counts: dict[str, int] = {}
    for part in _settings(rules):
        whole = {item.name for item in fields(part) if item.type is int}  # type: ignore[arg-type]
        for name, value in vars(part).items():
            dotted = part.path + name
            left_out = dotted in ENV_NUMBERS or (dotted == OPTIONAL and value == 0)
            if type(value) in (int, float) and not left_out:
                (counts if name in whole else floats)[dotted] = value
    return floats, counts


def numbers_of(rules: EnvRules) -> tuple[Tensor, ...]:
    """The tensors that libraries are given of the rules, see `with_numbers`."""
    floats, counts = plain_numbers(rules)
    limits = rules.max_steps, int(rules.max_seeds)
    costs = rules.reward.counts + rules.reward.flop
    prices = (torch.as_tensor(cost, dtype=STATE_FLOAT) for cost in costs)
    numbers = torch.tensor([*floats.values()], dtype=STATE_FLOAT)
    return numbers, torch.tensor([*counts.values(), *limits]), rules.blueprints, *prices


def with_numbers(rules: EnvRules, given: Iterable[Tensor]) -> EnvRules:
    """The rules with the tensors of `numbers_of` in place of all numbers and tables."""
    floats, counts, blueprints, *prices = given
    *whole, max_steps, max_seeds = counts.unbind()
    names = chain(*plain_numbers(rules))
    rules = rules_given(rules, dict(zip(names, (*floats.unbind(), *whole), strict=True)))
    costs = {"counts": Costs(*prices[:3]), "flop": Costs(*prices[3:])}  # type: ignore[arg-type]

    def priced(settings: RewardSettings) -> RewardSettings:
        parts = tuple(map(priced, settings.by_mode))
        return settings._replace(max_steps=max_steps, by_mode=parts, **costs)  # type: ignore[arg-type]

    return rules._replace(reward=priced(rules.reward), blueprints=blueprints, max_seeds=max_seeds)


def structure_of(rules: EnvRules) -> tuple[object, ...]:
    """All that the code of libraries follows from, in a text that is the same for the same code."""
    rules = given_by_env(rules)
    nothing = dict.fromkeys((*chain(*plain_numbers(rules)), *ENV_NUMBERS, *UNREAD))
    settings = [repr(config_of_envs(part, nothing)) for part in _settings(rules)]  # type: ignore[arg-type]
    modes = rules.reward.config.modes, len(rules.reward.by_mode)
    sizes = [(table.dtype, table.shape) for table in numbers_of(rules)]
    return settings, modes, rules.kernel_settings, rules.observed, sizes


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


class LibraryError(Exception):
    """A library cannot be loaded, or computes other results than the eager kernel."""


class LibraryKernel:
    """A kernel of a library, for the numbers of its rules and inputs as its first ones."""

    def __init__(
        self, path: Path, rules: EnvRules, inputs: tuple[Record, ...], like: Record
    ) -> None:
        """inputs, like: what the eager kernel takes and gives. RuntimeError where nothing loads."""
        self.numbers = numbers_of(rules)
        with inductor.config.patch(NO_VECTORS), TemporaryDirectory() as place:
            # The archive is unpacked there; a process that is killed would leave the files behind.
            given = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
            os.environ["TMPDIR"] = place
            try:
                # without its wrapper, which reads the structure of inputs anew at every call
                self.runner = inductor.aoti_load_package(str(path)).loader
            finally:
                del os.environ["TMPDIR"]
                os.environ.update(given)
        self.like = like
        self.inputs = Structure.of(inputs)
        self.results = Structure.of(like)  # type: ignore[arg-type]
        self.layout = _layout(leaves(inputs))

    def __call__(self, rules: EnvRules, *inputs: Record) -> Record:
        """The results; LibraryError for other dtypes or shapes, which it would misread."""
        tensors = [*map(Tensor.contiguous, self.inputs.leaves(inputs))]
        if _layout(tensors) != self.layout:
            raise LibraryError("inputs of other dtypes or shapes than the kernels were loaded for")
        return self.results.build(iter(self.runner.run([*tensors, *self.numbers])))


def _layout(tensors: list[Tensor]) -> tuple[list[torch.dtype], list[torch.Size]]:
    return [*map(attrgetter("dtype"), tensors)], [*map(attrgetter("shape"), tensors)]


def load_kernels(folder: Path, rules: EnvRules, num_envs: int) -> StepKernels:
    """Kernels of the libraries in `folder`, which were compiled for the structure of these rules.

    LibraryError where they cannot be loaded or differ from the eager ones, by a bit.
    """
    rules = given_by_env(rules)
    examples = example_inputs(rules, num_envs)
    try:
        kernels = []
        for (name, eager), inputs in zip(KERNELS.items(), examples, strict=True):
            path = folder / f"{name}{ENDING}"
            kernel = LibraryKernel(path, rules, inputs, like=eager(rules, *inputs))
            if not same_bits(leaves(kernel(rules, *inputs)), leaves(kernel.like)):
                raise LibraryError(f"the libraries of {folder} do not compute what they should")
            kernels.append(kernel)
    except RuntimeError as error:
        raise LibraryError(f"the libraries of {folder} cannot be loaded: {error}") from error
    record, respond = kernels
    return StepKernels(record, respond)  # type: ignore[arg-type]


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
