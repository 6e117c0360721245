"""Vega, Vega-Lite and vega-embed as one piece of JavaScript, for pages that work offline.

It comes out of vl-convert (the extra `report`), which needs seconds to put it together: it is kept
in the user's cache folder, by vl-convert's version and with its digest. Needs no torch.
"""

import hashlib
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec

from esper_soa.system.caches import FolderError, open_cache
from esper_soa.system.errors import UserError
from esper_soa.system.files import write_text

PACKAGE = "vl-convert-python"
MODULE = "vl_convert"
MISSING_EXTRA = "a report needs vl-convert: pip install 'esper-soa[report]'"


def available() -> bool:
    """Whether the extra `report` is installed."""
    return find_spec(MODULE) is not None


def bundle() -> str:
    """The program, safe inside a script element; UserError where the extra is not installed.

    A file that is damaged is made anew; that the cache cannot be read or written is no harm.
    """
    if not available():
        raise UserError(MISSING_EXTRA)
    try:
        folder = open_cache()
    except FolderError:
        return build_program()
    path = folder / f"vega_{metadata.version(PACKAGE)}.js"
    with suppress(OSError, UnicodeDecodeError):
        first, _, content = path.read_bytes().decode().partition("\n")
        if first == _digest(content):
            return content
    program = build_program()
    with suppress(OSError):
        write_text(path.resolve(), f"{_digest(program)}\n{program}")
    return program


def _digest(program: str) -> str:
    return f"// sha256 {hashlib.sha256(program.encode()).hexdigest()}"


def build_program() -> str:
    """The program, put together by vl-convert; nothing in it ends the script element."""
    return str(import_module(MODULE).javascript_bundle()).replace("</script", "<\\/script")
