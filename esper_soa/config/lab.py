"""What settings and arguments ask for of esper_soa.lab, which may not be installed. No torch."""

from collections.abc import Callable
from importlib import import_module
from typing import cast

from esper_soa.system.errors import UserError

# The functions and classes of the lab, by what asks for them.
LAB = {
    "telemetry.level": "esper_soa.lab.telemetry.recorder:make_recorder",
    "track": "esper_soa.lab.telemetry.tracking:Tracking",
    "report": "esper_soa.lab.report.end:EndReport",
    "--check-device": "esper_soa.lab.check_device:check_device",
    "--plan": "esper_soa.lab.plan.plan:show_plan",
    "--plan=json": "esper_soa.lab.plan.plan:show_plan_json",
    "sweep": "esper_soa.lab.sweep.plugins:check_plugins",
}


def find_in_lab(key: str, asked: str, remedy: str = "") -> Callable[..., object]:
    """What LAB has for `key`; raises UserError, which says what `asked` for it, without the lab."""
    module, name = LAB[key].split(":")
    try:
        return cast(Callable[..., object], getattr(import_module(module), name))
    except ModuleNotFoundError as error:
        missing = f"{asked} needs {error.name}, which is not installed"
        raise UserError(f"{missing}. {remedy}" if remedy else missing) from error
