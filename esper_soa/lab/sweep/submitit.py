"""Jobs by submitit: submitted as its Hydra launcher submits them, and all waited for to the end.

That launcher's own waiting ends with the first job that left no result, as one does that was killed
or ran out of its time. Needs the extra `sweep`, and no torch.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

import submitit
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
from omegaconf import OmegaConf
from submitit.core.utils import FailedJobError, UncompletedJobError

from esper_soa.lab.sweep.records import JobRecord, Status, read_records, save_record
from esper_soa.system.errors import one_line


def launch(
    launcher: BaseSubmititLauncher, overrides: Sequence[Sequence[str]], first: int
) -> list[JobReturn]:
    """Submit a job for each of `overrides`, numbered from `first` on, and wait until the last of
    them has ended; what became of each is in its record.
    """
    cluster = launcher._EXECUTOR
    params = dict(launcher.params)
    early = {"max_num_timeout"} & params.keys()
    at_start = {f"{cluster}_{name}": params.pop(name) for name in early}
    executor = submitit.AutoExecutor(params.pop("submitit_folder"), cluster=cluster, **at_start)
    shared = set(OmegaConf.structured(BaseQueueConf).keys())
    executor.update_parameters(
        **{name if name in shared else f"{cluster}_{name}": value for name, value in params.items()}
    )
    state = Singleton.get_state()
    arguments = [
        (list(job_overrides), "hydra.sweep.dir", number, f"job_id_for_{number}", state)
        for number, job_overrides in enumerate(overrides, first)
    ]
    jobs = executor.map_array(launcher, *zip(*arguments, strict=True))
    log_folder = Path(jobs[0].paths.folder).parent
    print(f"{len(jobs)} jobs are submitted; what they say is in {log_folder}", flush=True)
    sweep = Path(str(launcher.config.hydra.sweep.dir))
    for number, job in enumerate(jobs, first):
        try:
            job.results()
        except (FailedJobError, UncompletedJobError) as error:
            lost_record = JobRecord(
                number, list(overrides[number - first]), "", status=Status.WAITING
            )
            record = read_records(sweep, number).get(number, lost_record)
            if record.status in (Status.BEGUN, Status.WAITING):
                reason = f"ended by the system ({job.state}): {one_line(error)}"
                save_record(sweep, record.ended(Status.KILLED, message=reason))
    return [JobReturn(overrides=words, status=JobStatus.COMPLETED) for words in overrides]


def stop_with(process: int) -> None:
    """Have this process asked to stop once that one, of this machine, has ended; by SIGINT, as
    submitit's handler of SIGTERM lets a job go on.
    """

    def watch() -> None:
        with suppress(OSError):  # there is no such process
            while True:
                os.kill(process, 0)
                time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    Thread(target=watch, daemon=True).start()
