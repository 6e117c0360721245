"""The command line as a user meets it: exit status, one clear message, start-up without torch."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from esper_soa.config.arguments import prepare_arguments, show_help_or_version
from esper_soa.config.paths import config_dir
from esper_soa.config.settings import TrainConfig
from esper_soa.system.errors import UserError
from esper_soa.training.start.command import run_command
from tests.builders.program import ENVIRONMENT, finished


@pytest.mark.parametrize(
    ("override", "status", "told"),
    [
        ("envs=0", 2, "error: envs=0: must be in [1, 1048576]."),
        ("env=4", 2, "error: env: there is no such setting. Did you mean envs?"),
        ("run_dir=file/run", 2, "error: run_dir=file/run: cannot be written (Not a directory)"),
        ("run_dir=.", 2, "already holds the results of a run (summary.json)"),
        ("task/host=huge", 1, "Could not override 'task/host'"),
    ],
)
def test_a_mistake_has_a_status_and_words(
    tmp_path: Path, override: str, status: int, told: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "summary.json").write_text("{}")
    done = finished(override, folder=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    one_line = done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert status == 1 or one_line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "summary.json"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.ppo.lrr=4", " Did you mean policy.ppo.lr?"),
        ("rewards=net", " Did you mean reward?"),
        ("sweeps=gpus", " Did you mean sweep?"),
        ("compute.engin=torch", " Did you mean compute.engine?"),
        ("nonsense=1", ""),
    ],
)
def test_an_unknown_setting_is_told_with_what_may_have_been_meant(override: str, told: str) -> None:
    with pytest.raises(UserError) as raised:
        prepare_arguments([override], TrainConfig)
    assert str(raised.value) == f"{override.split('=')[0]}: there is no such setting.{told}"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("+experiment=smok", "experiment=smok: must be .* Did you mean smoke?"),
        ("experiment=smoke", "experiment=smoke: must be added. Give [+]experiment=smoke."),
        ("reward=shaped,simplifed", "reward=simplifed: must be .* Did you mean simplified?"),
        ("+sweep=[joblib,gpu]", "sweep=gpu: must be .* Did you mean gpus?"),
        ("sweep=gpus", "sweep=gpus: must be added. Give [+]sweep=gpus."),
        ("budget=hour", "budget=hour: must be added. Give [+]budget=hour."),
    ],
)
def test_an_unknown_option_is_told_with_what_may_have_been_meant(overrides: str, told: str) -> None:
    with pytest.raises(UserError, match=told.replace("?", r"\?")):
        prepare_arguments([overrides], TrainConfig)


@pytest.mark.parametrize(
    "overrides",
    [
        *("task=my_task --config-dir=mine", "task=my_task -cd mine", "reward=${mode}"),
        *("task=my_task hydra.searchpath=[mine]", "reward=${oc.env:REWARD}", "policy=mine:Agent"),
    ],
)
def test_options_of_other_folders_and_interpolations_are_left_to_hydra(overrides: str) -> None:
    given = overrides.split()
    assert sorted(prepare_arguments(given, TrainConfig)) == sorted(given)


def test_the_settings_are_shown_without_running(tmp_path: Path) -> None:
    given = ["+experiment=smoke", "device=cuda:1", "seed=${modulo:7,4}"]
    done = finished(*given, "--cfg", "job", "--resolve", folder=tmp_path)
    assert done.returncode == 0
    assert "\ndevice: cuda:1\n" in done.stdout
    assert "\nseed: 3\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_settings_hold_and_hydra_knows_passes_with_flags_anywhere() -> None:
    given = [
        "hydra.job.name=x",
        "hydra/launcher=joblib",
        "policy.ppo.probability_floor.op=0.01",
        "task=cifar_minimal",
        "~telemetry.anomaly.patience",
        "policy@policy=wait",
        "reward.mode=net",
    ]
    for flag in ("-m", "--multirun", "-r", "--run", "--resolve"):
        assert prepare_arguments([*given, flag, "envs=0"], TrainConfig) == [flag, *given, "envs=0"]


@pytest.mark.parametrize("program", ["train", "evaluate"])
def test_help_fits_a_screen_and_the_version_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, program: str
) -> None:
    shown = finished("--help", folder=tmp_path, program=program)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert 8 < shown.stdout.count("\n") <= 28
    named = {"train": "rounds steps batch_size val_samples", "evaluate": "checkpoint policies"}
    assert [name for name in named[program].split() if name not in shown.stdout] == []
    if program == "train":
        assert "\ngates: permissive, strict\n" in shown.stdout
        assert "hydra: " not in shown.stdout
    version = finished("--version", folder=tmp_path, program=program)
    assert version.returncode == 0
    others = (f"{one} {metadata.version(one)}" for one in ("torch", "tensordict", "hydra-core"))
    python = f"Python {platform.python_version()}"
    told = f"esper-soa {metadata.version('esper-soa')} ({', '.join([python, *others])})\n"
    assert version.stdout == told
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(sys, "argv", ["esper", "-h"])
    assert show_help_or_version(program)
    assert capsys.readouterr().out == shown.stdout


@pytest.mark.parametrize(
    ("words", "slow"),
    [
        ("--help", {"torch", "numpy", "hydra", "omegaconf", "rich", "importlib.metadata"}),
        ("--cfg job", {"torch", "numpy", "tensordict", "rich"}),
    ],
)
def test_what_answers_at_once_imports_nothing_slow(words: str, slow: set[str]) -> None:
    program = f"""
import atexit, sys, esper_soa.train
sys.argv = ["esper-train", *{words.split()}]
atexit.register(lambda: print(sorted({slow} & set(sys.modules))))
esper_soa.train.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.endswith("\n[]\n")


@pytest.mark.parametrize(
    ("words", "module"),
    [
        ("--plan", "plan.plan"),
        ("--plan=json", "plan.plan"),
        ("--check-device", "check_device"),
        *((words, "sweep.plugins") for words in ("-m", "--multirun", "hydra/launcher=joblib")),
        *((words, "sweep.plugins") for words in ("hydra/sweeper=basic", "+sweep=gpus")),
    ],
)
def test_a_part_of_the_lab_that_is_missing_is_named_with_what_asked_for_it(
    words: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, f"esper_soa.lab.{module}", None)
    monkeypatch.setattr(sys, "argv", ["esper-train", "seed=1", words])
    with pytest.raises(SystemExit) as end:
        run_command("train")
    told = f"error: {words} needs esper_soa.lab.{module}, which is not installed\n"
    assert (end.value.code, capsys.readouterr()) == (2, ("", told))


def test_an_evaluation_answers_no_question_about_a_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["esper-evaluate", "--plan"])
    with pytest.raises(SystemExit) as end:
        run_command("evaluate")
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --plan\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--plan", "--plan needs esper_soa.lab, which is not installed"),
        ("hydra.mode=MULTIRUN", "a sweep needs esper_soa.lab, which is not installed"),
        ("--cfg job", ""),
    ],
)
def test_what_needs_the_lab_says_so_without_it(tmp_path: Path, words: str, told: str) -> None:
    root = Path(config_dir()).parent
    (tmp_path / "esper_soa").mkdir()
    for part in [*root.glob("esper_soa/*"), root / "configs", root / "hydra_plugins"]:
        if part.name != "lab":
            (tmp_path / part.relative_to(root)).symlink_to(part)
    asked = [sys.executable, "-m", "esper_soa.train", *words.split()]
    given = {"cwd": tmp_path, "env": ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}}
    done = subprocess.run(asked, capture_output=True, text=True, **given)
    assert (done.returncode, done.stderr) == ((2, f"error: {told}\n") if told else (0, ""))
    assert not (tmp_path / "runs").exists()
    asked = [sys.executable, "-c", "import esper_soa; esper_soa.check_host"]
    done = subprocess.run(asked, capture_output=True, text=True, **given)
    *_, last = done.stderr.splitlines()
    assert last == "ImportError: esper_soa.check_host needs esper_soa.lab, which is not installed"
