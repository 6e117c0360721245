"""What is said at the end of a sweep: a table of all its jobs, in sweep.json too, and the ones that
are not done.

Made of the records and folders of the jobs, so that it is the same under every launcher. Needs no
torch.
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper_soa.ops.files import reason_of, write_text
from esper_soa.ops.json_lines import Json, json_line
from esper_soa.ops.progress import duration
from esper_soa.ops.rundir import RunFolder
from esper_soa.sweep.records import BEGUN, ENDED, WAITING, JobRecord, read_records

RESULT = "sweep.json"
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class Row(NamedTuple):
    """A job in the table."""

    job: JobRecord
    changed: list[str]  # overrides that not all jobs have
    summary: dict  # summary.json of its run; empty where it did not come to its end


def end_sweep(hydra: HydraConf, console: Console) -> bool:
    """Print the table of the sweep's jobs and write sweep.json; says whether all jobs came to their
    end.

    Names those that did not on standard error.
    """
    sweep = Path(hydra.sweep.dir)
    jobs = list_jobs(hydra, sweep)
    left = [job for job in jobs if job.status not in ENDED]
    common = set.intersection(*(set(job.overrides) for job in jobs)) if jobs else set()
    # which may be of another call than that which played some job
    hidden = common | {"resume=auto"}
    rows = [
        Row(job, [one for one in job.overrides if one not in hidden], _summary(job)) for job in jobs
    ]
    if rows:
        console.print(table(rows))
        missing = _write(sweep, rows, sorted(common))
        told = missing or f"written to {sweep / RESULT}"
        hint = "; resume=auto plays what is not done" if left else ""
        console.print(f"{count_words(jobs)}{hint}; {told}", highlight=False, soft_wrap=True)
    if left:
        print("failed jobs:", *map(failure_words, left), sep="\n  ", file=sys.stderr)
    return not left and bool(jobs)


def list_jobs(hydra: HydraConf, sweep: Path) -> list[JobRecord]:
    """The jobs that the sweep consists of; those that have not begun as well where they are known
    beforehand.

    Hydra's own sweeper plays every combination, and a record of another number is of an earlier,
    larger sweep.
    """
    found = read_records(sweep)
    if hydra.sweeper["_target_"] != BASIC:
        return list(found.values())
    given = [f"{key}={value}" for key, value in (hydra.sweeper["params"] or {}).items()] + list(
        hydra.overrides.task
    )
    (jobs,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(given), None)
    return [
        found.get(number, JobRecord(number, overrides, "", WAITING))
        for number, overrides in enumerate(jobs)
    ]


def table(rows: Sequence[Row]) -> Table:
    """The jobs one below the other."""
    shown = Table(box=box.SIMPLE, title="jobs", title_justify="left")
    for heading in ("job", "overrides", "status", "accuracy %", "less rent", "parameters", "time"):
        left = heading in ("overrides", "status")
        shown.add_column(heading, justify="left" if left else "right", overflow="fold")
    for row in rows:
        grown = row.summary.get("grown", {})
        accuracy = "" if row.job.value is None else f"{row.job.value:.2f}"
        took = duration(row.summary.get("wall_seconds", math.nan))
        numbers = [f"{grown['net']:.2f}", f"{grown['size']:,.0f}", took] if grown else []
        shown.add_row(
            str(row.job.number), escape(" ".join(row.changed)), row.job.status, accuracy, *numbers
        )
    return shown


def count_words(jobs: Sequence[JobRecord]) -> str:
    """How many jobs came to what."""
    statuses = [job.status for job in jobs]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def failure_words(job: JobRecord) -> str:
    """A job that is not done by number and overrides, and why."""
    why = job.message or ("has not come to its end" if job.status == BEGUN else job.status)
    return f"{' '.join([f'#{job.number}', *job.overrides])}: {' '.join(why.split())}"


def _write(sweep: Path, rows: Sequence[Row], common: Sequence[str]) -> str:
    """Write sweep.json; returns why that could not be, empty where it could."""
    jobs: list[Json] = []
    for row in rows:
        grown = row.summary.get("grown", {})
        job = row.job
        jobs.append(
            {
                "job": job.number,
                "overrides": list(row.changed),
                "status": job.status,
                "accuracy": job.value,
                "net": grown.get("net"),
                "parameters": grown.get("size"),
                "seconds": row.summary.get("wall_seconds"),
                "message": job.message,
                "folder": job.folder,
            }
        )
    try:
        write_text(sweep / RESULT, json_line({"common": list(common), "jobs": jobs}) + "\n")
    except OSError as error:
        return f"{RESULT} could not be written ({reason_of(error)})"
    return ""


def _summary(job: JobRecord) -> dict:
    """What the final table of the job's run says; empty where it has none."""
    path = RunFolder(Path(job.folder)).summary
    if job.status not in ENDED or not path.is_file():
        return {}
    summary = json.loads(path.read_text(encoding="utf-8"))
    return summary if isinstance(summary, dict) else {}
