"""Every command of the package really starts: an interpreter that has imported nothing. All other
tests of command lines run in forks (warm.py).
"""

import subprocess
from pathlib import Path

import pytest
from program import ENVIRONMENT, PATIENCE, TINY, command

SHORT = [*TINY, "rounds=1", "control=none", "report=false"]


def told(folder: Path, program: str, *words: str) -> str:
    """What the command says in `folder`; it must end well and complain of nothing."""
    done = subprocess.run(
        command(*words, program=program),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of one round lies, in `run`."""
    place = tmp_path_factory.mktemp("cold")
    assert "accuracy, mean over hosts (%)" in told(place, "train", *SHORT, "run_dir=run")
    return place


@pytest.mark.parametrize(
    ("program", "words", "left"),
    [
        (
            "evaluate",
            ["checkpoint=run", "run_dir=judged", "policies=[wait]", "episodes=1"],
            "judged/evaluation.json",
        ),
        ("export", ["run", "format=safetensors", "to=out"], "out/best.safetensors"),
        ("report.write", ["run"], "run/report.html"),
        (
            "compare",
            ["a=policy=wait", "b=policy=random", "seeds=2", "out=study", *SHORT],
            "study/compare.json",
        ),
        ("query", ["run", "select count(*) as rounds from rounds", "format=csv"], ""),
    ],
)
def test_a_command_starts_in_an_interpreter_of_its_own(
    folder: Path, program: str, words: list[str], left: str
) -> None:
    if program == "report.write":
        pytest.importorskip("vl_convert", reason="extra report")
    if program == "query":
        pytest.importorskip("duckdb", reason="extra query")
        assert told(folder, program, *words).split() == ["rounds", "1"]
    else:
        told(folder, program, *words)
        assert (folder / left).is_file()
