"""What esper-compare found of the runs of a report, as its compare.json says it.

Given runs by details.py. Needs no torch.
"""

from collections.abc import Sequence

from esper_soa.ops.comparison import MEASURES, RESULT
from esper_soa.report.run_files import Record, RunRecord, number, read_json
from esper_soa.report.words import p_value

TITLES = (
    "group",
    "against",
    "measure",
    "difference (points)",
    "seeds won",
    "effect",
    "p, exact",
    "p after Holm",
    "verdict",
)


def study_of(runs: Sequence[RunRecord]) -> Record:
    """The comparison that all `runs` are of, each in the folder <study>/<group>/<seed>; empty where
    there is none.
    """
    folders = {run.path.resolve().parent.parent for run in runs}
    return read_json(folders.pop() / RESULT) if len(folders) == 1 else {}


def study_words(study: Record) -> str:
    """What was tested, in words."""
    seeds = study.get("seeds")
    rows = _rows(study)
    count = len(seeds) if isinstance(seeds, list) else 0
    notes = [
        f"{row['group']}, {_measure(row)}: {row['power']}." for row in rows if row.get("power")
    ]
    tested = (
        f"By esper-compare, over {count} seeds that every group has played in lockstep: "
        "differences paired by seed, "
        f"intervals of {number(study, 'confidence') or 0:.0%} (Student's t), two-sided exact "
        "signed rank tests "
        f"(Wilcoxon 1945), corrected after Holm for {len(rows)} comparisons. The effect is the "
        "mean difference over "
        "its standard deviation, by Hedges."
    )
    return " ".join([tested, *notes])


def study_rows(study: Record) -> list[tuple[str, ...]]:
    """The comparisons under TITLES."""
    return [
        (
            str(row.get("group", "")),
            str(row.get("reference", "")),
            _measure(row),
            (
                f"{_told(row, 'mean', '+.2f')} [{_told(row, 'low', '+.2f')}, "
                f"{_told(row, 'high', '+.2f')}]"
            ),
            f"{_told(row, 'won', '.0f')} of {len(_differences(row))}",
            _told(row, "effect", "+.2f"),
            p_value(number(row, "p") or 0.0),
            p_value(number(row, "corrected") or 0.0),
            str(row.get("verdict", "")),
        )
        for row in _rows(study)
    ]


def _rows(study: Record) -> list[Record]:
    found = study.get("comparisons")
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _measure(row: Record) -> str:
    return MEASURES.get(str(row.get("measure")), str(row.get("measure")))


def _differences(row: Record) -> list[object]:
    found = row.get("differences")
    return found if isinstance(found, list) else []


def _told(row: Record, name: str, form: str) -> str:
    value = number(row, name)
    return "–" if value is None else format(value, form)
