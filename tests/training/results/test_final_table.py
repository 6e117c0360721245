"""The final table and summary.json."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from esper_soa.training.results.final_table import (
    Pareto,
    Speed,
    Summary,
    final_accuracy,
    print_summary,
    write_overview,
    write_summary,
)
from esper_soa.training.results.verdict import Episode, HostScore

SUMMARY = Summary(
    name="trial",
    task="cifar_baseline",
    policy="ppo",
    data="fashion32 (embedded)",
    device="cpu",
    envs=2,
    rounds=3,
    steps=5,
    grown=HostScore(
        "ppo",
        [
            Episode(
                validation_accuracies=[45.0, 44.0],
                test_accuracies=[50.0, 53.0],
                parameters=[7000.0, 8001.0],
                nets=[49.5, 52.0],
                train_flop=[3e9, 5e9],
                test_losses=[1.5, 1.3],
                all_flop=[4e9, 6e9],
                num_steps=[5, 5],
            )
        ],
    ),
    controls=[
        HostScore(
            "wait",
            [
                Episode(
                    validation_accuracies=[41.0, 43.0],
                    test_accuracies=[48.0, 49.0],
                    parameters=[6418.0, 6418.0],
                    nets=[48.0, 49.0],
                    train_flop=[2e9, 2e9],
                    test_losses=[1.7, 1.6],
                    all_flop=[2.5e9, 2.5e9],
                    num_steps=[5, 5],
                )
            ],
        )
    ],
    test_images=2000,
    validation_images=1000,
    seeds={"germinated": 9, "blended": 6, "fossilized": 4, "pruned": 2},
    reward=-1.25,
    speed=Speed(env_steps=30, seconds=12.0, train_samples=256, val_samples=128, alpha_rows=2.5),
    wall_seconds=65.0,
    pareto=Pareto(front_size=4, hypervolume=43.125),
)


def shown(summary: Summary) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_summary(summary, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, title: str) -> str:
    """The cells of the table row that starts with `title`, one blank between words."""
    line = next(line for line in text.splitlines() if line.strip().startswith(title))
    return " ".join(line.strip().removeprefix(title).split())


def test_the_table_and_the_lines_below_it_are_these() -> None:
    # means (50 + 53) / 2 and (48 + 49) / 2; sizes (7000 + 8001) / 2 = 7500.5 and 6418, rounded to
    # even; best: of the host with the highest validation accuracy
    # differences 2 and 4: mean 3, standard error 1, t of one degree of freedom 12.706; net 1.5 and
    # 3: 2.25 and 0.75; losses -0.2 and -0.3: -0.25 and 0.05; exp(1.4), exp(1.65), exp(-0.25)
    # 30 env-steps in 12 s, 10 of the control: one episode of 5 env-steps in 2 envs
    verdict = "At equal env-steps, no difference from the control (without growth) that this run "
    verdict += "could show: +3.00 points [-9.71, +15.71] for 1.17 times "
    rule = "─" * 94
    work = "256 training and 128 validation images, validated 2.5 times"
    assert (
        shown(replace(SUMMARY, perplexity=True))
        == f"""\
trial: cifar_baseline on fashion32 (embedded), policy ppo, cpu
  last env-step                            grown   without growth                   difference
 {rule}
  test loss, mean over hosts (nats)       1.4000           1.6500   -0.2500 [-0.8853, +0.3853]
  test perplexity, mean over hosts         4.055            5.207                      x 0.779
  test accuracy, mean over hosts (%)       51.50            48.50        +3.00 [-9.71, +15.71]
  test accuracy, best host (%)             50.00            49.00                        +1.00
  validation accuracy, mean (%)            44.50            42.00
  test accuracy - rent, mean over hosts    50.75            48.50        +2.25 [-7.28, +11.78]
  parameters, mean over hosts              7,500            6,418                       x 1.17
  training GFLOP, mean over hosts              4                2                       x 2.00
  GFLOP with validation, mean                  5              2.5                       x 2.00
{verdict}the parameters and 2.0 times the training FLOP.
measured 2 hosts x 1 episode (the last round), each on all 2,000 test images
chosen   best host by accuracy on V=128 of 1,000 validation images, which rewards see too
control  without growth: 10 env-steps on the same random seed, data order and images
interval 95% t interval of 2 paired differences, over hosts
seeds    9 germinated, 6 blended, 4 fossilized, 2 pruned
reward   -1.25 per episode in the last of 3 rounds
outcome  4 episodes that no other beats in accuracy, stability and size (the Pareto front)
speed    2.5 env-steps/s; 2 hosts, each with {work}
time     1m05s for 30 env-steps and 10 of the control
"""
    )


def test_several_episodes_are_compared_host_by_host_and_round_by_round(tmp_path: Path) -> None:
    more = Episode([50.0, 51.0], [60.0, 61.0], [9000.0, 9000.0], [59.0, 60.0], [6e9, 6e9])
    less = Episode([52.0, 50.0], [55.0, 60.0], [6418.0, 6418.0], [55.0, 60.0], [2e9, 2e9])
    less.num_steps.extend([5, 5])
    grown = replace(SUMMARY.grown, episodes=[*SUMMARY.grown.episodes, more])
    (control,) = SUMMARY.controls
    control = replace(control, episodes=[*control.episodes, less])
    text = shown(replace(SUMMARY, grown=grown, controls=[control]))
    # differences 2, 4, 5, 1: mean 3, deviation sqrt(10 / 3), t of three degrees of freedom 3.182
    assert row(text, "test accuracy, mean over hosts (%)") == "56.00 53.00 +3.00 [+0.09, +5.91]"
    assert row(text, "test accuracy, best host (%)") == "61.00 55.00 +6.00"
    assert "(without growth): +3.00 points [+0.09, +5.91] for 1.29 times the parameters and" in text
    assert "measured 2 hosts x 2 episodes (the last rounds), each on all 2,000 test images" in text
    assert "control  without growth: 20 env-steps" in text
    assert "30 env-steps and 20 of the control" in text
    write_summary(replace(SUMMARY, grown=grown, controls=[control]), tmp_path / "summary.json")
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["grown"]["test_accuracies"] == [60.0, 61.0]  # of the last round
    control = [episode["test_accuracies"] for episode in record["controls"][0]["episodes"]]
    assert control == [[48.0, 49.0], [55.0, 60.0]]
    assert record["controls"][0]["env_steps"] == 20


def test_one_host_and_one_episode_have_no_interval(tmp_path: Path) -> None:
    grown = HostScore(
        "ppo", [Episode([50.0], [50.0], [7000.0], [49.0], [3e9], [1.4], all_flop=[3e9])]
    )
    control = HostScore(
        "random", [Episode([48.0], [48.0], [6418.0], [48.0], [2e9], [1.6], all_flop=[2e9])]
    )
    summary = replace(SUMMARY, envs=1, grown=grown, controls=[control])
    text = shown(summary)
    assert row(text, "test accuracy, mean over hosts (%)") == "50.00 48.00 +2.00"
    assert row(text, "last env-step") == "grown random play difference"
    told = "One host in one episode says little, and has no interval: +2.00 points for 1.09 times"
    assert told in text
    assert "interval none, as there is but one pair of hosts to compare" in text
    write_summary(summary, tmp_path / "summary.json")
    record = json.loads((tmp_path / "summary.json").read_text())
    (written,) = record["controls"]
    assert written["difference"]["test_accuracy"] == {
        "mean": 2.0,
        "low": None,
        "high": None,
    }
    assert "non_finite" not in record


def test_hosts_whose_accuracy_is_not_finite_are_left_out_and_said() -> None:
    nan = math.nan
    mine = [50.0, nan, 54.0]
    theirs = [48.0, 49.0, 50.0]
    grown = HostScore("ppo", [Episode(mine, mine, [7000.0] * 3, mine, [3e9] * 3)])
    control = HostScore("wait", [Episode(theirs, theirs, [6418.0] * 3, theirs, [2e9] * 3)])
    text = shown(replace(SUMMARY, grown=grown, controls=[control]))
    assert row(text, "test accuracy, mean over hosts (%)").startswith("52.00 49.00 +3.00 [")
    assert row(text, "test accuracy, best host (%)").startswith("54.00 ")
    assert "left out 1 pairs with an accuracy that is not finite" in text
    assert "left out" not in shown(SUMMARY)


def test_the_summary_file_holds_the_record_and_what_follows_from_it(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    assert SUMMARY.grown.figures["validation_accuracy"] == 44.5  # the mean over hosts
    write_summary(replace(SUMMARY, reward=math.nan), path)
    record = json.loads(path.read_text())
    episode = {
        "validation_accuracies": [45.0, 44.0],
        "test_accuracies": [50.0, 53.0],
        "parameters": [7000.0, 8001.0],
        "nets": [49.5, 52.0],
        "train_flop": [3e9, 5e9],
        "test_losses": [1.5, 1.3],
        "settings": {},
        "all_flop": [4e9, 6e9],
        "num_steps": [5, 5],
        "validation_losses": [],
    }
    assert record["grown"] == episode | {
        "name": "ppo",
        "episodes": [episode],
        "test_accuracy": 51.5,
        "test_loss": 1.4,
        "perplexity": math.exp(1.4),
        "best": 50.0,
        "validation_accuracy": 44.5,
        "net": 50.75,
        "size": 7500.5,
        "flop": 4e9,
        "flop_with_validation": 5e9,
        "env_steps": 10,
    }
    (control,) = record["controls"]
    assert control["test_accuracy"] == 48.5
    assert control["test_accuracies"] == [48.0, 49.0]
    assert control["name"] == "wait"
    bound = pytest.approx(12.7062, abs=1e-4)  # standard errors of one degree of freedom
    intervals = {
        name: (one["mean"], (one["mean"] - one["low"]) / error, (one["high"] - one["mean"]) / error)
        for name, error in (("test_accuracy", 1.0), ("net", 0.75), ("test_loss", 0.05))
        for one in [control["difference"].pop(name)]
    }
    assert intervals == {
        "test_accuracy": (3.0, bound, bound),
        "net": (2.25, bound, bound),
        "test_loss": (pytest.approx(-0.25), bound, bound),
    }
    assert control["difference"] == {
        **{"confidence": 0.95, "outcome": "unclear", "pairs": 2, "left_out": 0},
        **{"source": "hosts", "p": pytest.approx(2 * stats.t.sf(3, 1))},
        **{"parameters": 7500.5 / 6418, "train_flop": 2.0},
    }
    assert "that this run could show: +3.00 points" in control["verdict"]
    expected = {
        "test_images": 2000,
        "validation_images": 1000,
        "seeds": {"germinated": 9, "blended": 6, "fossilized": 4, "pruned": 2},
        "pareto": {"front_size": 4, "hypervolume": 43.125},
        "data": "fashion32 (embedded)",
        "reward": None,
        "non_finite": ["reward=nan"],
    }
    assert expected.items() <= record.items()
    given = ("name", "task", "policy", "device", "envs", "rounds", "steps", "wall_seconds")
    for name in given:
        assert record[name] == getattr(SUMMARY, name), name
    plain = {"rollbacks": 0, "rounds_before": 0, "env_steps_before": 0, "budget": "steps"}
    plain |= {"perplexity": False, "policy_init": "none", "telemetry": {}, "samples": "images"}
    assert plain.items() <= record.items()
    more = {"grown", "controls", "speed", "configurations"}
    assert record.keys() == {*expected, *given, *plain, *more}
    assert record["configurations"] == []
    speed = {"env_steps": 30, "seconds": 12.0, "train_samples": 256, "val_samples": 128}
    assert record["speed"] == speed | {"alpha_rows": 2.5, "eps": 2.5}


def test_intervals_say_that_they_are_over_test_samples_and_that_of_the_loss_is_not(
    tmp_path: Path,
) -> None:
    def answered(side: HostScore, rows: list[list[int]]) -> HostScore:
        episodes = [replace(episode, answers=np.array(rows)) for episode in side.episodes]
        return replace(side, episodes=episodes, num_targets=4)

    grown = answered(SUMMARY.grown, [[4, 0, 2], [3, 1, 2]])
    controls = [answered(SUMMARY.controls[0], [[1, 0, 2], [1, 1, 2]])]
    told = replace(SUMMARY, grown=grown, controls=controls, samples="sequences")
    over = "interval 95% t interval of 2 paired differences, over hosts and test sequences"
    assert f"{over}\n" in shown(told)
    assert f"{over}; of the loss over hosts alone\n" in shown(replace(told, perplexity=True))
    write_summary(told, tmp_path / "summary.json")
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["controls"][0]["difference"]["source"] == "hosts and test sequences"


def configured() -> Summary:
    """Two episodes of three hosts with learning rates of their own beside a control of the same."""
    rates = {"settings": {"task.host_lr": [0.01, 0.123456, 0.5], "data.share": [1.0, 1.0, 0.25]}}

    def score(name: str, lead: float, size: float) -> HostScore:
        tested = [[50.0 + lead, 60.0 + lead, 40.0], [52.0 + 3 * lead, 62.0 + lead, 41.0]]
        seen = [[51.0, 41.0, 61.0], [51.0, 41.0, 61.0]]
        sizes = [[size, size + 1000, size + 500], [size, size + 2000, size + 500]]
        return HostScore(
            name,
            [
                Episode(*both, places, [one - 1 for one in both[1]], [2e9] * 3, [1.5] * 3, **rates)
                for *both, places in zip(seen, tested, sizes, strict=True)
            ],
        )

    return replace(
        SUMMARY, envs=3, grown=score("ppo", 2.0, 7000.0), controls=[score("wait", 0.0, 6418.0)]
    )


def test_configurations_of_hosts_are_told_by_their_accuracy(tmp_path: Path) -> None:
    summary = configured()
    told = [" ".join(line.split()) for line in shown(summary).splitlines()]
    first = told.index(
        "settings by env hosts test accuracy (%) without growth difference parameters"
    )
    # leads of 2 and 6: mean 4, standard error 2, t of one degree of freedom 12.706
    assert told[first + 2 : first + 5] == [
        "task.host_lr=0.1235 data.share=1 2 63.00 61.00 +2.00 8,500",
        "task.host_lr=0.01 data.share=1 2 55.00 51.00 +4.00 [-21.41, +29.41] 7,000",
        "task.host_lr=0.5 data.share=0.25 2 40.50 40.50 +0.00 7,500",
    ]
    alone = [" ".join(line.split()) for line in shown(replace(summary, controls=[])).splitlines()]
    assert "settings by env hosts test accuracy (%) parameters" in alone
    assert "task.host_lr=0.01 data.share=1 2 55.00 7,000" in alone
    (episode, _), long = summary.grown.episodes, "data.a_setting_with_a_name_that_needs_much_room"
    own = {long: [*range(3)], f"{long}_and_more": [0.5, 0.25, 0.1]}
    wide = replace(summary.grown, episodes=[replace(episode, settings=own)])
    row_ = f"{long}=1 {long}_and_more=0.25       1               62.00        8,000"
    assert f"  {row_}\n" in shown(replace(summary, grown=wide, controls=[]))
    many = {name: values * 11 for name, values in vars(episode).items() if name != "settings"} | {
        "settings": {"task.host_lr": [*range(33)]}
    }
    text = shown(replace(summary, grown=HostScore("ppo", [Episode(**many)]), controls=[]))
    assert text.count("task.host_lr=") == 32
    write_summary(summary, tmp_path / "summary.json")
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record["grown"]["test_accuracies"] == [58.0, 64.0, 41.0], "of the last round"
    assert [one["settings"]["task.host_lr"] for one in record["configurations"]] == [
        *(0.01, 0.123456, 0.5)
    ]
    assert record["configurations"][1] == {
        "settings": {"task.host_lr": 0.123456, "data.share": 1.0},
        "grown": {
            **{"name": "ppo", "test_accuracy": 63.0, "validation_accuracy": 41.0, "net": 62.0},
            **{"size": 8500.0, "flop": 2e9, "flop_with_validation": None},
        },
        "controls": [
            {
                **{"name": "wait", "test_accuracy": 61.0, "validation_accuracy": 41.0},
                **{"net": 60.0, "size": 7918.0, "flop": 2e9, "flop_with_validation": None},
            }
        ],
    }


def test_the_summary_of_several_tasks_has_their_means(tmp_path: Path) -> None:
    (episode,) = SUMMARY.grown.episodes
    speed = replace(SUMMARY.speed, env_steps=60, seconds=8.0)
    worse = [value - 10 for value in episode.validation_accuracies]
    slow = replace(
        SUMMARY,
        task="text",
        speed=speed,
        wall_seconds=61.0,
        grown=HostScore("ppo", [replace(episode, validation_accuracies=worse)]),
    )
    write_overview([SUMMARY, slow], tmp_path / "summary.json")
    scores = {"test_accuracy": 51.5, "validation_accuracy": 39.5, "net": 50.75}
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "name": "trial",
        "tasks": ["cifar_baseline", "text"],
        "policy": "ppo",
        "rounds": 3,
        "grown": scores | {"size": 7500.5, "flop": 4e9, "flop_with_validation": 5e9},
        "speed": {"env_steps": 90, "seconds": 20.0, "eps": 4.5},
        "wall_seconds": 65.0,
    }
    assert final_accuracy([SUMMARY, slow]) == 39.5
