"""The measurements of benchmarks/results/ in markdown, a section per kind of table; nothing is
typed by hand.

Records in, lines out; benchmarks/table.py prints them and writes them into the pages.
"""

from collections.abc import Callable, Iterator, Mapping

from benchmarks import family_tables, price_tables, proof_tables
from benchmarks.records import Line, Records, markdown, place
from benchmarks.text import table as text_table
from benchmarks.timing import COLUMNS

Section = Callable[[Records], list[str]]
OPPONENTS = {"baseline": "plain loop", "bare": "bare hosts"}


def sides(records: Records) -> list[str]:
    """Every side of every point by itself."""
    rows: list[Line] = []
    for record in records:
        for point in record["points"]:
            for name, side in point["sides"].items():
                whole = last_column(side)
                figures = f"{whole['eps']:.1f}", f"{whole['ms_per_env_step']:.2f}", p95_cell(side)
                images = f"{whole['images_per_second']:,.0f}"
                rows.append((work_cell(record, point), name, *figures, images, str(side["syncs"])))
    heads = "work | side | EPS | ms per env-step | of all envs, p95 | images/s | host syncs"
    return markdown(heads, rows)


def opponents(records: Records) -> list[str]:
    """The engine beside each loop, a row per point."""
    rows: list[Line] = []
    for opponent, words in OPPONENTS.items():
        for record, point, ratio in points_with(records, opponent):
            engine, loop = (last_column(point["sides"][name]) for name in ("engine", opponent))
            both = f"{engine['eps']:.1f}", f"{engine['images_per_second']:,.0f}", words
            side = point["sides"][opponent]
            layout = f"{loop['eps']:.1f}", p95_cell(side), layout_cell(side)
            ratios = (ratio_cell(ratio[name]) for name in ("training", "validation", "all"))
            rows.append((work_cell(record, point), *both, *layout, *ratios))
    speeds = "engine, EPS | images/s | beside | its EPS | of all envs, p95"
    columns = "training | + validation | whole cycle"
    return markdown(f"work | {speeds} | laid out as | {columns}", rows)


def within(records: Records) -> list[str]:
    """The engine against itself: a row per point of a work that has several."""
    rows: list[Line] = []
    for record in records:
        for point in record["points"] if len(record["points"]) > 1 else ():
            if "engine" not in point["sides"]:
                continue
            side = point["sides"]["engine"]
            figures = f"{last_column(side)['ms_per_env_step']:.2f}", f"{side['peak_mib']:.0f}"
            ratios = ("first", "")
            if "over_first" in point:
                ratio = point["over_first"]["engine"]
                ratios = ratio_cell(ratio["env_step"]["all"]), ratio_cell(ratio["step"]["alone"])
            rows.append((work_cell(record, point), *figures, *ratios))
    over = "env-step over first | policy and state machine, step over first"
    return markdown(f"work | ms per env-step | peak memory, MiB | {over}", rows)


def shares(records: Records) -> list[str]:
    """What of a round is neither training nor validation."""
    rows: list[Line] = []
    for record in records:
        for point in record["points"]:
            columns = point["sides"].get("engine", {"columns": {}})["columns"]
            if COLUMNS[3] in columns:
                seconds = [columns[column]["seconds"]["median"] for column in COLUMNS]
                share = 1 - seconds[1] / seconds[3]
                alone = (seconds[3] - seconds[2]) / seconds[3]
                rows.append(
                    (work_cell(record, point), f"{100 * share:.1f} %", f"{100 * alone:.1f} %")
                )
    return markdown("work | policy, state machine and PPO update | PPO update alone", rows)


def origins(records: Records) -> list[str]:
    """What the figures were taken with, a line per work."""
    lines = []
    for record in records:
        engine = record["points"][0]["sides"].get("engine", {})
        limits, others = record["limits"], record["busy"]["other_cores"]
        parts = [place(record), f"{record['settings']['repeats']} turns"]
        parts += [f"kernels {engine['kernels']}"] * ("kernels" in engine)
        if limits:
            most = f"{limits['gflops']:.0f} GFLOP/s and {limits['gb_per_second']:.0f} GB/s"
            parts.append(f"at most {most}")
        if others is not None:
            parts.append(f"{others:.2f} cores of other processes")
        lines.append(f"- {record['name']}: {', '.join(parts)}")
    return lines


def sleepers(record: Mapping) -> list[str]:
    """What sleeping seeds, scattered seeds and subset rows cost."""
    rows: list[Line] = []
    for row in record["rows"]:
        name = f"{row['top']}, over {row['bottom']}"
        extremes = f"{row['low']:.2f} to {row['high']:.2f}"
        times = f"{row['top_ms']:.0f} and {row['bottom_ms']:.0f}"
        rows.append((name, f"{row['ratio']:.2f}", extremes, times))
    work = f"N={record['envs']} B={record['batch']} T={record['train']} V={record['val']}"
    return [
        *markdown(" | ratio | range | ms", rows),
        f"{work}, medians of {record['repeats']} pairs, kernels {record['kernels']}, "
        f"{record['workers']} workers; {place(record)}.",
    ]


def kernels(record: Mapping) -> list[str]:
    """The state machine alone."""
    rows: list[Line] = []
    for row in record["results"]:
        quartiles = f"{1e3 * row['lower_quartile']:.1f} to {1e3 * row['upper_quartile']:.1f}"
        time = f"{1e3 * row['median']:.1f} ({quartiles})"
        rate = f"{row['env_steps_per_second']:,.0f}"
        rows.append((f"{row['envs']}", f"{row['mode']}, {row['threads']}", time, rate))
    return [
        *markdown("N | mode, threads | ms per env-step of all N | env-steps/s", rows),
        f"Medians and quartiles of {record['results'][0]['repeats']} env-steps, torch's own "
        f"kernels; {place(record)}.",
    ]


def environments(record: Mapping) -> list[str]:
    """Agents of other libraries beside the simulator alone, a row per side."""
    rows: list[Line] = [
        (row["side"], f"{row['eps']:.1f}", f"{row['low']:.1f} to {row['high']:.1f}")
        for row in record["rows"]
    ]
    return [
        *markdown("side | env-steps/s | range", rows),
        f"{record['envs']} hosts of {record['experiment']}, medians of {record['repeats']} "
        f"rounds of {record['steps']} env-steps in alternation; {place(record)}.",
    ]


def points_with(records: Records, opponent: str) -> Iterator[tuple[Mapping, Mapping, Mapping]]:
    """Records and points in which the engine has met `opponent`, and the ratio."""
    for record in records:
        for point in record["points"]:
            if opponent in point.get("ratios", {}):
                yield record, point, point["ratios"][opponent]


def last_column(side: Mapping) -> Mapping:
    """The last column, which has everything that the side does."""
    return [*side["columns"].values()][-1]


def work_cell(record: Mapping, point: Mapping) -> str:
    """The declared work of a point."""
    work = point["work"]
    seeds = f"{work['live']} {work['blueprint']}" if work["live"] else "none"
    subsets = f"K={work['K']}, seeds {seeds}"
    if work.get("policy"):
        subsets = f"seeds by {work['policy']}"
    cell = f"{record['name']}: N={work['N']} B={work['B']} T={work['T']} V={work['V']} {subsets}"
    return cell + varied(point)


def varied(point: Mapping) -> str:
    """What differs between the points of a record, where the other facts of the work do not say."""
    shown = point["value"] is None or point["vary"] in ("envs", "live")
    return "" if shown else f", {point['vary']}={point['value']:g}"


def work_cells(record: Mapping, point: Mapping) -> tuple[str, ...]:
    """The declared work of a point, a cell each; K of seeds that come and go is not declared."""
    work = point["work"]
    subsets = f"{work['K']}", f"{work['live']} {work['blueprint']}" if work["live"] else "none"
    if work.get("policy"):
        subsets = "varies", f"by `{work['policy']}`"
    return (record["name"] + varied(point), *(f"{work[name]}" for name in "NBTV"), *subsets)


def layout_cell(side: Mapping) -> str:
    """How a loop used the cores, the quickest way found."""
    text = f"{side['threads']} threads"
    if side["processes"] > 1:
        text = f"{side['processes']} processes of one thread" + ", a core each" * side["pinned"]
    return f"{text}, {side['how']}" if "how" in side else text


def p95_cell(side: Mapping) -> str:
    """The 95th percentile of an env-step of all envs, ms, the update apart; none in old records."""
    return f"{side['env_step_ms']['p95']:.0f}" if "env_step_ms" in side else ""


def ratio_cell(ratio: Mapping | None) -> str:
    """Median and extremes."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""


def speed(records: Records) -> list[str]:
    """The engine's whole cycle over those of both loops, works that have a loop beside them, and
    works whose seeds grow, which no loop does; and where they were measured.
    """
    rows: list[Line] = []
    measured: dict[str, list[str]] = {}  # by place, its works
    ratios = {
        name: {work_cell(*both): ratio["all"] for *both, ratio in points_with(records, name)}
        for name in OPPONENTS
    }
    for record in records:
        for point in record["points"]:
            work = work_cell(record, point)
            if "baseline" in point.get("ratios", {}) or point["work"].get("policy"):
                engine = point["sides"]["engine"]
                both = (ratio_cell(found.get(work)) for found in ratios.values())
                cells = work_cells(record, point)
                rows.append((*cells, f"{last_column(engine)['eps']:.0f}", p95_cell(engine), *both))
                measured.setdefault(place(record), []).append(cells[0])
    heads = "name | hosts (N) | batch size (B) | training images (T) | validation images (V)"
    heads += " | validation passes (K) | seeds per host | env-steps/s | time of a step of all hosts"
    heads += " (ms, 95th percentile) | speed-up over a plain loop | speed-up over bare hosts"
    notes = [
        f"Measured: {', '.join(dict.fromkeys(works)) + ': ' if len(measured) > 1 else ''}{words}."
        for words, works in measured.items()
    ]
    return [*markdown(heads, rows), *notes]


EPS: dict[str, Section] = {
    "speed": speed,
    "opponents": opponents,
    "within": within,
    "shares": shares,
    "origins": origins,
}


def each(table: Callable[[Mapping], list[str]]) -> Section:
    """The tables of all records, one behind the other."""

    def tables(records: Records) -> list[str]:
        return [line for record in records for line in table(record)]

    return tables


# Name of a section: kind of its records, and what makes it of them.
OTHERS: dict[str, tuple[str, Section]] = {
    "result": ("proof", proof_tables.result),
    "proof": ("proof", proof_tables.proof),
    "proof_main": ("proof_main", each(proof_tables.main_lines)),
    "sleepers": ("sleepers", each(sleepers)),
    "kernels": ("kernels", each(kernels)),
    "environments": ("environments", each(environments)),
    "family": ("family", each(family_tables.family)),
    "text": ("text", each(text_table)),
    "price_curve": ("price_curve", each(price_tables.table)),
    "price_result": ("price_curve", each(price_tables.result)),
}
