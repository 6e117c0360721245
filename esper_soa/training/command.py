"""Command lines of esper-train and esper-evaluate.

Exit status: 0 done, 1 a failure while running or a mistake that Hydra found, 2 a mistake that we
found, 130 interrupted, 143 terminated; of a sweep 1 where any job did not come to its end. What a
job needs is imported as it begins (job.py): settings are shown without.
"""

import sys

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from esper_soa.config.arguments import prepare_arguments
from esper_soa.config.errors import UserError
from esper_soa.config.paths import config_dir
from esper_soa.config.settings import EvaluateConfig, TrainConfig, register_schema
from esper_soa.lab.sweep.plugins import check_plugins, in_sweep
from esper_soa.lab.sweep.resolvers import register_resolvers
from esper_soa.runtime.signals import importing

LOOKS = ("--check-device", "--plan", "--plan=json")  # flags of esper-train that train nothing

register_schema()
register_resolvers()


def run_command(name: str, settings: type[TrainConfig] | type[EvaluateConfig]) -> None:
    """Run the command line with the configuration `name`, whose jobs have these settings."""
    given = sys.argv[1:]
    looks = [one for one in given if one in LOOKS and settings is TrainConfig]
    try:
        if looks:
            with importing():
                from esper_soa.training.job import look
            look(looks[0], [one for one in given if one not in LOOKS])
            return
        check_plugins(given)
        sys.argv[1:] = prepare_arguments(given, settings)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    whole = True
    try:
        hydra.main(version_base="1.3", config_path=config_dir(), config_name=name)(job)()
    finally:
        if HydraConfig.initialized() and in_sweep():
            with importing():
                from esper_soa.lab.sweep.summary import Console, end_sweep
            whole = end_sweep(HydraConfig.get(), Console())
    if not whole:
        sys.exit(1)


def job(composed: DictConfig) -> float | None:
    """Run one job, as Hydra asks; returns what sweepers maximise."""
    with importing():
        from esper_soa.training.job import run_job
    return run_job(composed)
