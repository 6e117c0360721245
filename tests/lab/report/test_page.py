"""The page as text, the command that writes it, and the report that a run leaves."""

import json
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from esper_soa.lab.report import bundle, details, page, sections, write
from esper_soa.lab.report.groups import groups_of
from esper_soa.lab.report.run_files import Table, find_runs
from esper_soa.lab.report.sections import Section, make_drawing
from esper_soa.lab.run_folders import COMPARISON_FILE
from tests.builders.report_runs import (
    PROGRAM,
    line,
    make_run,
    page_text,
    summary,
    write_round,
    write_table,
)

HOSTILE = "</script><img src=x onerror=alert(1)>"


def data_of(text: str) -> dict:
    """What the page's program is given."""
    found = re.search(r'id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def ended_run(folder: Path) -> Path:
    made = make_run(folder, [line(1, 40.0), line(2, 46.0)], ended=summary([50.0, 53.0]))
    for number in (1, 2):
        write_round(made, number, envs=2, steps=9)
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return ended_run(tmp_path / "run")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that has ended, two groups of three seeds, a run that was killed, and nothing yet."""
    folder = tmp_path_factory.mktemp("places")
    ended_run(folder / "run")
    for place in range(6):
        job = folder / "sweep" / str(place)
        end = summary([50.0 + place])
        reward = ("net", "shaped")[place % 2]
        make_run(job, [line(1, 40.0 + place)], place // 2, end, overrides=[f"reward={reward}"])
        write_round(job, 1, envs=2, steps=8)
    make_run(folder / "empty")
    make_run(folder / "killed", [line(1, 40.0), line(2, 44.0)])
    return {name: folder / name for name in ("run", "sweep", "killed", "empty")}


def shown_in(place: Path) -> tuple[list[Section], dict[str, Table]]:
    return make_drawing(groups_of(find_runs([place])))


def figures_in(place: Path) -> list[dict]:
    return [figure for section in shown_in(place)[0] for figure in section.figures]


@pytest.mark.parametrize(
    ("kind", "count"), [("run", 14), ("sweep", 15), ("killed", 13), ("empty", 0)]
)
def test_every_encoding_is_a_field_of_its_table(
    places: dict[str, Path], kind: str, count: int
) -> None:
    _, tables = shown_in(places[kind])
    figures = figures_in(places[kind])
    assert len(figures) == count
    for figure in figures:
        table = tables[figure["table"]]
        assert not table or {field for field, *_ in figure["columns"]} <= table.keys(), figure["id"]
        assert all(len(cells) == len(next(iter(table.values()))) for cells in table.values())
        for layer in figure["spec"]["layer"]:
            assert "if" not in layer
            columns = tables[layer["data"]["name"]].keys()
            made = {str(name) for step in layer.get("transform", []) for name in named(step)}
            used = set(fields_in(layer["encoding"]))
            assert not columns or used <= columns | made, (figure["id"], used - columns - made)


def named(step: dict) -> list[str]:
    """The fields that a transform makes."""
    made = step.get("as", [])
    return [made] if isinstance(made, str) else made


def fields_in(part: object) -> Iterator[str]:
    """Every field that an encoding names."""
    if isinstance(part, dict):
        yield from ([part["field"]] if "field" in part else [])
        part = list(part.values())
    if isinstance(part, list):
        for one in part:
            yield from fields_in(one)


def fields_drawn(place: Path) -> dict[tuple[str, str], str]:
    """The field on either axis of every figure; of layers that differ that of the last."""
    return {
        (one["id"], channel): layer["encoding"][channel]["field"]
        for one in figures_in(place)
        for layer in one["spec"]["layer"]
        for channel in ("x", "y")
        if "field" in layer["encoding"].get(channel, {})
    }


def test_runs_of_one_round_are_drawn_over_env_steps_and_by_bars(places: dict[str, Path]) -> None:
    drawn = fields_drawn(places["sweep"])
    assert "round" not in drawn.values(), "an axis of a single round says nothing"
    growth = [figure["id"] for figure in shown_in(places["sweep"])[0][0].figures]
    values = ["accuracy", "step_reward", "parameters", "val_loss", "train_loss"]
    assert growth[1:6] == [f"steps-{value.removeprefix('step_')}" for value in values]
    for name, value in zip(growth[1:6], values, strict=True):
        assert (drawn[name, "x"], drawn[name, "y"]) == ("step", value)
    assert drawn["cost-flop", "x"] == "train_gflop"
    assert (drawn["ops", "x"], drawn["ops", "y"]) == ("share", "op")
    assert (drawn["shapley", "x"], drawn["shapley", "y"]) == ("shapley", "slot")
    tables = shown_in(places["sweep"])[1]
    parts = ("ops", "terms", "shapley", "entropy", "times")
    assert [len({*tables[name]["run"]}) for name in parts] == [6] * 5, "rows of every run"


def test_a_slot_without_a_seed_has_no_colour(run: Path) -> None:
    write_table(run, "steps", 9, [{"step": 1, "env": 0, "accuracy": 40.0}])
    seed = {"stage": "training", "seed": 1, "blueprint": "norm"}
    rows = [{"slot": "r0c0", "stage": "embargoed"}, {"slot": "r0c1"} | seed]
    write_table(run, "slots", 9, [{"step": 1, "env": 0} | row for row in rows])
    (lanes,) = (one for one in figures_in(run) if one["id"] == "lanes")
    _, tables = shown_in(run)
    assert "none" in tables["lanes"]["blueprint"]
    assert '"none"' not in json.dumps(lanes["spec"])


def test_the_page_tells_the_verdict_and_asks_no_network(places: dict[str, Path]) -> None:
    text = page_text(places["run"])
    figures = {one["id"]: one for one in data_of(text)["figures"]}
    assert "hosts" in figures["curve-accuracy"]["data"]
    assert "hosts" not in figures["curve-reward"]["data"]
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {
        "https://vega.github.io/schema/vega-lite/v6.json"
    }, "which names the language of the charts, and is not fetched"
    assert " style=" not in text.replace(PROGRAM, ""), "which the policy blocks"
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", text)
    text = page_text(places["killed"])
    assert '<span class="state unfinished">2 of 4 rounds so far</span>' in text
    ended = "hosts ended the first at 40.00 % and the last at 44.00 %."
    assert f"Not finished: 2 of 4 rounds are played; {ended}" in text
    assert "<title>killed - esper_soa</title>" in text
    text = page_text(places["sweep"])
    assert "<title>6 runs - esper_soa</title>" in text
    tables = data_of(text)["tables"]
    assert tables["finals"]["accuracy"] == [50.0, 52.0, 54.0, 51.0, 53.0, 55.0]
    standings = tables["standings"]
    assert (standings["accuracy"], standings["runs"]) == ([53.0, 52.0], [3, 3])
    for words in ("Settings that differ", "All settings of run 0"):
        assert f"<h3>{words}</h3>" in text


@pytest.mark.parametrize(("explained", "warned"), [(-0.2, True), (0.1, False)])
def test_a_critic_that_explains_nothing_is_warned_of(
    tmp_path: Path, explained: float, warned: bool
) -> None:
    values = (9.0, -0.3, 0.4, explained)
    lines = [line(at, 40.0) for at in range(1, 5)]
    for record, value in zip(lines, values, strict=True):
        record["update"] = {"explained_variance": value}
    text = page_text(make_run(tmp_path / "run", lines))
    assert ("the critic explains nothing" in text) == warned
    assert ("<td>-0.0333</td>" in text) == warned, "of the last three updates"


@pytest.mark.parametrize("kind", ["run", "sweep"])
def test_a_page_is_whole(places: dict[str, Path], kind: str) -> None:
    """All of it but the data, style and program of figures, and figures other than the last."""
    text = page_text(places[kind])
    (mark,) = set(re.findall(r'nonce="(\w{64})"', text))
    for part, name in (
        (mark, "MARK"),
        (sections.asset("page.css"), "STYLE"),
        (sections.asset("page.js"), "PAGE"),
        (PROGRAM, "PROGRAM"),
        (metadata.version("esper-soa"), "VERSION"),
    ):
        text = text.replace(part, name)
    text = re.sub('(?<="report-data">).*?(?=</script>)', "DATA", text)
    text = re.sub('<figure id="(?!times).*?</figure>\n', "", text, flags=re.DOTALL)
    text = re.sub("(?=<main|<section|<tr)", "\n", text.replace("\n", "")) + "\n"
    part = slice(text.index("<main"), text.index('<section id="course"'))
    expected = (Path(__file__).parent / f"page_of_{kind}.html").read_text("utf-8")
    assert (text if kind == "run" else text[part]) == expected


def test_what_stands_in_a_run_folder_stays_text(tmp_path: Path) -> None:
    made = make_run(
        tmp_path / "run",
        [
            line(
                1,
                40.0,
                blueprints={HOSTILE: {"fossilized": 1, "mean_gain": 1.0}},
                anomalies=[HOSTILE],
            )
        ],
        settings=f"label: '{HOSTILE}'\n",
        overrides=[f"note={HOSTILE}"],
        ended=summary([50.0]) | {"controls": [{"verdict": HOSTILE}]},
    )
    text = page_text(made)
    assert "<img" not in text
    assert text.count("</script>") == 3, "the three of the page itself"
    policy = re.findall(r"script-src 'nonce-(\w{64})' 'unsafe-eval';", text)
    assert re.findall(r"<script (?!type)(.*?)>", text) == [f'nonce="{policy[0]}"'] * 2
    assert HOSTILE in data_of(text)["tables"]["blueprints"]["blueprint"]["names"]


def test_the_mark_of_scripts_is_another_wherever_the_page_shows_something_else() -> None:
    parts = page.Parts("title", "", "main", "data", "state", True)
    marks = {
        re.findall(r'nonce="(\w{64})"', page.page_html(one, [PROGRAM], ""))[0]
        for one in (parts, parts._replace(main="other"), parts._replace(data="other"))
    }
    assert len(marks) == 3


def test_every_run_of_a_group_bears_its_label(places: dict[str, Path]) -> None:
    groups = groups_of(find_runs([places["sweep"]]))
    assert len({group.label for group in groups}) == len(groups) > 1
    assert all(run.group == group.label for group in groups for run in group.runs)


def test_what_a_study_found_stands_in_the_page_of_its_runs_alone(tmp_path: Path) -> None:
    for study in ("one", "two"):
        for group in ("a", "b"):
            folder = tmp_path / study / group / "0"
            make_run(folder, settings=f"note: {study}{group}\n", ended=summary([50.0]))
        row = {"group": "a", "reference": "b", "measure": "net", "mean": 2.0, "low": -1.0}
        row |= {"high": 5.0, "won": 1, "differences": [2.0, -1.0, 0.0], "effect": 0.25}
        row |= {"p": 0.5, "corrected": 0.75, "verdict": "open", "power": "80 % for 9 points"}
        told = {"random_seeds": [0], "confidence": 0.9, "comparisons": [row, {"measure": "own"}]}
        (tmp_path / study / COMPARISON_FILE).write_text(json.dumps(told))
    page = page_text(tmp_path / "one")
    card = page[page.index("<h3>Comparisons") : page.index("</table>")]
    assert re.findall('<p class="about">(.*?)</p>', card) == [
        "By esper-compare, over 1 random seeds that every group has played: differences paired by "
        "random seed, intervals of 90%, p of signed rank tests, corrected after Holm for 2 "
        "comparisons. The effect is the mean difference over its standard deviation, by Hedges. a, "
        "test accuracy less rent: 80 % for 9 points."
    ]
    titles = ["group", "against", "measure", "difference (points)", "random seeds won", "effect"]
    assert re.findall(">([^<]*)</t[hd]>", card) == [
        *(*titles, "p", "p after Holm", "verdict"),
        *("a", "b", "test accuracy less rent", "+2.00 [-1.00, +5.00]", "1 of 3", "+0.25"),
        *("0.500", "0.750", "open", "", "", "own", "–", "– of 0", "–", "0e+00", "0e+00", ""),
    ]
    assert "By esper-compare" not in page_text(tmp_path)


def test_settings_that_differ_stand_side_by_side_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        make_run(tmp_path / str(seed), [line(1, 40.0)], seed, settings=f"note: n{seed}\n")
    whole = "<tr><td>note</td><td>n0</td><td>n1</td><td>n2</td></tr>"
    assert whole in page_text(tmp_path)
    assert "more runs are not shown here" not in page_text(tmp_path)
    monkeypatch.setattr(details, "MAX_COLUMNS", 2)
    assert "<tr><td>note</td><td>n0</td><td>n1</td></tr>" in page_text(tmp_path)
    assert '<p class="about">1 more runs are not shown here.</p>' in page_text(tmp_path)


def test_the_command_writes_beside_the_run_or_where_it_is_told_but_to_no_device(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(write, "bundle", lambda: PROGRAM)
    write.main([str(run)])
    write.main([str(run), "-o", str(tmp_path / "my.html")])
    assert (run / "report.html").read_text() == (tmp_path / "my.html").read_text()
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(tmp_path / "my.html")]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit) as stop:
        write.main([str(run), "-o", str(tmp_path / "pipe")])
    assert stop.value.code == 2
    assert "pipe" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_the_program_is_kept_in_the_users_cache_and_made_anew_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundle, "available", lambda: True)
    monkeypatch.setattr(bundle.metadata, "version", lambda _: "1.2.3")
    monkeypatch.setattr(bundle, "build_program", lambda: made.append(1) or "program\nof lines")
    assert [bundle.bundle(), bundle.bundle()] == ["program\nof lines"] * 2
    assert len(made) == 1
    kept = tmp_path / "esper_soa" / "vega_1.2.3.js"
    kept.write_text(kept.read_text()[:-1])
    assert bundle.bundle() == "program\nof lines"
    assert len(made) == 2
