"""Tables and record of a study tell means over random seeds and differences by random seed."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from esper_soa.lab.compare.command import study_of
from esper_soa.lab.compare.play import StudyTable
from esper_soa.lab.compare.study import FIGURES, Study
from esper_soa.lab.compare.tables import record, report, sentence_of

LEVEL = {"test_accuracy": (50.0, 52.0), "validation_accuracy": (0.0, 0.0), "test_loss": (1.0, 1.0)}
LEVEL |= {"net": (49.0, 51.0), "parameters": (7000.0, 8000.0), "env_steps": (4.0, 5.0)}
LEVEL |= {"train_flop": (2e9, 3e9), "all_flop": (4e9, 5e9), "eps": (10.0, 30.0)}


def study(folder: Path) -> Study:
    return study_of(["a=", "b=policy.name=wait", f"out={folder}", "rounds=1"])


def table(**groups: dict[str, tuple[float, ...]]) -> StudyTable:
    """Groups with a number per random seed, from 5 on."""
    figures = {
        group: {
            seed: dict(zip(values, row, strict=True))
            for seed, row in enumerate(zip(*values.values(), strict=True), 5)
        }
        for group, values in groups.items()
    }
    return StudyTable(0.0, figures, {})


def told_by(asked: Study, played: StudyTable) -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    report(console, asked, played)
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_random_seeds_that_a_group_has_not_played_count_for_none(tmp_path: Path) -> None:
    names = [*FIGURES, "eps"]
    figures = {
        group: {seed: dict.fromkeys(names, 10.0 * seed + lead(seed)) for seed in seeds}
        for group, seeds, lead in (
            ("a", (5, 9, 7, 8), lambda seed: 0.0),
            ("b", (5, 7, 8, 6), lambda seed: seed - 6.0),
        )
    }
    asked = study(tmp_path)
    played = StudyTable(0.0, figures, {})
    assert played.complete == [5, 7, 8]
    found = record(asked, [played])
    values = {"a": [50.0, 70.0, 80.0], "b": [49.0, 71.0, 82.0]}
    overrides = {"a": [], "b": ["policy.name=wait"]}
    bounds = [found["groups"][group].pop("intervals") for group in ("a", "b")]
    assert bounds[1]["net"]["mean"] == pytest.approx(202 / 3)
    assert bounds[0]["test_loss"].keys() == {"mean", "low", "high"}
    assert found.pop("groups") == {
        group: {"overrides": overrides[group]} | dict.fromkeys(names, values[group])
        for group in ("a", "b")
    }
    rows = found.pop("comparisons")
    assert [(row["measure"], row["differences"], row["won"]) for row in rows] == [
        (measure, (-1.0, 1.0, 2.0), 2) for measure in ("test_accuracy", "net")
    ]
    assert found.pop("random_seeds") == [5, 7, 8]
    assert (found.pop("experiment"), found.pop("common")) == ("", ["rounds=1"])
    assert found["test"] == "paired t tests over random seeds"


def test_the_tables_tell_means_and_differences(tmp_path: Path) -> None:
    more = LEVEL | {"test_accuracy": (51.0, 55.0), "eps": (5.0, 6.0)}
    told = told_by(study(tmp_path), table(a=LEVEL, b=more))
    head = "group test accuracy test accuracy less rent env-steps parameters training GFLOP"
    assert f"{head} all GFLOP EPS" in told
    # standard error 1, t of one degree of freedom 12.706
    assert "a 51.00 [38.29, 63.71] 50.00 [37.29, 62.71] 4 7,500 2.5 4.5 20.0" in told
    assert "b 53.00 [27.59, 78.41] 50.00 [37.29, 62.71] 4 7,500 2.5 4.5 5.5" in told
    rows = [line for line in told if line.startswith("b test accuracy")]
    assert rows[0].startswith("b test accuracy +2.00 [-10.71, +14.71] 2/2 +0.00 0.295 0.590 no")
    assert rows[1].startswith("b test accuracy less rent +0.00 0/2 +0.00 1.000 1.000 no")


def test_equal_values_and_a_random_seed_alone_have_no_bounds(tmp_path: Path) -> None:
    equal = LEVEL | {"test_accuracy": (50.1, 50.1)}
    for seeds, net in ((2, "50.00 [37.29, 62.71]"), (1, "49.00")):
        less = {name: values[:seeds] for name, values in equal.items()}
        more = less | {"test_accuracy": tuple(value + 0.2 for value in less["test_accuracy"])}
        told = told_by(study(tmp_path), table(a=less, b=less, c=more))
        assert any(line.startswith(f"a 50.10 {net} 4 7,") for line in told)
        lead = next(line for line in told if line.startswith("c test accuracy"))
        assert lead.startswith(f"c test accuracy +0.20 {seeds}/{seeds} – ")


def test_a_group_that_misses_its_budget_is_named(tmp_path: Path) -> None:
    played = table(a=LEVEL, b=LEVEL | {"train_flop": (2.6e9, 3.4e9)})._replace(gflop=2.5)
    assert "missed" not in sentence_of(played)
    told = sentence_of(played._replace(gflop=1.5))
    assert told.endswith("b has missed the budget with 3 GFLOP.")


def test_a_terminal_gets_whole_words_and_numbers_in_the_columns_that_it_has(
    tmp_path: Path,
) -> None:
    groups = table(**{"a": LEVEL, "b task.host_lr=0.1": LEVEL, "b task.host_lr=0.02": LEVEL})
    texts = {}
    for width in (80, 200):
        console = Console(width=width, force_terminal=True, no_color=True, file=io.StringIO())
        report(console, study(tmp_path), groups)
        texts[width] = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, texts[width].splitlines())) <= width
        assert "…" not in texts[width]
    whole, wide = ([*map(str.split, texts[width].splitlines())] for width in (80, 200))
    words = [
        {word for line in lines for word in line if "─" not in word} for lines in (whole, wide)
    ]
    assert words[0] == words[1], "the same words and numbers"
    assert wide[1][:3] == ["group", "test", "accuracy"]
    assert wide[3][0] == "a"
    values = ["51.00", "[38.29,", "63.71]", "50.00", "[37.29,", "62.71]", "4"]
    assert next(line for line in whole if line[:1] == ["a"]) == ["a", *values]
    assert ["a", "7,500", "2.5", "4.5", "20.0"] in whole, "in the part below"


def test_groups_stand_by_the_value_in_which_alone_they_differ(tmp_path: Path) -> None:
    names = ["b lr=0.1", "a", "b lr=0.02", "b lr=1e-3"]
    told = told_by(study(tmp_path), table(**dict.fromkeys(names, LEVEL)))
    rows = [line.split(" 51.00")[0] for line in told if " 51.00 [38.29" in line]
    assert rows == ["b lr=1e-3", "b lr=0.02", "b lr=0.1", "a"]
    differences = [line.split(" test acc")[0] for line in told if " test accuracy +0.00" in line]
    assert differences == ["a", "b lr=1e-3", "b lr=0.02"], "against the first given"
