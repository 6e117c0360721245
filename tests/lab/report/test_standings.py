"""Groups of runs beside each other."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from esper_soa.lab.report.groups import RunGroup, groups_of, pairs, standings
from esper_soa.lab.report.run_files import find_runs, part, read_run
from esper_soa.lab.report.sections import make_drawing
from esper_soa.lab.report.text import flop_in_words, p_value, tiles_of, verdict_of
from esper_soa.training.results.statistics import estimate
from tests.builders.report_runs import line, make_run, summary


def group(
    folder: Path, label: str, accuracies: list[float | None], first_seed: int = 0
) -> RunGroup:
    """Runs that end at these accuracies; None has not ended."""
    runs = []
    for seed, accuracy in enumerate(accuracies, first_seed):
        ended = None if accuracy is None else summary([accuracy - 1, accuracy + 1])
        runs.append(read_run(make_run(folder / f"{label}{seed}", seed=seed, ended=ended)))
    return RunGroup(label, runs)


def test_a_run_counts_once_and_those_that_have_not_ended_are_left_out(tmp_path: Path) -> None:
    last = group(tmp_path, "low", [30.0, 31.0])
    found, low = standings([last, group(tmp_path, "a", [40.0, 42.0, 44.0, None])])
    assert (found.label, low.label) == ("a", "low"), "the highest group stands first"
    assert (found.runs, found.left_out) == (3, 1)
    # standard error 2 / sqrt(3), t of two degrees of freedom 4.3027
    assert found.accuracy == pytest.approx((42.0, 42 - 4.9683, 42 + 4.9683), abs=1e-3)
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(2.0)


def test_a_group_tells_the_flop_of_its_hosts_and_a_gain_where_every_run_has_a_control(
    tmp_path: Path,
) -> None:
    ends = []
    for size, flop in ((5000.0, 1e9), (8000.0, 4e9)):
        end = summary([40.0, 42.0])
        sizes = {"size": size, "flop": flop}
        ends.append(end | {"grown": {"test_accuracy": 41.0} | sizes})
    ends.append(ends[0] | {"controls": []})
    runs = [
        read_run(make_run(tmp_path / str(seed), seed=seed, ended=end))
        for seed, end in enumerate(ends)
    ]
    both, one_alone = (standings([RunGroup("a", some)])[0] for some in (runs[:2], runs))
    assert (both.parameters, both.train_flop) == (6500.0, 2.5e9)
    assert both.gain is not None
    assert one_alone.gain is None, "the mean gain of some is not that of the group"


def test_pairs_are_tested_over_the_random_seeds_of_both_and_corrected(tmp_path: Path) -> None:
    groups = [
        group(tmp_path, "a", [1.0, 2.0, 3.0, 4.0]),
        group(tmp_path, "b", [11.0, 12.5, 13.0, 14.0]),
        group(tmp_path, "c", [2.5, 4.0, 1.5], first_seed=2),
        group(tmp_path, "d", [2.5, 3.5], first_seed=7),
    ]
    found = pairs(groups)
    assert [(pair.label, pair.other, pair.seeds) for pair in found] == [
        *(("a", "b", 4), ("b", "c", 2), ("a", "c", 2)),
    ]
    # differences of a and b: mean -10.125, error 0.125, three degrees of freedom
    p = 2 * stats.t.sf(81, 3)
    assert (found[0].found.interval.mean, found[0].found.p) == (-10.125, pytest.approx(p))
    assert found[0].adjusted == pytest.approx(3 * p)
    assert found[2].adjusted == found[2].found.p
    (back,) = pairs([groups[0], RunGroup("b", groups[1].runs[::-1])])
    assert back.found == found[0].found, "pairs are of one random seed, in whatever order"
    assert pairs(groups[2:]) == [], "of other random seeds there are no pairs"
    told = verdict_of([groups[1], groups[3]])
    assert told.endswith("Without two random seeds in common they are not compared.")


def test_runs_of_one_random_seed_count_by_their_mean(tmp_path: Path) -> None:
    first, other = (group(tmp_path, name, [40.0, 43.0]) for name in ("a", "b"))
    again = group(tmp_path, "c", [50.0, 53.0])
    (pair,) = pairs([RunGroup("twice", [*first.runs, *again.runs]), other])
    assert (pair.seeds, pair.found.interval) == (2, (5.0, 5.0, 5.0))


def test_groups_and_pairs_are_over_test_samples_where_all_runs_have_the_answers(
    tmp_path: Path,
) -> None:
    draws = np.random.default_rng(0)
    groups = []
    for name in "ab":
        runs = []
        for seed, run in enumerate(group(tmp_path, name, [50.0, 52.0, 54.0]).runs):
            grown, control = draws.normal([[run.accuracy], [run.accuracy - 2]], 20.0, (2, 8))
            both = {"grown": grown, "wait": control}
            both["grown"] += 50.0 + 2 * seed - grown.mean()
            runs.append(replace(run, samples=both))
        groups.append(RunGroup(name, runs))
    mine, theirs = ([run.samples["grown"] for run in one.runs] for one in groups)
    (pair,) = pairs(groups)
    assert pair.found == estimate([0.0] * 3, 0.95, np.subtract(mine, theirs))
    assert pair.found.sampled
    found = next(row for row in standings(groups) if row.label == "a")
    assert found.accuracy == estimate([50.0, 52.0, 54.0], 0.95, np.array(mine)).interval
    gains = np.subtract(mine, [run.samples["wait"] for run in groups[0].runs])
    assert found.gain == estimate([2.0] * 3, 0.95, gains).interval
    lacking = RunGroup("b", [replace(groups[1].runs[0], samples={}), *groups[1].runs[1:]])
    (pair,) = pairs([groups[0], lacking])
    assert not pair.found.sampled


def test_the_verdict_names_the_highest_group_and_how_sure_that_is(tmp_path: Path) -> None:
    ends = [1.0, 2.0, 3.0, 4.0]
    apart = [group(tmp_path, "a", ends), group(tmp_path, "b", [11.0, 12.0, 13.0, 15.0])]
    assert verdict_of(apart) == (
        "“b” ends highest, 12.75 [10.03, 15.47] %, clearly ahead of “a” at 2.50 [0.45, 4.55] % "
        "(p = 3e-05, paired t test, corrected for 1 comparison)."
    )
    for given, tile in (
        (apart[:1], ("test accuracy", "2.50 %")),
        (apart, ("highest test accuracy", "12.75 %")),
    ):
        assert tile in [(one.title, one.value) for one in tiles_of(given)]
    assert verdict_of([apart[0], group(tmp_path, "c", [1.5, 2.5, 3.5, 0.5])]) == (
        "“a” ends highest, 2.50 [0.45, 4.55] %, not surely ahead of “c” at 2.00 [-0.05, 4.05] % "
        "(p = 0.651, paired t test, corrected for 1 comparison)."
    )


def test_the_numbers_beside_the_verdict_of_one_run_are_those_of_its_end_or_its_last_round(
    tmp_path: Path,
) -> None:
    lines = [line(1, 40.0, eps=30.0), line(2, 46.0, eps=50.0, train_flop=5e9)]
    end = summary([50.0, 53.0])
    end |= {"grown": dict(part(end, "grown"), flop=4e9)}
    ended, playing = (
        {one.title: (one.value, one.note) for one in tiles_of([RunGroup("a", [read_run(path)])])}
        for path in (make_run(tmp_path / "a", lines, ended=end), make_run(tmp_path / "b", lines))
    )
    assert ended == {
        "test accuracy": ("51.50 %", "49.50 % without growth"),
        "validation accuracy": ("49.50 %", "47.50 % without growth"),
        "parameters of a host": ("7,000", "6,418 without growth"),
        "training of a host": ("4 GFLOP", "3 GFLOP without growth"),
        "rounds": ("2", "of 4; 2 hosts x 5 env-steps"),
        "seeds germinated": ("8", "4 fossilized, 2 pruned"),
        "speed": ("40.0", "env-steps/s; 1m00s in all"),
    }
    assert playing == {
        "validation accuracy": ("46.00 %", ""),
        "parameters of a host": ("7,002", ""),
        "training of a host": ("5 GFLOP", ""),
        "rounds": ended["rounds"],
        "seeds germinated": ended["seeds germinated"],
        "speed": ("50.0", "env-steps/s"),
    }


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (
            [[40.0, 42.0], [41.0, 41.0]],
            "“0” and “1” end highest, and alike: 41.00 [28.29, 53.71] %.",
        ),
        (
            [[40.0, 41.0, 42.0]],
            "Grown hosts end ahead of the control: +2.00 points, mean of 3 runs; 3 runs end at "
            "41.00 [38.52, 43.48] %.",
        ),
        ([[None]], "Not finished: no round has come to its end yet."),
        (
            [[None, None]],
            "None of 2 runs has come to its end: what follows is how far they are.",
        ),
    ],
)
def test_the_verdict_is_a_whole_sentence(
    tmp_path: Path, groups: list[list[float | None]], words: str
) -> None:
    made = [group(tmp_path, str(place), one) for place, one in enumerate(groups)]
    assert verdict_of(made) == words


def test_the_verdict_of_rounds_without_an_accuracy_is_a_whole_sentence(tmp_path: Path) -> None:
    (run,) = group(tmp_path, "a", [None]).runs
    run = replace(run, settings={"rounds": 4}, rounds=[{}])
    told = "Not finished: 1 of 4 rounds are played."
    assert verdict_of([RunGroup("a", [run])]) == told


@pytest.mark.parametrize(
    ("gains", "words"),
    [
        (
            (2.0, 2.2),
            "Grown hosts end ahead of the control: +2.10 points [+0.83, +3.37], mean of 2 runs; "
            "{}.",
        ),
        (
            (-2.0, -2.2),
            "Grown hosts end behind the control: -2.10 points [-3.37, -0.83], mean of 2 runs; {}.",
        ),
        (
            (2.0, 3.0),
            "No difference from the control that 2 runs could show: +2.50 points [-3.85, +8.85]; "
            "{}.",
        ),
        (
            (-2.0, -3.0),
            "No difference from the control that 2 runs could show: -2.50 points [-8.85, +3.85]; "
            "{}.",
        ),
        ((2.0, None), "{}; not all of them have a control to be set beside."),
    ],
)
def test_the_verdict_of_several_seeds_is_a_whole_sentence(
    tmp_path: Path, gains: tuple[float | None, ...], words: str
) -> None:
    runs = []
    for seed, gain in enumerate(gains):
        end = summary([40.0 + 2 * seed, 40.0 + 2 * seed], gain or 0.0)
        end |= {"controls": []} if gain is None else {}
        runs.append(read_run(make_run(tmp_path / str(seed), seed=seed, ended=end)))
    # 40 and 42: standard error 1, t of one degree of freedom 12.7062
    ended = "2 runs end at 41.00 [28.29, 53.71] %"
    assert verdict_of([RunGroup("a", runs)]) == words.format(ended)
    tiles = {one.title: (one.value, one.note) for one in tiles_of([RunGroup("a", runs)])}
    over = {} if None in gains else {"over the control": f"{sum(gains) / 2:+.2f} points"}  # type: ignore[arg-type]
    values = {"runs": "2", "groups": "1", "test accuracy": "41.00 %"} | over
    assert {title: value for title, (value, _) in tiles.items()} == values | {
        "parameters of a host": "7,000"
    }
    assert tiles["runs"][1] == "2 finished"


def test_the_verdict_of_groups_corrects_for_all_comparisons(tmp_path: Path) -> None:
    ends = {"a": [1.0, 2.0, 3.0, 4.0], "b": [11.0, 12.0, 13.0, 15.0], "c": [11.5, 12.5, 14.0, 14.5]}
    apart = [group(tmp_path, name, list(values)) for name, values in ends.items()]
    # differences of c and b: mean 0.375, error 0.315, three degrees of freedom
    assert verdict_of(apart) == (
        "“c” ends highest, 13.12 [10.93, 15.32] %, not surely ahead of “b” at 12.75 [10.03, 15.47] "
        "% (p = 0.319, paired t test, corrected for 3 comparisons)."
    )
    waiting = group(tmp_path, "d", [None])
    told = "Only “a” of 2 groups has runs at their end: 2.50 [0.45, 4.55] %."
    assert verdict_of([apart[0], waiting]) == told
    assert p_value(0.001) == "0.001"
    assert p_value(0.00099) == "1e-03"
    assert p_value(0.0123) == "0.012"


def test_flop_are_told_by_their_order() -> None:
    flop = (0.0, 999.0, 1000.0, 1.42e11, 3e21)
    words = ["0 FLOP", "999 FLOP", "1 kFLOP", "142 GFLOP", "3e+03 EFLOP"]
    assert [flop_in_words(value) for value in flop] == words


def test_groups_of_a_study_have_the_names_of_its_command_line(tmp_path: Path) -> None:
    for name, override in (("wide", "task.base_channels=16"), ("plain", "")):
        for seed in (1, 2):
            job = tmp_path / name / f"random_seed_{seed}"
            make_run(job, seed=seed, ended=summary([50.0]), overrides=[override] * bool(override))
    unnamed = groups_of(find_runs([tmp_path]))
    assert [group.label for group in unnamed] == ["trial", "task.base_channels=16"]
    told = {"groups": {"wide": {}, "plain task.host_lr=0.1": {}}}
    (tmp_path / "compare.json").write_text(json.dumps(told))
    named = groups_of(find_runs([tmp_path]))
    assert [(group.label, len(group.runs)) for group in named] == [("plain", 2), ("wide", 2)]


def test_groups_stand_by_the_value_of_a_setting_in_figures(tmp_path: Path) -> None:
    for rate, accuracy in (("0.1", 50.0), ("0.02", 40.0), ("1e-3", 45.0)):
        make_run(tmp_path / rate, ended=summary([accuracy]), overrides=[f"task.host_lr={rate}"])
    runs = find_runs([tmp_path / rate for rate in ("0.1", "0.02", "1e-3")])
    groups = groups_of(runs)
    labels = [f"task.host_lr={rate}" for rate in ("1e-3", "0.02", "0.1")]
    assert [group.label for group in groups] == labels
    assert [row.label for row in standings(groups)] == [labels[2], labels[0], labels[1]]
    assert make_drawing(groups)[1]["standings"]["group"] == labels
