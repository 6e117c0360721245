"""Runs that start from a policy learned before, runs that imitate first, and how that fails."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from esper_soa.agent.ppo import Learner
from esper_soa.config.agent import ImitationConfig, NetworkConfig
from esper_soa.config.settings import TrainConfig
from esper_soa.system.errors import SettingError, UserError
from esper_soa.training.files import find_policy, policies
from esper_soa.training.files.checkpoint import load_checkpoint, save_checkpoint
from esper_soa.training.files.checksum import CheckpointError
from esper_soa.training.files.policies import POLICY_FORMAT, save_policy
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.saved_run import SavedRun, SavedTask, read_run
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.players import build_player
from esper_soa.training.results.anomalies import WatchState
from esper_soa.training.results.totals import RunTotals
from tests.builders.equal_runs import assert_equal_runs, content, lines, same, settings
from tests.builders.program import TINY, finished
from tests.builders.tiny_runs import fresh, resumed

CPU = torch.device("cpu")
FACTS: dict[str, object] = {
    "rounds": 40,
    "tasks": ["cifar_baseline", "cifar_impaired"],
    "data": ["fashion32"],
}


def starting(init: object, **changed: object) -> TrainConfig:
    """The small run of equal_runs with another seed, from the policy `init`."""
    cfg = settings(seed=7, **changed)
    return replace(cfg, policy=replace(cfg.policy, init=str(init)))


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three rounds."""
    path = tmp_path_factory.mktemp("before")
    fresh(settings(rounds=3), path)
    return path


@pytest.fixture
def package(before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of policies that ship, with one: the policy of `before`, named `grower`."""
    folder = tmp_path / "policies"
    folder.mkdir()
    save_policy(folder / "grower.policy", read_run(RunFolder(before).checkpoint(3), CPU), FACTS)
    monkeypatch.setattr(find_policy, "POLICY_FOLDER", folder)
    return folder


def built(cfg: TrainConfig) -> Learner:
    learner = build_player(cfg, build_world(cfg, CPU)).learner
    assert learner is not None
    return learner


def assert_taken_over(learner: Learner, before: Path) -> None:
    saved = content(before, 3)["learner"]
    state = learner.state_dict()
    for part in ("policy", "reward", "value"):
        assert isinstance(state[part], dict)
        same(dict(state[part]), saved[part], part)
    assert saved["adam"]["steps"] > 0
    assert learner.rounds == learner.train_steps == learner.skipped == int(learner.adam.steps) == 0
    assert not learner.adam.first.any()
    assert not learner.adam.second.any()


def test_the_policy_of_a_run_says_what_it_has_learned_on(tmp_path: Path) -> None:
    data = [{"name": name, "source": "there", "identity": name} for name in ("a", "b", "a")]
    names = ("one", "two", "three")
    tasks = {
        name: SavedTask(RunTotals(rounds_done=5), facts)
        for name, facts in zip(names, data, strict=True)
    }
    given = asdict(settings())
    given["policy"] |= {"observe": ["data.share"], "network": {"hidden": 8, "layers": 3}}
    given["task"]["blueprints"] = ["norm", "parts:mine", "parts:other"]
    learner = {name: {} for name in ("policy", "adam", "reward", "value")} | {"rounds": 5}
    saved = SavedRun(tasks, given, {}, WatchState(), 1.0, learner)
    learned = policies._of_run("there", saved)
    assert learned == policies.Pretrained(
        "there",
        asdict(NetworkConfig(hidden=8, layers=3)),
        {name: {} for name in ("policy", "reward", "value")},
        {"rounds": 5, "tasks": [*names], "data": ["a", "b"]}
        | {"blueprints": ["mine", "other"], "observe": ["data.share"]},
    )
    assert str(learned) == "there: learned for 5 rounds on one, two, three with a, b"
    plain = asdict(settings())
    facts = policies._of_run("there", replace(saved, settings=plain)).facts
    assert facts == {"rounds": 5, "tasks": [*names], "data": ["a", "b"]}
    with pytest.raises(CheckpointError) as caught:
        policies._of_run("there", replace(saved, learner=None))
    told = "policy.init=there: it is of a run with policy.name=ppo, which learns nothing"
    assert str(caught.value) == told


# --- where it may come from


def test_a_run_starts_from_the_newest_checkpoint_of_a_run_folder(
    before: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_taken_over(built(starting(before)), before)
    monkeypatch.setenv("HOME", str(before.parent))
    assert_taken_over(built(starting(f"~/{before.name}")), before)


def test_a_run_starts_from_a_checkpoint_and_not_from_a_newer_one(before: Path) -> None:
    older = built(starting(RunFolder(before).checkpoint(2)))
    saved = load_checkpoint(RunFolder(before).checkpoint(2), CPU)["learner"]
    assert isinstance(saved, dict)
    assert isinstance(saved["policy"], dict)
    same(dict(older.policy.state_dict()), saved["policy"])


def test_a_run_starts_from_a_policy_that_ships_by_its_name_or_from_its_file(
    before: Path, package: Path
) -> None:
    assert find_policy.packaged_policies() == ["grower"]
    assert_taken_over(built(starting("grower")), before)
    assert_taken_over(built(starting(package / "grower.policy")), before)


def test_the_log_the_table_and_the_summary_say_what_it_started_from(
    package: Path, tmp_path: Path
) -> None:
    done = finished(*TINY, "policy.init=nowhere", "run_dir=run", folder=tmp_path)
    assert done.returncode == 2
    assert "policy.init=nowhere: there is no such policy, run folder or checkpoint" in done.stderr
    assert not (tmp_path / "run").exists()
    fresh(starting("grower", rounds=1), tmp_path / "one")
    # the first pass sees the probabilities that were played with: nothing was lost between the two
    assert lines(tmp_path / "one")[0]["update"]["ratio_error_first"] < 1e-5
    log = (tmp_path / "one" / "log.txt").read_text()
    assert (
        "start    from grower: learned for 40 rounds on cifar_baseline, cifar_impaired with "
        "fashion32\n"
    ) in log
    assert "policy ppo from grower, cpu" in log
    assert "INFO policy   ppo from grower, reward shaped, on cpu (" in log
    assert "slots r0c0, r0c1; 1 round of 3 env-steps\n" in log
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["policy_init"] == "grower"
    fresh(starting(RunFolder(package.parent / "one").path, rounds=1), tmp_path / "two")
    assert (
        "/one: learned for 1 rounds on tiny with synthetic\n"
        in (tmp_path / "two" / "log.txt").read_text()
    )


# --- going on


def test_a_run_that_started_from_a_policy_goes_on_without_it(before: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    shutil.copytree(before, gone)
    fresh(starting(gone, rounds=2), whole)
    fresh(starting(gone, rounds=1), parts)
    with pytest.raises(UserError, match=r"policy\.init: .* -> none"):
        resumed(starting("none"), parts)
    shutil.rmtree(gone)
    resumed(starting(gone, rounds=2), parts)
    assert_equal_runs(whole, parts, rounds=2)
    assert "start    from" in (whole / "log.txt").read_text()
    assert (parts / "log.txt").read_text().count("start    from") == 1


@pytest.mark.parametrize("teacher", ["schedule", pytest.param("heuristic", marks=pytest.mark.slow)])
def test_a_run_that_was_stopped_within_its_rounds_of_imitation_equals_one_that_was_not(
    tmp_path: Path, teacher: str
) -> None:
    cfg = settings(rounds=3)
    imitation = ImitationConfig(rounds=2, teacher=teacher, epochs=3)
    cfg = replace(cfg, policy=replace(cfg.policy, imitation=imitation))
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    fresh(cfg, whole)
    fresh(replace(cfg, rounds=1), parts)
    resumed(replace(cfg, rounds=2), parts)
    resumed(cfg, parts)
    assert_equal_runs(whole, parts, rounds=3)
    told = [{"cross_entropy", "agreement"} & set(line["update"]) for line in lines(whole)]
    assert told == [{"cross_entropy", "agreement"}] * 2 + [set()]
    assert ["approx_kl" in line["update"] for line in lines(whole)] == [False] * 2 + [True]
    assert [line["update"]["steps"] for line in lines(whole)] == [3] * 2 + [2]
    assert content(whole, 3)["learner"]["adam"]["steps"] == 2  # of the round of PPO


def test_rounds_of_imitation_have_the_teacher_that_is_asked_for() -> None:
    cfg = settings()
    imitation = ImitationConfig(rounds=1, teacher="schedule")
    cfg = replace(
        cfg,
        policy=replace(
            cfg.policy, imitation=imitation, schedule=replace(cfg.policy.schedule, tempo=2)
        ),
    )
    world = build_world(cfg, CPU)
    assert vars(build_player(cfg, world).teacher)["cfg"].tempo == 2
    assert build_player(settings(), world).teacher is None


# --- what fails


def test_what_leads_nowhere_is_told_with_the_names_of_what_ships(
    package: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"^policy\.init=grow: there is no such policy, run folder or checkpoint\. "
            r"Policies that ship: grower$"
        ),
    ):
        built(starting("grow"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        UserError,
        match=(
            r"^policy\.init=/.*/empty: there is no checkpoint in this folder\. Give a "
            r"checkpoint or a run folder$"
        ),
    ):
        built(starting(empty))
    (package / "grower.policy").unlink()
    told = (
        r"^policy\.init=grower: there is no such policy, run folder or checkpoint\. Policies that "
        r"ship: none yet$"
    )
    with pytest.raises(UserError, match=told):
        built(starting("grower"))


def test_an_empty_name_is_refused() -> None:
    told = (
        r"^policy\.init='': must be none, the name of a policy that ships, a run folder or a "
        r"file\.$"
    )
    with pytest.raises(SettingError, match=told):
        starting("")


def test_a_run_of_a_scripted_policy_starts_from_nothing_and_has_learned_nothing(
    tmp_path: Path,
) -> None:
    cfg = settings("heuristic", rounds=1)
    cfg = replace(cfg, policy=replace(cfg.policy, init="no such policy"))
    assert fresh(cfg, tmp_path / "run").policy_init == "none"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "INFO policy   heuristic, reward shaped, on cpu (" in log
    with pytest.raises(
        CheckpointError,
        match=(
            r"^policy\.init=/.*/run: it is of a run with policy\.name=heuristic, which "
            r"learns nothing$"
        ),
    ):
        built(starting(tmp_path / "run"))
    told = (
        r"^policy\.init=/.*/a\.policy: it is of a run with policy\.name=heuristic, which learns "
        r"nothing$"
    )
    with pytest.raises(CheckpointError, match=told):
        save_policy(
            tmp_path / "a.policy", read_run(RunFolder(tmp_path / "run").checkpoint(1), CPU), FACTS
        )


def test_other_sizes_are_refused_with_the_settings_to_give(package: Path) -> None:
    cfg = starting("grower")
    wider = replace(
        cfg, policy=replace(cfg.policy, network=NetworkConfig(hidden=16, features=8, layers=2))
    )
    with pytest.raises(UserError) as caught:
        built(wider)
    assert str(caught.value) == (
        "policy.init=grower: its network is of another size. Give policy.network.hidden=8 "
        "policy.network.layers=1 "
        "(instead of hidden=16 layers=2)"
    )


def test_a_damaged_file_is_refused_and_of_a_run_the_newest_whole_one_is_taken(
    before: Path, package: Path, tmp_path: Path
) -> None:
    path = package / "grower.policy"
    whole = path.read_bytes()
    path.write_bytes(whole[:400] + bytes([whole[400] ^ 1]) + whole[401:])
    told = (
        r"^checkpoint /.*/policies/grower\.policy: damaged \(its content is not what was written\)$"
    )
    with pytest.raises(CheckpointError, match=told):
        built(starting("grower"))
    told = (
        r"^policy\.init=/.*/policies/grower\.policy: checkpoint /.*/policies/grower\.policy: "
        r"damaged \(its content is not what was written\)$"
    )
    with pytest.raises(CheckpointError, match=told):
        built(starting(path))
    run = tmp_path / "run"
    shutil.copytree(before, run)
    newest = RunFolder(run).checkpoint(3)
    newest.write_bytes(newest.read_bytes()[:-1])
    fresh(starting(run, rounds=1), tmp_path / "next")
    log = (tmp_path / "next" / "log.txt").read_text()
    reason = "cut off, damaged, or not a checkpoint of this program"
    told = f"WARNING policy   checkpoint {newest}: {reason}; checkpoint_000002.pt is taken\n"
    assert told in log
    assert "learned for 2 rounds" in log


def test_files_of_something_else_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.policy"
    text.write_text("weights\n")
    told = (
        r"^policy\.init=/.*/text\.policy: checkpoint /.*/text\.policy: cut off, damaged, or not a "
        r"checkpoint of this program$"
    )
    with pytest.raises(CheckpointError, match=told):
        built(starting(text))
    other = tmp_path / "other.policy"
    save_checkpoint(other, {"weights": torch.zeros(3)})
    told = (
        r"^checkpoint /.*/other\.policy: is not of a training run \(the record lacks "
        r"best_accuracy\)$"
    )
    with pytest.raises(CheckpointError, match=told):
        built(starting(other))


NOT_OURS = "its file is not what this program writes"
WRONG: list[tuple[dict, str]] = [
    ({"version": 2}, "its version is 2, this program reads version 1"),
    ({"network": {"hidden": 8.0}}, f"{NOT_OURS} (the policy.network.hidden is 8.0)"),
    ({"network": 3}, f"{NOT_OURS} (the policy.network is 3)"),
    ({"facts": {"rounds": 1, "tasks": ["a"]}}, f"{NOT_OURS} (facts lacks data)"),
    ({"facts": {"rounds": 1.5, "tasks": [], "data": []}}, f"{NOT_OURS} (facts.rounds is 1.5)"),
    ({"facts": {"rounds": 1, "tasks": [3], "data": []}}, f"{NOT_OURS} (facts.tasks.0 is 3)"),
    ({"learner": []}, f"{NOT_OURS} (the policy.learner is a list)"),
    ({"learner": {"policy": {}}}, "its network does not fit these hosts (learner lacks reward)"),
    ({"more": 1}, f"{NOT_OURS} (the policy has more)"),
]


@pytest.mark.parametrize(("wrong", "told"), WRONG, ids=range(len(WRONG)))
def test_a_policy_that_this_program_would_not_have_written_is_refused(
    package: Path, wrong: dict, told: str
) -> None:
    path = package / "grower.policy"
    save_checkpoint(path, load_checkpoint(path, CPU) | wrong)
    with pytest.raises(CheckpointError) as caught:
        built(starting("grower"))
    assert str(caught.value) == f"policy.init=grower: {told}"


def test_weights_of_another_shape_or_not_finite_are_refused(package: Path) -> None:
    path = package / "grower.policy"
    whole = load_checkpoint(path, CPU)
    assert isinstance(whole["learner"], dict)
    unknown = torch.full_like(whole["learner"]["value"]["mean"], float("nan"))
    for value, told in (
        (torch.zeros(3), "is a float32 of shape [3] where a float64 of shape [] is wanted"),
        (unknown, "holds values that are not finite"),
    ):
        learner = whole["learner"] | {"value": whole["learner"]["value"] | {"mean": value}}
        save_checkpoint(path, whole | {"learner": learner})
        with pytest.raises(CheckpointError) as caught:
            built(starting("grower"))
        problem = "its network does not fit these hosts"
        assert str(caught.value) == f"policy.init=grower: {problem} (learner.value.mean {told})"


def test_a_head_that_a_policy_does_not_know_is_told(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = package / "grower.policy"
    whole = load_checkpoint(path, CPU)
    assert isinstance(whole["learner"], dict)
    weights = whole["learner"]["policy"]
    known = {name: weights[name] for name in weights if not name.startswith("heads.tempo.")}
    save_checkpoint(path, whole | {"learner": whole["learner"] | {"policy": known}})
    caplog.set_level("INFO")
    built(starting("grower"))
    assert "start    heads it does not know begin as new: tempo" in caplog.messages


def test_a_policys_file_holds_tensors_and_plain_values_alone_and_names_no_folder(
    before: Path, package: Path
) -> None:
    found = torch.load(package / "grower.policy", weights_only=True)
    assert found["format"] == POLICY_FORMAT
    assert set(found["learner"]) == {"policy", "reward", "value"}
    assert (found["network"]["hidden"], found["network"]["layers"]) == (8, 1)
    assert found["facts"] == dict(FACTS)
    assert str(before).encode() not in (package / "grower.policy").read_bytes()
