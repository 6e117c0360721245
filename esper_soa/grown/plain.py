"""Networks and policies as their `spec` alone makes them, of what users have wrapped or changed.

No file has hooks or what computes weights: the weights are taken as they are, hooks are refused.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.prune import BasePruningMethod

from esper_soa.agent.controller import Controller
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.system.errors import UserError

Module = GrownNetwork | Controller
# Classes of torch around a module that change nothing of what it computes, and its name in them.
WRAPPERS = dict.fromkeys(("DataParallel", "DistributedDataParallel", "AveragedModel"), "module")
WRAPPERS["OptimizedModule"] = "_orig_mod"  # of torch.compile
HOOKS = {  # by the names of torch's own records of them
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
PARAMETRIZATIONS = "parametrizations"  # the part in which torch keeps those of a layer
REMEDY = "keep it by torch.save"


def plain_module(module: nn.Module) -> Module:
    """The network or policy that `module` is, or is wrapped around; UserError where it is none."""
    plain = _unwrapped(module)[-1]
    if not isinstance(plain, GrownNetwork | Controller):
        kind = type(module).__name__
        raise UserError(f"a {kind} is no grown network, as run.export() returns them")
    return plain


def _unwrapped(module: nn.Module) -> list[nn.Module]:
    """`module` and what it is wrapped around, down to what is no wrapper."""
    kind = type(module)
    if kind.__name__ not in WRAPPERS or not kind.__module__.startswith("torch."):
        return [module]
    return [module, *_unwrapped(module.get_submodule(WRAPPERS[kind.__name__]))]


def current_module(module: nn.Module) -> Module:
    """The network or policy in `module` as its `spec` makes it, in eval mode, with the weights of
    now in the same memory; those that are pruned or parametrised are new numbers.

    UserError as of `plain_module`; ValueError for hooks and for layers that are not of the `spec`.
    """
    plain = plain_module(module)
    with torch.device("meta"):
        if isinstance(plain, GrownNetwork):
            made: Module = GrownNetwork(plain.spec)
            made.measured = plain.measured
        else:
            made = Controller(plain.spec | {"deterministic": plain.deterministic})
    for wrapper in _unwrapped(module)[:-1]:
        _check_hooks(type(wrapper).__name__, wrapper, nn.Module())
    parts = dict(made.named_modules())
    for name, part in plain.named_modules():
        _check_hooks(name or type(plain).__name__, part, parts.get(name, nn.Module()))
    expected = made.state_dict()
    tensors = plain.state_dict()
    with evaluating(plain), torch.no_grad():
        for name, value in _computed_weights(plain).items():
            owner, _, leaf = name.rpartition(".")
            sources = (f"{name}_", f"{owner}.{PARAMETRIZATIONS}.{leaf}.")
            if name in expected:
                tensors = {key: tensors[key] for key in tensors if not key.startswith(sources)}
                tensors[name] = value.detach()
    shapes = {name: value.shape for name, value in expected.items()}
    found = {name: value.shape for name, value in tensors.items() if type(value) is Tensor}
    changed = [*_differing(_layers(made), _layers(plain)), *_differing(shapes, found)]
    if changed:
        place = f"the layers of this network ({changed[0] or type(plain).__name__})"
        raise ValueError(f"{place} are not those of its spec: {REMEDY}")
    usable = {name: rows.clone() if rows.is_inference() else rows for name, rows in tensors.items()}
    made.load_state_dict(usable, assign=True)
    return made.eval()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """`module` is in eval mode in the context; behind it each of its parts is as it was."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _check_hooks(name: str, part: nn.Module, like: nn.Module) -> None:
    """Raise ValueError for hooks that a part has and `like` lacks, but for those that prune."""
    for record, kind in HOOKS.items():
        hooks = vars(part)[record].values()
        others = [hook for hook in hooks if not isinstance(hook, BasePruningMethod)]
        if len(others) > len(vars(like)[record]):
            raise ValueError(f"{name}: has a {kind}, which no file has: remove it, or {REMEDY}")


def _computed_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights that parametrizations and pruning compute, by name, in the module's mode."""
    weights = dict[str, Tensor]()
    for at, part in module.named_modules():
        if is_parametrized(part):
            names = [name for name, _ in part.get_submodule(PARAMETRIZATIONS).named_children()]
            weights |= {f"{at}.{name}": getattr(part, name) for name in names}
        for hook in vars(part)["_forward_pre_hooks"].values():
            if isinstance(hook, BasePruningMethod):
                weights[f"{at}.{hook._tensor_name}"] = hook.apply_mask(part)
    return weights


def _layers(module: nn.Module) -> dict[str, tuple]:
    """Class, arguments, numbers (of the package's and torch's), and whether it has a forward that
    is not of its class, by the name of each layer.
    """
    layers = dict[str, tuple]()
    for name, part in module.named_modules():
        kind = type_before_parametrizations(part)
        given = vars(part)
        known = kind.__module__.startswith(("torch.", "esper_soa."))
        names = [key for key in given if known and key != "training" and not key.startswith("_")]
        numbers = {key: given[key] for key in names if isinstance(given[key], int | float)}
        if PARAMETRIZATIONS not in name.split("."):
            layers[name] = kind.__name__, part.extra_repr(), numbers, "forward" in given
    return layers


def _differing(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]
