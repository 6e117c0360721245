"""Vega, Vega-Lite and vega-embed as one piece of JavaScript, for pages that must not ask any
network for it.

It comes out of vl-convert (the extra `report`), which needs seconds to put it together: it is kept
in the user's cache folder, by vl-convert's version. Called by page.py. Needs no torch.
"""

from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from esper_soa.errors import UserError
from esper_soa.ops.files import write_text
from esper_soa.user_cache import FolderError, cache_folder, open_folder

PACKAGE = "vl-convert-python"
MODULE = "vl_convert"
MISSING = "a report needs vl-convert: pip install 'esper-soa[report]'"
END_OF_SCRIPT = (
    "</script",
    "<\\/script",
)  # which would end the script element, also within a text of the program


def available() -> bool:
    """Whether the extra `report` is installed."""
    return find_spec(MODULE) is not None


def bundle() -> str:
    """The program, safe inside a script element; raises UserError where the extra is not
    installed.
    """
    if not available():
        raise UserError(MISSING)
    try:
        folder = cache_folder()
        open_folder(folder)
    except FolderError:
        return _made()
    return _kept(folder / f"vega_{metadata.version(PACKAGE)}.js")


def _kept(path: Path) -> str:
    """The program in the file `path`, made where it is missing; that it cannot be written there is
    no harm.
    """
    if path.is_file():
        return path.read_text(encoding="utf-8")
    made = _made()
    with suppress(OSError):
        write_text(path, made)
    return made


def _made() -> str:
    """The program, put together by vl-convert."""
    return str(import_module(MODULE).javascript_bundle()).replace(*END_OF_SCRIPT)
