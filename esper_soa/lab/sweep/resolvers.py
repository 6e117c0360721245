"""Functions of a job's number and of the machine, for configurations and command lines. No torch.

device: cuda:${modulo:${hydra:job.num},4}                      job by job another of four GPUs
compute.workers: ${share_of_cores:${hydra:launcher.n_jobs}}    cores here, shared by n_jobs jobs
"""

from esper_soa.config.hydra_versions import register_resolver
from esper_soa.system.cores import usable_cores
from esper_soa.system.errors import SettingError


def register_resolvers() -> None:
    """Let OmegaConf know them, in this process."""
    register_resolver("modulo", modulo, replace=True)
    register_resolver("share_of_cores", share_of_cores, replace=True)


def modulo(number: int | None, count: int) -> int:
    """`number` modulo `count`; raises SettingError where that is nothing to count by."""
    if not isinstance(number, int) or not isinstance(count, int) or count < 1:
        remedy = "A job has its number in a sweep (-m) alone." if number is None else ""
        allowed = "a whole number, and a count of at least 1"
        raise SettingError("modulo", f"{number},{count}", allowed, remedy=remedy)
    return number % count


def share_of_cores(jobs: int) -> int:
    """Cores for each of so many jobs at a time, at least one; -1, as with joblib, is one each."""
    return max(1, usable_cores() // jobs) if jobs > 0 else 1
