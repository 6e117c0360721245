"""Making a policy that ships: two small stages, a cut-off, the card, what is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm
from program import ENVIRONMENT, PATIENCE, TINY, wait_until

from benchmarks import ship
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.system.errors import UserError
from esper_soa.training.files import find_policy
from esper_soa.training.files.checkpoint import load_checkpoint
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.players import build_player

ROOT = Path(__file__).resolve().parents[2]
ENV = ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
CPU = torch.device("cpu")
OFTEN = [*TINY, "checkpoint_every=1"]
PLAN = {
    "purpose": "Grows nothing that\nanybody needs.",
    "stages": [
        {"name": "first", "settings": [*OFTEN, "seed=3", "rounds=3", "policy.imitation.rounds=2"]},
        {"name": "second", "settings": [*OFTEN, "seed=4", "policy.ppo.lr=1e-4"]},
    ],
}
GIVEN = ("--data-root", "/secret/images", "telemetry.progress=off")


def plan_file(folder: Path, **changed: object) -> Path:
    """A plan for `sprout` as a file; JSON is YAML."""
    path = folder / "sprout.yaml"
    path.write_text(json.dumps(PLAN | changed))
    return path


def command(folder: Path, *more: str) -> list[str]:
    asked = f"{folder}/sprout.yaml --folder {folder}/runs --into {folder}/policies"
    return [sys.executable, "-m", "benchmarks.ship", *asked.split(), *more]


def made(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    asked = command(folder, *more)
    return warm.run(asked, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=PATIENCE)


def weights_of(file: Path) -> dict:
    """The policy in a file of one, or in a checkpoint."""
    learner = load_checkpoint(file, CPU)["learner"]
    assert isinstance(learner, dict)
    return learner["policy"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made in one go."""
    folder = tmp_path_factory.mktemp("whole")
    plan_file(folder)
    done = made(folder, *GIVEN)
    assert done.returncode == 0, done.stderr
    (folder / "told.txt").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_it_says_what_it_will_do_and_does_every_stage_from_the_one_before(whole: Path) -> None:
    told = (whole / "told.txt").read_text().splitlines()
    assert told[0].startswith("sprout: 2 stages, then ")
    assert told[1].startswith(
        "  first: 3 rounds (2 of imitation) of 2 x 2 env-steps of 16 training images, "
        "cifar_impaired"
    )
    assert told[1].endswith(f"begins in {whole}/runs/first")
    assert told[2].startswith("  second: 2 rounds (0 of imitation)")
    assert told[-1] == f"{whole}/policies/sprout.policy and sprout.md are written"
    first, second = (RunFolder(whole / "runs" / name) for name in ("first", "second"))
    assert "start    from" not in first.log.read_text()
    assert (
        f"start    from {first.path}: learned for 3 rounds on cifar_impaired with synthetic"
        in second.log.read_text()
    )
    last = weights_of(second.checkpoint(2))
    for name, weight in weights_of(whole / "policies" / "sprout.policy").items():
        assert torch.equal(weight, last[name]), name


@pytest.mark.slow
def test_the_card_tells_how_it_was_made_and_names_no_folder(whole: Path) -> None:
    card = (whole / "policies" / "sprout.md").read_text()
    facts = load_checkpoint(whole / "policies" / "sprout.policy", CPU)["facts"]
    assert isinstance(facts, dict)
    told = [facts[name] for name in ("rounds", "tasks", "data", "licence")]
    assert told == [5, ["cifar_impaired"], ["synthetic"], "MIT"]
    assert facts["command"] == "python -m benchmarks.ship sprout telemetry.progress=off"
    summaries = [
        json.loads((whole / "runs" / name / "summary.json").read_text())
        for name in ("first", "second")
    ]
    assert isinstance(facts["stages"], list)
    for stage, summary in zip(facts["stages"], summaries, strict=True):
        grown, control = (summary[name]["validation_accuracy"] for name in ("grown", "control"))
        assert (stage["accuracy"], stage["control_accuracy"]) == (grown, control)
        assert stage["env_steps"] == summary["rounds"] * 4
        assert f"| {grown:.2f} | {control:.2f} |" in card
        assert "'policy.imitation.rounds=2'" in str(stage["settings"]) or stage["name"] == "second"
        assert len(stage["data_identity"]) == 64
        assert stage["data_identity"] in card
    assert [stage["seed"] for stage in facts["stages"]] == [3, 4]
    row = "| first | cifar_impaired | synthetic | 3 | 3 (2) | 12 |"
    for words in ("Grows nothing that anybody needs.", "policy.init=sprout", row):
        assert words in card
    everything = card.encode() + (whole / "policies" / "sprout.policy").read_bytes()
    for place in (str(whole), "/secret", str(ROOT), str(Path.home())):
        assert place.encode() not in everything, place


@pytest.mark.slow
def test_what_ended_is_not_done_again_and_results_are_in_the_card(
    whole: Path, tmp_path: Path
) -> None:
    weights = (whole / "policies" / "sprout.policy").read_bytes()
    log = (whole / "runs" / "first" / "log.txt").read_bytes()
    (tmp_path / "proof.md").write_text("| policy | accuracy |\n|---|---|\n")
    (tmp_path / "evaluation.txt").write_text("played well\n")
    results = ("--results", f"{tmp_path}/proof.md", "--results", f"{tmp_path}/evaluation.txt")
    done = made(whole, *results, "telemetry.progress=off")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("is done in") == 2
    assert (whole / "runs" / "first" / "log.txt").read_bytes() == log
    assert (whole / "policies" / "sprout.policy").read_bytes() == weights
    card = (whole / "policies" / "sprout.md").read_text()
    assert "## Results: proof.md\n\n| policy | accuracy |" in card
    assert "## Results: evaluation.txt\n\n```\nplayed well\n```" in card
    done = made(whole, *GIVEN, "policy.ppo.gamma=0.9")
    assert done.returncode == 1
    assert "first: this stage has ended with other settings" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_that_was_killed_goes_on_and_makes_the_same_policy(whole: Path, tmp_path: Path) -> None:
    plan_file(tmp_path)
    asked = command(tmp_path, *GIVEN)
    silent = subprocess.DEVNULL
    process = subprocess.Popen(asked, cwd=ROOT, env=ENV, stdout=silent, start_new_session=True)
    second = RunFolder(tmp_path / "runs" / "second")
    wait_until(lambda: len(second.checkpoints()) > 0, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "policies").exists()
    done = made(tmp_path, *GIVEN)
    assert done.returncode == 0, done.stderr
    assert "first: 3 rounds (2 of imitation)" in done.stdout
    assert done.stdout.count("is done in") == 1
    assert "goes on in" in done.stdout
    one, other = (weights_of(folder / "policies" / "sprout.policy") for folder in (whole, tmp_path))
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_command_and_says_so(tmp_path: Path) -> None:
    stage = {"name": "first", "settings": [*TINY, "device=cuda:77"]}
    plan_file(tmp_path, stages=[stage])
    done = made(tmp_path)
    assert done.returncode == 1
    assert "error: stage first ended with status 2; the same command goes on in" in done.stderr
    assert "Traceback" not in done.stderr


def staged(name: str, *settings: str) -> dict:
    """What a plan of one stage says of its stages."""
    return {"stages": [{"name": name, "settings": list(settings)}]}


BAD: list[tuple[dict, str]] = [
    ({"stages": []}, "must hold `purpose`, a text, and `stages`, a list"),
    ({"more": 1}, "must hold `purpose`"),
    ({"stages": [{"name": "a"}]}, "every stage must have `name` and `settings`"),
    ({"stages": staged("a")["stages"] * 2}, "be different and fit for folders"),
    (staged("../a"), "fit for folders"),
    (staged("a", "envs=0"), "stage a: envs=0: must be in"),
    (staged("a", "nonsense=1"), "stage a: nonsense: there is no such setting"),
    (staged("a", "data.root=x"), "stage a: data.root=x is not for a plan"),
    (staged("a", "resume=x"), "stage a: resume=x is not for a plan"),
    (
        {"stages": [*staged("a")["stages"], *staged("b", "policy.init=x")["stages"]]},
        "stage b: policy.init=x is not for a plan",
    ),
]


@pytest.mark.parametrize(("wrong", "told"), BAD, ids=range(len(BAD)))
def test_a_plan_that_cannot_work_is_refused(tmp_path: Path, wrong: dict, told: str) -> None:
    with pytest.raises(UserError) as caught:
        ship.jobs_of(ship.read_plan(str(plan_file(tmp_path, **wrong))), tmp_path / "runs", [])
    assert told in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_files_of_cifar10_are_for_the_stages_that_ask_for_them(tmp_path: Path) -> None:
    stages = [{"name": "a", "settings": TINY}, {"name": "b", "settings": ["data=cifar10"]}]
    plan = ship.read_plan(str(plan_file(tmp_path, stages=stages)))
    first, second = ship.jobs_of(plan, tmp_path / "runs", ["envs=3"], "/secret/images")
    assert (first.settings.data.root, second.settings.data.root) == ("", "/secret/images")
    assert second.given == ["data=cifar10", "envs=3"]


def test_a_plan_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(UserError, match="plan=sprout: there is no such plan. Give one of grower"):
        ship.read_plan("sprout")


def test_the_first_stage_may_start_from_somewhere(tmp_path: Path) -> None:
    stages = [*staged("a", *TINY, "policy.init=sprout")["stages"], *staged("b", *TINY)["stages"]]
    plan = ship.read_plan(str(plan_file(tmp_path, stages=stages)))
    first, second = ship.jobs_of(plan, tmp_path / "a b", [])
    assert first.settings.policy.init == "sprout"
    assert second.settings.policy.init == str(tmp_path / "a b" / "a")


@pytest.mark.parametrize("name", sorted(path.stem for path in ship.PLANS.glob("*.yaml")))
def test_the_plans_of_the_project_compose(name: str, tmp_path: Path) -> None:
    jobs = ship.jobs_of(ship.read_plan(name), tmp_path, [])
    assert jobs[0].settings.policy.imitation.rounds > 0
    assert len({str(job.settings.policy.network) for job in jobs}) == 1, "sizes must be the same"
    assert len({job.settings.seed for job in jobs}) == len(jobs)


# --- the files in the package


def test_every_policy_that_ships_has_a_card_and_starts_a_run() -> None:
    for name in find_policy.packaged_policies():
        card = (find_policy.POLICIES / f"{name}.md").read_text(encoding="utf-8")
        assert f"policy.init={name}" in card
        file = load_checkpoint(find_policy.find_policy(name), CPU)
        sizes = [f"policy.network.{key}={size}" for key, size in dict(file["network"]).items()]  # type: ignore[arg-type]
        plan = ship.Plan(name, "", [ship.Stage("a", [*TINY, f"policy.init={name}", *sizes])])
        cfg = ship.jobs_of(plan, Path("nowhere"), [])[0].settings
        assert isinstance(build_player(cfg, build_world(cfg, CPU)).agent, RecurrentPolicy)
