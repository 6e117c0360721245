"""Commands esper-train and esper-evaluate: read arguments, call, end with a status.

Exit status: 0 done, 1 a failure while running or a mistake that Hydra found, 2 a mistake that we
found, 130 interrupted, 143 terminated; of a sweep 1 where any job failed. Hydra and torch are
imported when they are needed, so that a signal is heard meanwhile and settings are shown without
torch.
"""

import os
import sys
from typing import TYPE_CHECKING

from esper_soa.config.arguments import prepare_arguments, show_help_or_version
from esper_soa.config.lab import find_in_lab
from esper_soa.config.paths import config_dir
from esper_soa.system.console import KNOWN_ERRORS, exit_with, safe_streams
from esper_soa.system.errors import UserError, reading
from esper_soa.system.signals import import_guard, stop_at_once, torch_import_guard

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from esper_soa.training.loop.callbacks import Callback

# Flags of esper-train that train nothing; the lab prints their answer, given the settings.
QUESTION_FLAGS = ("--check-device", "--prepare", "--plan", "--plan=json")
# Arguments that ask for a sweep begin with one of these.
SWEEP_ARGUMENTS = ("-m", "--multirun", "hydra/launcher=", "hydra/sweeper=", "+sweep=")


def train_command() -> None:
    """The command esper-train; ends the interpreter with the status above."""
    run_command("train")


def evaluate_command() -> None:
    """The command esper-evaluate; ends the interpreter with the status above."""
    run_command("evaluate")


def run_command(name: str) -> None:
    """Run the command `name`, train or evaluate; ends the interpreter with the status above."""
    with safe_streams(), stop_at_once():
        if show_help_or_version(name):
            return
        with import_guard():
            import hydra

            from esper_soa.config.hydra_versions import MAIN
            from esper_soa.config.settings import EvaluateConfig, TrainConfig, register_schema
        register_schema()
        arguments = sys.argv[1:]
        questions = [word for word in arguments if word in QUESTION_FLAGS and name == "train"]
        sweep = next((word for word in arguments if word.startswith(SWEEP_ARGUMENTS)), "")
        try:
            with reading("the current folder", UserError, "one that is there"):
                os.getcwd()
            if questions:
                with import_guard():
                    from rich.console import Console

                    from esper_soa.config.compose import compose_settings
                others = [word for word in arguments if word not in QUESTION_FLAGS]
                composed = compose_settings(overrides=others)
                with torch_import_guard():
                    show = find_in_lab(questions[0], questions[0])
                show(composed, Console())
                return
            if sweep:
                find_in_lab("sweep", sweep)(arguments)
            settings = TrainConfig if name == "train" else EvaluateConfig
            sys.argv[1:] = prepare_arguments(arguments, settings)
        except UserError as error:
            exit_with(error)
        hydra.main(config_path=config_dir(), config_name=name, **MAIN)(job)()


def job(composed: "DictConfig", *callbacks: "Callback") -> float | None:
    """`run_job`; a single run that fails with a message of ours ends the interpreter, and Hydra
    prints other errors. Returns what sweepers maximise.
    """
    with import_guard():
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        from esper_soa.training.start.job import run_job
    try:
        return run_job(composed, callbacks)
    except KNOWN_ERRORS as error:
        if not OmegaConf.is_missing(HydraConfig.get().job, "num"):  # a job of a sweep
            raise
        exit_with(error)
