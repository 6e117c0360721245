"""Hosts with seeds of a user's modules come out as plain modules, go into files and back."""

import sys
from pathlib import Path

import pytest
import torch
import warm

import esper_soa

PARTS = Path(__file__).resolve().parents[2] / "examples" / "own_parts"
GIVEN = (
    "task=cifar_minimal",
    "slots=[r0c0,r0c1]",
    "data.name=synthetic",
    "control=none",
    "rounds=1",
    "steps=8",
    "envs=2",
    "task.blueprints=[norm,my_parts.seeds:mixer]",
    "policy=schedule",
    "policy.schedule.blueprint=my_parts.seeds:mixer",
    "policy.schedule.fossilize=1",
    "lifecycle=auto_forward",
    "gates.min_blending_steps=1",
)


def test_a_module_of_a_users_own_comes_out_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PARTS))
    run = esper_soa.train("smoke", [*GIVEN, f"run_dir={tmp_path}/run"])
    net = run.export(0)
    assert {seed["blueprint"] for seed in net.spec["seeds"]} == {"mixer"}
    assert type(net.get_submodule("r0c0.seed.own0")).__name__ == "Mixer"
    images = torch.rand(4, 3, 32, 32)
    esper_soa.save(net, tmp_path / "host.safetensors")
    assert torch.equal(esper_soa.load(tmp_path / "host.safetensors")(images), net(images))
    torch.save((images, net(images)), tmp_path / "wanted.pt")
    code = (
        f"import sys, torch, esper_soa; sys.path.insert(0, {str(PARTS)!r}); "
        "torch.set_num_threads(1); IMPORT; net = esper_soa.load('host.safetensors'); "
        "images, wanted = torch.load('wanted.pt'); "
        "assert torch.equal(net(images), wanted)"
    )
    for imported, status in (("import my_parts.seeds", 0), ("pass", 1)):
        command = [sys.executable, "-c", code.replace("IMPORT", imported)]
        done = warm.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == status, done.stderr
    assert "import my_parts.seeds first" in done.stderr
