"""Neural networks that grow while they train: a struct-of-arrays simulator with a learning policy.

    run = esper_soa.train("cifar_3seed", overrides=["seed=7"])
    net = run.export()

What a name stands for is imported when it is first asked for: torch takes seconds, which `--help` has no need of.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper_soa.agent.controller import Controller
    from esper_soa.library import RecordedRun, open_run, train
    from esper_soa.nets.model.modules import GrownNetwork
    from esper_soa.ops.modules import load, save

__all__ = ["Controller", "GrownNetwork", "RecordedRun", "load", "open_run", "save", "train"]

PLACES = {
    "Controller": "esper_soa.agent.controller",
    "GrownNetwork": "esper_soa.nets.model.modules",
    "RecordedRun": "esper_soa.library",
    "load": "esper_soa.ops.modules",
    "open_run": "esper_soa.library",
    "save": "esper_soa.ops.modules",
    "train": "esper_soa.library",
}


def __getattr__(name: str) -> object:
    if name not in PLACES:
        raise AttributeError(f"module 'esper_soa' has no attribute {name!r}")
    return getattr(import_module(PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
