"""Files of networks and policies: the same bits in another process; what is none is told so."""

import copy
import io
import json
import re
import resource
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper_soa import host, layer
from esper_soa.agent.controller import Controller, controller_of, controller_spec
from esper_soa.config.agent import NetworkConfig, PolicyConfig
from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.grown.formats import export
from esper_soa.grown.module_files import (
    FIGURES,
    METADATA_ENTRY,
    ModuleFileError,
    digest,
    load,
    save,
    save_hosts,
)
from esper_soa.nets.model.modules import GrownNetwork, layer_of
from esper_soa.system.errors import UserError
from esper_soa.training.start.export import main
from tests.builders import warm
from tests.builders.grown_hosts import Measured, measured_hosts

NUM_HOSTS = 5


@pytest.fixture(scope="module")
def hosts() -> Measured:
    return measured_hosts("torch", NUM_HOSTS)


@pytest.fixture
def net(hosts: Measured) -> GrownNetwork:
    return hosts.networks([4])[0]


def policy() -> Controller:
    """A small policy of four slots with its own numbers."""
    slots = sort_slots(TaskConfig(), ["r0c0", "r0c1", "r1c0", "r1c1"])
    made = Controller(
        controller_spec(PolicyConfig(network=NetworkConfig(hidden=16, features=8)), slots)
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for value in made.state_dict().values():
            value.copy_(torch.rand_like(value))
    return made.eval()


def header(path: Path) -> dict:
    content = path.read_bytes()
    return json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])


def with_entry(path: Path, change: Callable[[dict], object]) -> None:
    """Write the file again with its own entry changed."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    head = header(path)
    ours = json.loads(head["__metadata__"][METADATA_ENTRY])
    change(ours)
    head["__metadata__"][METADATA_ENTRY] = json.dumps(ours)
    again = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(again)) + again + content[8 + size :])


LOADED = """
import sys, json, torch, hashlib
from esper_soa.grown.module_files import digest, load
net = load(sys.argv[1])
torch.manual_seed(0)
out = net(torch.rand(3, 3, 32, 32))
print(json.dumps([digest(net.state_dict()), digest({"out": out.detach()}), net.training, net.spec]))
"""


def test_a_network_is_the_same_to_the_bit_in_a_fresh_process(
    net: GrownNetwork, tmp_path: Path
) -> None:
    path = tmp_path / "host.safetensors"
    save(net, path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out = net(torch.rand(3, 3, 32, 32)).detach()
    done = warm.run(
        [sys.executable, "-c", LOADED, str(path)], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert told == [digest(net.state_dict()), digest({"out": out}), False, net.spec]
    assert digest(load_file(path)) == digest(net.state_dict())  # other programs read the weights


def test_a_policy_comes_back_the_same_to_the_bit(tmp_path: Path) -> None:
    made = policy()
    path = tmp_path / "policy.safetensors"
    save(made, path)
    again = load(path)
    assert (digest(again.state_dict()), again.spec) == (digest(made.state_dict()), made.spec)
    assert not again.training
    with_entry(path, lambda ours: ours["modules"][0]["spec"]["network"].update(hidden=12))
    told = r"policy \(policy\.network\.hidden=12: must be a multiple of 8\.\)$"
    with pytest.raises(ModuleFileError, match=told):
        load(path)


def test_weights_are_saved_as_they_are_now(net: GrownNetwork, tmp_path: Path) -> None:
    with torch.no_grad():
        net.get_submodule("classifier.linear").weight.add_(1)
    save(net.half(), str(tmp_path / "host"))
    again = load(tmp_path / "host")
    assert digest(again.state_dict()) == digest(net.state_dict())
    assert next(again.parameters()).dtype == torch.float16
    scale, shift = [one for one in net.parameters() if one.dim() == 1][:2]
    shift.data = scale.data  # in one memory
    net.to(memory_format=torch.channels_last)
    path = tmp_path / "again"
    save(net, path)
    again = load(path)
    path.write_bytes(b"\0" * path.stat().st_size)  # what was loaded is not the file
    assert digest(again.state_dict()) == digest(net.state_dict())


WRAPPERS = {
    "compiled": partial(torch.compile, backend="eager"),
    "parallel": nn.DataParallel,
    "averaged": AveragedModel,
    "both": lambda net: nn.DataParallel(torch.compile(net, backend="eager")),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_torch_puts_around_a_network_is_left_out(
    name: str, net: GrownNetwork, tmp_path: Path
) -> None:
    save(net, tmp_path / "net")
    save(WRAPPERS[name](load(tmp_path / "net")), tmp_path / "wrapped")
    assert (tmp_path / "net").read_bytes() == (tmp_path / "wrapped").read_bytes()


def test_a_network_that_is_no_longer_that_of_its_spec_is_refused(
    net: GrownNetwork, tmp_path: Path
) -> None:
    for around in (nn.Sequential(net), nn.ModuleDict({"module": net})):
        with pytest.raises(UserError):
            save(around, tmp_path / "net")
    net.add_module("input", nn.Hardtanh())
    with pytest.raises(ValueError, match="not those of its spec"):
        save(net, tmp_path / "net")


def test_figures_of_other_weights_are_not_kept(net: GrownNetwork, tmp_path: Path) -> None:
    net.spec.update(dict.fromkeys(FIGURES, 12.5))
    save(net, tmp_path / "net")
    again = copy.deepcopy(load(tmp_path / "net"))
    save(again, tmp_path / "same")
    next(again.parameters()).data.add_(1)
    save(again, tmp_path / "tuned")
    figures = [[load(tmp_path / name).spec[key] for key in FIGURES] for name in ("same", "tuned")]
    assert figures == [[12.5] * 3, [None] * 3]


def test_all_hosts_of_a_round_are_one_file(hosts: Measured, tmp_path: Path) -> None:
    path = tmp_path / "hosts.safetensors"
    every = hosts.hosts(list(range(NUM_HOSTS)))
    save_hosts(every, path)
    for env, one in enumerate(every):
        again = load(path, env)
        assert digest(again.state_dict()) == digest(one.tensors)
        assert again.spec == one.spec
    with pytest.raises(ModuleFileError, match="holds 5 hosts: say which by env=0 to 4"):
        load(path)
    for env in (-1, 5):
        with pytest.raises(ModuleFileError, match=rf"env={env}: must be 0 to 4, the hosts in it"):
            load(path, env)
    save_hosts(every[:1], path)
    assert (
        digest(load(path, 0).state_dict())
        == digest(load(path).state_dict())
        == digest(every[0].tensors)
    )


NO_FILE = r"must be a whole file of networks or of a policy \(\S.*\)"  # with what the library says
TORCHS = io.BytesIO()
torch.save({"weight": torch.zeros(3)}, TORCHS)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: b"", NO_FILE),
        (lambda content: content[: len(content) // 2], NO_FILE),
        (lambda content: content[:-1], NO_FILE),
        (lambda content: content[:20], NO_FILE),
        (
            lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
            r"damaged \(its content is not what was written\)",
        ),
        (lambda content: b"accuracy,loss\n" * 100, NO_FILE),
        (lambda content: to_bytes({"weight": torch.zeros(3)}), "written by another program"),
        (lambda content: TORCHS.getvalue(), r"open_run\(FOLDER\) has export\(\) and policy\(\)"),
    ],
)
def test_a_file_that_is_none_is_named_with_the_reason(
    net: GrownNetwork, tmp_path: Path, damage: Callable[[bytes], bytes], told: str
) -> None:
    path = tmp_path / "host.safetensors"
    save(net, path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModuleFileError, match=told) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sizes", [{"network": {"hidden": 16_384, "layers": 32}}, {"heads": {"blueprint": 10**9}}]
)
def test_a_policy_is_as_large_as_its_tensors_before_anything_is_allocated(sizes: dict) -> None:
    made = policy()
    spec = {name: part | sizes.get(name, {}) for name, part in made.spec.items() if name in sizes}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RuntimeError, match="size mismatch|Missing key"):
        controller_of(made.spec | spec, made.state_dict())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


KILLED = """
import os, signal, sys
from pathlib import Path
from esper_soa.system import files
from esper_soa.grown.module_files import load, save
net = load(sys.argv[1])
net.classifier.linear.bias.data.zero_()
setattr(files.os, sys.argv[2], lambda *given, **folders: os.kill(os.getpid(), signal.SIGKILL))
save(net, sys.argv[1])
"""


@pytest.mark.parametrize("moment", ["replace", pytest.param("fsync", marks=pytest.mark.slow)])
def test_a_kill_during_the_write_leaves_the_old_file(
    net: GrownNetwork, tmp_path: Path, moment: str
) -> None:
    path = tmp_path / "host.safetensors"
    save(net, path)
    before = path.read_bytes()
    done = warm.run([sys.executable, "-c", KILLED, str(path), moment], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert digest(load(path).state_dict()) == digest(net.state_dict())


# Functions that a file must not be able to call, whatever it says and wherever it says it.
HOSTILE = ("os:system", "builtins:exec", "subprocess:getoutput")
PLACES = {
    "host": lambda spec, layer: spec["host"][0]["layers"].insert(0, layer),
    "seed": lambda spec, layer: spec["seeds"][0]["layers"].insert(0, layer),
    "gate": lambda spec, layer: spec["seeds"][0].update(gate=layer),
}


GIVEN: tuple[dict, ...] = ({"channels": "CODE"}, {"classes": "CODE", "segment": 0}, {"channels": 8})


@pytest.mark.parametrize(
    ("place", "kind", "arguments"),
    [
        (place, HOSTILE[(row + column) % 3], GIVEN[column])
        for row, place in enumerate(PLACES)
        for column in range(3)
    ],
)
def test_a_file_calls_nothing_that_is_not_a_marked_part(
    hosts: Measured, tmp_path: Path, place: str, kind: str, arguments: dict
) -> None:
    path = tmp_path / "host.safetensors"
    trace = tmp_path / "trace"
    code = f"open({str(trace)!r}, 'w')" if kind == "builtins:exec" else f"touch {trace}"
    layer = {
        "name": "x",
        "kind": kind,
        "arguments": {key: code if value == "CODE" else value for key, value in arguments.items()},
    }
    net = next(one for one in hosts.networks(list(range(NUM_HOSTS))) if one.spec["seeds"])
    save(net, path)
    with_entry(path, lambda ours: PLACES[place](ours["modules"][0]["spec"], layer))
    with pytest.raises(ModuleFileError, match="must be a whole file of networks"):
        load(path)
    with pytest.raises(SystemExit):
        main([str(path), "format=code", f"to={tmp_path}"])
    assert not trace.exists()


@host("pair")
def pair(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))


def test_a_users_host_has_the_segments_that_it_has() -> None:
    spec = {"name": "x", "kind": f"{__name__}:pair", "arguments": {"classes": 3, "segment": 1}}
    assert isinstance(layer_of(spec, "host"), nn.LazyLinear)
    spec["arguments"]["segment"] = 2
    told = f"^a part that {__name__}:pair makes: it has no segment 2$"
    with pytest.raises(ValueError, match=told):
        layer_of(spec, "host")


@layer("scaled")
def scaled(by: float) -> nn.Module:
    return nn.Hardtanh(0.0, by)


def test_a_users_layer_takes_numbers() -> None:
    spec = {"name": "x", "kind": f"{__name__}:scaled", "arguments": {"by": 0.5}}
    assert isinstance(layer_of(spec, "blueprint"), nn.Hardtanh)
    for by in ("0.5", [0.5]):
        told = re.escape(f"{__name__}:scaled with by={by!r}, which is no number of a layer")
        with pytest.raises(ValueError, match=f"^a layer of the kind {told}$"):
            layer_of(spec | {"arguments": {"by": by}}, "blueprint")


def test_a_digest_is_of_names_types_and_bytes() -> None:
    zeros = torch.zeros(2)
    states = [{"a": zeros}, {"b": zeros}, {"a": zeros.int()}, {"a": -zeros}, {"a": torch.zeros(3)}]
    states += [{"a": zeros, "b": zeros}, {}]
    assert len({digest(state) for state in states}) == len(states)
    assert digest({"b": zeros, "a": zeros}) == digest({"a": zeros, "b": zeros})


CHANGED: dict[str, Callable[[dict], object]] = {
    "no shape": lambda spec: spec["input"].pop("shape"),
    "an input of text": lambda spec: spec.update(input="images"),
    "no finite number": lambda spec: spec.update(validation_loss=float("nan")),
    "stride": lambda spec: spec["host"][0]["layers"][0]["arguments"].update(stride=0),
    "padding": lambda spec: spec["host"][0]["layers"][0]["arguments"].update(padding=-9),
    "depth": lambda spec: spec.update(task=json.loads("[" * 400 + "]" * 400)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_changed_description_is_refused_in_a_line(
    net: GrownNetwork, tmp_path: Path, change: str
) -> None:
    path = tmp_path / "host.safetensors"
    save(net, path)
    with_entry(path, lambda ours: CHANGED[change](ours["modules"][0]["spec"]))
    form = "code" if change == "depth" else "pt2"
    with pytest.raises(UserError, match=r"^.*$"):
        export(load(path), form, to=tmp_path)
