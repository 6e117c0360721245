"""The figure of the proof: accuracy against parameters and against training FLOP, a row per data
set, as SVG.

Made from a record alone by benchmarks/table.py; the same record and version of matplotlib give the
same bytes. Colours are those of Okabe and Ito (2008), which the colour-blind tell apart.
"""

import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.proof_statistics import levels
from benchmarks.records import CONFIDENCE

try:
    from matplotlib import rc, rc_context, rcdefaults
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
except ImportError:
    sys.exit(
        "error: the figure of the proof needs matplotlib. Install it with: pip install "
        "'esper-soa[stats]'"
    )

STYLES = {  # colour and marker by player
    "learned": ("#D55E00", "*"),
    "wait": ("#999999", "o"),
    "random": ("#F0E442", "v"),
    "heuristic": ("#56B4E9", "^"),
    "schedule": ("#009E73", "s"),
    "static_final": ("#0072B2", "D"),
    "static_large": ("#CC79A7", "P"),
}
AXES = {"parameters": ("parameters per host", 1.0), "train_flop": ("training GFLOP per host", 1e9)}
WIDTH = 9.0  # inches
ROW_HEIGHT = 3.4


def stamp(record: Mapping) -> str:
    """A hash of the record, which the figure carries."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def figure(record: Mapping) -> bytes:
    """The figure of a proof as SVG."""
    with style():
        page = Figure(figsize=(WIDTH, ROW_HEIGHT * len(record["data"]) + 0.5), layout="constrained")
        FigureCanvasSVG(page)
        panels = page.subplots(len(record["data"]), len(AXES), squeeze=False, sharey="row")
        for row, data in zip(panels, record["data"], strict=True):
            for panel, size in zip(row, AXES, strict=True):
                draw(panel, data, size)
            row[0].set_ylabel(f"{data['name']}\ntest accuracy (%)")
        handles, names = panels[0][0].get_legend_handles_labels()
        page.legend(
            handles,
            names,
            loc="outside lower center",
            ncols=len(names),
            frameon=False,
            handletextpad=0.1,
            columnspacing=1.2,
        )
        page.suptitle(
            f"Interquartile means over {len(record['seeds'])} random seeds with "
            f"{CONFIDENCE:.0%} t intervals; up and to the left is better",
            fontsize=10,
        )
        return svg(page, "Does growth pay?", stamp(record))


@contextmanager
def style() -> Iterator[None]:
    """Within it pictures look the same, whatever the user has set."""
    with rc_context():
        rcdefaults()
        rc("svg", hashsalt="esper_soa", fonttype="path")
        rc("font", family="DejaVu Sans", size=9.0)
        rc("axes.spines", top=False, right=False)
        yield


def svg(page: Figure, title: str, source: str) -> bytes:
    """The file of a picture; the same picture has the same bytes."""
    out = io.BytesIO()
    page.savefig(out, format="svg", metadata={"Date": None, "Title": title, "Source": source})
    return out.getvalue()


def draw(panel: Axes, data: Mapping, size: str) -> None:
    """Every player of a data set with its intervals, over one of AXES; a plain mean there."""
    title, unit = AXES[size]
    for level in levels(data["players"]):
        colour, marker = STYLES[level.player]
        accuracy = level.means["accuracy"]
        cost = level.sizes[size]
        up_down = [[accuracy.mean - accuracy.low], [accuracy.high - accuracy.mean]]
        sideways = [[(cost.mean - cost.low) / unit], [(cost.high - cost.mean) / unit]]
        panel.errorbar(
            [cost.mean / unit],
            [accuracy.mean],
            yerr=up_down,
            xerr=sideways,
            color=colour,
            marker=marker,
            markersize=13 if marker == "*" else 8,
            markeredgecolor="black",
            markeredgewidth=0.6,
            ecolor="#444444",
            elinewidth=1.0,
            capsize=3,
            linestyle="none",
            label=level.player,
        )
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel(f"{title} (log scale)")
    panel.grid(True, color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
