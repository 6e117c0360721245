"""The picture of one run: accuracy with and without growth, and what stands in every slot.

    python -m benchmarks.growth_figure                         the main run, to docs/growth.svg
    python -m benchmarks.growth_figure --seed 3 --out my.svg   another random seed

The shipped policy plays as in the first round of `python -m esper_soa.train
+experiment=cifar_3seed`, and its control plays the same hosts without growth.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.machine import git_commit
from benchmarks.proof_figure import style, svg
from esper_soa.nets.model.blueprints import names_by_code
from esper_soa.simulator import Simulator, make
from esper_soa.vocabulary import LIVE_STAGES, STAGE_NAMES, Stage

OUT = Path(__file__).resolve().parents[1] / "docs" / "growth.svg"
EXPERIMENT = "cifar_3seed"
# Okabe and Ito (2008); stages that are not named are drawn as nothing.
COLOURS = {
    Stage.GERMINATED: "#F0E442",
    Stage.TRAINING: "#56B4E9",
    Stage.BLENDING: "#E69F00",
    Stage.HOLDING: "#CC79A7",
    Stage.FOSSILIZED: "#009E73",
    Stage.EMBARGOED: "#DDDDDD",
}
GROWN = "#D55E00"
PLAIN = "#666666"


class Played(NamedTuple):
    """A round of N envs over T env-steps."""

    accuracy: np.ndarray  # float64 [T, N], percent
    stage: np.ndarray  # int64 [T, N, S], behind the decision
    blueprint: np.ndarray  # int64 [T, N, S]
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]  # names by code


def play(sim: Simulator) -> Played:
    """The next round of a simulator, played by its policy."""
    steps = list(sim.episode())
    slots = [step.state.slots for step in steps]
    return Played(
        np.stack([step.accuracy.cpu().numpy() for step in steps]),
        np.stack([slot.stage.cpu().numpy() for slot in slots]),
        np.stack([slot.blueprint.cpu().numpy() for slot in slots]),
        sim.slots,
        names_by_code(sim.world.rules.setup.shape.blueprints),
    )


def figure(grown: Played, plain: Played, title: str) -> bytes:
    """Both rounds as SVG: curves above, the slots of every host below."""
    with style():
        page = Figure(figsize=(9.0, 6.0), layout="constrained")
        FigureCanvasSVG(page)
        above, below = page.subplots(2, 1, sharex=True, height_ratios=(1.0, 1.2))
        curves(above, grown, GROWN, "grown")
        curves(above, plain, PLAIN, "the same hosts, without growth")
        above.set_ylabel("validation accuracy (%)")
        above.legend(frameon=False, loc="lower right")
        timelines(below, grown)
        below.set_xlabel("env-step")
        met = [stage for stage in COLOURS if (grown.stage == stage).any()]
        page.legend(
            [Patch(color=COLOURS[stage]) for stage in met],
            [STAGE_NAMES[stage] for stage in met],
            loc="outside lower center",
            ncols=len(met),
            frameon=False,
        )
        page.suptitle(title, fontsize=10)
        return svg(page, "Seeds over time", title)


def curves(panel: Axes, played: Played, colour: str, label: str) -> None:
    """Mean over hosts, and the range of hosts."""
    steps = np.arange(1, len(played.accuracy) + 1)
    panel.fill_between(
        steps, played.accuracy.min(1), played.accuracy.max(1), color=colour, alpha=0.15, linewidth=0
    )
    panel.plot(steps, played.accuracy.mean(1), color=colour, label=label)
    panel.grid(True, color="#DDDDDD", linewidth=0.6)


def timelines(panel: Axes, played: Played) -> None:
    """A bar per host and slot, coloured by stage, with the blueprint where a seed begins."""
    num_steps, num_envs, num_slots = played.stage.shape
    for env in range(num_envs):
        for slot in range(num_slots):
            row = env * (num_slots + 0.8) + slot
            stages = played.stage[:, env, slot]
            edges = [0, *(np.flatnonzero(np.diff(stages)) + 1), num_steps]
            for begin, end in zip(edges[:-1], edges[1:], strict=True):
                colour = COLOURS.get(int(stages[begin]))
                if colour is not None:
                    panel.broken_barh([(begin + 1, end - begin)], (row, 0.9), facecolors=colour)
                if stages[begin] in LIVE_STAGES and (
                    begin == 0 or stages[begin - 1] not in LIVE_STAGES
                ):
                    name = played.blueprints[played.blueprint[begin, env, slot]]
                    panel.text(begin + 1.2, row + 0.45, name, fontsize=4.5, va="center_baseline")
    panel.set_yticks([env * (num_slots + 0.8) + num_slots / 2 for env in range(num_envs)])
    panel.set_yticklabels([f"host {env}" for env in range(num_envs)])
    panel.invert_yaxis()


def main(arguments: list[str] | None = None) -> int:
    """Play both rounds and write the picture; exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("overrides", nargs="*", help="settings, as on the command line of a run")
    options = parser.parse_args(arguments)
    given = {"seed": options.seed, "overrides": options.overrides}
    grown, plain = (play(make(EXPERIMENT, policy=policy, **given)) for policy in (None, "wait"))
    hosts = grown.accuracy.shape[1]
    reached = [f"{played.accuracy[-1].mean():.1f} %" for played in (grown, plain)]
    title = (
        f"{hosts} hosts of {EXPERIMENT}, slots {', '.join(grown.slots)}, random seed "
        f"{options.seed}: {reached[0]} against {reached[1]} (commit {git_commit()})"
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(figure(grown, plain, title))
    print(f"{options.out}: {title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
