"""The command of the proof: what it declares, says, refuses, and takes up again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import warm

from benchmarks import proof
from benchmarks.proof import MAIN_SEEDS, PLAYERS, SEEDS, Watch, jobs_left, parse
from benchmarks.proof_play import (
    Data,
    Job,
    check_given,
    data_settings,
    grown_of,
    of_seed,
    plain_settings,
)
from benchmarks.timing import BenchmarkError
from benchmarks.units import Units

ROOT = Path(__file__).resolve().parents[2]
FASHION = Data("fashion32", (), "abc", 4000, 1000, 1000)
TINY = ("envs=2", "steps=2", "train_samples=32", "val_samples=32", "policy.ppo.minibatches=1")


# --- what is declared


def test_seeds_players_and_the_way_of_playing_are_declared() -> None:
    assert tuple(range(20260101, 20260111)) == SEEDS
    assert tuple(range(101, 111)) == MAIN_SEEDS
    assert PLAYERS == (
        "learned",
        "wait",
        "random",
        "heuristic",
        "schedule",
        "static_final",
        "static_large",
    )
    cfg = of_seed(FASHION, SEEDS[0], ("steps=7", "device=auto"))
    assert (cfg.name, cfg.seed, cfg.steps, cfg.device) == ("cifar_3seed", SEEDS[0], 7, "auto")
    assert cfg.policy.deterministic
    assert (cfg.compute.workers, cfg.compute.threads) == (1, 1)


@pytest.mark.parametrize(
    "given",
    [
        "seed=3",
        "data.root=/x",
        "data=fashion32",
        "policy.deterministic=false",
        "policy.name=wait",
        "run_dir=x",
        "+experiment=smoke",
    ],
)
def test_what_is_declared_cannot_be_given(given: str) -> None:
    with pytest.raises(BenchmarkError, match="is declared by the proof"):
        check_given(["steps=3", given])


def test_other_settings_can_be_given_but_not_to_the_record_of_the_declared_proof(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_given(["steps=3", "policy.init=x", "seeds=1", "task=cifar_impaired"])
    for arguments in (["steps=3"], ["--seeds", "4"], ["--main", "--seeds", "4"]):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert "--name of its own" in capsys.readouterr().err
    assert parse(["steps=3", "--name", "short"]).folder == ROOT / "runs" / "proof" / "short"
    assert parse(["--seeds", "2", "steps=3", "--results", ""]).seeds == SEEDS[:2]
    with pytest.raises(SystemExit):
        parse(["--seeds", "11", "--results", ""])
    declared = parse([])
    assert (declared.seeds, declared.name, declared.folder.name) == (SEEDS, "proof", "proof")
    assert parse(["--main"]).seeds == MAIN_SEEDS


def test_a_folder_of_cifar_may_have_any_name(tmp_path: Path) -> None:
    root = str(tmp_path / "my data, 'new' = {1}")
    data = Data("cifar10", data_settings(root), "abc", 1, 1, 1)
    assert of_seed(data, 1, ()).data.root == root
    assert data_settings("") == ()


def test_settings_are_compared_without_what_differs_between_units(tmp_path: Path) -> None:
    here = Data("cifar10", data_settings(str(tmp_path)), "abc", 1, 1, 1)
    assert plain_settings(of_seed(here, 1, ())) == plain_settings(of_seed(FASHION, 2, ()))
    assert plain_settings(of_seed(FASHION, 1, ())) != plain_settings(
        of_seed(FASHION, 1, ("steps=7",))
    )
    assert str(tmp_path) not in json.dumps(plain_settings(of_seed(here, 1, ())))


# --- what is left, and how long it takes


def half_done(tmp_path: Path) -> Units:
    """All of the first seed, learned and wait of the second, nothing of the third."""
    units = Units(tmp_path)
    for seed, players in zip(SEEDS, (PLAYERS, PLAYERS[:2]), strict=False):
        for player in players:
            slow = player == "static_large"
            units.write((FASHION.stem, seed, player), {"seconds": 50.0 if slow else 30.0})
    return units


def left(units: Units) -> list[Job]:
    return jobs_left(units, [FASHION], "c", parse(["--seeds", "3", "--results", ""]))


def test_what_is_done_is_not_played_again(tmp_path: Path) -> None:
    jobs = left(half_done(tmp_path))
    assert [(job.seed, job.players) for job in jobs] == [
        (SEEDS[1], PLAYERS[2:]),
        (SEEDS[2], PLAYERS),
    ]


def test_every_new_unit_has_a_line_with_the_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    units = half_done(tmp_path)
    keys = [(FASHION.stem, seed, player) for seed in SEEDS[:3] for player in PLAYERS]
    # 9 of 21 units took 8 * 30 + 50 seconds
    assert Watch(units, keys, 2).left() == pytest.approx(290 / 9 * 12 / 2)
    watch = Watch(units, keys, 1)
    watch.look()
    assert capsys.readouterr().out == ""
    units.write((FASHION.stem, SEEDS[1], "random"), {"seconds": 30.0})
    watch.look()
    watch.look()
    assert capsys.readouterr().out == (
        "fashion32_abc seed 20260102 random       30s; 10 of 21 units, left 5m52s\n"
    )  # 11 units of 32 seconds


def test_what_the_learned_policy_grew_is_read_back_as_it_was_written() -> None:
    topology = {"blueprint": [[3, -1]], "blend": [[0, 0]], "alpha": [[0.30000000000000004, 0.0]]}
    numbers = {"validation_accuracy": [1.0], "parameters": [7000.0], "train_flop": [1.0]}
    grown = grown_of(json.loads(json.dumps({**numbers, "topology": topology})))
    assert {name: part.tolist() for name, part in grown.topology._asdict().items()} == topology
    assert [str(part.dtype) for part in grown.topology] == [
        "torch.int64",
        "torch.int64",
        "torch.float64",
    ]


# --- the whole command


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training run from scratch."""
    folder = tmp_path_factory.mktemp("policy") / "run"
    command = [
        sys.executable,
        "-m",
        "esper_soa.train",
        "+experiment=cifar_3seed",
        *TINY,
        "rounds=1",
        "control=none",
        "policy.init=none",
        f"run_dir={folder}",
    ]
    warm.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def command_line(*more: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.proof", *TINY, "--seeds", "2", "--jobs", "2", *more]


def record_in(folder: Path) -> Mapping:
    [path] = folder.glob("*.jsonl")
    return json.loads(path.read_text().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_proof_that_is_killed_goes_on_and_comes_to_what_one_in_peace_comes_to(
    tmp_path: Path, learned: Path
) -> None:
    def command(folder: str) -> list[str]:
        return command_line(
            f"policy.init={learned}",
            "--name",
            "tiny",
            "--folder",
            str(tmp_path / folder),
            "--results",
            str(tmp_path / f"{folder}_results"),
        )

    peace = warm.run(command("peace"), cwd=ROOT, check=True, capture_output=True, text=True)
    assert "14 of 14 units are left" in peace.stdout
    cut = subprocess.Popen(command("cut"), cwd=ROOT, stdout=subprocess.DEVNULL)
    folder = tmp_path / "cut"
    deadline = time.monotonic() + 240
    while (
        len(list(folder.glob("*/*-wait.json"))) < 1
        and cut.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    os.kill(cut.pid, signal.SIGKILL)
    cut.wait()
    time.sleep(2)  # its workers notice
    held = sorted(folder.glob("*/fashion32_*.json"))
    assert 2 <= len(held) < 14
    before = {path: (json.loads(path.read_text()), path.stat().st_mtime_ns) for path in held}
    again = warm.run(command("cut"), cwd=ROOT, check=True, capture_output=True, text=True)
    assert f"{14 - len(held)} of 14 units are left" in again.stdout
    assert all(path.stat().st_mtime_ns == when for path, (_, when) in before.items())
    one = record_in(tmp_path / "peace_results")
    other = record_in(tmp_path / "cut_results")
    assert one["data"] == other["data"]
    assert one["weights"] == other["weights"]
    players = one["data"][0]["players"]
    assert list(players) == list(PLAYERS)
    assert [len(hosts) for hosts in players["learned"]["accuracy"]] == [2, 2]
    assert players["wait"]["parameters"] == [[6418, 6418]] * 2
    sizes = zip(
        players["static_final"]["parameters"], players["learned"]["parameters"], strict=True
    )
    assert all(
        6418 <= static <= grown for seeds in sizes for static, grown in zip(*seeds, strict=True)
    )
    assert all(
        flop > 0 for player in players.values() for hosts in player["train_flop"] for flop in hosts
    )


@pytest.mark.slow
def test_a_proof_of_a_policy_that_has_learned_nothing_is_refused(tmp_path: Path) -> None:
    done = warm.run(
        command_line("policy.init=none", "--results", "", "--folder", str(tmp_path / "units")),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "policy.init=none: must be a policy that has learned" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_main_runs_are_commands_of_their_own_and_go_on(tmp_path: Path, learned: Path) -> None:
    folder = tmp_path / "units"
    command = command_line(
        "--main",
        "rounds=1",
        f"policy.init={learned}",
        "--name",
        "tiny",
        "--folder",
        str(folder),
        "--results",
        str(tmp_path / "results"),
    )
    first = warm.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "2 of 2 units are left" in first.stdout
    record = record_in(tmp_path / "results")
    for seed, run in zip(record["seeds"], record["data"][0]["runs"], strict=True):
        (path,) = folder.glob(f"*/fashion32_*-{seed}-main/summary.json")
        summary = json.loads(path.read_text())
        assert run["grown"]["accuracies"] == summary["grown"]["test_accuracies"]
        assert run["control"]["accuracies"] == summary["control"]["test_accuracies"]
        assert run["seconds"] > summary["wall_seconds"]  # start and imports included
    next(folder.glob("*/fashion32_*-102-main.json")).unlink()
    again = warm.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "1 of 2 units are left" in again.stdout
    assert record_in(tmp_path / "results")["data"][0]["runs"][0] == record["data"][0]["runs"][0]


def test_no_results_of_changed_files_are_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(proof.machine, "git_commit", lambda: "1234567+")
    with pytest.raises(SystemExit) as ended:
        proof.main([])
    assert ended.value.code == 2
    assert "takes only records of a commit" in capsys.readouterr().err
