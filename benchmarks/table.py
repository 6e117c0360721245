"""The README's performance section in markdown, from the newest line of every file in benchmarks/results/.

    python -m benchmarks.table [--results benchmarks/results]

Prints one table for the comparisons of engine and plain loop, one for those of a work with itself, and what they were
measured on. Nothing is typed by hand.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.report import COLUMNS, overhead_share

Row = tuple[str, ...]


def newest(folder: Path) -> list[Mapping]:
    """The last record of every file, by name."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        if lines:
            found.append(json.loads(lines[-1]))
    return [record for record in found if record.get("benchmark") == "eps"]


def work_cell(record: Mapping, point: Mapping) -> str:
    """The declared work of a point."""
    work = point["work"]
    seeds = f"{work['live']} {work['blueprint']}" if work["live"] else "none"
    if work["live"] and work["live_envs"] < work["N"]:
        seeds += f" in {work['live_envs']} envs"
    cell = f"{record['name']}: N={work['N']} B={work['B']} T={work['T']} V={work['V']} K={work['K']}, seeds {seeds}"
    shown = point["value"] is None or point["vary"] in ("envs", "live", "live_share")
    return cell if shown else f"{cell}, {point_name(point)}"


def ratio_cell(ratio: Mapping | None) -> str:
    """Median and extremes."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else ""


def versus(records: list[Mapping]) -> Iterator[Row]:
    """Engine beside the plain loop, a row per point."""
    yield ("work", "engine, EPS", "images/s", "plain loop, EPS", "training", "+ validation", "whole cycle")
    for record in records:
        for point in record["points"]:
            if "ratio" not in point:
                continue
            engine, loop = ([*side["columns"].values()][-1] for side in point["sides"].values())
            ratio = point["ratio"]
            yield (
                work_cell(record, point), f"{engine['eps']:.1f}", f"{engine['images_per_second']:,.0f}",
                f"{loop['eps']:.1f}", ratio_cell(ratio["training"]), ratio_cell(ratio["validation"]),
                ratio_cell(ratio["all"]),
            )  # fmt: skip


def within(records: list[Mapping]) -> Iterator[Row]:
    """The engine against itself: a row per point that is compared with the first of its work."""
    yield ("work", "ms per env-step", "env-step over first", "policy and state machine, step over first")
    for record in records:
        for point in record["points"]:
            over = point.get("over_first", {}).get("engine")
            if over is None:
                continue
            last = [*point["sides"]["engine"]["columns"].values()][-1]
            yield (
                f"{work_cell(record, point)}, first {point_name(record['points'][0])}",
                f"{last['ms_per_env_step']:.2f}", ratio_cell(over["env_step"]["all"]),
                ratio_cell(over["step"]["alone"]),
            )  # fmt: skip


def point_name(point: Mapping) -> str:
    """The setting that tells a point from others."""
    return f"{'N' if point['vary'] == 'envs' else point['vary']}={point['value']:g}"


def shares(records: list[Mapping]) -> Iterator[Row]:
    """What of a round is neither training nor validation."""
    yield ("work", "policy, state machine and PPO update", "PPO update alone")
    for record in records:
        for point in record["points"]:
            side = point["sides"].get("engine", {"columns": {}})
            share = overhead_share(side)
            if share is not None:
                seconds = [side["columns"][column]["seconds"]["median"] for column in COLUMNS]
                alone = (seconds[3] - seconds[2]) / seconds[3]
                yield work_cell(record, point), f"{100 * share:.1f} %", f"{100 * alone:.1f} %"


def markdown(rows: list[Row]) -> Iterator[str]:
    """A table; nothing where there is only a head."""
    if len(rows) > 1:
        yield "| " + " | ".join(rows[0]) + " |"
        yield "|" + "---|" * len(rows[0])
        yield from ("| " + " | ".join(row) + " |" for row in rows[1:])
        yield ""


def origin(records: list[Mapping]) -> Iterator[str]:
    """Machines, versions and settings that the figures were taken with."""
    for record in records:
        facts, limits, busy = record["machine"], record["limits"], record["busy"]
        place = f"{facts['gpu']}, " if "gpu" in facts else ""
        most = f", at most {limits['gflops']:.0f} GFLOP/s and {limits['gb_per_second']:.0f} GB/s" if limits else ""
        other = f", other processes used {busy['other_cores']:.2f} cores" if busy["other_cores"] is not None else ""
        yield (f"- {record['name']}: {record['time'][:10]}, commit {record['commit']}, {place}{facts['cpu']}, "
               f"{facts['cores']} cores, torch {facts['torch']}, {record['settings']['repeats']} turns{most}{other}"
               )  # fmt: skip


def section(records: list[Mapping]) -> list[str]:
    """All tables, a line each."""
    lines = ["Medians of the ratio of two timings of one turn, in brackets the extremes; `whole cycle` is all that the",
             "plain loop does, without policy and update, over all that the engine does.", ""]  # fmt: skip
    for rows in (versus(records), within(records), shares(records)):
        lines += markdown(list(rows))
    return lines + list(origin(records))


def main() -> None:
    """Print the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().results
    records = newest(folder)
    if not records:
        sys.exit(f"error: no results in {folder}; python -m benchmarks.eps makes them")
    print("\n".join(section(records)))


if __name__ == "__main__":
    main()
