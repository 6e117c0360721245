"""What the proof says of known numbers: means, pairs, shares, verdicts, tables, figure."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from benchmarks.proof_figure import figure, stamp
from benchmarks.proof_statistics import Comparison, comparisons, levels, main_runs
from benchmarks.table import figure_of, main, sections
from esper_soa.training.results.statistics import Interval
from tests.benchmarks.proof_record import PLAYERS, main_record, player, proof_record

ROOT = Path(__file__).resolve().parents[2]
ALL = proof_record()["data"][0]["players"]


def against(control: str, measure: str, players: dict = ALL) -> Comparison:
    return next(
        one for one in comparisons(players) if (one.control, one.measure) == (control, measure)
    )


# --- players over seeds


def test_a_level_is_the_interquartile_mean_of_the_means_of_seeds_and_the_plain_mean_of_sizes() -> (
    None
):
    first = levels({"learned": player(70.0, 5000.0)})[0]
    assert first.means["accuracy"].mean == pytest.approx(70.45)  # 70.2 ... 70.7 of 70.0 ... 70.9
    assert first.means["net"].mean == pytest.approx(69.95)
    assert first.sizes["parameters"].mean == 5000
    assert first.sizes["train_flop"].mean == 5e9
    # h = 6; winsorised 70.2 three times, 70.3 ... 70.6, 70.7 three times: SSD 6 * 0.0625 + 2 *
    # 0.0225 + 2 * 0.0025
    reach = 2.570582 * math.sqrt(0.425 / 30)
    assert first.means["accuracy"].low == pytest.approx(70.45 - reach, rel=1e-6)


def test_hosts_of_a_seed_count_as_one_value() -> None:
    wide = player(70.0, 5000.0)
    wide["accuracy"] = [[hosts[0] - 30, hosts[1] + 30] for hosts in wide["accuracy"]]
    assert levels({"learned": wide})[0].means["accuracy"] == pytest.approx(
        levels({"learned": player(70.0, 5000.0)})[0].means["accuracy"]
    )


# --- learned against a control


def test_pairs_of_seeds_are_compared_learned_less_control() -> None:
    one = against("wait", "accuracy")
    assert one.difference == pytest.approx((0.5, 0.5, 0.5))  # the same for every seed
    assert one.middle == pytest.approx((0.5, 0.5, 0.5))
    # 70.0 ... 70.9 against 69.5 ... 70.4 in tenths: 4 + 3 + 2 + 1 + 0 ... of each are not above; 5
    # pairs are tied
    above = sum(
        (7000 + 10 * a > 6950 + 10 * b) + 0.5 * (7000 + 10 * a == 6950 + 10 * b)
        for a in range(10)
        for b in range(10)
    )
    assert one.improvement.mean == pytest.approx(above / 100)
    assert (one.seeds_won, one.seeds, one.hosts_won, one.hosts) == (10, 10, 20, 20)
    assert one.shares == pytest.approx({"parameters": 5 / 6, "train_flop": 5 / 6})
    assert against("wait", "net").difference.mean == pytest.approx(0.5 + 0.1)


def test_every_control_is_compared_in_both_measures() -> None:
    assert [(one.measure, one.control) for one in comparisons(ALL)] == [
        (measure, control) for measure in ("accuracy", "net") for control in PLAYERS[1:]
    ]


def test_hosts_and_seeds_won_are_strictly_ahead() -> None:
    mine = player(70.0, 5000.0)
    theirs = player(70.0, 5000.0)
    mine["accuracy"] = [[80.0, 60.5 + n] for n in range(10)]  # means 70.25 + n / 2
    # the last mean is as high as ours
    theirs["accuracy"] = [[80.0, 60.0 + n] for n in range(9)] + [[80.5, 69.0]]
    one = against("wait", "accuracy", {"learned": mine, "wait": theirs})
    assert one.seeds_won == 9
    assert one.hosts_won == 10  # the first host is tied nine times and lost once


def comparison(low: float, high: float, p: float) -> Comparison:
    interval = Interval((low + high) / 2, low, high)
    return Comparison("wait", "accuracy", interval, interval, p, interval, 0, 10, 0, 80, {})


@pytest.mark.parametrize(
    ("low", "high", "p", "verdict"),
    [
        (0.1, 2.0, 0.009, "ahead"),
        (-2.0, -0.1, 0.009, "behind"),
        (-0.1, 2.0, 0.009, "no difference shown"),
        (0.1, 2.0, 0.011, "no difference shown"),
        (-2.0, -0.1, 0.011, "no difference shown"),
        (-2.0, 0.1, 0.001, "no difference shown"),
    ],
)
def test_a_verdict_needs_the_paired_interval_and_the_test(
    low: float, high: float, p: float, verdict: str
) -> None:
    assert comparison(low, high, p).verdict == verdict


def test_ten_seeds_that_are_all_above_all_others_are_ahead_with_the_least_p() -> None:
    one = against("static_large", "accuracy")
    assert one.p == pytest.approx(2 / math.comb(20, 10))
    assert one.verdict == "ahead"
    swapped = {"learned": ALL["static_large"], "static_large": ALL["learned"]}
    assert against("static_large", "accuracy", swapped).verdict == "behind"


# --- the main run


def test_main_runs_are_paired_over_hosts_and_over_seeds() -> None:
    found = main_runs([[71.0, 73.0], [69.0, 71.0]], [[70.0, 70.0], [70.0, 70.0]])
    assert found.differences == [2.0, 0.0]
    assert found.ahead == 1  # a seed without a difference is not ahead
    # 1, 3, -1, 1: mean 1, variance 8 / 3; the quantile of 3 degrees of freedom at 0.975 is 3.182446
    reach = 3.182446 * math.sqrt(8 / 3 / 4)
    assert found.over_hosts == pytest.approx((1.0, 1 - reach, 1 + reach), rel=1e-6)
    assert found.over_seeds.mean == 1.0
    assert found.over_seeds.high == pytest.approx(
        1 + 12.706205, rel=1e-6
    )  # of 1 degree of freedom, error 1


# --- tables


def section(tmp_path: Path, record: dict) -> list[str]:
    (tmp_path / f"{record['name']}.jsonl").write_text(json.dumps(record) + "\n")
    return sections(tmp_path)[0][record["benchmark"]]


def test_the_section_has_figure_and_two_tables_per_data_set(tmp_path: Path) -> None:
    lines = section(tmp_path, proof_record())
    assert "(proof.svg)" in lines[0]
    titles = [line for line in lines if line.startswith("**")]
    assert titles[0] == (
        "**fashion32** (4,000 training, 1,000 validation and 1,000 test images), cifar_3seed: 10 "
        "random seeds of 2 hosts, 38,400 training images per host, accuracy on all test images, "
        "validation accuracy on 900 images."
    )
    assert titles[1].startswith("**cifar10** ")
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 2 * (2 + 7 + 2 + 12)
    assert rows[2].startswith("| learned | 70.45 [70.14, 70.76] | 69.95 [")
    assert rows[2].endswith("| 5,000 | 5.0 |")
    last = next(row for row in rows if row.startswith("| static_large | accuracy |"))
    assert "| +3.00 [+3.00, +3.00] |" in last
    assert last.endswith(
        "| 1.1e-05 | 1.00 [0.80, 1.00] | 10 of 10 | 20 of 20 | 0.45 times | 0.45 times | ahead |"
    )
    assert lines[-1] == (
        "policy.init=shipped (weights abc), likeliest choices; random seeds 20260101 to 20260110; "
        "95% t intervals, of P(better) by Newcombe; "
        "2026-01-01, commit 1234567, a processor, 2 cores, torch 2."
    )


def test_the_table_of_the_readme_names_the_mean_that_it_has(tmp_path: Path) -> None:
    """One random seed far below the others moves a mean, and no interquartile mean."""
    record = proof_record()
    for data in record["data"]:
        low = data["players"]["learned"]["accuracy"]
        data["players"]["learned"] |= {"accuracy": [[0.0, 0.0], *low[1:]]}
    section(tmp_path, record)
    heads, _, learned, *_ = sections(tmp_path)[0]["result"]
    assert heads == (
        "| interquartile mean over 10 random seeds [95 % t interval] | "
        "test accuracy on fashion32 (%) | test accuracy on cifar10 (%) | "
        "parameters | training GFLOP per host |"
    )
    assert learned == (
        "| grown by `grower` | 70.45 [70.14, 70.76] | 70.45 [70.14, 70.76] | 5,000 | 5 |"
    )


def test_proofs_under_other_settings_come_after_and_have_no_figure(tmp_path: Path) -> None:
    other = proof_record("impaired", ("fashion32",)) | {"settings_given": ["task=cifar_impaired"]}
    lines = section(tmp_path, other)
    assert "docs/proof.svg" not in "".join(lines)
    assert figure_of(tmp_path) is None
    assert "cifar_3seed with task=cifar_impaired: 10 random seeds" in lines[0]
    both = section(tmp_path, proof_record())
    titles = [line for line in both if line.startswith("**")]
    assert ["with" in line for line in titles] == [False, False, True]


def test_the_main_run_has_a_row_per_seed_and_says_what_all_come_to(tmp_path: Path) -> None:
    lines = section(tmp_path, main_record())
    assert "| 101 | 72.00 | 70.00 | +2.00 | 10,000 / 6,418 | 91 |" in lines
    assert "| 102 | 70.00 | 70.00 | +0.00 | 10,000 / 6,418 | 85 |" in lines
    said = next(line for line in lines if line.startswith("Grown minus"))
    assert (
        "over 4 hosts +1.00 [-1.60, +3.60], over 2 random seeds +1.00 [-11.71, +13.71] points"
        in said
    )
    assert "ahead with 1 of 2. The longest run took 91 s" in said


# --- the figure


def test_the_figure_is_made_with_the_tables_and_says_what_it_shows(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    record = proof_record()
    section(tmp_path, record)
    page.write_text(
        "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in sections(tmp_path)[0])
    )
    assert main(["--results", str(tmp_path), "--write", str(page)]) == 0
    drawn = (tmp_path / "proof.svg").read_bytes()
    assert drawn == figure(record)
    words = set(re.findall(r"<!-- (.*?) -->", drawn.decode()))
    assert {
        *PLAYERS,
        "parameters per host (log scale)",
        "training GFLOP per host (log scale)",
    } <= words
    assert {"fashion32", "cifar10", "test accuracy (%)"} <= words
    assert any(one.startswith("Interquartile means over 10 random seeds ") for one in words)
    assert drawn.decode().count(stamp(record)) == 1


@pytest.mark.slow
def test_the_figure_is_the_same_to_the_byte_in_another_process_with_other_habits(
    tmp_path: Path,
) -> None:
    habits = tmp_path / "matplotlibrc"
    habits.write_text("font.size: 22\nsvg.fonttype: none\nxtick.major.size: 20\ntext.color: red\n")
    code = (
        "import sys; sys.path.insert(0, '.'); from tests.benchmarks.proof_record import "
        "proof_record; from benchmarks.proof_figure import figure; "
        "sys.stdout.buffer.write(figure(proof_record()))"
    )
    env = os.environ | {"MATPLOTLIBRC": str(habits), "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, check=True, capture_output=True
    )
    assert done.stdout == figure(proof_record())


def test_another_record_is_another_figure() -> None:
    record = proof_record()
    record["data"][1]["players"] = record["data"][1]["players"] | {"learned": player(75.0, 5000.0)}
    assert figure(record) != figure(proof_record())


def test_without_matplotlib_the_extra_is_named() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; import benchmarks.table"
    done = warm.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'esper-soa[stats]'" in done.stderr
    assert "Traceback" not in done.stderr
