"""What stands below the figures: every comparison with its test, settings and how they differ,
versions, findings.

Plain tables in the page itself. Given groups of runs by page.py. Needs no torch.
"""

from collections.abc import Iterable, Sequence
from html import escape

from esper_soa.report.groups import Group, differing
from esper_soa.report.run_files import Record, RunRecord
from esper_soa.report.standings import CONFIDENCE, Pair, pairs
from esper_soa.report.study import TITLES, study_of, study_rows, study_words
from esper_soa.report.words import bounded, p_value

MOST_COLUMNS = 12  # runs side by side in the table of differing settings


def details(groups: Sequence[Group]) -> str:
    """The section of settings, with everything that is told in words and tables alone."""
    runs = [run for group in groups for run in group.runs]
    study = study_of(runs)
    compared = _study(study) if study else _pairs(pairs(groups)) if len(groups) > 1 else ""
    cards = [
        _card("Comparisons", compared),
        _card("Settings that differ", _differing(runs)) if len(runs) > 1 else "",
        _card("What the updates showed", _anomalies(runs)),
        _card(
            "Overrides",
            _table(("run", "overrides"), ((run.label, " ".join(run.overrides)) for run in runs)),
        ),
        _card("Software and machine", _versions(runs)),
        _card(
            "All settings" + (f" of run {runs[0].label}" if len(runs) > 1 else ""),
            _all_settings(runs[0]),
        ),
    ]
    return (
        '<section id="settings" aria-labelledby="settings-title"><h2 id="settings-title">Settings '
        "and findings</h2>"
        "<p>What was asked for, what it ran on, and what was noticed.</p>"
        f'<div class="figures">{"".join(cards)}</div></section>\n'
    )


def _card(title: str, content: str) -> str:
    return f'<div class="card wide"><h3>{escape(title)}</h3>{content}</div>\n' if content else ""


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Texts in a table that scrolls on its own; empty where there are no rows."""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    name = escape(", ".join(titles))
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table: {name}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _pairs(found: Sequence[Pair]) -> str:
    if not found:
        return ""
    rows = [
        (
            pair.label,
            pair.other,
            "not of the same seeds" if pair.difference is None else bounded(pair.difference),
            bounded(pair.better),
            p_value(pair.p),
            p_value(pair.adjusted),
        )
        for pair in found
    ]
    titles = (
        "group",
        "other",
        "difference, same seeds (points)",
        "probability of ending higher",
        "p, exact",
        f"p of {len(found)} together",
    )
    words = (
        f"Intervals of {CONFIDENCE:.0%}. Differences are paired by seed (Student's t). The "
        "probability that a run of "
        "the group ends above one of the other is Mann and Whitney's share of pairs with "
        "Newcombe's interval; p is "
        "their exact test, and in the last column corrected after Holm for the number of "
        f"comparisons, {len(found)}."
    )
    return f'<p class="about">{escape(words)}</p>{_table(titles, rows)}'


def _study(study: Record) -> str:
    return f'<p class="about">{escape(study_words(study))}</p>{_table(TITLES, study_rows(study))}'


def _differing(runs: Sequence[RunRecord]) -> str:
    found = differing(runs[:MOST_COLUMNS])
    table = _table(
        ["setting", *(run.label for run in runs[:MOST_COLUMNS])],
        ([row.name, *row.values] for row in found),
    )
    left_out = len(runs) - MOST_COLUMNS
    return table + (
        f'<p class="about">{left_out} more runs are not shown here.</p>' if left_out > 0 else ""
    )


def _anomalies(runs: Sequence[RunRecord]) -> str:
    """The rounds in which an update looked wrong; a row per finding and set of runs that share
    it.
    """
    found = []
    for run in runs:
        rounds: dict[str, list[str]] = {}
        for line in run.rounds:
            names = line.get("anomalies")
            for name in names if isinstance(names, list) else []:
                rounds.setdefault(str(name), []).append(str(line.get("round", "?")))
        found += [(run.label, name, ", ".join(where)) for name, where in rounds.items()]
    table = _table(("finding", "in rounds", "runs"), _shared(found, len(runs)))
    return (
        table
        and f'<p class="about">The log of a run says what each means and what to do.</p>{table}'
    )


def _versions(runs: Sequence[RunRecord]) -> str:
    """A row per fact and set of runs that share it."""
    found = [(run.label, name, value) for run in runs for name, value in _facts(run.versions)]
    return _table(("fact", "value", "runs"), _shared(found, len(runs)))


def _shared(found: Iterable[tuple[str, str, str]], given: int) -> list[tuple[str, str, str]]:
    """Labels of runs with a name and a value each, as rows of name, value and the runs that share
    both, by name.

    given: how many runs there are.
    """
    rows: dict[tuple[str, str], list[str]] = {}
    for label, name, value in found:
        rows.setdefault((name, value), []).append(label)
    return [
        (name, value, "all" if len(labels) == given else ", ".join(labels))
        for (name, value), labels in sorted(rows.items(), key=lambda row: row[0][0])
    ]


def _facts(versions: Record, before: str = "") -> list[tuple[str, str]]:
    facts: list[tuple[str, str]] = []
    for name, value in versions.items():
        inner = value if isinstance(value, dict) else None
        facts += (
            [(f"{before}{name}", str(value))]
            if inner is None
            else _facts(inner, f"{before}{name}.")
        )
    return facts


def _all_settings(run: RunRecord) -> str:
    table = _table(
        ("setting", "value"), ((name, str(value)) for name, value in run.settings.items())
    )
    return (
        f"<details><summary>{len(run.settings)} settings</summary>{table}</details>"
        if table
        else ""
    )
