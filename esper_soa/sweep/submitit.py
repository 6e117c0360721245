"""Jobs by submitit: submitted as hydra-submitit-launcher submits them, and all waited for, however
each ends.

That launcher's own waiting ends with the first job that left no result, as one does that was killed
or ran out of its time. Needs the extra `sweep`, and no torch.
"""

from collections.abc import Sequence
from pathlib import Path

import submitit
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf
from submitit.core.utils import FailedJobError, UncompletedJobError

from esper_soa.errors import one_line
from esper_soa.sweep.records import BEGUN, KILLED, WAITING, JobRecord, keep, read_record

BEFORE = ("max_num_timeout",)  # settings that an executor is made with


def executor_of(launcher: BaseSubmititLauncher) -> submitit.AutoExecutor:
    """What submits the jobs, with the settings of the launcher."""
    cluster = launcher._EXECUTOR
    given = dict(launcher.params)
    made_with = {f"{cluster}_{name}": given.pop(name) for name in BEFORE if name in given}
    executor = submitit.AutoExecutor(given.pop("submitit_folder"), cluster=cluster, **made_with)
    shared = set(OmegaConf.structured(BaseQueueConf).keys())
    executor.update_parameters(
        **{name if name in shared else f"{cluster}_{name}": value for name, value in given.items()}
    )
    return executor


def launch(
    launcher: BaseSubmititLauncher, overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Submit a job for each of `overrides`, numbered from `first` on, and wait until the last of
    them has ended.
    """
    sweep = Path(str(launcher.config.hydra.sweep.dir))
    numbers = range(first, first + len(overrides))
    given = [
        (list(one), "hydra.sweep.dir", number, f"job_id_for_{number}", Singleton.get_state())
        for number, one in zip(numbers, overrides, strict=True)
    ]
    jobs = executor_of(launcher).map_array(launcher, *zip(*given, strict=True))
    print(
        f"{len(jobs)} jobs are submitted; what they say is in {executor_folder(jobs)}", flush=True
    )
    return [
        _result(job, sweep, number, one)
        for job, number, one in zip(jobs, numbers, overrides, strict=True)
    ]


def executor_folder(jobs: Sequence[submitit.Job]) -> Path:
    """Where the jobs' output goes."""
    return Path(jobs[0].paths.folder).parent if jobs else Path()


def _result(job: submitit.Job, sweep: Path, number: int, overrides: Sequence[str]) -> JobReturn:
    """Wait for a job; how it failed is in its record, and not raised, so that the others are waited
    for.
    """
    done = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    try:
        (result,) = job.results()
    except (FailedJobError, UncompletedJobError) as error:
        record = read_record(sweep, number) or JobRecord(number, list(overrides), "", WAITING)
        if record.status in (BEGUN, WAITING):
            keep(
                sweep,
                record.ended(
                    KILLED, message=f"ended by the system ({job.state}): {one_line(error)}"
                ),
            )
        return done
    return result if result.status == JobStatus.COMPLETED else done
