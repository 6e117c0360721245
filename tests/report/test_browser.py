"""Reports in a real browser: what is drawn equals the tables, nothing is asked of a network, the
console stays quiet.

Of a run that has ended, one that was killed, a sweep of two groups and one of ten seeds; and the
live view of a run that goes on and is killed. Needs playwright and a Chromium (`pip install
playwright && apt install chromium`, or `playwright install chromium`); `pytest -m browser
tests/report` runs it. Screenshots stay in the folder that $ESPER_SOA_SCREENSHOTS names.
"""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import TINY, finished, started, wait_until
from report_runs import episode, line, make_run, summary, write_lines, write_round

from esper_soa.report.bundle import bundle
from esper_soa.report.live import HOST, Server, Watched
from esper_soa.report.page import write_report

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("vl_convert", reason="the extra report is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.browser]

WIDTHS = (390, 1280)
SCHEMES = ("light", "dark")
KINDS = ("real", "sweep", "seeds", "killed")
SEEDS = 10
CURVES = {
    "accuracy": lambda one: one["accuracy"]["mean"],
    "reward": lambda one: one["reward"]["mean"],
    "parameters": lambda one: one["parameters"],
    "val_loss": lambda one: one["val_loss"],
    "eps": lambda one: one["eps"],
}
DRAWN = 20  # numbers compared
LONG = 200  # rounds and envs of the largest report
MANY = 64
MOST_BYTES = 5_000_000
MOST_SECONDS = 3.0


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        found = (
            shutil.which("chromium")
            or shutil.which("chromium-browser")
            or playwright.chromium.executable_path
        )
        if not Path(found).exists():
            pytest.skip("there is no Chromium")
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that has ended, one that was killed, a sweep of two groups of seeds, and one of ten
    seeds.
    """
    folder = tmp_path_factory.mktemp("runs")
    more = ["rounds=4", "steps=12", "envs=3"]
    done = finished(*TINY, *more, f"run_dir={folder / 'real'}", folder=folder)
    assert done.returncode == 0, done.stderr
    done = finished(
        "-m",
        *TINY,
        *more,
        "seed=1,2",
        "reward=net,shaped",
        f"run_dir={folder / 'sweep'}",
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    done = finished(
        "-m",
        *TINY,
        "rounds=3",
        "seed=" + ",".join(map(str, range(SEEDS))),
        f"run_dir={folder / 'seeds'}",
        "report=false",
        folder=folder,
    )
    assert done.returncode == 0, done.stderr
    killed = folder / "killed"
    process = started(*TINY, "rounds=500", "steps=12", f"run_dir={killed}", folder=folder)
    wait_until((killed / "telemetry" / "slots" / "round_000003.parquet").exists, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return {name: folder / name for name in KINDS}


class Opened:
    """A report in the browser, all of it drawn."""

    def __init__(
        self, browser: sync_api.Browser, address: str, width: int = 1280, scheme: str = "light"
    ) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        begun = time.monotonic()
        self.page.goto(address)
        self.page.wait_for_selector(".chart[data-drawn]")
        self.seconds = time.monotonic() - begun
        self.page.evaluate("report.drawAll()")

    def check(self, width: int, scheme: str, shot: str) -> None:
        """Nothing was said, nothing sticks out, every figure is drawn, in the colours that were
        asked for.
        """
        assert self.said == []
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width, (
            "nothing sticks out"
        )
        assert self.page.locator(".chart svg").count() == self.page.evaluate("report.figures.size")
        paper = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) > 382) == (scheme == "light")
        folder = os.environ.get("ESPER_SOA_SCREENSHOTS", "")
        if folder:
            self.page.screenshot(path=Path(folder, f"{shot}_{width}_{scheme}.png"), full_page=True)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", KINDS)
def test_a_report_opens_without_a_word_and_without_a_network(
    browser: sync_api.Browser, runs: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    path = runs[name].parent / f"{name}.html"
    write_report([str(runs[name])], path)
    opened = Opened(browser, path.as_uri(), width, scheme)
    opened.check(width, scheme, name)
    assert [url for url in opened.asked if not url.startswith("data:")] == [path.as_uri()]
    opened.page.close()


@pytest.mark.parametrize("name", ["real", "killed"])
def test_numbers_that_are_drawn_are_those_of_the_runs_files(
    browser: sync_api.Browser, runs: dict[str, Path], name: str
) -> None:
    path = runs[name].parent / "numbers.html"
    write_report([str(runs[name])], path)
    opened = Opened(browser, path.as_uri())
    lines = lines_of(runs[name])
    compared = 0
    for field, of in CURVES.items():
        labels = labels_of(opened, f"curve-{field}", "point")
        assert len(labels) == len(lines)
        for label, one in zip(labels, lines, strict=True):
            told = told_by(label)
            assert number_in(told["round"]) == one["round"]
            assert number_in(list(told.values())[1]) == pytest.approx(of(one), rel=1e-5, abs=1e-5)
            compared += 1
    assert compared >= (DRAWN if name == "real" else len(CURVES))
    lanes = labels_of(opened, "lanes", "rect mark")
    assert sorted(map(lane_in_words, shown_rows(opened))) == sorted(lanes)
    assert compared + len(lanes) >= DRAWN
    opened.page.close()


def test_numbers_that_are_drawn_of_ten_seeds_are_those_of_the_runs_files(
    browser: sync_api.Browser, runs: dict[str, Path]
) -> None:
    path = runs["seeds"].parent / "numbers_of_seeds.html"
    write_report([str(runs["seeds"])], path)
    opened = Opened(browser, path.as_uri())
    played = [lines_of(runs["seeds"] / str(seed)) for seed in range(SEEDS)]
    compared = 0
    for field, of in CURVES.items():
        labels = labels_of(opened, f"curve-{field}", "point")
        assert len(labels) == len(played[0])
        for label, ones in zip(labels, zip(*played, strict=True), strict=True):
            told = told_by(label)
            assert number_in(told["round"]) == ones[0]["round"]
            assert number_in(told["runs"]) == SEEDS
            assert number_in(list(told.values())[1]) == pytest.approx(
                sum(map(of, ones)) / SEEDS, rel=1e-4, abs=0.006
            )
            compared += 1
        assert opened.page.locator(f"#curve-{field} svg .mark-line path").count() == SEEDS + 1, (
            "every seed, and the mean"
        )
    ends = [
        json.loads((runs["seeds"] / str(seed) / "summary.json").read_text())
        for seed in range(SEEDS)
    ]
    ticks = [
        number_in(told_by(label)["final accuracy (%)"])
        for label in labels_of(opened, "standings", "tick")
    ]
    assert ticks == pytest.approx([end["grown"]["accuracy"] for end in ends], abs=0.006)
    assert compared + len(ticks) >= DRAWN
    opened.page.close()


@pytest.mark.parametrize("name", ["real", "seeds", "killed"])
def test_rounds_on_an_axis_are_told_once_and_whole(
    browser: sync_api.Browser, runs: dict[str, Path], name: str
) -> None:
    path = runs[name].parent / "axes.html"
    write_report([str(runs[name])], path)
    opened = Opened(browser, path.as_uri())
    texts = opened.page.locator("#curve-accuracy svg [aria-label^='X-axis'] .role-axis-label text")
    told = [text for text in texts.all_text_contents() if text]
    rounds = opened.page.evaluate("[...new Set(report.rowsOf('rounds').map(row => row.round))]")
    assert told == [str(one) for one in rounds]
    opened.page.close()


def lines_of(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(one) for one in (run / "metrics.jsonl").read_text().splitlines()]


def told_by(label: str) -> dict[str, str]:
    """What the label of a mark says, by name."""
    return dict(part.split(": ", 1) for part in label.split("; "))


def number_in(text: str) -> float:
    """A number as it is written for readers."""
    return float(text.replace(",", "").replace("\u2212", "-"))


def shown_rows(opened: Opened) -> list[dict]:
    """The rows of the lanes of living seeds that are chosen."""
    return opened.page.evaluate("""() => {
        const chosen = Object.fromEntries(
            [...document.querySelectorAll("#lanes select")].map(one => [one.name, one.value]));
        return report.rowsOf("lanes").filter(row => row.round === chosen.round && row.hosts === chosen.hosts
            && !["pruned", "embargoed", "resetting"].includes(row.stage));
    }""")  # noqa: E501


def lane_in_words(row: dict) -> str:
    """What is read out of a stretch of a lane."""
    worth = row["contribution"]
    points = "" if worth is None else f", contribution {worth:+.2f} points".replace("-", "\u2212")
    return (
        f"host {row['host']}, {row['slot']}: {row['blueprint']}, {row['stage']}, env-steps "
        f"{row['from']} to "
        f"{row['to']}, alpha {row['alpha']:.2f}{points}"
    )


def test_a_table_opened_behind_a_figure_has_the_same_rows(
    browser: sync_api.Browser, runs: dict[str, Path]
) -> None:
    path = runs["real"].parent / "table.html"
    write_report([str(runs["real"])], path)
    opened = Opened(browser, path.as_uri())
    opened.page.locator("#curve-accuracy summary").press("Enter")
    cells = opened.page.locator("#curve-accuracy tbody td:nth-child(3)").all_text_contents()
    lines = lines_of(runs["real"])
    assert [float(cell) for cell in cells] == pytest.approx(
        [one["accuracy"]["mean"] for one in lines], abs=1e-4
    )
    assert opened.page.locator("#curve-accuracy th[scope=col]").count() == 5
    opened.page.close()


def test_another_round_is_drawn_when_it_is_chosen(
    browser: sync_api.Browser, runs: dict[str, Path]
) -> None:
    path = runs["real"].parent / "choice.html"
    write_report([str(runs["real"])], path)
    opened = Opened(browser, path.as_uri())
    before = labels_of(opened, "lanes", "rect mark")
    assert before
    select = opened.page.locator("#lanes select[name=round]")
    other = select.locator("option").nth(1).get_attribute("value")
    select.select_option(other)
    opened.page.wait_for_timeout(500)
    assert labels_of(opened, "lanes", "rect mark") != before
    wanted = opened.page.evaluate(
        f"report.rowsOf('lanes').filter(row => row.round === {other!r}).length"
    )
    assert 0 < len(labels_of(opened, "lanes", "rect mark")) <= wanted
    opened.page.close()


def labels_of(opened: Opened, figure: str, kind: str) -> list[str]:
    """What a screen reader says of the marks of a kind in a figure."""
    marks = f"#{figure} svg [aria-roledescription='{kind}']"
    return [
        str(label)
        for label in opened.page.eval_on_selector_all(marks, "all => all.map(one => one.ariaLabel)")
    ]


def test_a_long_run_of_many_envs_is_a_small_file_that_opens_at_once(
    browser: sync_api.Browser, tmp_path: Path
) -> None:
    run = make_run(
        tmp_path / "long",
        [line(number, 40 + number / 10) for number in range(1, LONG + 1)],
        ended=summary([60.0 + env / 10 for env in range(MANY)]),
    )
    write_lines(
        run / "episodes.jsonl",
        [
            episode(number, env, [1.0, env / 10, number / 50])
            for number in range(1, LONG + 1)
            for env in range(MANY)
        ],
    )
    write_round(run, 1, envs=MANY, steps=75)
    for table in ("slots", "steps", "events"):
        first = run / "telemetry" / table / "round_000001.parquet"
        for number in range(2, LONG + 1):
            shutil.copy(first, first.with_name(f"round_{number:06d}.parquet"))
    path = tmp_path / "long.html"
    write_report([str(run)], path)
    assert path.stat().st_size < MOST_BYTES
    found = []
    for _ in range(3):
        opened = Opened(browser, path.as_uri())
        found.append(opened.seconds)
        assert opened.said == []
        opened.page.close()
    assert min(found) < MOST_SECONDS, found
    print(f"{path.stat().st_size:,} bytes, opens in {min(found):.2f} s")


def test_a_page_of_a_run_follows_it_and_outlives_its_end(
    browser: sync_api.Browser, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = started(
        *TINY,
        "rounds=5000",
        "steps=12",
        "telemetry.write_interval=1",
        f"run_dir={run}",
        folder=tmp_path,
    )
    wait_until((run / "telemetry" / "slots" / "round_000002.parquet").exists, process)
    with Server(Watched([str(run)]), bundle(), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://{HOST}:{server.server_address[1]}/"
        opened = Opened(browser, address)
        page = opened.page
        look_at(browser, address, "going_on")
        page.locator("#curve-accuracy summary").click()
        rounds = page.evaluate("report.rowsOf('rounds').length")
        page.wait_for_function(f"report.rowsOf('rounds').length > {rounds}", timeout=60_000)
        assert page.locator("#curve-accuracy details[open] tbody tr").count() > rounds, (
            "what was open is still open"
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        page.wait_for_timeout(5000)
        assert "stopped, killed or still going on" in page.locator("main .state").inner_text()
        labels = labels_of(opened, "curve-accuracy", "point")
        drawn = [number_in(told_by(label)["Validation accuracy (%)"]) for label in labels]
        assert drawn == pytest.approx([one["accuracy"]["mean"] for one in lines_of(run)], abs=0.006)
        assert opened.said == []
        assert all(url.startswith((address, "data:")) for url in opened.asked)
        look_at(browser, address, "killed_while_watched")
        server.shutdown()
    page.wait_for_function(
        "document.getElementById('live').textContent.startsWith('no answer')", timeout=60_000
    )
    page.close()


def look_at(browser: sync_api.Browser, address: str, name: str) -> None:
    """The live view at every width and in both schemes."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            opened = Opened(browser, address, width, scheme)
            opened.check(width, scheme, name)
            opened.page.close()


def test_a_sweep_is_watched_side_by_side(browser: sync_api.Browser, runs: dict[str, Path]) -> None:
    with Server(Watched([str(runs["seeds"])]), bundle(), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = Opened(browser, f"http://{HOST}:{server.server_address[1]}/")
        opened.check(1280, "light", "watched_sweep")
        assert opened.page.locator("#curve-accuracy svg .mark-line path").count() == SEEDS + 1
        assert "10 of 10 runs finished" in opened.page.locator("main .state").inner_text()
        opened.page.close()
        server.shutdown()
