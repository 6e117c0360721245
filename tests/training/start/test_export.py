"""The command line esper-export: the formats of a host of a run, and a word for every mistake."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import esper_soa
from esper_soa.agent.controller import Controller, controller_spec
from esper_soa.config.agent import NetworkConfig, PolicyConfig
from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.grown.module_files import digest
from esper_soa.training.start.export import main
from tests.builders import warm
from tests.builders.program import TINY, command, finished


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    done = finished(*TINY, "policy=random", "control=none", "run_dir=run", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_host_in_all_formats_by_a_process_that_says_no_more(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    out = tmp_path / "out"
    asked = command(str(run), "format=safetensors,code,onnx,pt2", f"to={out}", program="export")
    done = warm.run(asked, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    endings = ("safetensors", "py", "onnx", "pt2")
    assert done.stdout.split() == [str(out / f"best.{ending}") for ending in endings]
    net = esper_soa.load(tmp_path / "out" / "best.safetensors")
    assert digest(net.state_dict()) == digest(esper_soa.open_run(run).export().state_dict())


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_one_host_of_the_last_round_and_a_file_again(
    run: Path, chosen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run), "env=1", "format=safetensors"])
    assert capsys.readouterr().out == "host_1.safetensors\n"
    main(["host_1.safetensors", "format=pt2", "to=more"])
    assert capsys.readouterr().out == "more/host_1.pt2\n"
    program = torch.export.load(chosen / "more" / "host_1.pt2").module()
    given = torch.rand(3, 3, 32, 32)
    assert torch.allclose(program(given), esper_soa.open_run(run).export(1)(given), atol=1e-6)
    (hosts,) = (run / "networks").glob("hosts_*.safetensors")
    main([str(hosts), "env=1", "to=again"])
    assert capsys.readouterr().out == "again/host_1.safetensors\n"
    net = esper_soa.load(chosen / "again" / "host_1.safetensors")
    assert net.spec["env"] == 1
    assert digest(net.state_dict()) == digest(esper_soa.open_run(run).export(1).state_dict())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["RUN", "format=h5"], "onnx, code, with commas between.\n"),
        (["RUN", "env=9"], "env=9: must be 0 to 1"),
        (["RUN", "env=worst"], "env=worst: must be"),
        (["RUN", "environment=1"], "=1: must be one of env=, format=, to=, import=. See --help.\n"),
        (["RUN", "best"], "best='': must be one of env=, format=, to=, import=. See --help.\n"),
        (
            ["RUN", "import=json,nowhere"],
            "import=nowhere: must be",
        ),
        (["nowhere"], "nowhere: is"),
        (["~nobody_here/x"], "RUN=~nobody_here/x: must be"),
        (["RUN", "to=~nobody_here/x"], "to=~nobody_here/x: must be"),
        (["policy.safetensors"], "other programs cannot play: esper_soa.load reads it\n"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    run: Path, chosen: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    slots = sort_slots(TaskConfig(), ["r0c0"])
    config = PolicyConfig(network=NetworkConfig(hidden=8, features=8))
    esper_soa.save(Controller(controller_spec(config, slots)), "policy.safetensors")
    with pytest.raises(SystemExit) as caught:
        main([str(run) if given == "RUN" else given for given in arguments])
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert told in said.err
    assert said.err.count("\n") == 1
    assert [path.name for path in chosen.iterdir()] == ["policy.safetensors"]


def test_help_says_all_without_torch() -> None:
    program = "import sys; sys.argv = ['esper-export', '--help']\n"
    program += "from esper_soa.training.start.export import main\n"
    program += "try: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "usage: esper-export RUN [env=best] [format=safetensors] [to=.] [import=MODULE]\n\n"
        "Take a grown network out of a run.\n"
    )
    for word in ("env=best", "format=safetensors", "to=.", "esper-soa[onnx]", "code", "import="):
        assert word in done.stdout
