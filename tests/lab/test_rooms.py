"""Each room of the lab can be taken out: a run and the commands that remain do without it, and what
needs it says by name what is not installed.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders.program import ENVIRONMENT, TINY

PACKAGE = Path(__file__).resolve().parents[2] / "esper_soa"
TABLE_READERS = ("report=true", "esper-report", "esper-watch", "esper-query")
# By room: what needs it.
NEEDED_BY = {
    "telemetry": ["telemetry.level=events", "track", *TABLE_READERS, "effects.ops"],
    "effects": ["effects.ops"],
    "report": ["report=true", "esper-report", "esper-watch"],
    "compare": ["esper-compare"],
    "sweep": ["-m"],
    "plan": ["--plan"],
    "query": ["esper-query"],
    "check_device": ["--check-device"],
    "prepare": ["--prepare"],
    "conformance": ["check_reward"],
}
# Plays a run by the command, then asks for everything in turn: a line for each, with its error.
PROGRAM = """
import contextlib, functools, io, sys
import esper_soa
from esper_soa.config import lab
from esper_soa.training.start.command import train_command

random_seeds, experiment, *little = sys.argv[1:]
little += ["telemetry.level=rounds", "report=false", "control=none", "rounds=1"]
study = [random_seeds, "out=study", "a=policy=wait", "b=policy=random"]

def command(run, *words):
    sys.argv[1:] = words
    run()

def train(*words):
    esper_soa.train("smoke", [*little, "policy=wait", "run_dir=other", "resume=auto", *words])

command(train_command, experiment, *little, "policy=wait", "run_dir=run")
for name, ask in {
    "telemetry.level=events": lambda: train("telemetry.level=events"),
    "track": lambda: train("track=[tensorboard]"),
    "report=true": lambda: train("report=true"),
    "esper-report": lambda: command(lab.report_command, "run"),
    "esper-watch": lambda: command(lab.watch_command, "run", "port=x"),
    "esper-query": lambda: command(lab.query_command, "run", "select count(*) from rounds"),
    "esper-compare": lambda: command(lab.compare_command, experiment, *little, *study),
    "-m": lambda: command(train_command, "-m", experiment, *little, "resume=x"),
    "--plan": lambda: lab.find_in_lab("--plan", "--plan"),
    "--check-device": lambda: lab.find_in_lab("--check-device", "--check-device"),
    "--prepare": lambda: lab.find_in_lab("--prepare", "--prepare"),
    "check_reward": lambda: esper_soa.check_reward,
    "effects.ops": lambda: train("effects.ops=[germinate]", "run_dir=measured"),
}.items():
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            ask()
    except (esper_soa.UserError, ImportError) as error:
        said.write(str(error))
    except SystemExit:
        pass
    print("asked", name, repr(said.getvalue()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("room", NEEDED_BY)
def test_a_room_can_be_taken_out(room: str, tmp_path: Path) -> None:
    lab = [f"{room}{end}" for end in ("", ".py", "_networks.py")]
    assert any((PACKAGE / "lab" / name).exists() for name in lab)

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(folder) == PACKAGE / "lab" and name in lab}

    shutil.copytree(PACKAGE, tmp_path / "esper_soa", ignore=left_out)
    for folder in ("configs", "hydra_plugins"):
        shutil.copytree(PACKAGE.parent / folder, tmp_path / folder)
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    (tmp_path / "work").mkdir()
    given = {"cwd": tmp_path / "work", "env": ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}}
    asked = [sys.executable, "-c", PROGRAM, f"random_seeds={int(room == 'report')}", *TINY]
    done = subprocess.run(asked, capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("asked ")]
    assert len(lines) == 13
    missing = {name: said for _, name, said in lines if "is not installed" in said}
    assert list(missing) == NEEDED_BY[room], done.stdout
    for said in missing.values():
        assert f"esper_soa.lab.{room}" in said
        assert said.count("\\n") <= 1  # a line
    assert "Traceback" not in done.stderr
    study = tmp_path / "work" / "study"
    assert room != "report" or (study / "compare.json").is_file()
    assert not list(study.rglob("report.html"))
