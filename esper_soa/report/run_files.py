"""What a run folder holds, read as it is: finished, killed or still going on.

A line that was cut off, or a file that is not there yet, is no error: a report is of what has been
written. Called by page.py and live.py. Needs no torch.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from esper_soa.ops.found_runs import find_run_folders, read_settings
from esper_soa.ops.rundir import RunFolder

Record = dict[str, object]
# As ops/profile.py says them: "phases   round 2/5: training 71.2 %, state 8.1 % of 20.3 s".
PHASES = re.compile(
    r"phases   round (?P<round>\d+)/\d+: (?P<shares>.+?) of (?P<seconds>[\d.]+) s$", re.MULTILINE
)
SHARE = re.compile(r"(\w[\w ]*?) ([\d.]+) %")


class Phases(NamedTuple):
    """Where the time of a round went."""

    round: int
    seconds: dict[str, float]  # by phase


@dataclass(frozen=True)
class RunRecord:
    """A run by its files."""

    path: Path
    label: str  # that no other run of the report has
    settings: dict[str, object] = field(default_factory=dict)  # by dotted name
    overrides: list[str] = field(default_factory=list)
    versions: Record = field(default_factory=dict)
    rounds: list[Record] = field(default_factory=list)  # lines of metrics.jsonl
    episodes: list[Record] = field(default_factory=list)  # lines of episodes.jsonl
    summary: Record = field(default_factory=dict)  # empty where the run has not come to its end
    phases: list[Phases] = field(default_factory=list)  # only of runs with profile=phases

    @property
    def planned(self) -> int:
        """Rounds that the settings ask for; 0 where they cannot be read."""
        return int(number(self.settings, "rounds") or 0)

    @property
    def finished(self) -> bool:
        """Whether the run has written its final table."""
        return bool(self.summary)

    @property
    def slots(self) -> list[str]:
        """Names of the host's slots."""
        found = self.settings.get("slots")
        return [str(name) for name in found] if isinstance(found, list) else []


def number(record: object, *names: str) -> float | None:
    """The finite number under `names`, one within the other; None where there is none."""
    for name in names:
        record = record.get(name) if isinstance(record, Mapping) else None
    if isinstance(record, bool) or not isinstance(record, int | float):
        return None
    return float(record) if math.isfinite(record) else None


def part(record: object, *names: str) -> Record:
    """The record under `names`, one within the other; empty where there is none."""
    for name in names:
        record = record.get(name) if isinstance(record, Mapping) else None
    return {str(key): value for key, value in record.items()} if isinstance(record, Mapping) else {}


def numbers(record: object, *names: str) -> list[float | None]:
    """The list of numbers under `names`; empty where there is none."""
    found = part(record, *names[:-1]).get(names[-1])
    return [number({"": value}, "") for value in found] if isinstance(found, list) else []


def find_runs(given: Sequence[str | Path]) -> list[RunRecord]:
    """The runs in the folders `given`: each a run folder, or one that holds some, as a sweep does.

    Raises UserError where a folder holds none.
    """
    return [read_run(path, label) for label, path in find_run_folders(given).items()]


def read_run(path: Path, label: str = "") -> RunRecord:
    """The run in the folder `path`, whatever of it there is."""
    folder = RunFolder(path)
    overrides = _text(folder.overrides).splitlines()
    return RunRecord(
        path,
        label or path.name,
        read_settings(folder.config),
        [line for line in overrides if line],
        read_json(folder.versions),
        read_lines(folder.metrics),
        read_lines(folder.episodes),
        read_json(folder.summary),
        read_phases(folder.log),
    )


def read_lines(path: Path) -> list[Record]:
    """The whole lines of a file of JSON lines."""
    found = (_parsed(line) for line in _text(path).splitlines())
    return [record for record in found if isinstance(record, dict)]


def read_json(path: Path) -> Record:
    """The record in a JSON file; empty where there is none."""
    found = _parsed(_text(path))
    return found if isinstance(found, dict) else {}


def read_phases(path: Path) -> list[Phases]:
    """The lines of the log that tell phases; of a round that was played again after a resumption,
    the last.
    """
    found: dict[int, Phases] = {}
    for line in PHASES.finditer(_text(path)):
        seconds = float(line["seconds"])
        shares = {name: float(share) for name, share in SHARE.findall(line["shares"])}
        found[int(line["round"])] = Phases(
            int(line["round"]), {name: share / 100 * seconds for name, share in shares.items()}
        )
    return [found[number_] for number_ in sorted(found)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
