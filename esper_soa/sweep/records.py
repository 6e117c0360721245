"""What became of the jobs of a sweep: a small file per job in its folder. Needs no torch."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from esper_soa.ops.files import write_text

FOLDER = ".jobs"  # in the folder of the sweep
BEGUN = "begun"
DONE = "done"
PRUNED = "pruned"
FAILED = "failed"
STOPPED = "stopped"
KILLED = "killed"
ENDED = (DONE, PRUNED)  # a sweep that goes on leaves such jobs alone
WAITING = "not begun"  # of a job without a record


@dataclass(frozen=True)
class JobRecord:
    """A job of a sweep, as it stands."""

    number: int  # from 0, as Hydra counts
    overrides: list[str]  # of its settings, as on the command line
    folder: str  # of its run
    status: str = BEGUN
    value: float | None = None  # final accuracy in percent; of a pruned job that of its last round
    message: str = ""  # why it did not come to its end

    def ended(self, status: str, value: float | None = None, message: str = "") -> "JobRecord":
        """The record with what the job came to."""
        return replace(self, status=status, value=value, message=message)


def this_job() -> JobRecord:
    """The job that Hydra has begun in this process."""
    context = HydraConfig.get()
    return JobRecord(int(context.job.num), list(context.overrides.task), context.runtime.output_dir)


def keep(sweep: Path, record: JobRecord) -> None:
    """Write the record of a job, all or nothing; raises OSError."""
    (sweep / FOLDER).mkdir(parents=True, exist_ok=True)
    write_text(sweep / FOLDER / f"{record.number}.json", json.dumps(asdict(record)) + "\n")


def read_record(sweep: Path, number: int) -> JobRecord | None:
    """The record of a job; None where there is none."""
    return read_records(sweep, str(number)).get(number)


def read_records(sweep: Path, number: str = "*") -> dict[int, JobRecord]:
    """All records of a sweep by number, in order; or that of the job `number`."""
    texts = [path.read_text(encoding="utf-8") for path in (sweep / FOLDER).glob(f"{number}.json")]
    records = [JobRecord(**json.loads(text)) for text in texts]
    return {one.number: one for one in sorted(records, key=lambda one: one.number)}
