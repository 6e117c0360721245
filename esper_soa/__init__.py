"""Neural networks that grow while they train: a struct-of-arrays simulator with a learning policy.

    run = esper_soa.train("cifar_3seed", overrides=["seed=7"])
    net = run.export()

What is listed in `__all__` is the public interface; everything else may change. Names are imported
when they are first asked for, as torch takes seconds; type checkers read the imports below.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING

from esper_soa.config.registry import agent as agent
from esper_soa.config.registry import blueprint as blueprint
from esper_soa.config.registry import dataset as dataset
from esper_soa.config.registry import host as host
from esper_soa.config.registry import layer as layer
from esper_soa.config.registry import reward as reward

if TYPE_CHECKING:
    from esper_soa.agent.controller import Controller as Controller
    from esper_soa.agent.protocol import Agent as Agent
    from esper_soa.agent.scripted import as_decision as as_decision
    from esper_soa.agent.scripted import seed_action as seed_action
    from esper_soa.agent.user_agents import AgentContext as AgentContext
    from esper_soa.config.compose import compose_settings as compose_settings
    from esper_soa.config.compose import experiments as experiments
    from esper_soa.config.settings import TrainConfig as TrainConfig
    from esper_soa.env.legal import obey as obey
    from esper_soa.env.reward_records import RewardInputs as RewardInputs
    from esper_soa.grown.formats import export as export
    from esper_soa.grown.module_files import ModuleFileError as ModuleFileError
    from esper_soa.grown.module_files import load as load
    from esper_soa.grown.module_files import save as save
    from esper_soa.lab.conformance import ConformanceError as ConformanceError
    from esper_soa.lab.conformance import check_agent as check_agent
    from esper_soa.lab.conformance import check_blueprint as check_blueprint
    from esper_soa.lab.conformance import check_host as check_host
    from esper_soa.lab.conformance import check_reward as check_reward
    from esper_soa.nets.data.image_set import ImageSet as ImageSet
    from esper_soa.nets.data.user_images import check_images as check_images
    from esper_soa.nets.data.user_images import images as images
    from esper_soa.nets.model.blueprints import Architecture as Architecture
    from esper_soa.nets.model.conv import ConvBlock as ConvBlock
    from esper_soa.nets.model.modules import GrownNetwork as GrownNetwork
    from esper_soa.nets.model.parts import CHANNELS as CHANNELS
    from esper_soa.nets.model.parts import NARROW as NARROW
    from esper_soa.nets.model.parts import REDUCED as REDUCED
    from esper_soa.nets.model.parts import Conv as Conv
    from esper_soa.nets.model.parts import Depthwise as Depthwise
    from esper_soa.nets.model.parts import Excite as Excite
    from esper_soa.nets.model.parts import Part as Part
    from esper_soa.nets.model.parts import SoftNorm as SoftNorm
    from esper_soa.nets.model.parts import Squeeze as Squeeze
    from esper_soa.nets.model.parts import Start as Start
    from esper_soa.nets.model.parts import Width as Width
    from esper_soa.nets.model.residual import Residual as Residual
    from esper_soa.nets.model.segments import HostPart as HostPart
    from esper_soa.simulator import Info as Info
    from esper_soa.simulator import Seed as Seed
    from esper_soa.simulator import Simulator as Simulator
    from esper_soa.simulator import Step as Step
    from esper_soa.simulator import make as make
    from esper_soa.state import Action as Action
    from esper_soa.state import Decision as Decision
    from esper_soa.state import Ending as Ending
    from esper_soa.state import EnvState as EnvState
    from esper_soa.state import Guard as Guard
    from esper_soa.state import Masks as Masks
    from esper_soa.state import Observation as Observation
    from esper_soa.state import Ramp as Ramp
    from esper_soa.state import Signals as Signals
    from esper_soa.state import Slots as Slots
    from esper_soa.state import Totals as Totals
    from esper_soa.state import View as View
    from esper_soa.system.errors import DataError as DataError
    from esper_soa.system.errors import RunMemoryError as RunMemoryError
    from esper_soa.system.errors import SettingError as SettingError
    from esper_soa.system.errors import UserError as UserError
    from esper_soa.system.files import IncompleteError as IncompleteError
    from esper_soa.training.loop.callbacks import Callback as Callback
    from esper_soa.training.loop.callbacks import EnvStep as EnvStep
    from esper_soa.training.start.runs import NetworkScore as NetworkScore
    from esper_soa.training.start.runs import RecordedRun as RecordedRun
    from esper_soa.training.start.runs import open_run as open_run
    from esper_soa.training.start.runs import train as train
    from esper_soa.vocabulary import Blueprint as Blueprint
    from esper_soa.vocabulary import Op as Op
    from esper_soa.vocabulary import Stage as Stage
    from esper_soa.vocabulary import Style as Style


# The public names by the module below this package that has each.
MODULES = {
    "config.registry": "agent blueprint dataset host layer reward",
    "agent.controller": "Controller",
    "agent.protocol": "Agent",
    "agent.scripted": "as_decision seed_action",
    "agent.user_agents": "AgentContext",
    "config.compose": "compose_settings experiments",
    "config.settings": "TrainConfig",
    "env.legal": "obey",
    "env.reward_records": "RewardInputs",
    "grown.formats": "export",
    "grown.module_files": "ModuleFileError load save",
    "lab.conformance": "ConformanceError check_agent check_blueprint check_host check_reward",
    "nets.data.image_set": "ImageSet",
    "nets.data.user_images": "check_images images",
    "nets.model.blueprints": "Architecture",
    "nets.model.conv": "ConvBlock",
    "nets.model.modules": "GrownNetwork",
    "nets.model.parts": (
        "CHANNELS NARROW REDUCED Conv Depthwise Excite Part SoftNorm Squeeze Start Width"
    ),
    "nets.model.residual": "Residual",
    "nets.model.segments": "HostPart",
    "simulator": "Info Seed Simulator Step make",
    "state": (
        "Action Decision Ending EnvState Guard Masks Observation Ramp Signals Slots Totals View"
    ),
    "system.errors": "DataError RunMemoryError SettingError UserError",
    "system.files": "IncompleteError",
    "training.loop.callbacks": "Callback EnvStep",
    "training.start.runs": "NetworkScore RecordedRun open_run train",
    "vocabulary": "Blueprint Op Stage Style",
}
import_module(f"{__name__}.system.cores")  # it sees the forks that come after
HOMES = {name: module for module, names in MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("esper-soa")
    if name == "__all__":
        return [*HOMES, "__version__"]
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    state: AbstractContextManager[None] = nullcontext()
    if "torch" in sys.modules:  # whose state the caller may have changed; tensordict computes
        state = import_module(f"{__name__}.system.torch_state").package_state()
    try:
        with state:
            return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("esper_soa.lab"):
            raise
        raise ImportError(f"esper_soa.{name} needs {error.name}, which is not installed") from None


def __dir__() -> list[str]:
    return [*HOMES, "__version__"]
