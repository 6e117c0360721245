"""What a seed brought: the main run over ten random seeds, a third of the germinations measured
against a twin of the host that waited instead.

    python -m benchmarks.studies.effects                        all of it; begun again, it goes on
    python -m benchmarks.studies.effects --out FOLDER --results '' effects.share=1 effects.rows=40

Runs lie in FOLDER (runs/effects), a folder for each random seed; one that is done is not played
again. Prints tables in markdown: effects by blueprint and by env-step of birth beside the floor,
the rank correlation of contribution and Shapley value with the measured effect, and the sum of the
effects of a host's births beside its difference to the control; and a JSON line, which is appended
to benchmarks/results/effects.jsonl.
"""

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.processes import ROOT, train
from benchmarks.records import (
    CONFIDENCE,
    Line,
    Record,
    bounds,
    command_line,
    markdown,
    origin,
    report,
)
from benchmarks.timing import BenchmarkError
from esper_soa.lab.report.effects import (
    WORTHS,
    by_name,
    chosen,
    effects_of,
    finite,
    floor_of,
    rank_correlation,
)
from esper_soa.lab.report.run_files import Columns
from esper_soa.runtime.device import resolve_device
from esper_soa.training.results.statistics import Interval, estimate

RANDOM_SEEDS = range(1, 11)  # fixed before the first of them was played
RUN = ("+experiment=cifar_3seed", "control=wait", "report=false", "resume=auto")
MEASURED = ("effects.ops=[germinate]", "effects.share=0.33", "effects.rows=16")
MEASURES = {"accuracy": "validation accuracy", "test_accuracy": "test accuracy"}
MOST_STEPS = 6  # env-steps of births that are parts by themselves
BIRTHS = 3  # parts of all births by their env-step, where there are more


def main() -> None:
    """Play what is left, then print and keep what came out."""
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "effects", help="of the runs")
    parser.add_argument("settings", nargs="*", help="of all runs, beside those of the study")
    report(parser.parse_args(), measure, table)


def measure(options: argparse.Namespace) -> Record:
    """Play the runs that are left; the record of all of them."""
    out = options.out.resolve()
    folders = {seed: out / f"random_seed_{seed}" for seed in RANDOM_SEEDS}
    asked = [*MEASURED, *options.settings]
    facts = out / "settings.json"
    out.mkdir(parents=True, exist_ok=True)
    if facts.exists() and json.loads(facts.read_text(encoding="utf-8")) != asked:
        raise BenchmarkError(f"{out} has runs with other settings. Give another --out")
    facts.write_text(json.dumps(asked), encoding="utf-8")
    for seed, folder in folders.items():
        if not (folder / "summary.json").exists():
            train(*RUN, *asked, f"seed={seed}", f"run_dir={folder}")
    effects = joined([effects_of(folder) for folder in folders.values()])
    device = resolve_device("cpu")
    return {
        **origin("effects", device),
        "played_at": sorted({commit_of(folder) for folder in folders.values()}),
        "random_seeds": [*RANDOM_SEEDS],
        "settings": asked,
        "points": {name: points(effects, name) for name in MEASURES},
        "sums": {name: sums(folders, name) for name in MEASURES},
        "correlations": correlations(effects),
    }


def commit_of(folder: Path) -> str:
    """The commit that a run was played at."""
    versions = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
    return str(versions["git"])


def joined(parts: Sequence[Columns]) -> Columns:
    """The rows of all runs, each with the place of its run."""
    known = [
        part | {"run": np.full(len(part["step"]), place)}
        for place, part in enumerate(parts)
        if part
    ]
    return {name: np.concatenate([part[name] for part in known]) for name in known[0]}


def points(effects: Columns, measure: str) -> list[Record]:
    """Of all actions, each horizon, each blueprint and each part of the births: mean effect, its
    interval, and the floor of such a mean.
    """
    horizons = by_name(effects, "horizon") if measure == "accuracy" else ["end"]
    parts = [("horizon", name, name, None) for name in sorted(horizons, key=_order)]
    last = chosen(effects, False)
    parts += [("blueprint", name, "", part) for name, part in by_name(last, "blueprint").items()]
    for low, high in births(last["step"]):
        where = (last["step"] >= low) & (last["step"] <= high)
        part = {name: column[where] for name, column in last.items()}
        name = f"{low} to {high}" if high > low else str(low)
        if where.sum() > 1:  # or there is no interval
            parts.append(("born at env-step", name, "", part))
    found = []
    for kind, name, horizon, part in parts:
        values = finite((chosen(effects, False, horizon) if part is None else part)[measure])
        placebos = finite(chosen(effects, True, horizon)[measure])
        found.append(
            {
                "by": kind,
                "name": name,
                "effects": len(values),
                "interval": estimate(values.tolist(), CONFIDENCE).interval,
                "placebos": len(placebos),
                "floor": floor_of(placebos),
                "floor_of_mean": floor_of(placebos, max(1, len(values))),
                "above": float((np.abs(values) > floor_of(placebos)).mean()) if len(values) else 0,
            }
        )
    return found


def births(steps: np.ndarray) -> list[tuple[int, int]]:
    """First and last env-step of parts of these births: each by itself where they are few."""
    different = np.unique(steps)
    count = len(different) if len(different) <= MOST_STEPS else BIRTHS
    return [(int(part[0]), int(part[-1])) for part in np.array_split(different, count)]


def _order(horizon: str) -> int:
    return int(horizon) if horizon.isdecimal() else 2**31


def correlations(effects: Columns) -> list[Record]:
    """Rank correlations of what seeds were said to be worth with their effects, with intervals by
    Fisher's z (Bonett and Wright 2000).
    """
    last = chosen(effects, False)
    found = []
    names = [(worth, measure) for worth in WORTHS for measure in MEASURES]
    for mine, other in [*names, (WORTHS[0], WORTHS[1])]:
        value, count = rank_correlation(last[mine], last[other])
        reach = 1.96 * math.sqrt((1 + value**2 / 2) / (count - 3)) if count > 3 else math.inf
        middle = math.atanh(np.clip(value, -0.999, 0.999))
        ends = [math.tanh(middle - reach), math.tanh(middle + reach)]
        pair = {"of": mine, "with": other, "seeds": count}
        found.append(pair | {"interval": Interval(value, *ends)})
    return found


def sums(folders: Mapping[int, Path], measure: str) -> Record:
    """By random seed: what all births of a host brought by their effects, as the mean effect times
    the births of a host, and the difference of the grown hosts to their control.
    """
    own: list[float] = []
    differences: list[float] = []
    kind = {"accuracy": "validation_accuracies"}.get(measure, "test_accuracies")
    for folder in folders.values():
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        grown, control = (
            np.array(side[kind]) for side in (summary["grown"], summary["controls"][0])
        )
        births = summary["seeds"]["germinated"] / (summary["envs"] * summary["rounds"])
        last = chosen(effects_of(folder), False)
        own.append(float(finite(last[measure]).mean() * births))
        differences.append(float((grown - control).mean()))
    left = np.subtract(differences, own)
    rows = {"effects": own, "difference": differences, "difference less effects": left}
    return {
        "by_random_seed": {name: [*map(float, values)] for name, values in rows.items()},
        "intervals": {name: estimate(each, CONFIDENCE).interval for name, each in rows.items()},
    }


def table(record: Mapping) -> Sequence[str]:
    """The record in markdown."""
    lines: list[str] = []
    for measure, words in MEASURES.items():
        rows = [point_row(point) for point in record["points"][measure]]
        heads = (
            "by | part | effects | mean | floor of the mean | verdict | floor of a twin | beyond it"
        )
        lines += [f"Effects in {words} (percent points)", "", *markdown(heads, rows)]
        intervals = record["sums"][measure]["intervals"]
        rows = [(name, bounds(interval, "+.2f")) for name, interval in intervals.items()]
        lines += [f"Of a host, in {words}", "", *markdown("sum | percent points", rows)]
    rows = [
        (pair["of"], MEASURES.get(pair["with"], pair["with"]), str(pair["seeds"]))
        + (bounds(pair["interval"], "+.2f"),)
        for pair in record["correlations"]
    ]
    return [*lines, *markdown("rank correlation of | with the effect in | seeds | rho", rows)]


def point_row(point: Mapping) -> Line:
    """A mean effect beside its floor."""
    interval = point["interval"]
    below = abs(interval.mean) <= point["floor_of_mean"]
    form: Callable[[float], str] = "{:.2f}".format
    return (
        point["by"],
        point["name"],
        str(point["effects"]),
        bounds(interval, "+.2f"),
        form(point["floor_of_mean"]),
        "below the floor" if below else "",
        form(point["floor"]),
        f"{point['above']:.0%}",
    )


if __name__ == "__main__":
    main()
