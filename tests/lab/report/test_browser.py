"""Reports in a real browser: what is drawn equals the files of the run, nothing is asked of a
network, the console stays quiet.

Of a run that has ended, one that was killed and a sweep; and the live view of a run that goes on.
Needs playwright and a Chromium (`pip install playwright && apt install chromium`, or `playwright
install chromium`); `pytest -m browser tests/lab/report` runs it. Screenshots stay in the folder
that $ESPER_SOA_SCREENSHOTS names.
"""

import csv
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from esper_soa.lab.report.bundle import bundle
from esper_soa.lab.report.live import HOST, Server
from esper_soa.lab.report.page import page_of
from esper_soa.lab.report.run_files import find_runs
from tests.builders.report_runs import line, make_run, summary, write_lines, write_round

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytest.importorskip("vl_convert", reason="the extra report is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.browser]

# Widths go with schemes in pairs.
LOOKS = ((390, "light"), (390, "dark"), (1280, "light"), (1280, "dark"))
KINDS = ("ended", "killed", "sweep")
SEEDS = 6
CURVES = {  # by figure: what its points say, and that of a line of metrics.jsonl
    "accuracy": ("accuracy (%)", lambda one: one["accuracy"]["mean"]),
    "reward": ("reward of an episode", lambda one: one["reward"]["mean"]),
    "kl": ("divergence of an update (nats)", lambda one: one["update"]["approx_kl"]),
    "eps": ("speed (env-steps/s)", lambda one: one["eps"]),
}
BLOCKED = """
window.blocked = [];
document.addEventListener("securitypolicyviolation", (one) =>
  window.blocked.push(`${one.violatedDirective} ${one.blockedURI} ${one.sample}`));
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        found = shutil.which("chromium") or playwright.chromium.executable_path
        if not Path(found).exists():
            pytest.skip("there is no Chromium")
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def write_report(run: Path, path: Path) -> None:
    path.write_text(page_of(find_runs([run]), bundle()), encoding="utf-8")


def rounds(count: int, more: float = 0.0) -> list[dict]:
    """Lines of which no two say the same."""
    return [
        line(number, 40 + 3.25 * number + more, eps=40.0 + number, rollbacks={"panic": number})
        for number in range(1, count + 1)
    ]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The reports of a run that has ended, of one that was killed, and of two groups of seeds."""
    folder = tmp_path_factory.mktemp("runs")
    ended = make_run(folder / "ended", rounds(4), ended=summary([50.0, 53.0]))
    killed = make_run(folder / "killed", rounds(2))
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"round":3,"accur')
    for run, last in ((ended, 4), (killed, 3)):
        for number in range(1, last + 1):
            write_round(run, number, envs=3, steps=60 if number == 4 else 16)
    for seed in range(SEEDS):
        for reward in ("net", "shaped"):
            job = folder / "sweep" / f'{reward}, "{seed}"'
            end = summary([50.0 + seed, 52.0])
            make_run(job, rounds(3, seed), seed, end, overrides=[f"reward={reward}"])
            write_round(job, 3, envs=2, steps=10)
    for name in KINDS:
        write_report(folder / name, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in KINDS}


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
        self.page.add_init_script(BLOCKED)
        begun = time.monotonic()
        self.page.goto(address)
        self.page.wait_for_selector(".chart[data-drawn]")
        self.seconds = time.monotonic() - begun
        self.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        drawn = "document.querySelectorAll('.chart[data-drawn]').length"
        self.page.wait_for_function(f"{drawn} === report.figures.size")

    def check(self, width: int, scheme: str, shot: str) -> None:
        """Nothing was said or blocked, nothing sticks out, every figure is drawn, in the colours
        asked for."""
        assert self.said == []
        assert self.page.evaluate("blocked") == []
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width
        assert self.page.locator(".chart svg").count() == self.page.evaluate("report.figures.size")
        paper = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) > 382) == (scheme == "light")
        folder = os.environ.get("ESPER_SOA_SCREENSHOTS", "")
        if folder:
            self.page.screenshot(path=Path(folder, f"{shot}_{width}_{scheme}.png"), full_page=True)

    def labels(self, figure: str, kind: str) -> list[str]:
        """What a screen reader says of the marks of a kind in a figure."""
        marks = f"#{figure} svg [aria-roledescription='{kind}']"
        return self.page.eval_on_selector_all(marks, "all => all.map(one => one.ariaLabel)")


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("name", KINDS)
def test_a_report_opens_without_a_word_and_without_a_network(
    browser: sync_api.Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    opened = Opened(browser, pages[name].as_uri(), width, scheme)
    opened.check(width, scheme, name)
    assert [url for url in opened.asked if not url.startswith("data:")] == [pages[name].as_uri()]
    opened.page.close()


@pytest.mark.parametrize("live", [False, True])
def test_styles_of_strangers_are_blocked_and_those_of_the_page_are_not(
    browser: sync_api.Browser, pages: dict[str, Path], live: bool
) -> None:
    with Server([str(pages["ended"].with_suffix(""))], bundle(), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://{HOST}:{server.server_address[1]}/" if live else pages["ended"].as_uri()
        page = Opened(browser, address).page
        server.shutdown()
    page.locator("#curve-accuracy .mark-symbol path").last.hover()
    page.wait_for_selector("#vg-tooltip-element.visible")
    tip = "const tip = getComputedStyle(document.getElementById('vg-tooltip-element'));"
    card = "getComputedStyle(document.querySelector('figure'))"
    look = f"(() => {{ {tip} return [tip.position, tip.backgroundColor] }})()"
    colour = page.evaluate(f"{card}.backgroundColor")
    assert page.evaluate(look) == ["fixed", colour]
    least = page.evaluate("document.querySelector('#lanes .chart').style.minHeight")
    assert least == f"{page.evaluate('report.figures.get(`lanes`).spec.height')}px"
    assert page.evaluate("blocked") == []
    hostile = "<style>h1 { color: red }</style><p style='color: red'>"
    page.evaluate(f"document.getElementById('main').insertAdjacentHTML('beforeend', `{hostile}`)")
    page.wait_for_function("blocked.length === 2")
    red = "[...document.querySelectorAll('h1, main > p')].map(one => getComputedStyle(one).color)"
    assert "rgb(255, 0, 0)" not in page.evaluate(red)
    page.close()


def told_by(label: str) -> dict[str, str]:
    """What the label of a mark says, by name."""
    return dict(part.split(": ", 1) for part in label.split("; "))


def number_in(text: str) -> float:
    """A number as it is written for readers."""
    return float(text.replace(",", "").replace("\u2212", "-"))


@pytest.mark.parametrize(("name", "count"), [("ended", 4), ("killed", 2), ("sweep", 3)])
def test_numbers_that_are_drawn_are_those_of_the_runs_files(
    browser: sync_api.Browser, pages: dict[str, Path], name: str, count: int
) -> None:
    opened = Opened(browser, pages[name].as_uri())
    groups = 2 if name == "sweep" else 1
    lines = rounds(count, (SEEDS - 1) / 2 if name == "sweep" else 0.0)  # a mean over seeds
    for field, (title, of) in CURVES.items():
        points = [told_by(label) for label in opened.labels(f"curve-{field}", "point")]
        drawn = [(number_in(one["round"]), number_in(one[title])) for one in points]
        assert [place for place, _ in drawn] == [one["round"] for one in lines] * groups
        assert [value for _, value in drawn] == pytest.approx([*map(of, lines)] * groups, abs=0.006)
    thin = 0 if name != "sweep" else SEEDS * groups
    paths = opened.page.locator("#curve-accuracy svg .mark-line path").count()
    assert paths == (thin or 1) + groups, "every run, and the mean"
    ticks = [number_in(told_by(one)["accuracy (%)"]) for one in opened.labels("standings", "tick")]
    assert sorted(ticks) == [51 + seed / 2 for seed in range(SEEDS) for _ in range(2) if thin]
    axis = "#curve-accuracy svg [aria-label^='X-axis'] .role-axis-label text"
    assert opened.page.locator(axis).first.get_attribute("fill") == "var(--muted)", "of the page"
    shown = [one for one in opened.page.locator(axis).all_text_contents() if one]
    assert shown == [str(one["round"]) for one in lines], "once and whole"
    opened.page.close()


CELLS = "all => all.map((row) => [...row.cells].map((cell) => cell.textContent))"


def cell_of(value: str | float | None, missing: str) -> str:
    """What a table shows of a value."""
    if value is None:
        return missing
    return value if isinstance(value, str) else f"{value:,.6g}"


@pytest.mark.parametrize(
    ("name", "id_", "field"), [("sweep", "terms", "run"), ("ended", "lanes", "round")]
)
def test_a_choice_is_drawn_listed_and_saved(
    browser: sync_api.Browser, pages: dict[str, Path], name: str, id_: str, field: str
) -> None:
    page = Opened(browser, pages[name].as_uri()).page
    rows = page.evaluate(f"report.rowsOf('{id_}')")
    columns = page.evaluate(f"report.figures.get('{id_}').columns")
    figure = page.locator(f"#{id_}")
    labels = figure.locator("label:visible").evaluate_all(
        "all => all.map(one => one.firstChild.data)"
    )
    assert labels == [field.capitalize()], "of the others there is one value"
    figure.locator("summary").press("Enter")
    view = f"report.figures.get('{id_}').view.data('{id_}')"
    for choice in (rows[0][field], rows[-1][field]):
        figure.locator(f"select[name={field}]").select_option(choice)
        chosen = [row for row in rows if row[field] == choice]
        page.wait_for_function(
            f"choice => {view}.every((row) => row.{field} === choice)", arg=choice
        )
        drawn = page.evaluate(view)
        assert [{key: row[key] for key in chosen[0]} for row in drawn] == chosen
        listed = figure.locator("tbody tr").evaluate_all(CELLS)
        shown = [[cell_of(row[key], no) for key, _, no in columns] for row in chosen]
        assert listed == shown[:400]
        told = f": the first 400 of {len(chosen)} rows" in figure.locator("caption").inner_text()
        assert told == (len(chosen) > 400) == (choice == "4 (last, best)")
        numbers = {key for row in chosen for key in row if isinstance(row[key], int | float)}
        numeric = [title for key, title, _ in columns if key in numbers]
        assert figure.locator("th.number").all_text_contents() == numeric
        with page.expect_download() as saved:
            figure.locator("details button").click()
        assert saved.value.suggested_filename == f"{id_}.csv"
        with Path(saved.value.path()).open(newline="") as file:
            lines = list(csv.DictReader(file))
        keys = [key for key, *_ in columns]
        if choice == rows[-1][field]:
            for button, head in (("SVG", b"<svg"), ("PNG", b"\x89PNG")):
                with page.expect_download() as saved:
                    figure.locator(".saves button", has_text=button).click()
                assert saved.value.suggested_filename == f"{id_}.{button.lower()}"
                content = Path(saved.value.path()).read_bytes()
                assert content.startswith(head)
                assert not any(word in content for word in (b"var(", b"color-mix", b"light-dark"))
        assert lines == [
            {key: "" if row[key] is None else str(row[key]) for key in keys} for row in chosen
        ]
    for theme, found in (("dark", "dark"), ("auto", None)):
        page.locator(f"[data-set-theme={theme}]").click()
        assert page.evaluate("document.documentElement.dataset.theme") == found
        assert page.locator("[aria-pressed=true]").get_attribute("data-set-theme") == theme
    page.close()


def date_files(run: Path, seconds: float) -> None:
    """Have the files of a run written so many seconds ago."""
    for file in (path for path in run.rglob("*") if path.is_file()):
        os.utime(file, (time.time() - seconds,) * 2)


def test_a_live_page_follows_a_run_to_its_end(browser: sync_api.Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds(2))
    for number in (1, 2):
        write_round(run, number, envs=2, steps=8)
    date_files(run, 3 * 3600)
    with Server([str(run)], bundle(), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://{HOST}:{server.server_address[1]}/"
        opened = Opened(browser, address)
        page = opened.page
        assert page.locator("#live").inner_text() == "2 of 4 rounds so far, last written 3 h ago"
        assert not page.locator("main .state").is_visible(), "which would say it again"
        choice = page.locator("#lanes select[name=round]")
        choice.select_option(index=1)
        chosen = choice.input_value()
        page.locator("#curve-accuracy summary").click()
        page.evaluate("scrollTo(0, 700)")
        write_lines(run / "metrics.jsonl", rounds(3))
        page.wait_for_function("report.rowsOf('rounds').length === 3", timeout=60_000)
        page.wait_for_function("document.querySelector('#curve-accuracy [data-drawn]')")
        accuracies = [one["accuracy"]["mean"] for one in rounds(3)]
        cells = page.locator("#curve-accuracy details[open] tbody td:nth-child(3)")
        assert [*map(float, cells.all_text_contents())] == accuracies, "still open"
        assert (choice.input_value(), page.evaluate("scrollY")) == (chosen, 700)
        state, age = page.locator("#live").inner_text().split(", last written ")
        assert (state, age.split()[1:]) == ("3 of 4 rounds so far", ["s", "ago"])
        points = [told_by(label) for label in opened.labels("curve-accuracy", "point")]
        assert [number_in(one["accuracy (%)"]) for one in points] == accuracies
        assert page.locator("#live.unfinished").count() == 0
        (run / "summary.json").write_text(json.dumps(summary([50.0])))
        date_files(run, 600)
        ended = (
            "document.getElementById('live').textContent === 'finished, last written 10 min ago'"
        )
        page.wait_for_function(ended, timeout=60_000)
        assert opened.said == []
        assert page.evaluate("blocked") == []
        assert all(url.startswith((address, "data:")) for url in opened.asked)
        assert len({url for url in opened.asked if "/news" in url}) > 1, "since what it has shown"
        server.shutdown()
    page.wait_for_selector("#live.unfinished", timeout=60_000)
    assert page.locator("#live").inner_text().startswith("no answer")
    page.close()
