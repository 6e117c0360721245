"""The final table and summary.json."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from esper_soa.ops.report import HostScore, Pareto, SeedCounts, Speed, Summary, print_summary, write_summary

SUMMARY = Summary(
    name="trial",
    task="cifar_baseline",
    policy="ppo",
    data="fashion32 (embedded)",
    device="cpu",
    envs=2,
    rounds=3,
    steps=5,
    grown=HostScore(accuracies=[50.0, 53.0], parameters=[7000.0, 8001.0]),
    control=HostScore(accuracies=[48.0, 49.0], parameters=[6418.0, 6418.0]),
    seeds=SeedCounts(germinated=9, blended=6, fossilized=4, pruned=2),
    reward=-1.25,
    speed=Speed(env_steps=30, seconds=12.0, train_samples=256, val_samples=128, alpha_rows=2.5),
    wall_seconds=65.0,
    pareto=Pareto(front_size=4, hypervolume=43.125),
)


def shown(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_summary(summary, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, title: str) -> list[str]:
    """The numbers of the table row that starts with `title`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(title))
    return line.strip().removeprefix(title).split()


def test_the_table_sets_grown_hosts_beside_the_same_hosts_without_growth() -> None:
    text = shown(SUMMARY)
    # means (50 + 53) / 2 and (48 + 49) / 2; sizes (7000 + 8001) / 2 = 7500.5 and 6418, rounded to even
    assert row(text, "accuracy, mean over hosts (%)") == ["51.50", "48.50", "+3.00"]
    assert row(text, "accuracy, best host (%)") == ["53.00", "49.00", "+4.00"]
    assert row(text, "parameters, mean over hosts") == ["7,500", "6,418", "+1,082"]


def test_the_table_names_data_seeds_reward_speed_and_time() -> None:
    text = shown(SUMMARY)
    for fact in (
        "trial: cifar_baseline on fashion32 (embedded), policy ppo, cpu",
        "9 germinated, 6 blended, 4 fossilised, 2 pruned",
        "-1.25 per episode in the last of 3 rounds",
        "2.5 env-steps/s at T=256, V=128, K=2.5 (N=2)",  # 30 env-steps in 12 s
        "4 episodes on the Pareto front of accuracy, stability and size, hypervolume 43.12",
        "1m05s for 30 env-steps and 10 without growth",  # one episode of 5 env-steps in 2 envs
    ):
        assert fact in text


def test_the_time_of_a_resumed_run_is_that_of_the_env_steps_it_played_itself() -> None:
    text = shown(replace(SUMMARY, rounds_before=2))
    assert "1m05s for 10 of 30 env-steps (the others before the run was resumed) and 10 without growth" in text
    assert "2.5 env-steps/s" in text  # over all rounds


def test_without_a_control_there_is_one_column() -> None:
    text = shown(replace(SUMMARY, control=None))
    assert row(text, "accuracy, mean over hosts (%)") == ["51.50"]
    assert "without growth" not in text


def test_the_final_accuracy_is_the_mean_over_hosts() -> None:
    assert SUMMARY.accuracy == 51.5


def test_the_summary_file_holds_the_record_and_what_follows_from_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(replace(SUMMARY, reward=math.nan), path)
    record = json.loads(path.read_text())
    assert record["grown"] == {"accuracies": [50.0, 53.0], "parameters": [7000.0, 8001.0], "accuracy": 51.5,
                               "best": 53.0, "size": 7500.5}  # fmt: skip
    assert record["control"]["accuracy"] == 48.5
    assert record["speed"]["eps"] == 2.5
    assert record["control_env_steps"] == 10
    assert record["seeds"] == {"germinated": 9, "blended": 6, "fossilized": 4, "pruned": 2}
    assert record["pareto"] == {"front_size": 4, "hypervolume": 43.125}
    assert record["data"] == "fashion32 (embedded)"
    assert record["reward"] is None
    assert record["non_finite"] == ["reward=nan"]
