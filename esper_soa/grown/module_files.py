"""Files of modules: networks and policies in safetensors, with the description to make them from.

A file is one that every reader of safetensors takes. The package adds one entry to its metadata: a
version, and for each module its description (`spec`) and a SHA-256 of its tensors. Nothing in it is
run. One file may hold all hosts of a round.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import SupportsIndex
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from esper_soa.agent.controller import Controller, controller_of
from esper_soa.grown.build import GrownHost
from esper_soa.grown.plain import Module, current_module
from esper_soa.nets.model.modules import GrownNetwork, network_of
from esper_soa.system.errors import UserError, check, check_path, one_line, reading
from esper_soa.system.files import write_bytes
from esper_soa.system.torch_state import package_state

FIGURES = ("validation_accuracy", "validation_loss", "test_accuracy")  # of a spec, measured
BY_CLASS = "test_by_class"  # and this of networks of a user's images
VERSION = 1  # of the package's entry in a file
METADATA_ENTRY = "esper_soa"
MODULE_FIELDS = ("kind", "prefix", "spec", "sha256")
MAKERS: dict[str, Callable[[dict, Mapping[str, Tensor]], Module]] = {
    "network": network_of,
    "policy": controller_of,
}


class ModuleFileError(UserError):
    """A file of a module is missing, broken, or not one of ours."""


@package_state()
def save(module: nn.Module, path: str | PathLike[str]) -> None:
    """Replace the file `path` by the module, with its weights as they are now; all or nothing.

    What torch.compile, DataParallel or AveragedModel put around it is left out; pruned, normed and
    parametrised weights are written as numbers. Accuracies and loss that were measured with other
    weights become None in the file. Raises UserError for what is no network or policy, ValueError
    for hooks, and for layers that are not those of its `spec`, OSError where not written.
    """
    check_path("path", path)
    write_module(module, Path(path).resolve())


def write_module(module: nn.Module, path: Path) -> None:
    """`save` to a path without links."""
    plain = current_module(module)
    # each in memory of its own on the CPU
    tensors = {name: value.cpu().clone().contiguous() for name, value in plain.state_dict().items()}
    kind = "network" if isinstance(plain, GrownNetwork) else "policy"
    _write(path, [_entry(kind, current_spec(plain), tensors)], tensors)


def current_spec(module: Module) -> dict:
    """The `spec`, without figures that were measured with other weights."""
    if isinstance(module, Controller) or not module.measured:
        return module.spec
    known = digest(module.state_dict()) == module.measured
    figures = (*FIGURES, *{BY_CLASS} & module.spec.keys())
    return module.spec if known else module.spec | dict.fromkeys(figures)


def save_hosts(hosts: Sequence[GrownHost], path: Path) -> None:
    """Replace the file `path` by the hosts 0, 1, ... of a run; all or nothing. Raises OSError."""
    entries = []
    tensors = dict[str, Tensor]()
    for number, host in enumerate(hosts):
        prefix = f"{number}."
        entries.append(_entry("network", host.spec, host.tensors, prefix=prefix))
        tensors |= {prefix + name: value for name, value in host.tensors.items()}
    _write(path, entries, tensors)


@package_state()
def load(path: str | PathLike[str], env: int | None = None) -> Module:
    """The module that was saved to `path`, in eval mode on the CPU, the same to the bit.

    env: number of the host, in a file with all hosts of a round. Raises ModuleFileError for a file
    that is missing, cut off, damaged, foreign or of a newer version, or lacks this host.
    """
    check_path("path", path)
    allowed = "the number of a host, from 0"
    check(env is None or isinstance(env, SupportsIndex), "env", env, allowed=allowed)
    place = one_line(path)
    with reading(path, ModuleFileError, "a whole file of networks or of a policy"):
        if not Path(path).exists():
            raise ModuleFileError(f"{place}: there is no such file")
        if not Path(path).is_file() or is_zipfile(path):  # as a checkpoint is
            remedy = "esper_soa.open_run(FOLDER) has export() and policy() of a run"
            kind = "no file of a network or of a policy that esper_soa.save wrote"
            raise ModuleFileError(f"{place}: {kind}. {remedy}")
        with safe_open(Path(path), framework="pt") as file:
            entries = _entries(place, file.metadata())
            last = len(entries) - 1
            if env is None and last:
                which = f"say which by env=0 to {last}"
                raise ModuleFileError(f"{place}: holds {last + 1} hosts: {which}")
            if not 0 <= (env or 0) <= last:
                raise ModuleFileError(f"{place}: env={env}: must be 0 to {last}, the hosts in it")
            entry = entries[env or 0]
            prefix = str(entry["prefix"])
            names = [name for name in sorted(file.keys()) if name.startswith(prefix)]
            tensors = {name.removeprefix(prefix): file.get_tensor(name).clone() for name in names}
        if entry["sha256"] != digest(tensors):
            raise ModuleFileError(f"{place}: damaged (its content is not what was written)")
        json.dumps(entry["spec"], allow_nan=False)  # as it was written
        module = MAKERS[entry["kind"]](entry["spec"], tensors)
    if isinstance(module, GrownNetwork):
        module.measured = entry["sha256"]
    return module


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types and bytes, hexadecimal."""
    result = hashlib.sha256()
    for name in sorted(tensors):
        result.update(f"{name} {tensors[name].dtype}\n".encode())
        values = tensors[name].detach().cpu().reshape(-1)
        result.update(values.view(torch.uint8).numpy().data)
    return result.hexdigest()


def _entry(kind: str, spec: dict, tensors: Mapping[str, Tensor], prefix: str = "") -> dict:
    return {"kind": kind, "prefix": prefix, "spec": spec, "sha256": digest(tensors)}


def _write(path: Path, entries: list[dict], tensors: dict[str, Tensor]) -> None:
    entry = json.dumps({"version": VERSION, "modules": entries}, allow_nan=False)
    # a single entry: safetensors writes several in any order, and the same must be the same bytes
    write_bytes(path, to_bytes(tensors, {METADATA_ENTRY: entry}))


def _entries(place: str, metadata: Mapping[str, str] | None) -> list[dict]:
    """The entries of the modules in the metadata of a file."""
    if metadata is None or METADATA_ENTRY not in metadata:
        raise ModuleFileError(f"{place}: written by another program")
    record = json.loads(metadata[METADATA_ENTRY])
    if record["version"] > VERSION:
        age = f"has version {record['version']}, written by a newer version of the program"
        raise ModuleFileError(f"{place}: {age}: this one reads version {VERSION}")
    entries = [{name: entry[name] for name in MODULE_FIELDS} for entry in record["modules"]]
    unknown = [one_line(entry["kind"]) for entry in entries if entry["kind"] not in MAKERS]
    if unknown or not entries:
        kinds = unknown[0] if unknown else "nothing"
        raise ModuleFileError(f"{place}: holds {kinds}, no network or policy")
    return entries
