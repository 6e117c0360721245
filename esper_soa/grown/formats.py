"""Grown networks in other programs' formats: torch.export, ONNX, Python code that needs only torch.

Every file holds the description of the network too, and is replaced as a whole or not at all.
"""

import base64
import io
import json
import logging
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from pprint import pformat
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor, nn

from esper_soa.grown.module_files import current_spec, save
from esper_soa.grown.plain import current_module, evaluating, plain_module
from esper_soa.nets.model import modules, pictures
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.system.errors import UserError, check, check_path, reading
from esper_soa.system.files import write_bytes
from esper_soa.system.torch_state import package_state

INPUT_TYPES = {"float32": torch.float32, "int64": torch.int64}
MAX_INPUTS = 1 << 24  # numbers of a sample
EXPORTED = "one that this format can hold"  # what a network must be; that of a changed file is not
CODE_WIDTH = 116  # letters of a line
PACKAGE_IMPORT = "from esper_soa."
EXPORTER_LOGGER = "torch.onnx._internal.exporter._registration"
CODE_HEAD = '''"""A grown network with its weights; needs torch alone.

`network()` makes it: inputs [B, *SPEC["input"]["shape"]], images float32 and RGB in [0, 1], to
logits [B, ..., SPEC["classes"]]; `network().preprocess(image)` makes such an input of a file or an
array. SPEC says what it was grown on and by which version of esper_soa.
"""

import base64
import io
from math import inf, nan
'''
CODE_TAIL = '''

def network() -> GrownNetwork:
    """The network in eval mode."""
    content = io.BytesIO(base64.b64decode(WEIGHTS))
    return network_of(SPEC, torch.load(content, weights_only=True))


if __name__ == "__main__":
    print(network())
'''


def save_pt2(net: GrownNetwork, path: Path) -> None:
    """Write a program of torch.export for any number of samples; spec.json is an extra file."""
    content = io.BytesIO()
    with reading("the network", UserError, EXPORTED):
        spec = json.dumps(current_spec(net))
        torch.export.save(_traced(net), content, extra_files={"spec.json": spec})
    write_bytes(path.resolve(), content.getvalue())


def save_onnx(net: GrownNetwork, path: Path) -> None:
    """Write a model of ONNX from any number of samples to `logits`, with `spec` as metadata."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"format=onnx: needs {' and '.join(missing)}. Install esper-soa[onnx]")
    with reading("the network", UserError, EXPORTED), _quiet_exporter():
        program = torch.onnx.export(
            _traced(net),
            dynamo=True,
            verbose=False,
            input_names=[net.spec["input"].get("name", "images")],
            output_names=["logits"],
        )
        model = program.model_proto  # type: ignore[union-attr]
        model.metadata_props.add(key="spec", value=json.dumps(current_spec(net)))
        content = model.SerializeToString()
    write_bytes(path.resolve(), content)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Suppress warnings of torch's exporter that no user can act on."""
    logger = logging.getLogger(EXPORTER_LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            about = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
            warnings.filterwarnings("ignore", about, FutureWarning)
            yield
    finally:
        logger.setLevel(before)


def save_code(net: GrownNetwork, path: Path) -> None:
    """Write a Python file that makes the network from its own text."""
    state = {name: value.cpu() for name, value in net.state_dict().items()}
    content = io.BytesIO()
    torch.save(state, content)
    source = "".join(map(_source, (pictures, modules)))
    with reading("the network", UserError, EXPORTED):
        spec = pformat(current_spec(net), width=CODE_WIDTH, sort_dicts=False)
    lines = [
        CODE_HEAD + source,
        f"SPEC = {spec}",
        'WEIGHTS = """',
        *textwrap.wrap(base64.b64encode(content.getvalue()).decode(), CODE_WIDTH),
        '"""',
    ]
    text = "\n".join(lines) + CODE_TAIL
    names: dict = {"__name__": path.stem}
    with reading("the network", UserError, EXPORTED):
        exec(compile(text, path.name, "exec"), names)
        check_same(net, names["network"]())
    write_bytes(path.resolve(), text.encode())


def _source(module: ModuleType) -> str:
    """The text of a module behind its docstring, without what it imports from the package."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8").split('"""\n', 1)[1]
    return "".join(line for line in text.splitlines(True) if not line.startswith(PACKAGE_IMPORT))


def _traced(net: GrownNetwork) -> torch.export.ExportedProgram:
    """The network as a program for any number of samples; UserError where it computes otherwise."""
    # two samples, as a single one would become a constant
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(net, (_samples(net, 2),), dynamic_shapes=(batch,))
    check_same(net, program.module())
    return program


def check_same(net: GrownNetwork, program: nn.Module) -> None:
    """UserError where `program` has other logits of a few samples than `net` in eval mode."""
    with reading("the network", UserError, EXPORTED), evaluating(net), torch.no_grad():
        samples = _samples(net, 3)
        logits = program.to(samples.device)(samples)
        same = torch.allclose(logits, net(samples), rtol=1e-3, atol=1e-4, equal_nan=True)
    if not same:
        raise UserError("the network: as a program it computes other logits")


def _samples(net: GrownNetwork, count: int) -> Tensor:
    """Inputs of the network, always the same, on its device and in its precision; UserError where
    it takes none such, as that of a changed file.
    """
    inputs = net.spec["input"]
    shape = inputs["shape"]
    dtype = inputs.get("dtype", "float32")
    known = isinstance(shape, list) and all(type(side) is int and side > 0 for side in shape)
    check(known and math.prod(shape) <= MAX_INPUTS, "input.shape", shape, allowed="a small shape")
    check(str(dtype) in INPUT_TYPES, "input.dtype", dtype, allowed=" or ".join(INPUT_TYPES))
    draws = torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))
    weights = next(net.parameters(), draws)
    samples = draws.to(weights) if dtype == "float32" else (2 * draws).long().to(weights.device)
    with reading("the network", UserError, f"of layers that take {shape}"), torch.no_grad():
        net(samples)
    return samples


Writer: TypeAlias = Callable[[GrownNetwork, Path], None]
FORMATS: dict[str, tuple[str, Writer]] = {  # file name ending and writer
    "safetensors": (".safetensors", save),
    "pt2": (".pt2", save_pt2),
    "onnx": (".onnx", save_onnx),
    "code": (".py", save_code),
}


@package_state()
def export(net: nn.Module, target: str | PathLike[str], to: str | PathLike[str] = ".") -> Path:
    """Write `net` as esper-export does; returns the path of the file.

    target: a file whose ending names the format (.safetensors, .pt2, .onnx, .py); or the format
    (safetensors, pt2, onnx, code), whose file is `to`/host_<env of net.spec><ending>. The folder is
    made where it is new. Raises UserError for another format, for what is no grown network, and for
    one that computes otherwise there; ValueError as `save`; OSError where it cannot be written.
    """
    given = plain_module(net)
    plain = current_module(net)
    if not isinstance(given, GrownNetwork) or not isinstance(plain, GrownNetwork):
        raise UserError(f"a {type(net).__name__} is no grown network, as run.export() returns them")
    check_same(given, plain)
    check_path("target", target)
    check_path("to", to)
    name = str(target)
    path = Path(target)
    if name in FORMATS:
        env = plain.spec.get("env")
        check(type(env) is int and env >= 0, "env", env, allowed="the number of a host, from 0")
        path = Path(to, f"host_{env}{FORMATS[name][0]}")
    else:
        known = {ending: name for name, (ending, _) in FORMATS.items()}
        allowed = f"a file ending in {', '.join(known)}, or a format: {', '.join(FORMATS)}"
        check(path.suffix in known, "target", name, allowed=allowed)
        name = known[path.suffix]
    path.parent.mkdir(parents=True, exist_ok=True)
    FORMATS[name][1](plain, path)
    return path
