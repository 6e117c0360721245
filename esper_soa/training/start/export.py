"""The command line that takes a network out of a run: `esper-export RUN env=best format=onnx`.

Exit status: 0 done, 1 a file not written, 2 a user's mistake.
"""

import argparse
from importlib import import_module
from pathlib import Path

from esper_soa.config.paths import user_path
from esper_soa.system.console import ending_with_status, parser
from esper_soa.system.errors import SettingError, UserError, check, one_line
from esper_soa.system.signals import import_guard

EXPORT_SETTINGS = {"env": "best", "format": "safetensors", "to": ".", "import": ""}  # with defaults
EXPORT_HELP = """\
  RUN                a run folder, or a file that esper_soa.save wrote
  env=best           the host with the highest validation accuracy of the run, or the number of one
                     of the last round
  format=safetensors one or more of safetensors, pt2 (torch.export), onnx (needs esper-soa[onnx]),
                     code (one Python file that needs torch alone), with commas between
  to=.               folder that the files are written to
  import=            modules of your own parts, with commas between: a network that holds such
                     parts cannot be made without (PYTHONPATH says where they lie)

  esper-export runs/cifar_3seed/2026-01-31_12-00-00 format=safetensors,pt2,onnx,code
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the interpreter with its status where that is not 0."""
    usage = "esper-export RUN [env=best] [format=safetensors] [to=.] [import=MODULE]"
    words = parser(usage, "Take a grown network out of a run.", EXPORT_HELP)
    words.add_argument("run", help=argparse.SUPPRESS)
    words.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    options = words.parse_args(arguments)
    with ending_with_status():
        write_network(options.run, settings_of(options.settings))


def settings_of(pairs: list[str]) -> dict[str, str]:
    """EXPORT_SETTINGS with the pairs name=value put in; raises UserError for another name."""
    named = [setting.partition("=") for setting in pairs]
    for name, sign, value in named:
        if not sign or name not in EXPORT_SETTINGS:
            known = ", ".join(f"{name}=" for name in EXPORT_SETTINGS)
            raise SettingError(name, value, f"one of {known}", remedy="See --help.")
    return EXPORT_SETTINGS | {name: value for name, _, value in named}


def write_network(run: str, settings: dict[str, str]) -> None:
    """Write the network of `run` in all the formats, and print the paths."""
    with import_guard():
        from esper_soa.grown.formats import FORMATS
        from esper_soa.grown.module_files import load
        from esper_soa.nets.model.modules import GrownNetwork
        from esper_soa.training.start.runs import open_run
    formats = settings["format"].split(",")
    for name in formats:
        known = f"one or more of {', '.join(FORMATS)}, with commas between"
        check(name in FORMATS, "format", name, allowed=known)
    for module in filter(None, settings["import"].split(",")):
        try:
            import_module(module)
        except ImportError as error:
            allowed = f"a module that can be imported ({one_line(error)})"
            remedy = "PYTHONPATH=<folder> says where it lies."
            raise SettingError("import", module, allowed, remedy=remedy) from error
    env: int | str = int(settings["env"]) if settings["env"].isdecimal() else settings["env"]
    place = user_path("RUN", run)
    folder = user_path("to", settings["to"])
    if place.is_file():
        net = load(place, env if isinstance(env, int) else None)
    else:
        net = open_run(place).export(env)
    reason = "holds a policy, which other programs cannot play: esper_soa.load reads it"
    if not isinstance(net, GrownNetwork):
        raise UserError(f"{place}: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    best = place.stem if place.is_file() else "best"
    for ending, write in (FORMATS[name] for name in formats):
        path = Path(folder, (best if env == "best" else f"host_{env}") + ending)
        write(net, path)
        print(path)
