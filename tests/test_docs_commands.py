"""Every command of the README and of docs/ works, and the code of the pages on Python: those of
the package run, on little work; those of the set-up, of other machines and of benchmarks/ are named
here with what checks them instead.
"""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

import esper_soa
from tests.builders import warm
from tests.builders.program import ENVIRONMENT, PATIENCE, TINY

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
# A path of the checkout, and what only looks like one.
PATH = re.compile(r"(?<![\w/.])(?:docs|configs|tests|benchmarks|examples|esper_soa)/[\w./-]*\w")
PLACEHOLDER = re.compile(r"NAME|-v0$")
MODULES = {
    "esper-train": "esper_soa.train",
    "esper-evaluate": "esper_soa.evaluate",
    "esper-export": "esper_soa.export",
    "esper-compare": "esper_soa.lab.compare.command",
    "esper-report": "esper_soa.lab.report.write",
    "esper-watch": "esper_soa.lab.report.live",
    "esper-query": "esper_soa.lab.query.command",
}
PYTHON = ("python", ".venv/bin/python")
LITTLE = shlex.split(
    "rounds=1 steps=2 envs=4 batch_size=16 train_samples=16 val_samples=16 data.synthetic_train=64 "
    "data.synthetic_test=32 compute.threads=1 compute.workers=1"
)
# A command that begins with one of these is checked elsewhere.
ELSEWHERE = {
    "python3 -m venv": ".ci/run and tests/test_wheel.py install and run the package",
    "pip install": ".ci/run",
    ".venv/bin/python -c": "prints versions on a machine with a GPU",
    ".venv/bin/python -m benchmarks": "tests/benchmarks",
    "python -m benchmarks": "tests/benchmarks",
    "esper-compare +experiment=cifar_3seed data.name=fashion32 envs=4": (
        "takes hours: tests/lab/compare/test_study.py"
    ),
    "torchrun": "tests/training/start/test_launch.py",
    "esper-watch": "a server that does not end: tests/lab/report/test_live.py",
    "python -m esper_soa.train +experiment=smoke data=npz": "tests/test_images_page.py",
    ".venv/bin/esper-train --check-device": "needs a GPU",
}
# A setting of the docs, and what a test takes for it.
SHORTER = [
    (r"'device=\"cuda.*?'", "device=cpu"),
    (r"device=cuda", "device=cpu"),
    (r"data\.root=/data/cifar-10-batches-py", "data=synthetic"),
    (r"slots=\[r0c0,r1c2\]", "slots=[r0c0]"),
    (r"\b(n_trials|n_jobs)=\d+", r"\1=2"),
    (r"\bseed=1,2,3[,\d]*", "seed=1,2"),
    (r"\brandom_seeds=10", "random_seeds=4"),
    (r"\b(envs|rounds|steps|batch_size|train_samples|val_samples)=\d+ ?", ""),
    (r"\brun_dir=runs/\w+", "run_dir=there"),
    (r"\bcheckpoint=runs/\w+", "checkpoint={run}"),
    (r"runs/cifar_3seed/20\S+", "{run}"),
    (r"runs/cifar_3seed/sweep_20\S+", "{sweep}"),
    (r"^esper-export RUN env=best format=\S+ to=\. import=\S+", "esper-export {run} env=best"),
]


def commands() -> dict[str, str]:
    """Every command line of the pages by its place: "running.md: esper-train ..."."""
    found = {}
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
            text = block["text"].replace("\\\n", " ")
            for line in text.splitlines() if block["language"] in ("", "bash", "sh") else ():
                line = re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip()
                first = line.partition(" ")[0].removeprefix(".venv/bin/")
                if first in MODULES or line.startswith(tuple(ELSEWHERE)) or first in PYTHON:
                    found[f"{page.name}: {' '.join(line.split())}"] = line
    return found


def is_run_here(line: str) -> bool:
    """Whether no entry of ELSEWHERE has the line."""
    return not line.startswith(tuple(ELSEWHERE))


COMMANDS = commands()
RUN_HERE = {place: line for place, line in COMMANDS.items() if is_run_here(line)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run and a sweep that commands may read."""
    folder = tmp_path_factory.mktemp("recorded")
    found = {"run": folder / "run", "sweep": folder / "sweep"}
    for name, arguments in (("run", []), ("sweep", ["-m", "seed=1,2"])):
        run_command("esper_soa.train", [*arguments, *TINY, f"run_dir={found[name]}"], folder)
    return found


def run_command(module: str, arguments: list[str], folder: Path) -> str:
    """What the command prints; fails where its status is not 0."""
    done = warm.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shortened(line: str, folders: dict[str, Path]) -> tuple[str, list[str]]:
    """The module of a command line of the docs, and its arguments for little work."""
    for pattern, text in SHORTER:
        line = re.sub(pattern, text, line)
    line = re.sub(r"(PYTHONPATH=\S+ )?(\.venv/bin/)?python -m (\S+)", r"\3", line)
    for name, path in folders.items():
        line = line.replace(f"{{{name}}}", str(path))
    program, *arguments = shlex.split(line)
    program = program.removeprefix(".venv/bin/")
    module = MODULES.get(program, program)
    if module in ("esper_soa.train", "esper_soa.lab.compare.command"):
        arguments = [*arguments, *LITTLE]
    return module, arguments


@pytest.mark.slow
@pytest.mark.parametrize("place", RUN_HERE)
def test_a_command_of_the_docs_runs(tmp_path: Path, folders: dict[str, Path], place: str) -> None:
    for word, launcher in (("joblib", "joblib"), ("submitit", "submitit"), ("optuna", "optuna")):
        if f"+sweep=[{word}" in place or f"+sweep={word}" in place:
            pytest.importorskip(launcher)
    module, arguments = shortened(RUN_HERE[place], folders)
    run_command(module, arguments, tmp_path)


def test_the_pages_have_commands_of_every_program() -> None:
    programs = {line.partition(" ")[0].removeprefix(".venv/bin/") for line in COMMANDS.values()}
    assert set(MODULES) <= programs
    assert len(RUN_HERE) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", "simulator.md", "running.md", "grown-networks.md"])
def test_the_python_code_of_a_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (page,) = (page for page in PAGES if page.name == name)
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"esper_soa": esper_soa}
    for code in blocks:  # one after the other, as a reader types them
        exec(code.replace("cifar_3seed", "smoke"), names)


def test_every_file_that_pages_and_settings_name_exists() -> None:
    texts = [*PAGES, *ROOT.glob("*.md"), *(ROOT / "configs").rglob("*.yaml")]
    named = {
        (text.name, path)
        for text in texts
        for path in PATH.findall(text.read_text(encoding="utf-8"))
        if not PLACEHOLDER.search(path)
    }
    assert len(named) > 100
    missing = [(text, path) for text, path in named if not (ROOT / path).exists()]
    assert [one for one in missing if not list(ROOT.glob(f"{one[1]}*"))] == []


def test_every_dependency_of_the_core_has_its_licence_on_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[<>=]", text)[0] for text in project["dependencies"]}
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([a-z-]+) \|", page, re.MULTILINE)[1:] == sorted(names, key=page.index)
