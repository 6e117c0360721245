"""The command line as a user meets it: exit status, one clear message, start-up without torch."""

import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from esper_soa.config.arguments import prepare_arguments, show_help_or_version
from esper_soa.config.settings import EvaluateConfig, TrainConfig
from esper_soa.system.errors import UserError
from esper_soa.training.start.command import train_command
from tests.builders.program import finished


@pytest.mark.parametrize(
    ("override", "status", "told"),
    [
        ("envs=0", 2, "error: envs=0: must be in [1, 1048576]."),
        ("run_dir=file/run", 2, "error: run_dir=file/run: cannot be written (Not a directory)"),
        ("task/host=huge", 1, "Could not override 'task/host'"),
    ],
)
def test_a_mistake_has_a_status_and_words(
    tmp_path: Path, override: str, status: int, told: str
) -> None:
    (tmp_path / "file").touch()
    done = finished(override, folder=tmp_path)
    assert (done.returncode, done.stdout) == (status, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    one_line = done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert status == 1 or one_line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.ppo.lrr=4", " Did you mean policy.ppo.lr?"),
        ("rewards=net", " Did you mean reward?"),
        ("sweeps=gpus", " Did you mean sweep?"),
        ("compute.engin=torch", " Did you mean compute.engine?"),
        ("nonsense=1", ""),
        ("random_seed=3", " Did you mean seed?"),
        ("policy.lr=1", " Did you mean policy.ppo.lr or policy.imitation.lr?"),
        ("rent_weight=1", " Did you mean reward.rent_weight?"),
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
        ("reward=choice(net,simplifed)", "reward=simplifed: must be .* Did you mean simplified?"),
        ("+sweep=[joblib,gpu]", "sweep=gpu: must be .* Did you mean gpus?"),
        ("sweep=gpus", "sweep=gpus: must be added. Give [+]sweep=gpus."),
        ("budget=hour", "budget=hour: must be added. Give [+]budget=hour."),
        ("policy=PPO", "policy=PPO: must be .* Did you mean ppo?"),
        ("policy=grower", "A trained policy is policy.init=NAME"),
        ("+experiment=smoke.yaml", "must be a name without .yaml"),
    ],
)
def test_an_unknown_option_is_told_with_what_may_have_been_meant(overrides: str, told: str) -> None:
    with pytest.raises(UserError, match=told.replace("?", r"\?")):
        prepare_arguments([overrides], TrainConfig)


@pytest.mark.parametrize(
    ("words", "settings", "told"),
    [
        ("--experiment smoke", TrainConfig, "dashes. Give [+]experiment=smoke$"),
        ("--seed 3", TrainConfig, "--seed: settings have no dashes. Give seed=3$"),
        ("smoke", TrainConfig, "Give [+]experiment=smoke$"),
        ("runs/a", EvaluateConfig, "Give checkpoint=runs/a$"),
        ("+experiment=smoke", EvaluateConfig, "takes this from the run of checkpoint=$"),
        ("+experiment=smoke +sweep=optuna", TrainConfig, "Give -m [+]sweep=optuna$"),
        ("slots=[r0c0 r0c1]", TrainConfig, "slots=.r0c0: must be whole lists. Quotes"),
        ("seed=1,2", TrainConfig, "seed=1,2: must be a single value. A sweep .* -m.$"),
        ("reward=net,shaped", TrainConfig, "reward=net,shaped: must be a single value"),
        ("slots=r0c0,r0c1", TrainConfig, r"must be a list. Give slots=\[r0c0,r0c1\], or -m"),
        ("track=wandb", TrainConfig, r"track=wandb: must be a list. Give track=\[wandb\].$"),
        ("steps=1e2", TrainConfig, "steps=1e2: must be a whole number"),
        ("data.augment=maybe", TrainConfig, "must be true or false"),
    ],
)
def test_words_that_are_no_setting_with_its_value_are_told_with_what_is(
    words: str, settings: type, told: str
) -> None:
    with pytest.raises(UserError, match=told):
        prepare_arguments(words.split(" "), settings)


def test_what_flags_take_and_hydra_computes_is_left_to_hydra() -> None:
    given = ["--cfg", "job", "steps=${envs}", "slots=[r0c0,r0c1]", "tasks=['text_small envs=4']"]
    given += ["policy.schedule.fossilize=20%", "task.host_lr=[0.1,0.2]", "device='a,b'"]
    assert len(prepare_arguments(given, TrainConfig)) == len(given)
    assert prepare_arguments(["seed=1,2", "-m"], TrainConfig) == ["-m", "seed=1,2"]


@pytest.mark.parametrize(
    ("override", "passed"),
    [
        ("reward=choice(shaped,net)", "reward=choice(shaped,net)"),
        ("reward=sort(shaped,net,reverse=true)", "reward=sort(shaped,net,reverse=true)"),
        ("reward=glob([s*,net],exclude=sparse)", "reward=glob([s*,net],exclude=sparse)"),
        ("slots=choice(1,3)", "slots=choice([1],[3])"),
    ],
)
def test_what_names_several_values_in_the_words_of_hydra_passes(override: str, passed: str) -> None:
    assert prepare_arguments([override], TrainConfig) == [passed]
    assert OverridesParser.create().parse_overrides([passed])[0].is_sweep_override()


def test_shells_complete_words() -> None:
    assert prepare_arguments(["-sc", "install=bash"], TrainConfig) == ["-sc", "install=bash"]


def test_a_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.setattr(sys, "argv", ["esper-train", "+experiment=smoke"])
    with pytest.raises(SystemExit):
        train_command()
    assert capsys.readouterr().err.startswith("error: the current folder: must be one that is ")


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
        "~telemetry.anomaly.enabled",
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
