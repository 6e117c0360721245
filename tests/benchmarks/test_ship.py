"""Making a policy that ships: two small stages, a cut-off, the card, what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import warm
from program import ENVIRONMENT, PATIENCE, TINY

from benchmarks import ship
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.config.errors import UserError
from esper_soa.training import start
from esper_soa.training.build import build_world
from esper_soa.training.checkpoint import load_checkpoint
from esper_soa.training.players import build_player
from esper_soa.training.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PLAN = {
    "purpose": "Grows nothing that\nanybody needs.",
    "stages": [
        {
            "name": "first",
            "settings": [
                *TINY,
                "seed=3",
                "rounds=3",
                "checkpoint_every=1",
                "policy.imitation.rounds=2",
            ],
        },
        {
            "name": "second",
            "settings": [*TINY, "seed=4", "checkpoint_every=1", "policy.ppo.lr=1e-4"],
        },
    ],
}


def plan_file(folder: Path, **changed: object) -> Path:
    """A plan for `sprout` as a file; JSON is YAML."""
    path = folder / "sprout.yaml"
    path.write_text(json.dumps(PLAN | changed))
    return path


def command(folder: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "benchmarks.ship",
        str(folder / "sprout.yaml"),
        "--folder",
        str(folder / "runs"),
        "--into",
        str(folder / "policies"),
        *more,
    ]


def made(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    env = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    return warm.run(
        command(folder, *more), cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in one go."""
    folder = tmp_path_factory.mktemp("whole")
    plan_file(folder)
    done = made(folder, "--data-root", "/secret/images", "telemetry.progress=off")
    assert done.returncode == 0, done.stderr
    (folder / "told.txt").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_it_says_what_it_will_do_before_it_does_it(whole: Path) -> None:
    told = (whole / "told.txt").read_text().splitlines()
    assert told[0].startswith("sprout: 2 stages, then ")
    assert told[1].startswith(
        "  first: 3 rounds (2 of imitation) of 2 x 2 env-steps of 16 training images, "
        "cifar_impaired"
    )
    assert told[1].endswith(f"begins in {whole}/runs/first")
    assert told[2].startswith("  second: 2 rounds (0 of imitation)")
    assert told[-1] == f"{whole}/policies/sprout.policy and sprout.md are written"


@pytest.mark.slow
def test_every_stage_starts_from_the_one_before_and_the_last_one_ships(whole: Path) -> None:
    first, second = (RunFolder(whole / "runs" / name) for name in ("first", "second"))
    assert "start    from" not in first.log.read_text()
    assert (
        f"start    from {first.path}: learned for 3 rounds on cifar_impaired with synthetic"
        in second.log.read_text()
    )
    file = load_checkpoint(whole / "policies" / "sprout.policy", CPU)
    learner = file["learner"]
    last = load_checkpoint(second.checkpoint(2), CPU)["learner"]
    assert isinstance(learner, dict)
    assert isinstance(last, dict)
    assert isinstance(learner["policy"], dict)
    for name, weight in learner["policy"].items():
        assert torch.equal(weight, last["policy"][name]), name


@pytest.mark.slow
def test_the_card_tells_how_it_was_made_and_names_no_folder(whole: Path) -> None:
    card = (whole / "policies" / "sprout.md").read_text()
    file = load_checkpoint(whole / "policies" / "sprout.policy", CPU)
    facts = file["facts"]
    assert isinstance(facts, dict)
    assert (facts["rounds"], facts["tasks"], facts["data"]) == (
        5,
        ["cifar_impaired"],
        ["synthetic"],
    )
    assert facts["licence"] == "MIT"
    assert facts["command"] == "python -m benchmarks.ship sprout telemetry.progress=off"
    summaries = [
        json.loads((whole / "runs" / name / "summary.json").read_text())
        for name in ("first", "second")
    ]
    assert isinstance(facts["stages"], list)
    for stage, summary in zip(facts["stages"], summaries, strict=True):
        assert stage["accuracy"] == summary["grown"]["validation_accuracy"]
        assert stage["control_accuracy"] == summary["control"]["validation_accuracy"]
        assert stage["env_steps"] == summary["rounds"] * 4
        assert (
            f"| {summary['grown']['accuracy']:.2f} | {summary['control']['accuracy']:.2f} |" in card
        )
        assert "'policy.imitation.rounds=2'" in str(stage["settings"]) or stage["name"] == "second"
        assert len(stage["data_identity"]) == 64
        assert stage["data_identity"] in card
    assert [stage["seed"] for stage in facts["stages"]] == [3, 4]
    assert "Grows nothing that anybody needs." in card
    assert "policy.init=sprout" in card
    assert "| first | cifar_impaired | synthetic | 3 | 3 (2) | 12 |" in card
    everything = card.encode() + (whole / "policies" / "sprout.policy").read_bytes()
    for place in (str(whole), "/secret", str(ROOT), str(Path.home())):
        assert place.encode() not in everything, place


@pytest.mark.slow
def test_what_ended_is_not_done_again_and_results_go_into_the_card(
    whole: Path, tmp_path: Path
) -> None:
    weights = (whole / "policies" / "sprout.policy").read_bytes()
    log = (whole / "runs" / "first" / "log.txt").read_bytes()
    (tmp_path / "proof.md").write_text("| policy | accuracy |\n|---|---|\n")
    (tmp_path / "evaluation.txt").write_text("played well\n")
    done = made(
        whole,
        "--results",
        f"{tmp_path}/proof.md",
        "telemetry.progress=off",
        "--results",
        f"{tmp_path}/evaluation.txt",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done in") == 2
    assert (whole / "runs" / "first" / "log.txt").read_bytes() == log
    assert (whole / "policies" / "sprout.policy").read_bytes() == weights
    card = (whole / "policies" / "sprout.md").read_text()
    assert "## Results: proof.md\n\n| policy | accuracy |" in card
    assert "## Results: evaluation.txt\n\n```\nplayed well\n```" in card


@pytest.mark.slow
def test_another_setting_after_the_end_is_refused(whole: Path) -> None:
    done = made(
        whole, "--data-root", "/secret/images", "telemetry.progress=off", "policy.ppo.gamma=0.9"
    )
    assert done.returncode == 1
    assert "first: this stage has ended with other settings" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_that_was_killed_goes_on_and_makes_the_same_policy(whole: Path, tmp_path: Path) -> None:
    plan_file(tmp_path)
    process = subprocess.Popen(
        command(tmp_path, "--data-root", "/secret/images", "telemetry.progress=off"),
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    second = RunFolder(tmp_path / "runs" / "second")
    ending = time.monotonic() + PATIENCE
    while not second.checkpoints() and process.poll() is None and time.monotonic() < ending:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "policies").exists()
    done = made(tmp_path, "--data-root", "/secret/images", "telemetry.progress=off")
    assert done.returncode == 0, done.stderr
    assert "first: 3 rounds (2 of imitation)" in done.stdout
    assert done.stdout.count("is done in") == 1
    assert "goes on in" in done.stdout
    one, other = (
        load_checkpoint(folder / "policies" / "sprout.policy", CPU) for folder in (whole, tmp_path)
    )
    assert isinstance(one["learner"], dict)
    assert isinstance(other["learner"], dict)
    for name, weight in one["learner"]["policy"].items():
        assert torch.equal(weight, other["learner"]["policy"][name]), name


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_command_and_says_so(tmp_path: Path) -> None:
    stage = {"name": "first", "settings": [*TINY, "device=cuda:77"]}
    plan_file(tmp_path, stages=[stage])
    done = made(tmp_path)
    assert done.returncode == 1
    assert "error: stage first ended with status 2; the same command goes on in" in done.stderr
    assert "Traceback" not in done.stderr


BAD: list[tuple[dict, str]] = [
    ({"stages": []}, "must hold `purpose`, a text, and `stages`, a list"),
    ({"more": 1}, "must hold `purpose`"),
    ({"stages": [{"name": "a"}]}, "every stage must have `name` and `settings`"),
    (
        {"stages": [{"name": "a", "settings": []}] * 2},
        "must be different and fit for folders, not a, a",
    ),
    ({"stages": [{"name": "../a", "settings": []}]}, "fit for folders"),
    ({"stages": [{"name": "a", "settings": ["envs=0"]}]}, "stage a: envs=0: must be in"),
    (
        {"stages": [{"name": "a", "settings": ["nonsense=1"]}]},
        "stage a: nonsense: there is no such setting",
    ),
    (
        {"stages": [{"name": "a", "settings": ["data.root=x"]}]},
        "stage a: data.root=x is not for a plan",
    ),
    ({"stages": [{"name": "a", "settings": ["resume=x"]}]}, "stage a: resume=x is not for a plan"),
    (
        {"stages": [{"name": "a", "settings": []}, {"name": "b", "settings": ["policy.init=x"]}]},
        "stage b: policy.init=x is not for a plan",
    ),
]


@pytest.mark.parametrize(("wrong", "told"), BAD, ids=range(len(BAD)))
def test_a_plan_that_cannot_work_is_refused_before_anything_is_trained(
    tmp_path: Path, wrong: dict, told: str
) -> None:
    with pytest.raises(UserError) as caught:
        ship.jobs_of(ship.read_plan(str(plan_file(tmp_path, **wrong))), tmp_path / "runs", [])
    assert told in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_files_of_cifar10_are_for_the_stages_that_ask_for_them_and_stay_out_of_the_card(
    tmp_path: Path,
) -> None:
    stages = [{"name": "a", "settings": TINY}, {"name": "b", "settings": ["data=cifar10"]}]
    plan = ship.read_plan(str(plan_file(tmp_path, stages=stages)))
    first, second = ship.jobs_of(plan, tmp_path / "runs", ["envs=3"], "/secret/images")
    assert (first.settings.data.root, second.settings.data.root) == ("", "/secret/images")
    assert second.given == ["data=cifar10", "envs=3"]


def test_a_plan_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(UserError, match="plan=sprout: there is no such plan. Give one of grower"):
        ship.read_plan("sprout")


def test_the_first_stage_may_start_from_somewhere(tmp_path: Path) -> None:
    stages = [
        {"name": "a", "settings": [*TINY, "policy.init=sprout"]},
        {"name": "b", "settings": TINY},
    ]
    first, second = ship.jobs_of(
        ship.read_plan(str(plan_file(tmp_path, stages=stages))), tmp_path / "a b", []
    )
    assert first.settings.policy.init == "sprout"
    assert second.settings.policy.init == str(tmp_path / "a b" / "a")


@pytest.mark.parametrize("name", sorted(path.stem for path in ship.PLANS.glob("*.yaml")))
def test_the_plans_of_the_project_compose(name: str, tmp_path: Path) -> None:
    jobs = ship.jobs_of(ship.read_plan(name), tmp_path, [])
    assert jobs[0].settings.policy.imitation.rounds > 0
    assert len({json.dumps(vars(job.settings.policy.network)) for job in jobs}) == 1, (
        "sizes must be the same"
    )
    assert len({job.settings.seed for job in jobs}) == len(jobs)


# --- the files in the package


def test_every_policy_that_ships_has_a_card_and_starts_a_run() -> None:
    for name in start.shipped():
        card = (start.POLICIES / f"{name}.md").read_text(encoding="utf-8")
        assert f"policy.init={name}" in card
        file = load_checkpoint(start.find_policy(name), CPU)
        sizes = [f"policy.network.{key}={size}" for key, size in dict(file["network"]).items()]  # type: ignore[arg-type]
        plan = ship.Plan(name, "", [ship.Stage("a", [*TINY, f"policy.init={name}", *sizes])])
        cfg = ship.jobs_of(plan, Path("nowhere"), [])[0].settings
        assert isinstance(build_player(cfg, build_world(cfg, CPU)).agent, RecurrentPolicy)
