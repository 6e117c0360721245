"""Results of benchmarks/eps.py as tables for people: on a console, and in markdown by
benchmarks/table.py.
"""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from benchmarks.timing import COLUMNS

HEADS = ("training", "+ validation", "+ policy, state machine", "+ PPO update")
SHOWN = (
    "processes",
    "threads",
    "pinned",
    "workers",
    "env_chunk",
    "how",
    "val_batch",
    "fused_validation",
    "kernels",
)
WORK_OF = {
    "baseline": "all that the plain loop does, without policy and update",
    "bare": "hosts alone, without seeds, augmentation, state machine, policy and update",
}


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


def show(record: Mapping, console: Console) -> None:
    """Print everything that a reader needs to judge the figures."""
    facts = record["machine"]
    limits = record["limits"]
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}, "
        f"{facts.get('gpu', 'no GPU')}, commit {record['commit']}",
        markup=False,
        highlight=False,
    )
    if limits:
        console.print(
            f"limits   {limits['gflops']:.0f} GFLOP/s (matrix product), "
            f"{limits['gb_per_second']:.1f} GB/s (copy), all cores, float32",
            highlight=False,
        )
    for point in record["points"]:
        console.print(f"\nwork     {declared(point['work'])}", markup=False, highlight=False)
        console.print(point_table(point))
        for line in notes(point, limits):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def point_table(point: Mapping) -> Table:
    """EPS, milliseconds and images per second by column, and the ratio."""
    table = Table(
        "", *HEADS, title="each column with those before it; medians", title_justify="left"
    )
    for name, side in point["sides"].items():
        cells = [side["columns"].get(column) for column in COLUMNS]
        table.add_row(f"{name}, EPS", *[f"{cell['eps']:.1f}" if cell else "-" for cell in cells])
        table.add_row(
            "  ms per env-step",
            *[f"{cell['ms_per_env_step']:.2f}" if cell else "-" for cell in cells],
        )
        table.add_row(
            "  images/s", *[f"{cell['images_per_second']:,.0f}" if cell else "-" for cell in cells]
        )
    for name, ratio in point.get("ratios", {}).items():
        table.add_row(
            f"{name} over engine", *[in_brackets(ratio.get(column)) for column in COLUMNS]
        )
    for name, over in point.get("over_first", {}).items():
        for kind, text in (("step", "step"), ("env_step", "env-step")):
            row = [in_brackets(over[kind].get(column)) for column in COLUMNS]
            table.add_row(f"{name}, {text} over first", *row)
    return table


def in_brackets(ratio: Mapping | None) -> str:
    """Median and extremes of a paired ratio."""
    return f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "-"


def notes(point: Mapping, limits: Mapping | None) -> list[str]:
    """How each side was set up and what it used, a line each; then the whole ratio."""
    lines = []
    for name, side in point["sides"].items():
        chosen = {key: side[key] for key in SHOWN if key in side}  # facts about the side
        text = ", ".join(f"{key} {value}" for key, value in chosen.items())
        lines.append(
            f"{name:8} {text}; {side['dtype']}; {side['peak_mib']:.0f} MiB; warm-up "
            f"{side['build_seconds']:.1f} s, {side['graphs']} graphs; {side['syncs']:.0f} host "
            "syncs per env-step of all envs"
        )
        lines += [f"{'':8} {line}" for line in use_of_limits(side, point["work"], limits)]
        share = overhead_share(side)
        if share is not None:
            lines.append(
                f"{'':8} policy, state machine and update: {100 * share:.1f} % of the round"
            )
    for name, over in point.get("over_first", {}).items():
        lines.append(
            f"{name:8} policy and state machine alone, step over first: "
            f"{in_brackets(over['step']['alone'])}"
        )
    for name, ratio in point.get("ratios", {}).items():
        lines.append(
            f"{name:8} {in_brackets(ratio['all'])} times the engine's whole cycle: {WORK_OF[name]}"
        )
    return lines


def use_of_limits(side: Mapping, work: Mapping, limits: Mapping | None) -> list[str]:
    """Training against what the machine can do."""
    seconds = side["columns"]["training"]["seconds"]["median"]
    if not limits:
        return []
    rates = work["train_gflop"] / seconds, work["train_gbyte"] / seconds
    shares = 100 * rates[0] / limits["gflops"], 100 * rates[1] / limits["gb_per_second"]
    return [
        f"training {rates[0]:.1f} GFLOP/s ({shares[0]:.0f} % of the limit), about {rates[1]:.1f} "
        f"GB/s of host activations ({shares[1]:.0f} %; caches hold part of them)"
    ]


def overhead_share(side: Mapping) -> float | None:
    """Share of the round that is neither training nor validation; None without an update."""
    columns = side["columns"]
    if "update" not in columns:
        return None
    return 1 - columns["validation"]["seconds"]["median"] / columns["update"]["seconds"]["median"]
