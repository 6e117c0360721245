"""Measurements of a probe, as plan.py and probe.py both know it. Needs no torch."""

from typing import NamedTuple

from esper_soa.config.settings import LOWER

SETTINGS = "settings.yaml"  # of a rank by itself, in the folder of a plan
ENDED = f"the first round was ended by a signal, as when memory runs out. Lower {LOWER}"


class ProbeResult(NamedTuple):
    """Measured cost of a round."""

    program: int  # bytes of the process before anything of the run was built
    host: int  # bytes of the process at most
    device: int  # bytes on the GPU at most; 0 where there is none
    free: int  # bytes that the GPU, or the machine, had left before; -1 where it does not say
    build_seconds: float  # up to the first round
    episode_seconds: float  # an episode of all envs, with its decisions
    bare_seconds: float  # the same at the pace of its quickest env-step: hosts without seeds
    update_seconds: float  # a policy update
    files_seconds: float  # what a round takes beside these
    report_seconds: float
    measured_steps: int  # env-steps that were played in full
    per_env: float  # bytes of one more env
    least: int  # bytes that are known to be needed
    device_name: str
    train_flop: float = 0.0  # FLOP of training a host in the first round, mean over hosts
