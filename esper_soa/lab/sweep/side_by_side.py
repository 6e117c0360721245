"""Jobs side by side on this machine, as many at a time as joblib's `hydra.launcher.n_jobs` says.

Every job is a process that this one has started: it ends with the sweep, and no process of joblib's
stands between them, with which the jobs of others would be lost. Hydra prepares them in turn, as it
keeps in its process what it has composed. Needs no torch.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, NamedTuple

from hydra.core.utils import JobReturn, configure_log, filter_overrides, run_job, setup_globals
from omegaconf import DictConfig, open_dict

from esper_soa.lab.sweep import jobs
from esper_soa.lab.sweep.records import JobRecord, Status
from esper_soa.system.cores import usable_cores
from esper_soa.system.errors import check

if TYPE_CHECKING:
    from hydra_plugins.hydra_joblib_launcher.joblib_launcher import JoblibLauncher

LOGGER = logging.getLogger(__name__)


def launch(
    launcher: "JoblibLauncher", overrides: Sequence[Sequence[str]], first: int
) -> Sequence[JobReturn]:
    """Play a job for each of `overrides`, numbered from `first` on, and wait until the last of them
    has ended; what became of each is in its record. Raises Interrupted where asked to stop.
    """
    hydra = launcher.config.hydra
    at_a_time = jobs_at_a_time(launcher.joblib["n_jobs"])
    setup_globals()
    configure_log(hydra.hydra_logging, hydra.verbose)
    Path(str(hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    LOGGER.info("Launching %d jobs locally, %d at a time", len(overrides), at_a_time)
    prepared: list[JobReturn] = []
    values: list[Future[float | None]] = []
    processes: list[Popen[bytes]] = []
    with jobs.handing_on(processes) as stops, ThreadPoolExecutor(at_a_time) as watchers:
        for number, words in enumerate(overrides, first):
            waiting = [value for value in values if not value.done()]
            if len(waiting) == at_a_time:
                wait(waiting, return_when=FIRST_COMPLETED)
            if stops:
                break
            LOGGER.info("\t#%d : %s", number, " ".join(filter_overrides(words)))
            prepared.append(prepare(launcher, words, number))
            begun: Begun = prepared[-1].return_value
            if begun.process is not None:
                processes.append(begun.process.running)
            for stop in stops:  # that came before the process was known
                processes[-1].send_signal(stop)
            values.append(watchers.submit(finish, begun, Path(str(hydra.sweep.dir))))
    for result, value in zip(prepared, values, strict=True):
        result.return_value = value.result()
    return prepared


def jobs_at_a_time(n_jobs: int) -> int:
    """The number that joblib means: -1 is a job for each usable core, -2 for all but one."""
    check(n_jobs != 0, "hydra.launcher.n_jobs", n_jobs, allowed="at least 1, or -1, one per core")
    return n_jobs if n_jobs > 0 else max(1, usable_cores() + 1 + n_jobs)


class Begun(NamedTuple):
    """A job that Hydra has prepared."""

    record: JobRecord
    process: jobs.JobProcess | None  # None where it had ended in an earlier call


def prepare(launcher: "JoblibLauncher", overrides: Sequence[str], number: int) -> JobReturn:
    """Have Hydra prepare the folder of the job, and begin it; its return value is Begun."""
    config: DictConfig = launcher.hydra_context.config_loader.load_sweep_config(
        launcher.config, list(overrides)
    )
    with open_dict(config):
        config.hydra.job.id = f"{config.hydra.job.name}_{number}"
        config.hydra.job.num = number
    (task,) = launcher.task_function.args  # of jobs.run_job
    return run_job(
        task_function=partial(begin, task),
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=launcher.hydra_context,
        configure_logging=False,  # the job does, in its process
    )


def begin(task: jobs.Task, composed: DictConfig) -> Begun:
    """Begin the job that Hydra has prepared, unless there is nothing to run."""
    record = jobs.next_job(composed)
    is_new = record.status == Status.BEGUN
    return Begun(record, jobs.begin(task, composed) if is_new else None)


def finish(begun: Begun, sweep: Path) -> float | None:
    """Wait for the end of the job; what sweepers maximise, None where it did not end."""
    if begun.process is None:
        return begun.record.value
    return jobs.finish(begun.process, sweep, begun.record)
