"""Kernels that came compiled with the package, for levels of processors, and which suits this one.

A wheel that was built where there was a compiler (hatch_build.py) holds them in the folder
`libraries`, with a manifest, as trusted as the code that reads it; a checkout has none. A file is
taken if it is what the manifest says and was made of the C files beside it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.compiler import SOURCE_FOLDER, sources_digest
from esper_soa.system.cores import Processor

LIBRARY_FOLDER = SOURCE_FOLDER / "libraries"
MANIFEST_NAME = "manifest.json"
# the level that is all that the building machine's processor has, for processors of its kind
BUILDER_LEVEL = "native"


class ProcessorLevel(NamedTuple):
    """The features of a processor that a library needs."""

    name: str
    machine: str
    needs: frozenset[str]  # features as Linux names them

    @property
    def target(self) -> str:
        """The compiler's option."""
        return f"-march={self.name}"


_V2 = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_AVX = _V2 | {"aes", "avx", "pclmulqdq", "xsave"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
# Best first: the levels of the x86-64 psABI, and what every arm64 processor has. Between v2 and v3
# there is one more: processors of 2011 to 2013 have vectors of 8 floats but no FMA, and train with
# them in a third of the time of v2. Code that is compiled for one processor is at most 4 % quicker
# than that of its level, and is not waited for.
PROCESSOR_LEVELS = (
    ProcessorLevel("x86-64-v4", "x86_64", frozenset(_V4)),
    ProcessorLevel("x86-64-v3", "x86_64", frozenset(_V3)),
    ProcessorLevel("sandybridge", "x86_64", frozenset(_AVX)),
    ProcessorLevel("x86-64-v2", "x86_64", frozenset(_V2)),
    ProcessorLevel("armv8-a", "aarch64", frozenset({"asimd", "fp"})),
)


def write_manifest(
    folder: Path, compiler: str, builder: str, libraries: Sequence[Mapping[str, object]]
) -> None:
    """Say beside the libraries what they were made of, by what compiler and on what processor.

    libraries: level, sha256 and flags of each, which is the file `<level>.so`.
    """
    record = {"sources": sources_digest(), "compiler": compiler, "builder": builder}
    text = json.dumps(record | {"libraries": libraries}, indent=2)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def choose_prebuilt(folder: Path, processor: Processor) -> tuple[Path, str] | None:
    """The best library of `folder` for the processor, and words for logs; None where none is.

    Raises NativeError where that one, the manifest or the C files have changed since their making.
    """
    if not folder.is_dir():
        return None
    try:
        manifest = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
        digests = {library["level"]: library["sha256"] for library in manifest["libraries"]}
        builder = manifest["builder"]
        same_sources = manifest["sources"] == sources_digest()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise NativeError(
            f"{folder / MANIFEST_NAME} is damaged (install the package again)"
        ) from error
    levels = [BUILDER_LEVEL] if processor.kind and builder == processor.kind else []
    levels += [
        level.name
        for level in PROCESSOR_LEVELS
        if level.machine == processor.machine and level.needs <= processor.features
    ]
    best = next((name for name in levels if name in digests), None)
    if best is None:
        return None
    if not same_sources:
        words = "were made of other C files than those of"
        raise NativeError(f"the libraries of {folder} {words} {SOURCE_FOLDER}")
    path = folder / f"{best}.so"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NativeError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != digests[best]:
        raise NativeError(f"{path} is not what {MANIFEST_NAME} says (install the package again)")
    return path, "prebuilt for this CPU" if best == BUILDER_LEVEL else f"prebuilt ({best})"
