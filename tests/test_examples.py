"""The package of parts in examples/ works from a clean folder, by the real command line."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper_soa.config.env import TERM_NAMES
from esper_soa.config.registry import REWARD, find
from esper_soa.env.reward_records import RewardInputs
from esper_soa.env.user_reward import sample_inputs
from tests.builders import warm
from tests.builders.program import ENVIRONMENT, PATIENCE, TINY, command

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "own_parts"
PAGE = (ROOT / "docs" / "own_parts.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"# (my_parts/\w+\.py)\n")  # the first line of a module of the page


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """The example by itself, without the repository around it."""
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(EXAMPLE, tmp_path / "parts", ignore=ignore))


def finished(
    words: list[str], folder: Path, parts: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A process in `folder`, a clean one, that finds the package of `parts`."""
    folder.mkdir()
    path = [str(parts)] if parts is not None else []
    path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    given = {"cwd": folder, "env": ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)}}
    return warm.run(words, capture_output=True, text=True, timeout=PATIENCE, **given)


WITH_BLUEPRINTS = 'task.blueprints=["my_parts.seeds:twin","my_parts.seeds:mixer"]'


def test_a_run_is_played_with_all_of_the_example(parts: Path, tmp_path: Path) -> None:
    own = "policy.name=my_parts.agents:patient reward.mode=my_parts.rewards:thrifty run_dir=run"
    own += " rounds=1 steps=16 control=random gates.min_blending_steps=1"
    own += " gates.min_gradient_health=0 lifecycle.min_prune_age=1"
    words = command(*TINY, WITH_BLUEPRINTS, *own.split())
    done = finished(words, tmp_path / "work", parts)
    assert done.returncode == 0, done.stderr
    assert "twin of your own, code 13" in done.stdout
    assert "policy my_parts.agents:patient" in done.stdout
    (line,) = (tmp_path / "work" / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert set(record["blueprints"]) == {"twin", "mixer"}
    assert list(record["reward_terms"]) == [*TERM_NAMES, "thrifty"]
    assert sum(record["reward_terms"].values()) == pytest.approx(record["reward"]["mean"])
    assert record["reward_terms"]["compute_rent"] < 0 == record["reward_terms"]["accuracy_change"]
    assert record["ops"]["germinate"] > 1


@pytest.mark.parametrize(
    ("host", "parameters"),
    [("funnel", 2_482), pytest.param("residual", 1_762, marks=pytest.mark.slow)],
)
def test_a_run_is_played_on_the_hosts_of_the_example(
    host: str, parameters: int, parts: Path, tmp_path: Path
) -> None:
    own = f"task.host=my_parts.hosts:{host} slots=[r0c0,r0c1] policy=random control=none"
    done = finished(command(*TINY, *own.split(), "run_dir=run"), tmp_path / "work", parts)
    assert done.returncode == 0, done.stderr
    assert f"x {host} of your own, {parameters:,} parameters, slots r0c0, r0c1" in done.stdout
    assert list((tmp_path / "work" / "run" / "networks").glob("best_*.safetensors"))


def test_the_reward_of_the_example_is_what_its_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    thrifty = find(REWARD, "my_parts.rewards:thrifty", "reward.mode")
    inputs = sample_inputs(6, 3, 20, torch.device("cpu"))
    terms = thrifty(inputs)
    assert isinstance(terms, dict)
    first = inputs.step == 1
    assert torch.equal(terms["own"], torch.where(first, 0.0, inputs.accuracy_delta))
    growth = inputs.total_params / inputs.host_params - 1
    torch.testing.assert_close(terms["compute_rent"], -0.02 * growth)


@pytest.mark.slow  # test_a_run_is_played_with_all_of_the_example is the cheap twin
def test_a_policy_learns_the_example_and_is_evaluated_beside_its_agent(
    parts: Path, tmp_path: Path
) -> None:
    words = command(*TINY, WITH_BLUEPRINTS, "rounds=1", "run_dir=../run")
    learned = finished(words, tmp_path / "work", parts)
    assert learned.returncode == 0, learned.stderr
    asked = "checkpoint=../run policies=[ppo,my_parts.agents:patient] episodes=1 progress=off"
    asked += " run_dir=seen compute.engine=torch"
    words = command(*asked.split(), program="evaluate")
    done = finished(words, tmp_path / "evaluation", parts)
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "evaluation" / "seen" / "evaluation.json").read_text())
    assert set(table["policies"]) == {"ppo", "my_parts.agents:patient"}


def test_the_example_passes_its_own_check(parts: Path, tmp_path: Path) -> None:
    done = finished([sys.executable, str(parts / "check.py")], tmp_path / "work", parts)
    assert (done.returncode, done.stdout) == (0, "my_parts: all is well\n"), done.stderr


def test_a_package_that_is_not_on_the_path_is_missed_in_words(tmp_path: Path) -> None:
    done = finished(command(*TINY, WITH_BLUEPRINTS), tmp_path / "work")
    assert done.returncode == 2
    told = "must be module:name of a module that can be imported (No module named 'my_parts')"
    told += ". PYTHONPATH=<folder> says where it lies.\n"
    assert done.stderr == f"error: task.blueprints=my_parts.seeds:twin: {told}"


@pytest.fixture
def parts_of_page(tmp_path: Path) -> Path:
    """The modules that the page about own parts shows, as a package."""
    folder = tmp_path / "page"
    (folder / "my_parts").mkdir(parents=True)
    (folder / "my_parts" / "__init__.py").touch()
    for code in CODE:
        if (named := NAMED.match(code)) is not None:
            (folder / named[1]).write_text(code, encoding="utf-8")
    return folder


# What the page calls the parts that it shows.
BLUEPRINT, HOST = "my_parts.seeds:twin", "my_parts.hosts:funnel"
REWARD_OF_PAGE, AGENT = "my_parts.rewards:thrifty", "my_parts.agents:eager"
LITTLE = shlex.split(
    "rounds=1 steps=9 envs=2 train_samples=32 val_samples=16 data=synthetic "
    "data.synthetic_train=64 data.synthetic_test=32 compute.threads=1 compute.workers=1 "
    "control=none report=false run_dir=run"
)


def test_the_parts_of_the_page_pass_their_checks(parts_of_page: Path, tmp_path: Path) -> None:
    checks = [
        ("blueprint", BLUEPRINT),
        ("host", HOST),
        ("reward", REWARD_OF_PAGE),
        ("agent", AGENT),
    ]
    checks += [("blueprint", "my_parts.scaled:scaled"), ("host", "my_parts.plain:plain")]
    code = "; ".join(f"esper_soa.check_{kind}({name!r})" for kind, name in checks)
    words = [sys.executable, "-c", f"import esper_soa; {code}"]
    done = finished(words, tmp_path / "work", parts_of_page)
    assert done.returncode == 0, done.stderr
    assert all(name in PAGE for _, name in checks[:4])


def test_the_command_of_the_page_grows_its_blueprint(parts_of_page: Path, tmp_path: Path) -> None:
    text = PAGE.replace("\\\n", " ")
    (line,) = re.findall(r"^PYTHONPATH=\S+ python -m esper_soa.train (.*)$", text, re.MULTILINE)
    words = command(*shlex.split(line), *LITTLE)
    done = finished(words, tmp_path / "work", parts_of_page)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "work" / "run" / "metrics.jsonl").read_text())
    assert record["blueprints"]["twin"]["germinated"] == 2 * 2  # at env-steps 1 and 6


def test_the_other_parts_of_the_page_are_played_together(
    parts_of_page: Path, tmp_path: Path
) -> None:
    own = f"task.host={HOST}", f"reward.mode={REWARD_OF_PAGE}", f"policy.name={AGENT}"
    words = command("+experiment=cifar_3seed", *own, *LITTLE)
    done = finished(words, tmp_path / "work", parts_of_page)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "work" / "run" / "metrics.jsonl").read_text())
    assert record["ops"]["germinate"] > 1
    assert record["reward_terms"]["compute_rent"] < 0 != record["reward_terms"]["thrifty"]


def test_the_page_about_own_parts_tells_every_input_of_a_reward() -> None:
    told = re.findall(r"`(\w+)`", PAGE)
    assert [name for name in RewardInputs.__annotations__ if name not in told] == []
