"""User parts: decorators that mark functions and classes, and the lookup of `module:name`.

The mark is an attribute of the part; there is no global registry: two runs of a process may take
parts from different modules, and a cell of a notebook may be run twice. Found while a run is built,
by nets/model/user_parts.py, nets/data/datasets.py, env/user_reward.py, agent/user_agents.py. Needs
no torch.
"""

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import TypeVar

from esper_soa.system.errors import SettingError, one_line

RAISES = "it raises"  # in a finding, before what a user's code raised
RAISED = (  # what a user's code may raise where it is called to be looked at
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)
BLUEPRINT = "blueprint"  # kinds of parts
HOST = "host"
LAYER = "layer"
DATASET = "dataset"
REWARD = "reward"
AGENT = "agent"
TORCH_STATE = "esper_soa.system.torch_state"
TOPOLOGY = "_esper_soa_topology"  # of a blueprint's features, see config/nets.py
MARK = "_esper_soa_"  # begins the attribute of a part that has its name, the kind ends it
NAME = r"[A-Za-z_][\w-]{0,59}"
REFERENCE = re.compile(rf"([A-Za-z_]\w*\.)*[A-Za-z_]\w*:{NAME}")
Part = Callable[..., object]
Marked = TypeVar("Marked", bound=Part)
Mark = Callable[[Marked], Marked]  # a decorator that gives back what it is given


def blueprint(name: str, topology: str = "images") -> Mark:
    """Marks a function or class as blueprint `name`, listed by `task.blueprints` as `module:name`.

    It is called without an argument and gives a tuple of parts or an Architecture, or it is called
    with the channels C of a slot and gives an nn.Module that maps features [B, C, H, W] to such
    features; with `topology` "sequences" features [B, C, T], with "vectors" [B, C]. Raises
    ValueError for a name of other signs than letters, digits, '_' and '-'.
    """
    return _make_decorator(BLUEPRINT, name, **{TOPOLOGY: topology})


def host(name: str) -> Mark:
    """Marks a function or class as the host `name`, which `task.host` takes as `module:name`.

    It is called without an argument and gives a tuple of segments, or a Host of nets/model/host.py
    for other samples than images; or it is called with the number of classes and gives an
    nn.Sequential that maps images [B, 3, 32, 32] to logits [B, classes].
    """
    return _make_decorator(HOST, name)


def layer(name: str) -> Mark:
    """Marks an nn.Module as the layer `name`, by which files of networks name it.

    It is called with the arguments of the LayerSpec of kind `module:name` that a part gives.
    """
    return _make_decorator(LAYER, name)


def dataset(name: str) -> Mark:
    """Marks a class as the data set `name`, which `data.name` takes as `module:name`.

    It is called with the DataConfig and gives a BatchSource on the CPU; `spec`, an attribute of
    the class, says what its samples are like before any is read.
    """
    return _make_decorator(DATASET, name)


def reward(name: str) -> Mark:
    """Marks a function as the reward `name`, which `reward.mode` takes as `module:name`.

    It is given RewardInputs and gives the reward [N] of an env-step, or terms [N] by name.
    """
    return _make_decorator(REWARD, name)


def agent(name: str) -> Mark:
    """Marks a function or class as agent `name`; `policy.name`, `control` take `module:name`.

    It is called without an argument, or with the AgentContext of a run, and gives an Agent.
    """
    return _make_decorator(AGENT, name)


def _make_decorator(kind: str, name: str, **attributes: str) -> Mark:
    if not isinstance(name, str):
        raise TypeError(f'@esper_soa.{kind} takes a name, as in @esper_soa.{kind}("mine")')
    if re.fullmatch(NAME, name) is None:
        reason = "its name must be of at most 60 letters, digits, '_' and '-'"
        raise ValueError(f"{kind} {name!r}: {reason}")

    def mark(part: Marked) -> Marked:
        for attribute, value in (attributes | {MARK + kind: name}).items():
            setattr(part, attribute, value)
        return part

    return mark


def is_reference(value: str) -> bool:
    """Whether a setting's value names a part of a user's own, as `module:name`."""
    return REFERENCE.fullmatch(value) is not None


def name_in(reference: str) -> str:
    """The name that `module:name` gives a part, as in records; a word of the package's as it is."""
    return reference.rpartition(":")[2]


def marked_name(kind: str, part: object) -> str | None:
    """The name that `part` itself, not a base class, is marked with as of this kind, or None."""
    return vars(part).get(MARK + kind) if hasattr(part, "__dict__") else None


def reference_to(kind: str, part: Part) -> str:
    """`module:name` of a part that is marked as of this kind; raises ValueError where it is not."""
    name = marked_name(kind, part)
    if name is None:
        raise ValueError(f"{part!r} is not marked by @esper_soa.{kind}, so no file can name it")
    return f"{part.__module__}:{name}"


def find(kind: str, reference: str, setting: str) -> Part:
    """The part that `reference` names; raises SettingError where there is no such module or part.

    What the module itself raises while it is imported is not caught.
    """
    place, _, name = reference.partition(":")
    state = importlib.import_module(TORCH_STATE)
    try:
        with state.package_state():  # again, whatever the module sets
            module = importlib.import_module(place)
    except ImportError as error:
        is_absent = f"{place}.".startswith(f"{error.name}.")
        remedy = "PYTHONPATH=<folder> says where it lies." if is_absent else ""
        remedy = "A module is named without .py." if place.endswith(".py") else remedy
        allowed = f"module:name of a module that can be imported ({one_line(error)})"
        raise SettingError(setting, reference, allowed, remedy=remedy) from error
    parts = {id(part): part for part in vars(module).values()}  # by whatever names it has there
    marked_parts = [(marked_name(kind, part), part) for part in parts.values()]
    named = [part for own_name, part in marked_parts if own_name == name]
    if not named:
        article = "an" if kind == AGENT else "a"
        available = ", ".join(sorted(own_name for own_name, _ in marked_parts if own_name))
        allowed = f"{article} {kind} that {place} registers ({available or 'none'})"
        remedy = f'@esper_soa.{kind}("{name}") above a function or class there registers it.'
        raise SettingError(setting, reference, allowed, remedy=remedy)
    if len(named) > 1:
        reason = f"{len(named)} of its functions and classes are the {kind} {name}."
        raise SettingError(setting, reference, f"registered once in {place}", remedy=reason)
    return named[0]


@contextmanager
def collect_faults(faults: list[str], what: str = RAISES) -> Iterator[None]:
    """Append to `faults` what the user's code raises within the context."""
    try:
        yield
    except RAISED as error:
        faults.append(f"{what} {type(error).__name__}: {one_line(error)}")


@contextmanager
def raise_faults(setting: str, reference: str, allowed: str) -> Iterator[list[str]]:
    """Raise SettingError after the context where its list has faults, or on a ValueError within."""
    faults: list[str] = []
    try:
        yield faults
    except ValueError as error:
        faults.append(one_line(error))
    if faults:
        raise SettingError(
            setting, reference, allowed, remedy="; ".join(dict.fromkeys(faults)) + "."
        )


def num_required(part: Part) -> int:
    """How many arguments the part must be called with."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = signature(part).parameters.values()
    return sum(part.kind in kinds and part.default is Parameter.empty for part in parameters)
