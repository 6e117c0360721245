"""Whole runs of a user's hosts: learned, saved, resumed, evaluated, taken out, as a library."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hosts_of_users import SLOTS

import esper_soa
from esper_soa.config.settings import (
    ComputeConfig,
    EvaluateConfig,
    TrainConfig,
    settings_from_mapping,
)
from esper_soa.grown.formats import save_code, save_pt2
from esper_soa.simulator import Simulator
from esper_soa.system.errors import SettingError, UserError
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import read_run
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.evaluation import build_agent
from esper_soa.training.start.export import main as export_command
from tests.builders import warm
from tests.builders.equal_runs import CPU, assert_equal_runs, lines, settings
from tests.builders.grown_hosts import score
from tests.builders.lanes import some_of
from tests.builders.program import TINY
from tests.builders.tiny_runs import fresh, log_of, resumed

HERE = "hosts_of_users"
TESTS = Path(__file__).resolve().parents[2]
USERS = TESTS / "builders" / "users"
GIVEN: dict[str, str | int | float] = {
    "control": "none",
    "rounds": 1,
    "steps": 6,
    "envs": 2,
    "train_samples": 16,
    "val_samples": 32,
    "batch_size": 8,
    "data.name": "synthetic",
    "data.synthetic_train": 32,
    "data.synthetic_test": 32,
    "device": "cpu",
    "policy": "schedule",
    "policy.schedule.fossilize": 1,
    "lifecycle": "auto_forward",
    "gates.min_blending_steps": 1,
    "compute.workers": 1,
    "compute.threads": 1,
}


def with_host(name: str, **changed: object) -> TrainConfig:
    """The small run of equal_runs with this host of hosts_of_users."""
    cfg = settings(**changed)
    return replace(cfg, task=replace(cfg.task, host=f"{HERE}:{name}"))


@pytest.mark.parametrize("name", ["staged", pytest.param("refined", marks=pytest.mark.slow)])
def test_a_resumed_run_equals_one_that_was_not_stopped(name: str, tmp_path: Path) -> None:
    """With a learning policy, and a control that trains what has grown from the start."""
    compute = ComputeConfig(workers=2, env_chunk=1)
    cfg = with_host(name, control="static_final", rounds=3, compute=compute)
    fresh(cfg, tmp_path / "before")
    fresh(replace(cfg, rounds=2), tmp_path / "after")
    resumed(cfg, tmp_path / "after")
    assert_equal_runs(tmp_path / "before", tmp_path / "after", rounds=3)
    (told,) = [line for line in log_of(tmp_path / "before") if line.startswith("INFO hosts")]
    assert told.startswith(f"INFO hosts    2 x {name} of your own, ")
    assert any(record["blueprints"] for record in lines(tmp_path / "before"))
    saved = read_run(RunFolder(tmp_path / "before").checkpoint(3), CPU)
    other = settings_from_mapping(saved.settings).for_evaluation(
        EvaluateConfig(checkpoint="given", envs=2)
    )
    assert build_agent("ppo", other.policy, build_world(other, CPU), saved) is not None
    with pytest.raises(UserError, match=f"task.host: {HERE}:{name} -> chain"):
        resumed(settings(control="static_final", rounds=3), tmp_path / "before")


class Played(dict[str, Simulator]):
    """By the kind of its hosts an episode in which seeds grow, modules in one of them; it is played
    when it is asked for.
    """

    def __missing__(self, name: str) -> Simulator:
        seed = "parts_of_users:grouped" if name == "staged" else "norm"
        given = {
            "task.host": f"{HERE}:{name}",
            "slots": f"[{','.join(SLOTS[name])}]",
            "task.blueprints": f"[{seed}]",
            "policy.schedule.blueprint": seed,
        }
        self[name] = esper_soa.make("smoke", **(GIVEN | given))
        for _ in self[name].episode():
            pass
        return self[name]


@pytest.fixture(scope="module")
def played() -> Played:
    return Played()


@pytest.mark.parametrize("name", SLOTS)
def test_a_grown_network_has_the_accuracy_and_the_loss_of_its_engine(
    name: str, played: Played
) -> None:
    net = played[name].export(1)
    world = played[name].world
    grown = {seed["blueprint"] for seed in net.spec["seeds"]}
    assert grown == {"grouped" if name == "staged" else "norm"}
    chosen = world.validation.order
    images = world.data
    x = images.val_images[chosen].permute(0, 3, 1, 2).float() / 255
    labels = images.val_labels[chosen]
    assert score(net, x, labels) == pytest.approx(
        (net.spec["validation_accuracy"], net.spec["validation_loss"]), abs=1e-5
    )
    assert net.spec["task"] == name


@pytest.mark.parametrize("name", some_of(SLOTS, "staged", "uneven"))
def test_a_grown_network_goes_into_files_and_comes_back(
    name: str, played: Played, tmp_path: Path
) -> None:
    net = played[name].export(0)
    images = torch.rand(3, 3, 32, 32)
    assert sum(one.numel() for one in net.parameters()) == net.spec["parameters"]
    esper_soa.save(net, tmp_path / "host.safetensors")
    assert torch.equal(esper_soa.load(tmp_path / "host.safetensors")(images), net(images))
    save_pt2(net, tmp_path / "host.pt2")
    program = torch.export.load(tmp_path / "host.pt2").module()
    torch.testing.assert_close(program(images[:2]), net(images[:2]), rtol=1e-5, atol=1e-5)


def test_a_counter_comes_out_as_the_whole_number_that_it_was(played: Played) -> None:
    state = played["counting"].export(0).state_dict()
    assert state["0.own.batches"].dtype == torch.int64
    assert int(state["0.own.batches"]) == 2 * 6  # batches of env-steps


@pytest.mark.parametrize(("name", "imported"), [("refined", False), ("staged", True)])
def test_the_code_of_a_host_of_parts_stands_alone_and_that_of_modules_needs_them(
    name: str, imported: bool, played: Played, tmp_path: Path
) -> None:
    net = played[name].export(0)
    images = torch.rand(2, 3, 32, 32)
    torch.save((images, net(images)), tmp_path / "wanted.pt")
    save_code(net, tmp_path / "host.py")
    esper_soa.save(net, tmp_path / "host.safetensors")
    code = (
        "import torch, host, esper_soa; torch.set_num_threads(1); "
        "x, wanted = torch.load('wanted.pt'); "
        "nets = esper_soa.load('host.safetensors'), host.network(); "
        "assert all(torch.equal(net(x), wanted) for net in nets)"
    )
    paths = f"import sys; sys.path[:0] = {[str(USERS), str(TESTS.parent)]!r}; "
    found = paths + "import hosts_of_users, parts_of_users; " if imported else ""
    command = [sys.executable, "-c", found + code]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if imported:
        done = warm.run([*command[:2], code], cwd=tmp_path, capture_output=True, text=True)
        assert "import hosts_of_users first" in done.stderr


def test_the_command_imports_the_modules_that_a_network_needs(
    played: Played,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = str(tmp_path / "host.safetensors")
    esper_soa.save(played["staged"].export(0), file)
    monkeypatch.delitem(sys.modules, "hosts_of_users")
    with pytest.raises(SystemExit):
        export_command([file, "format=pt2", f"to={tmp_path}"])
    assert "hosts_of_users first (esper-export: import=hosts_of_users)" in capsys.readouterr().err
    export_command([file, "format=pt2", f"to={tmp_path}", "import=hosts_of_users"])
    assert (tmp_path / "host.pt2").is_file()


def test_the_policy_of_a_run_comes_out_with_the_slots_of_its_host(tmp_path: Path) -> None:
    given = ["control=none", f"task.host={HERE}:staged", "slots=[r0c0,r0c2]"]
    run = esper_soa.train("smoke", [*TINY[1:], *given, f"run_dir={tmp_path}/run"])
    slots = [(slot["name"], slot["channels"]) for slot in run.policy().spec["slots"]]
    assert slots == [("r0c0", 6), ("r0c2", 10)]
    assert run.export().spec["task"] == "staged"


def test_a_simulator_says_what_is_wrong_with_its_host() -> None:
    with pytest.raises(
        SettingError,
        match=(
            r"^task\.host=hosts_of_users:branching: must be a host that can be trained\. "
            r"it gives a Branching, which is no nn\.Sequential: a host is a chain of "
            r"segments\.$"
        ),
    ):
        esper_soa.make("smoke", **{"task.host": f"{HERE}:branching"})
