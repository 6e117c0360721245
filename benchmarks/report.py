"""What a reader of the console of benchmarks/eps.py needs to judge its figures, as lines."""

from collections.abc import Mapping

from benchmarks.records import Line, markdown, place
from benchmarks.timing import COLUMNS

HEADS = ("training", "+ validation", "+ policy, state machine", "+ PPO update")
LAYOUT = ("processes", "threads", "pinned", "workers", "env_chunk")
SHOWN = (*LAYOUT, "how", "val_batch", "fused_validation", "kernels")
WORK_OF = {
    "baseline": "all that the plain loop does, without policy and update",
    "bare": "hosts alone, without seeds, augmentation, state machine, policy and update",
}


def lines_of(record: Mapping) -> list[str]:
    """Machine, limits, and every point: its work, its table, how each side was set up."""
    lines = [place(record)]
    if limits := record["limits"]:
        lines.append(
            f"limits   {limits['gflops']:.0f} GFLOP/s (matrix product), "
            f"{limits['gb_per_second']:.1f} GB/s (copy), all cores, float32"
        )
    for point in record["points"]:
        lines += ["", f"work     {declared(point['work'])}", "", *point_table(point), *notes(point)]
    return lines


def declared(work: Mapping) -> str:
    """The work of a point in one line."""
    seeds = (
        f"{work['live']} live {work['blueprint']} seeds, {work['stage']}, in "
        f"{work['live_envs']} envs"
    )
    return (
        f"N={work['N']} B={work['B']} T={work['T']} V={work['V']} K={work['K']}, {work['host']}, "
        f"{len(work['slots'])} slots, {seeds if work['live'] else 'no live seed'}, {work['device']}"
    )


def point_table(point: Mapping) -> list[str]:
    """Medians by column, each with those before it, and the ratios."""
    rows: list[Line] = [("", *HEADS)]
    for name, side in point["sides"].items():
        cells = [side["columns"].get(column) for column in COLUMNS]
        for words, key, form in (
            (f"{name}, EPS", "eps", ".1f"),
            ("ms per env-step", "ms_per_env_step", ".2f"),
            ("images/s", "images_per_second", ",.0f"),
        ):
            rows.append((words, *(f"{cell[key]:{form}}" if cell else "-" for cell in cells)))
    ratios = {f"{name} over engine": one for name, one in point.get("ratios", {}).items()}
    for name, over in point.get("over_first", {}).items():
        ratios |= {f"{name}, step over first": over["step"]}
        ratios |= {f"{name}, env-step over first": over["env_step"]}
    for words, ratio in ratios.items():
        rows.append((words, *(in_brackets(ratio.get(column)) for column in COLUMNS)))
    return markdown(rows)


def in_brackets(ratio: Mapping | None) -> str:
    """Median and extremes of a paired ratio."""
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "-"


def notes(point: Mapping) -> list[str]:
    """How each side was set up and what it used, a line each; then the whole ratio."""
    lines = []
    for name, side in point["sides"].items():
        text = ", ".join(f"{key} {side[key]}" for key in SHOWN if key in side)
        lines.append(
            f"{name:8} {text}; {side['dtype']}; {side['peak_mib']:.0f} MiB; warm-up "
            f"{side['build_seconds']:.1f} s, {side['graphs']} graphs; {side['syncs']:.0f} host "
            "syncs per env-step of all envs"
        )
        share = overhead_share(side)
        if share is not None:
            lines.append(f"{'':8} policy, state machine and update: {share:.1%} of the round")
    for name, over in point.get("over_first", {}).items():
        alone = in_brackets(over["step"]["alone"])
        lines.append(f"{name:8} policy and state machine alone, step over first: {alone}")
    for name, ratio in point.get("ratios", {}).items():
        whole = in_brackets(ratio["all"])
        lines.append(f"{name:8} {whole} times the engine's whole cycle: {WORK_OF[name]}")
    return lines


def overhead_share(side: Mapping) -> float | None:
    """Share of the round that is neither training nor validation; None without an update."""
    columns = side["columns"]
    if "update" not in columns:
        return None
    return 1 - columns["validation"]["seconds"]["median"] / columns["update"]["seconds"]["median"]
