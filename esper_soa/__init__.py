"""Neural networks that grow while they train: a struct-of-arrays simulator with a learning policy.

    run = esper_soa.train("cifar_3seed", overrides=["seed=7"])
    net = run.export()

What is listed in `__all__` is the public interface; everything else may change. Names are imported
when they are first asked for, as torch takes seconds.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING

from esper_soa.registry import agent, blueprint, host, reward

if TYPE_CHECKING:
    from esper_soa.agent.controller import Controller
    from esper_soa.compose import compose_settings, experiments
    from esper_soa.conformance import check_agent, check_blueprint, check_host, check_reward
    from esper_soa.errors import UserError
    from esper_soa.nets.model.modules import GrownNetwork
    from esper_soa.nets.user_images import check_images, images
    from esper_soa.ops.module_files import load, save
    from esper_soa.runs import RecordedRun, open_run, train
    from esper_soa.simulator import Info, Seed, Simulator, Step, make

HOMES = {
    "Controller": "agent.controller",
    "GrownNetwork": "nets.model.modules",
    "Info": "simulator",
    "RecordedRun": "runs",
    "Seed": "simulator",
    "Simulator": "simulator",
    "Step": "simulator",
    "UserError": "errors",
    "check_agent": "conformance",
    "check_blueprint": "conformance",
    "check_host": "conformance",
    "check_images": "nets.user_images",
    "check_reward": "conformance",
    "compose_settings": "compose",
    "experiments": "compose",
    "images": "nets.user_images",
    "load": "ops.module_files",
    "make": "simulator",
    "open_run": "runs",
    "save": "ops.module_files",
    "train": "runs",
}
__all__ = [
    "Controller",
    "GrownNetwork",
    "Info",
    "RecordedRun",
    "Seed",
    "Simulator",
    "Step",
    "UserError",
    "__version__",
    "agent",
    "blueprint",
    "check_agent",
    "check_blueprint",
    "check_host",
    "check_images",
    "check_reward",
    "compose_settings",
    "experiments",
    "host",
    "images",
    "load",
    "make",
    "open_run",
    "reward",
    "save",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return metadata.version("esper-soa")
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
