"""The page as text, the command that writes it, and the report that a run leaves."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from report_runs import line, make_run, summary, write_round, write_table

from esper_soa.errors import UserError
from esper_soa.ops.rundir import RunFolder
from esper_soa.ops.session import session
from esper_soa.report import bundle, end, page, write
from esper_soa.report.groups import groups_of
from esper_soa.report.run_files import RunRecord, find_runs
from esper_soa.report.sections import shown_of
from esper_soa.telemetry.table_files import table_path

PROGRAM = "/* what draws */"
HOSTILE = "</script><img src=x onerror=alert(1)>"


def data_of(text: str) -> dict:
    """What the page's program is given."""
    found = re.search(r'id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "run", [line(1, 40.0), line(2, 46.0)], ended=summary([50.0, 53.0]))
    for number in (1, 2):
        write_round(made, number, envs=2, steps=20)
    return made


def sweep(folder: Path) -> Path:
    """Two groups of three seeds."""
    for place in range(6):
        seed = place // 2
        reward = ("net", "shaped")[place % 2]
        make_run(
            folder / str(place),
            [line(1, 40.0 + place)],
            seed,
            summary([50.0 + place]),
            overrides=[f"reward={reward}"],
        )
        write_round(folder / str(place), 1, envs=2, steps=8)
    return folder


@pytest.mark.parametrize("kind", ["run", "sweep", "killed", "empty"])
def test_every_encoding_and_column_is_a_field_of_its_table(
    run: Path, tmp_path: Path, kind: str
) -> None:
    place = {
        "run": lambda: run,
        "sweep": lambda: sweep(tmp_path / "sweep"),
        "empty": lambda: make_run(tmp_path / "empty"),
        "killed": lambda: make_run(tmp_path / "killed", [line(1, 40.0)]),
    }[kind]()
    shown = shown_of(groups_of(find_runs([str(place)])))
    figures = [one for section in shown.sections for one in section.figures]
    assert len(figures) == {"run": 16, "sweep": 15, "killed": 13, "empty": 0}[kind]
    for figure in figures:
        table = shown.tables[figure.table]
        assert not table or {field for field, _ in figure.columns} <= table.keys(), figure.id
        assert all(len(cells) == len(next(iter(table.values()))) for cells in table.values())
        for layer in figure.spec["layer"]:
            columns = shown.tables[layer["data"]["name"]].keys()
            made = {str(name) for step in layer.get("transform", []) for name in named(step)}
            used = set(fields_in(layer["encoding"]))
            assert not columns or used <= columns | made, (figure.id, used - columns - made)


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


def test_a_figure_draws_the_number_that_it_is_named_after(run: Path, tmp_path: Path) -> None:
    for place in (run, sweep(tmp_path / "sweep")):
        shown = shown_of(groups_of(find_runs([str(place)])))
        drawn = {
            (one.id, channel): layer["encoding"][channel].get("field")
            for section in shown.sections
            for one in section.figures
            for layer in one.spec["layer"]
            for channel in ("x", "y")
            if channel in layer["encoding"]
        }
        assert drawn["cost-parameters", "x"] == "parameters"
        assert drawn["cost-flop", "x"] == "train_gflop"
        assert drawn["cost-flop", "y"] == "accuracy"
        assert drawn["curve-kl", "y"] == "kl"
        assert drawn["curve-explained_variance", "y"] == "explained_variance"
        assert drawn["ops", "y"] == "share"
        assert drawn["shapley", "x"] == "round"
        if place == run:
            assert drawn["credit-contribution", "y"] == "contribution"
            assert drawn["credit-interaction", "x"] == "step"


def test_the_control_stands_beside_the_curve_of_its_hosts_alone(run: Path) -> None:
    figures = {
        one["id"]: one for one in data_of(page.page_of(find_runs([run]), PROGRAM))["figures"]
    }
    assert "hosts" in figures["curve-accuracy"]["data"]
    assert "hosts" not in figures["curve-reward"]["data"]


def test_the_page_asks_no_network_and_holds_its_program_and_style(run: Path) -> None:
    text = page.page_of(find_runs([str(run)]), PROGRAM)
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {
        "https://vega.github.io/schema/vega-lite/v6.json"
    }, "which names the language of the charts, and is not fetched"
    assert PROGRAM in text
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:link|script|img)[^>]+(?:src|href)=\"(?!data:)", text)


def test_what_stands_in_a_run_folder_stays_text(tmp_path: Path) -> None:
    made = make_run(
        tmp_path / "run",
        [line(1, 40.0, blueprints={HOSTILE: {"germinated": 1}}, anomalies=[HOSTILE])],
        settings=f"label: '{HOSTILE}'\n",
        overrides=[f"note={HOSTILE}"],
        ended=summary([50.0]) | {"verdict": HOSTILE},
    )
    text = page.page_of(find_runs([str(made)]), PROGRAM)
    assert "<img" not in text
    assert text.count("</script>") == 3, "the three of the page itself"
    assert HOSTILE in data_of(text)["tables"]["blueprints"]["blueprint"]["names"]


def test_every_run_at_its_end_stands_beside_its_groups_interval(tmp_path: Path) -> None:
    tables = data_of(page.page_of(find_runs([str(sweep(tmp_path / "sweep"))]), PROGRAM))["tables"]
    assert tables["finals"]["accuracy"] == [50.0, 52.0, 54.0, 51.0, 53.0, 55.0]
    assert tables["standings"]["accuracy"] == [53.0, 52.0]
    assert tables["standings"]["runs"] == [3, 3]


def test_sections_have_the_state_and_the_verdict_of_the_run(run: Path, tmp_path: Path) -> None:
    text = page.page_of(find_runs([str(run)]), PROGRAM)
    assert "Growth paid: +2.00 points." in text
    killed = make_run(tmp_path / "killed", [line(1, 40.0), line(2, 44.0)])
    text = page.page_of(find_runs([str(killed)]), PROGRAM)
    assert "2 of 4 rounds: stopped, killed or still going on" in text
    assert (
        "Not finished: 2 of 4 rounds are played; hosts ended the first at 40.00 % and the last at "
        "44.00 %."
    ) in text


def test_findings_name_the_runs_that_share_them(tmp_path: Path) -> None:
    for seed, names in enumerate((["a"], ["a", "b"], ["a"])):
        make_run(tmp_path / "sweep" / str(seed), [line(1, 40.0, anomalies=names)], seed)
    text = page.page_of(find_runs([str(tmp_path / "sweep")]), PROGRAM)
    assert (
        "<tr><td>a</td><td>1</td><td>all</td></tr><tr><td>b</td><td>1</td><td>1</td></tr>" in text
    )


def test_the_head_names_the_kinds_of_runs_and_says_where_it_leaves_some_out(tmp_path: Path) -> None:
    for seed in range(6):
        make_run(tmp_path / "alike" / str(seed), seed=seed)
        make_run(tmp_path / "apart" / str(seed), seed=seed, settings=f"policy:\n  name: p{seed}\n")
    alike, apart = (
        page.page_of(find_runs([str(tmp_path / name)]), PROGRAM) for name in ("alike", "apart")
    )
    assert '<p class="about">trial, tiny</p>' in alike
    assert "trial, tiny, policy p3 …</p>" in apart


def test_a_figure_of_nothing_but_zeros_is_left_out(run: Path) -> None:
    shown = [
        figure["id"] for figure in data_of(page.page_of(find_runs([str(run)]), PROGRAM))["figures"]
    ]
    assert {"credit-contribution", "credit-interaction"} <= {*shown}
    steps = {"round": [3] * 2, "step": [1, 2], "env": [0] * 2}
    write_table(run, "steps", 3, steps | {"accuracy": [10.0] * 2})
    write_table(
        run,
        "slots",
        3,
        steps
        | {
            "slot": ["r0c0"] * 2,
            "stage": ["blending"] * 2,
            "blueprint": ["norm"] * 2,
            "contribution": [1.0] * 2,
            "interaction": [0.0] * 2,
        },
    )
    for number in (1, 2):
        table_path(run, "slots", number).unlink()
    shown = [
        figure["id"] for figure in data_of(page.page_of(find_runs([str(run)]), PROGRAM))["figures"]
    ]
    assert "credit-contribution" in shown
    assert "credit-interaction" not in shown


def test_comparisons_and_settings_that_differ_stand_in_the_page(tmp_path: Path) -> None:
    text = page.page_of(find_runs([str(sweep(tmp_path / "sweep"))]), PROGRAM)
    assert "reward=net" in text
    assert "Settings that differ" in text
    assert "corrected after Holm for the number of comparisons, 1." in text


def test_the_command_writes_beside_the_run_or_where_it_is_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "bundle", lambda: PROGRAM)
    write.main([str(run)])
    write.main([str(run), "-o", str(tmp_path / "my.html")])
    assert (run / "report.html").read_text() == (tmp_path / "my.html").read_text()
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(tmp_path / "my.html")]


def test_a_device_is_not_replaced_by_a_report(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "bundle", lambda: PROGRAM)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit) as stop:
        write.main([str(run), "-o", str(tmp_path / "pipe")])
    assert stop.value.code == 2
    assert "pipe" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_without_the_extra_the_command_names_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundle, "MODULE", "no_such_module")
    with pytest.raises(SystemExit) as stop:
        write.main([str(run)])
    assert stop.value.code == 2
    assert "pip install 'esper-soa[report]'" in capsys.readouterr().err
    assert not (run / "report.html").exists()


def test_a_run_without_the_extra_says_so_in_one_line_and_goes_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MODULE", "no_such_module")
    with session(RunFolder(run)) as within:
        end.leave_report(within)
        within.finish()
    assert re.findall(r"report   none, as .*esper-soa\[report\]", (run / "log.txt").read_text())
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    "error", [UserError("there is no run"), ValueError("a bug of ours"), KeyError("r0c9")]
)
def test_a_report_that_cannot_be_made_fails_no_run(
    error: Exception, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Sequence[RunRecord], __: str) -> str:
        raise error

    monkeypatch.setattr(end, "available", lambda: True)
    monkeypatch.setattr(end, "page_of", broken)
    monkeypatch.setattr(end, "bundle", lambda: PROGRAM)
    with session(RunFolder(run)) as within:
        end.leave_report(within)
        within.finish()
    told = (run / "log.txt").read_text()
    assert f"report   none: {type(error).__name__}: {error}" in told
    assert "in broken" in told, "where it came from"


def test_a_run_that_has_ended_leaves_its_report(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end, "available", lambda: True)
    monkeypatch.setattr(end, "bundle", lambda: PROGRAM)
    with session(RunFolder(run)) as within:
        end.leave_report(within)
    assert "Growth paid" in (run / "report.html").read_text()


def test_the_program_is_kept_in_the_users_cache_and_made_anew_where_it_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bundle, "available", lambda: True)
    monkeypatch.setattr(bundle.metadata, "version", lambda _: "1.2.3")
    monkeypatch.setattr(bundle, "_made", lambda: made.append(1) or "program\nof lines")
    assert [bundle.bundle(), bundle.bundle()] == ["program\nof lines"] * 2
    assert len(made) == 1
    kept = tmp_path / "esper_soa" / "vega_1.2.3.js"
    kept.write_text(kept.read_text()[:-1])
    assert bundle.bundle() == "program\nof lines"
    assert len(made) == 2


def test_every_chart_is_one_that_the_library_can_draw(run: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("vl_convert", reason="the extra report is not installed")
    for place in (run, sweep(tmp_path / "sweep")):
        data = data_of(page.page_of(find_runs([str(place)]), PROGRAM))
        for figure in data["figures"]:
            empty = {name: [] for name in figure["data"]}
            assert library.vegalite_to_vega(
                figure["spec"] | {"config": data["config"], "datasets": empty}
            )["marks"]


def test_the_program_cannot_end_its_own_script_element() -> None:
    pytest.importorskip("vl_convert", reason="the extra report is not installed")
    assert "</script" not in bundle.bundle()
