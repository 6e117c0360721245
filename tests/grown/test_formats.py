"""Networks for other programs compute what the module computes, for any number of images."""

import itertools
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper_soa.grown import formats
from esper_soa.grown.build import ACTIVE_STAGES_OF_HOST
from esper_soa.grown.formats import export, save_code, save_onnx, save_pt2
from esper_soa.grown.module_files import digest
from esper_soa.nets.model.modules import GrownNetwork
from esper_soa.system.errors import UserError
from tests.builders.grown_hosts import KINDS, Measured, measured_hosts

BATCHES = (1, 2, 7, 64)


@pytest.fixture(scope="module")
def hosts() -> Measured:
    return measured_hosts("auto")


@pytest.fixture(scope="module")
def cover(hosts: Measured) -> list[GrownNetwork]:
    """A few hosts in which every blueprint has every blend, at an alpha between 0 and 1 or at 1."""
    kinds = {
        env: {
            (seed["blueprint"], seed["blend"]) for seed in host.spec["seeds"] if seed["alpha"] > 0
        }
        for env, host in enumerate(hosts.hosts(list(range(len(KINDS)))))
    }
    missing = set(itertools.chain(*kinds.values()))
    chosen = list[int]()
    assert (
        len(missing) == len({kind[:2] for kind in KINDS if kind[2] in ACTIVE_STAGES_OF_HOST}) == 21
    )
    while missing:
        chosen.append(max(kinds, key=lambda env: len(kinds[env] & missing)))
        missing -= kinds[chosen[-1]]
    return hosts.networks(chosen)


def images(count: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(count)
        return torch.rand(count, 3, 32, 32)


@torch.no_grad()
def assert_same(net: nn.Module, other: nn.Module, limit: float) -> None:
    for count in BATCHES:
        given = images(count)
        assert (net(given) - other(given)).abs().max() <= limit


def check_pt2(net: GrownNetwork, path: Path) -> None:
    save_pt2(net, path)
    extra = {"spec.json": ""}
    program = torch.export.load(path, extra_files=extra)
    assert_same(net, program.module(), 1e-6)
    assert json.loads(extra["spec.json"]) == net.spec


@torch.no_grad()
def check_onnx(net: GrownNetwork, path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    save_onnx(net, path)
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    for count in BATCHES:
        given = images(count)
        (logits,) = session.run(["logits"], {"images": given.numpy()})
        assert np.abs(logits - net(given).numpy()).max() <= 1e-5
    assert json.loads(session.get_modelmeta().custom_metadata_map["spec"]) == net.spec


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_blueprint_with_every_blend_is_a_program_of_torch_export_and_a_model_of_onnx(
    cover: list[GrownNetwork], tmp_path: Path
) -> None:
    for net in cover:
        check_pt2(net, tmp_path / "host.pt2")
        check_onnx(net, tmp_path / "host.onnx")


SINGLE_PROCESS = """
import sys
sys.modules["esper_soa"] = None
import torch
found = []
for name in ("host0", "host1", "host2"):
    host = __import__(name)
    net = host.network()
    assert not net.training
    found.append((net.state_dict(), net(torch.load("images.pt")).detach(), host.SPEC))
print(sorted(name for name in sys.modules if name.startswith("esper")))
torch.save(found, "out.pt")
"""


def test_code_is_one_file_that_needs_torch_alone_and_gives_the_same_bits(
    cover: list[GrownNetwork], tmp_path: Path
) -> None:
    for number, net in enumerate(cover[:3]):
        save_code(net, tmp_path / f"host{number}.py")
    torch.save(images(7), tmp_path / "images.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SINGLE_PROCESS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.stderr, done.stdout) == ("", "['esper_soa']\n")
    for net, (state, out, spec) in zip(cover, torch.load(tmp_path / "out.pt"), strict=False):
        assert digest(state) == digest(net.state_dict())
        assert torch.equal(out, net(images(7)))
        assert spec == net.spec


def test_code_is_what_a_formatter_and_a_reader_can_live_with(
    cover: list[GrownNetwork], tmp_path: Path
) -> None:
    save_code(cover[0], tmp_path / "host.py")
    text = (tmp_path / "host.py").read_text()
    assert max(map(len, text.splitlines())) == 116
    assert text.startswith('"""A grown network with its weights; needs torch alone.\n')
    assert "esper_soa" not in "".join(line for line in text.splitlines() if "import" in line)
    made: dict = {"__name__": "host"}
    exec(compile(text, "host.py", "exec"), made)
    assert digest(made["network"]().state_dict()) == digest(cover[0].state_dict())
    assert list(made["SPEC"]) == list(cover[0].spec)


def test_a_format_whose_packages_are_missing_names_its_extra(
    cover: list[GrownNetwork], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"format=onnx: needs onnx and onnxscript\. Install esper-soa\[onnx\]"
    ):
        save_onnx(cover[0], tmp_path / "host.onnx")
    assert list(tmp_path.iterdir()) == []


def test_texts_of_a_file_are_no_code(
    hosts: Measured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = hosts.networks([0])[0]
    hostile = '"""\nimport pathlib\npathlib.Path("trace").touch()\n"""'
    changed = dict.fromkeys(("task", "version", "classes"), hostile)
    net.spec = net.spec | changed | {"data": {"name": hostile}}
    net.spec["input"] = net.spec["input"] | {"about": [hostile]}
    save_code(net, tmp_path / "net.py")
    monkeypatch.chdir(tmp_path)
    runpy.run_path("net.py", run_name="__main__")
    assert capsys.readouterr().out.startswith("GrownNetwork(\n")
    assert not (tmp_path / "trace").exists()


def test_numbers_that_are_not_finite_come_back_from_code(hosts: Measured, tmp_path: Path) -> None:
    net = hosts.networks([0])[0]
    net.spec = net.spec | {"validation_loss": float("inf"), "accuracy": float("nan")}
    save_code(net, tmp_path / "net.py")
    spec = runpy.run_path(str(tmp_path / "net.py"))["SPEC"]
    assert repr(spec) == repr(net.spec)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("dtype", "save"), ("dtype", []), ("shape", [10**9, 3])),
        *(("shape", [0, 3]), ("shape", "x"), ("shape", [3, -1, 32]), ("shape", [7, 32, 32])),
    ],
)
def test_inputs_that_the_network_does_not_take_are_refused_by_name(
    hosts: Measured, tmp_path: Path, name: str, value: object
) -> None:
    net = hosts.networks([0])[0]
    net.spec = net.spec | {"input": net.spec["input"] | {name: value}}
    with pytest.raises(UserError, match=r"^(input\.(shape|dtype)=|the network: ).*$"):
        save_pt2(net, tmp_path / "net.pt2")
    assert not list(tmp_path.iterdir())


class CountsCalls(nn.Module):
    """A layer whose output depends on how often it was called, which no program keeps."""

    calls = 0

    def forward(self, features: Tensor) -> Tensor:
        """The features, times the number of calls."""
        self.calls += 1
        return self.calls * features


@pytest.mark.parametrize("write", [save_pt2, save_code])
def test_a_program_that_computes_otherwise_is_not_written(
    write: Callable[[GrownNetwork, Path], None], hosts: Measured, tmp_path: Path
) -> None:
    net = hosts.networks([0])[0]
    net.get_submodule("classifier").flatten = nn.Sequential(nn.Flatten(), CountsCalls())
    with pytest.raises(UserError, match="other logits"):
        write(net, tmp_path / "net")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", [".pt2", ".py"])
def test_a_network_in_training_is_exported_in_its_precision_and_stays_as_it_was(
    ending: str, hosts: Measured, tmp_path: Path
) -> None:
    net = hosts.networks([0])[0].half()
    net.train().get_submodule("block0").eval()
    before = digest(net.state_dict()), [part.training for part in net.modules()]
    assert export(net, tmp_path / f"net{ending}").exists()
    assert (digest(net.state_dict()), [part.training for part in net.modules()]) == before
