"""Every command of the package starts in an interpreter that has imported nothing of it, but torch
and tensordict. All other tests of command lines run in forks of one that has (warm.py).
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.program import ENVIRONMENT, PATIENCE, TINY, command

SHORT = [*TINY, "rounds=1", "control=none", "report=false"]
# What others wrote is imported once; each command is a fork, which ends with the command's status.
FORKS = """
import os, runpy, sys, tensordict, torch
for line in sys.stdin:
    folder, program, *words = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        told = os.open("told", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(told, 1)
        os.dup2(told, 2)
        sys.argv[1:] = words
        runpy.run_module(f"esper_soa.{program}", run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitpid(child, 0)[1], file=sys.stderr, flush=True)
"""


class Forks:
    """Starts commands in forks that have nothing of the package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        given = [sys.executable, "-c", FORKS]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            given, env=ENVIRONMENT, stdin=pipe, stderr=pipe, stdout=subprocess.DEVNULL, text=True
        )

    def told(self, program: str, *words: str) -> str:
        """What the command says; it must end well."""
        print(self.folder, program, *words, sep="\t", file=self.process.stdin, flush=True)
        status = self.process.stderr.readline()
        said = (self.folder / "told").read_text()
        assert status == "0\n", said
        return said


def slow(*case: object) -> object:
    """A case of the slow lane."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Where a run of one round lies, in `run`."""
    forks = Forks(tmp_path_factory.mktemp("cold"))
    with forks.process:
        assert "accuracy, mean over hosts (%)" in forks.told("train", *SHORT, "run_dir=run")
        yield forks
        forks.process.stdin.close()


@pytest.mark.parametrize(
    ("program", "words", "left"),
    [
        (
            "evaluate",
            ["checkpoint=run", "run_dir=judged", "policies=[wait]", "episodes=1"],
            "judged/evaluation.json",
        ),
        slow("export", ["run", "format=safetensors", "to=out"], "out/best.safetensors"),
        ("lab.report.write", ["run"], "run/report.html"),
        slow(
            "lab.compare.command",
            ["a=policy=wait", "b=policy=random", "random_seeds=1", "out=study", *SHORT],
            "study/compare.json",
        ),
        (
            "lab.query.command",
            ["run", "select count(*) as rounds from rounds", "format=csv"],
            "told",
        ),
    ],
)
def test_a_command_starts(forks: Forks, program: str, words: list[str], left: str) -> None:
    for needed, extra in (("lab.report.write", "vl_convert"), ("lab.query.command", "duckdb")):
        if program == needed:
            pytest.importorskip(extra)
    said = forks.told(program, *words)
    assert (forks.folder / left).is_file()
    assert program != "lab.query.command" or said.split() == ["rounds", "1"]


@pytest.mark.slow  # test_a_command_starts is the cheap twin
def test_training_starts_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    given = {"cwd": tmp_path, "env": ENVIRONMENT, "timeout": PATIENCE}
    done = subprocess.run(command(*SHORT), capture_output=True, **given)
    assert (done.returncode, done.stderr) == (0, b"")
