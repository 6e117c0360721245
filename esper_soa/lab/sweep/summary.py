"""The summary of a sweep: a table of all jobs, also in sweep.json, and the unfinished ones.

Made of the records and folders of the jobs: the same under every launcher. Needs no torch.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper_soa.lab.sweep.records import ENDED_STATUSES, JobRecord, Status, read_records
from esper_soa.system.errors import printable
from esper_soa.system.files import reason_of, write_text
from esper_soa.system.json_lines import Json, json_line
from esper_soa.system.plain_files import read_text
from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.results.progress import duration

BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def end_sweep(hydra: HydraConf, console: Console) -> bool:
    """Print the table of the sweep's jobs and write sweep.json; says whether all have ended.

    Names those that did not on standard error.
    """
    sweep = Path(hydra.sweep.dir)
    jobs = list_jobs(hydra, sweep)
    unfinished = [job for job in jobs if job.status not in ENDED_STATUSES]
    if jobs:
        common = set.intersection(*(set(job.overrides) for job in jobs))
        # resume=auto may be of another call than that which ran some job
        rows = [_row(job, sweep, common | {"resume=auto"}) for job in jobs]
        console.print(table(rows))
        path = RunFolder(sweep.resolve()).sweep_table
        where = f"written to {path}"
        text = json_line({"common": sorted(common), "jobs": rows})
        try:
            write_text(path, text + "\n")
        except OSError as error:
            where = f"{path.name} could not be written ({reason_of(error)})"
        hint = "; resume=auto plays what is not done" if unfinished else ""
        counts = Counter(job.status for job in jobs).items()
        counts_text = ", ".join(f"{count} {status}" for status, count in counts)
        console.print(f"{counts_text}{hint}; {where}", highlight=False, soft_wrap=True)
    if unfinished:
        print("failed jobs:", file=sys.stderr)
    for job in unfinished:
        reason = job.message or (
            "has not come to its end" if job.status == Status.BEGUN else job.status
        )
        name = " ".join([f"#{job.number}", *job.overrides])
        print(printable(f"  {name}: {' '.join(reason.split())}"), file=sys.stderr)
    return not unfinished and bool(jobs)


def list_jobs(hydra: HydraConf, sweep: Path) -> list[JobRecord]:
    """The jobs that the sweep consists of, with those not begun where they are known beforehand.

    Hydra's own sweeper runs every combination; other numbers are of earlier, larger sweeps.
    """
    records = read_records(sweep)
    if hydra.sweeper["_target_"] != BASIC_SWEEPER:
        return list(records.values())
    params = [f"{key}={value}" for key, value in (hydra.sweeper["params"] or {}).items()]
    program = GlobalHydra.instance()
    loader = program.config_loader() if program.is_initialized() else None  # knows options, by glob
    overrides = OverridesParser.create(loader).parse_overrides([*params, *hydra.overrides.task])
    (jobs,) = BasicSweeper.split_arguments(overrides, None)
    return [
        records.get(number, JobRecord(number, combination, "", status=Status.WAITING))
        for number, combination in enumerate(jobs)
    ]


def _row(job: JobRecord, sweep: Path, hidden: set[str]) -> dict[str, Json]:
    """A job in sweep.json, without the overrides that are `hidden`; a folder that its record names
    elsewhere is not read.
    """
    place = Path(job.folder)
    inside = place.is_relative_to(sweep) and ".." not in place.parts
    path = RunFolder(sweep.resolve() / place.relative_to(sweep) if inside else place).summary
    summary: object = {}
    if inside and job.status in ENDED_STATUSES:
        with suppress(OSError, ValueError):  # there is none, or none of ours
            summary = json.loads(read_text(path))
    grown = summary.get("grown") if isinstance(summary, dict) else {}
    # Sweeps choose: what they show is of the validation images, `net` of summary.json of the test.
    names = ("validation_accuracy", "net", "test_accuracy")
    scores = [score for name in names if (score := _number(grown, name)) is not None]
    return {
        "job": job.number,
        "overrides": [override for override in job.overrides if override not in hidden],
        "status": job.status,
        "accuracy": job.value,
        "net": scores[0] + scores[1] - scores[2] if len(scores) == len(names) else None,
        "parameters": _number(grown, "size"),
        "seconds": _number(summary, "wall_seconds"),
        "message": job.message,
        "folder": job.folder,
    }


def _number(record: object, name: str) -> float | None:
    """The finite number under `name`; None where there is none."""
    value = record.get(name) if isinstance(record, dict) else None
    finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return value if finite else None


def table(rows: Sequence[dict]) -> Table:
    """The jobs one below the other."""
    console_table = Table(box=box.SIMPLE, title="jobs", title_justify="left")
    numbers = "validation %", "less rent", "parameters", "time"
    for heading in ("job", "overrides", "status", *numbers):
        is_text = heading in ("overrides", "status")
        console_table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    forms = {"accuracy": ".2f", "net": ".2f", "parameters": ",.0f"}
    for row in rows:
        cells = ["" if row[key] is None else format(row[key], form) for key, form in forms.items()]
        duration_text = "" if row["seconds"] is None else duration(row["seconds"])
        words = escape(printable(" ".join(row["overrides"])))
        console_table.add_row(str(row["job"]), words, row["status"], *cells, duration_text)
    return console_table
