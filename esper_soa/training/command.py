"""Commands esper-train and esper-evaluate: read arguments, call, end with a status.

Exit status: 0 done, 1 a failure while running or a mistake that Hydra found, 2 a mistake that we
found, 130 interrupted, 143 terminated; of a sweep 1 where any job failed. Hydra and torch are
imported when they are needed, so that a signal is heard meanwhile and settings are shown without
torch.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from esper_soa.config.arguments import prepare_arguments, show_help_or_version
from esper_soa.config.errors import UserError
from esper_soa.config.paths import config_dir
from esper_soa.runtime.console import exit_with, standing_streams
from esper_soa.runtime.signals import importing, importing_torch, stopped_at_once

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from esper_soa.training.session import Judge

# Flags of esper-train that train nothing, and what prints their answer, given the settings.
QUESTIONS = {
    "--check-device": "esper_soa.lab.check_device:check_device",
    "--plan": "esper_soa.lab.plan.plan:show_plan",
    "--plan=json": "esper_soa.lab.plan.plan:show_plan_json",
}
# Arguments that ask for a sweep begin with one of these; the function checks all arguments.
SWEEPS = ("-m", "--multirun", "hydra/launcher=", "hydra/sweeper=", "+sweep=")
CHECK_SWEEP = "esper_soa.lab.sweep.plugins:check_plugins"


def run_command(name: str) -> None:
    """Run the command `name`, train or evaluate; ends the interpreter with the status above."""
    with standing_streams(), stopped_at_once():
        if show_help_or_version(name):
            return
        with importing():
            import hydra

            from esper_soa.config.settings import EvaluateConfig, TrainConfig, register_schema
        register_schema()
        arguments = sys.argv[1:]
        questions = [one for one in arguments if one in QUESTIONS and name == "train"]
        sweep = next((one for one in arguments if one.startswith(SWEEPS)), "")
        try:
            if questions:
                answer(questions[0], [one for one in arguments if one not in QUESTIONS])
                return
            if sweep:
                find_in_lab(CHECK_SWEEP, sweep)(arguments)
            settings = TrainConfig if name == "train" else EvaluateConfig
            sys.argv[1:] = prepare_arguments(arguments, settings)
        except UserError as error:
            exit_with(error)
        hydra.main(version_base="1.3", config_path=config_dir(), config_name=name)(job)()


def job(composed: "DictConfig", hopeless: "Judge | None" = None) -> float | None:
    """Run the job that Hydra has begun; returns what sweepers maximise. See job.run_job."""
    with importing():
        from esper_soa.training.job import run_job
    return run_job(composed, hopeless)


def answer(question: str, overrides: list[str]) -> None:
    """Print what a flag asks of a run with these overrides; raises UserError."""
    with importing():
        from rich.console import Console

        from esper_soa.config.compose import compose_settings
    settings = compose_settings(overrides=overrides)
    with importing_torch():
        show = find_in_lab(QUESTIONS[question], question)
    show(settings, Console())


def find_in_lab(target: str, argument: str) -> Callable[..., object]:
    """The function `target`, a "module:function"; raises UserError where the module is missing.

    argument: what on the command line asks for it.
    """
    module, function = target.split(":")
    try:
        return cast(Callable[..., object], getattr(import_module(module), function))
    except ModuleNotFoundError as error:
        raise UserError(f"{argument}: needs {error.name}, which is not installed") from error
