"""Figures as Vega draws them: places and looks of their marks, against the tables of the page."""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from statistics import fmean

import pytest

from esper_soa.lab.report.groups import groups_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.lab.report.sections import make_drawing
from tests.builders.report_runs import line, make_run, summary, write_round, write_table

vega = pytest.importorskip("vl_convert", reason="the extra report is not installed")

SIDE = 100  # pixels of a chart a side; scales go from 0 to as much
DARKNESS = {"germinated": 18, "training": 32, "blending": 50, "holding": 70, "fossilized": 95}
FATES = {"germinated": "triangle-up", "fossilized": "diamond", "pruned": "cross"}
Row = dict
Tables = dict[str, list[Row]]


def marks(item: Row) -> Iterator[Row]:
    """All that is drawn of data, layer by layer."""
    data = item.get("role") == "mark" and item["marktype"] != "group"
    for part in item.get("items", []):
        yield from [part] if data else marks(part)


def drawn(figure: Row, tables: Tables) -> list[Row]:
    """The marks of a figure, where the place of each is its value."""
    spec = deepcopy(figure["spec"]) | {"width": SIDE, "height": SIDE, "autosize": "none"}
    spec["datasets"] = {name: tables[name] for name in figure["data"]}
    for encoding in (layer["encoding"] for layer in spec["layer"]):
        for place in (encoding[name] for name in ("x", "y") if name in encoding):
            place["axis"] = None
            if place.get("type") == "quantitative":
                place["scale"] = {"domain": [0, SIDE], "nice": False, "zero": False}
    found = list(marks(vega.vegalite_to_scenegraph(spec)["scenegraph"]))
    return [one | {name: SIDE - one[name] for name in ("y", "y2") if name in one} for one in found]


def seen(mark: Row, name: str) -> str:
    """What a mark has there, numbers as they are read."""
    value = mark.get(name)
    return f"{value + 0.0:.4f}" if isinstance(value, int | float) else str(value)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict, Tables]]:
    """Figures and tables of a run that has ended, of one of a single round, and of a sweep."""
    folder = tmp_path_factory.mktemp("runs")
    ended = summary([50.0, 53.0])
    for part, share in ((ended["grown"], 0.1), (ended["controls"][0], 0.3)):
        (episode,) = part["episodes"]
        episode["settings"] = {"reward.rent": [2 * share, share], "gates": [3.0, 3.0]}
    run = make_run(folder / "ended", [line(at, 40 + 3.25 * at) for at in (1, 2, 3)], ended=ended)
    write_round(run, 3, envs=2, steps=16)
    single = make_run(folder / "single", [line(1, 40.0)])
    write_round(single, 1, envs=2, steps=16)
    steps = [{"step": at, "env": env} for at in range(1, 17) for env in range(2)]
    control = [at | {"accuracy": 30.0 + at["step"] / 4 + at["env"]} for at in steps]
    write_table(single, "control_steps", 1, control)
    lives = [at | {"kind": [*FATES][at["step"] % 3], "slot": "r0c0"} for at in steps[3:]]
    write_table(single, "events", 1, lives)
    for seed in range(6):
        end = summary([50.0 + seed, 52.0])
        job = folder / "sweep" / str(seed)
        make_run(job, [line(1, 40.0)], seed // 2, end, overrides=[f"reward={seed % 2}"])
    found = {}
    for name in ("ended", "single", "sweep"):
        sections, tables = make_drawing(groups_of(find_runs([folder / name])))
        figures = {one["id"]: one for section in sections for one in section.figures}
        rows = {
            of: [
                dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)
            ]
            for of, table in tables.items()
        }
        found[name] = figures, rows
    return found


def layer(rows: list[Row], **places: object) -> list[Row]:
    """Marks of rows: in each place a column, what a function makes of the row, or a constant."""

    def read(row: Row, of: object) -> object:
        return of(row) if callable(of) else row.get(of, of)

    return [{place: read(row, of) for place, of in places.items()} for row in rows]


def curve(tables: Tables, x: str, rows: str, means: str, value: str) -> Iterator[list[Row]]:
    """Band of the hosts, the control, a line per run, the mean, its points, fates of seeds."""
    banded = [row for row in tables[means] if f"{value}_min" in row]
    yield layer(banded, x=x, y=f"{value}_min", y2=f"{value}_max")
    control = [row["accuracy"] for row in tables["hosts"] if row["hosts"] == "control"]
    level = fmean(control) if control else "control_accuracy"
    course = tables[means][: 1 if control else None] if value == "accuracy" else []
    yield layer(course, y=level, strokeDash="[5, 4]")
    yield layer(tables[rows], x=x, y=value, opacity=0.38)
    yield layer(tables[means], x=x, y=value, strokeWidth=2.6)
    yield layer(tables[means], x=x, y=value, shape="circle")
    most = max((row["seeds"] for row in tables["fates"]), default=1)
    for depth, (event, shape) in zip((10, 24, 38), FATES.items(), strict=True):
        lives = [row for row in tables["fates"] if row["event"] == event and value == "accuracy"]
        size = partial(lambda row, most: 20 + 110 * row["seeds"] / most, most=most)
        yield layer(lives, x=x, y=-depth, shape=shape, size=size)


def lanes(tables: Tables) -> Iterator[list[Row]]:
    """Accuracies, intervals of seeds up to 0.88 and up to alpha, their stages, names, events."""
    darkness = lambda row: f"color-mix(in srgb, var(--ink) {DARKNESS[row['stage']]}%, var(--card))"  # noqa: E731
    interval = partial(layer, tables["lanes"], x="from", x2="to", y2="base")
    yield layer(tables["accuracies"], x="step", y="y")
    yield interval(y=lambda row: row["base"] + 0.88, opacity=0.17)
    yield interval(y=lambda row: row["base"] + 0.08 + 0.8 * row["alpha"])
    yield interval(y=lambda row: row["base"] + 0.08, fill=darkness)
    yield layer(tables["hostnames"], y="y", text="words")
    yield layer(tables["marks"], x="step", y="y", shape=lambda row: FATES[row["event"]])


def cost(tables: Tables, x: str) -> Iterator[list[Row]]:
    """The way of a run, twice, and its hosts at the end, those of the control as rings."""
    for opacity in (0.25, 0.35):
        yield layer(tables["rounds"], x=x, y="accuracy", opacity=opacity)
    full = {"grown": 0.85, "control": 0}
    yield layer(tables["hosts"], x=x, y="accuracy", fillOpacity=lambda row: full[row["hosts"]])


def standings(tables: Tables) -> Iterator[list[Row]]:
    """Every run, the intervals of the means, and the means."""
    yield layer(tables["finals"], x=lambda row: row["accuracy"] - 0.75, width=1.5)
    yield layer(tables["standings"], x="accuracy_low", x2="accuracy_high")
    yield layer(tables["standings"], x="accuracy", shape="circle")


ROUNDS = {"x": "round", "rows": "rounds", "means": "means"}
STEPS = {"x": "step", "rows": "steps", "means": "step_means"}
EXPECTED = {
    ("ended", "curve-accuracy"): partial(curve, **ROUNDS, value="accuracy"),
    ("ended", "curve-reward"): partial(curve, **ROUNDS, value="reward"),
    ("ended", "curve-kl"): partial(curve, **ROUNDS, value="kl"),
    ("single", "steps-accuracy"): partial(curve, **STEPS, value="accuracy"),
    ("single", "steps-reward"): partial(curve, **STEPS, value="step_reward"),
    ("ended", "lanes"): lanes,
    ("ended", "cost-parameters"): partial(cost, x="parameters"),
    ("ended", "cost-flop"): partial(cost, x="train_gflop"),
    ("sweep", "standings"): standings,
    ("ended", "blueprints"): lambda t: (
        layer(t["paid"], x2="points", fill="var(--c3)"),
        layer(t["paid"], x="points", text=lambda row: f"{row['points']:+.2f}"),
    ),
    ("ended", "settings"): lambda t: [layer(t["settings"], x="value", y="test_accuracy")],
    ("ended", "shapley"): lambda t: 2 * [layer(t["shapley"], x="round", y="shapley")],
    ("ended", "terms"): lambda t: [layer(t["terms"], height="term_sum")],
    ("ended", "times"): lambda t: [layer(t["times"], height="seconds")],
    ("single", "ops"): lambda t: [layer(t["ops"], x2="share")],
}


@pytest.mark.parametrize("case", EXPECTED, ids="-".join)
def test_marks_show_the_numbers_of_the_tables(
    reports: dict[str, tuple[dict, Tables]], case: tuple[str, str]
) -> None:
    figures, tables = reports[case[0]]
    left = drawn(figures[case[1]], tables)
    for layer in EXPECTED[case](tables):
        part = left[: len(layer)]
        del left[: len(layer)]
        names = layer[0].keys() if layer else ()
        shown, wanted = (
            [[seen(mark, name) for name in names] for mark in all_] for all_ in (part, layer)
        )
        assert sorted(shown) == sorted(wanted), names
    assert not left
