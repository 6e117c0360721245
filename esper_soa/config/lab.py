"""The parts of esper_soa.lab that settings, arguments and commands ask for: any room of it may be
missing. Needs no torch.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import cast

from esper_soa.system.console import ending_with_status
from esper_soa.system.errors import UserError

# The functions and classes of the lab, by what asks for them.
LAB = {
    "telemetry.level": "esper_soa.lab.telemetry.recorder:make_recorder",
    "track": "esper_soa.lab.telemetry.tracking:Tracking",
    "report": "esper_soa.lab.report.end:EndReport",
    "effects.ops": "esper_soa.lab.effects.recorder:Effects",
    "report of a study": "esper_soa.lab.report.page:report_in",
    "figure of a study": "esper_soa.lab.report.figures:write_frontier",
    "--check-device": "esper_soa.lab.check_device:check_device",
    "--prepare": "esper_soa.lab.prepare:prepare",
    "--plan": "esper_soa.lab.plan.plan:show_plan",
    "--plan=json": "esper_soa.lab.plan.plan:show_plan_json",
    "plan of a study": "esper_soa.lab.plan.plan:make_plan",
    "users' parts": "esper_soa.lab.conformance:findings_of_a_run",
    "sweep": "esper_soa.lab.sweep.plugins:check_plugins",
    "esper-compare": "esper_soa.lab.compare.command:main",
    "esper-report": "esper_soa.lab.report.write:main",
    "esper-watch": "esper_soa.lab.report.live:main",
    "esper-query": "esper_soa.lab.query.command:main",
}


def find_in_lab(key: str, asked: str, remedy: str = "") -> Callable[..., object]:
    """The entry of LAB for `key`; UserError, which names what `asked` for it, without it."""
    module, name = LAB[key].split(":")
    try:
        return cast(Callable[..., object], getattr(import_module(module), name))
    except ModuleNotFoundError as error:
        missing = f"{asked} needs {error.name}, which is not installed"
        raise UserError(f"{missing}. {remedy}" if remedy else missing) from error


def run_lab_command(name: str) -> None:
    """Run the command `name`; ends the interpreter with 2 where a part of the lab is missing."""
    with ending_with_status():
        command = find_in_lab(name, name)
    command()


compare_command = partial(run_lab_command, "esper-compare")
report_command = partial(run_lab_command, "esper-report")
watch_command = partial(run_lab_command, "esper-watch")
query_command = partial(run_lab_command, "esper-query")
