"""Records of a sweep's jobs: a file for each in the folder of the sweep. Needs no torch."""

import json
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from operator import attrgetter
from pathlib import Path

from esper_soa.system.errors import UserError, reading
from esper_soa.system.files import write_text
from esper_soa.system.plain_files import list_folder, make_folder, read_text
from esper_soa.system.value_types import type_error
from esper_soa.training.files.run_folder import RunFolder


class Status:
    """How far a job has come, as its record says it."""

    WAITING = "not begun"  # a job without a record
    BEGUN = "begun"
    DONE = "done"
    PRUNED = "pruned"
    FAILED = "failed"
    STOPPED = "stopped"
    KILLED = "killed"


ENDED_STATUSES = (Status.DONE, Status.PRUNED)  # a sweep that goes on leaves such jobs alone


@dataclass(frozen=True)
class JobRecord:
    """A job of a sweep, as it stands."""

    number: int  # from 0, as Hydra counts
    overrides: list[str]  # of its settings, as on the command line
    folder: str  # of its run
    status: str = Status.BEGUN
    # Final validation accuracy, percent, of a pruned job that of its last round. Searches choose by
    # it, so it is never of test images.
    value: float | None = None
    message: str = ""  # why it did not come to its end

    def ended(self, status: str, value: float | None = None, message: str = "") -> "JobRecord":
        """The record with what the job came to."""
        return replace(self, status=status, value=value, message=message)


def save_record(sweep: Path, record: JobRecord) -> None:
    """Write the record of a job, all or nothing; raises OSError."""
    jobs = RunFolder(sweep.resolve()).jobs
    make_folder(jobs)
    write_text(jobs / f"{record.number}.json", json.dumps(asdict(record)) + "\n")


def read_records(sweep: Path, number: int | str = "*") -> dict[int, JobRecord]:
    """All records of a sweep by number, in order; or that of the job `number`, if there is one."""
    names = list_folder(RunFolder(sweep.resolve()).jobs)
    paths = [path for path in names if fnmatch(path.name, f"{number}.json")]
    records = []
    for path in paths:
        with reading(path, UserError, "the record of a job"):
            records.append(JobRecord(**json.loads(read_text(path))))
            fault = type_error(vars(records[-1]), JobRecord, "the record")
            if fault:
                raise ValueError(fault)
    return {record.number: record for record in sorted(records, key=attrgetter("number"))}
