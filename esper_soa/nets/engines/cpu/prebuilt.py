"""Kernels that came compiled with the package, for levels of processors: which there are, and which
suits this one.

A wheel that was built where there was a compiler (hatch_build.py) holds them in the folder
`libraries`, with a manifest; a checkout has none. A file is taken if it is what the manifest says
and was made of the C files beside it. The manifest is as trusted as the code that reads it: who can
write the one can write the other.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from esper_soa.nets.engines.cpu.cache import NativeError
from esper_soa.nets.engines.cpu.compiler import FOLDER, sources_digest
from esper_soa.nets.engines.cpu.processor import Processor

LIBRARIES = FOLDER / "libraries"
MANIFEST = "manifest.json"
# the level that is all that the building machine's processor has, for processors of its kind
BUILDER = "native"


class Level(NamedTuple):
    """What a library needs of a processor."""

    name: str
    machine: str
    target: str  # the compiler's option
    needs: frozenset[str]  # features as Linux names them


_V2 = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
# Best first: the levels of the x86-64 psABI, and what every arm64 processor has. Between v2 and v3
# there is one more: processors of 2011 to 2013 have vectors of 8 floats but no FMA, and train with
# them in a third of the time of v2. Code that is compiled for one processor is at most 4 % quicker
# than that of its level, and is not waited for.
LEVELS = (
    Level("x86-64-v4", "x86_64", "-march=x86-64-v4", frozenset(_V4)),
    Level("x86-64-v3", "x86_64", "-march=x86-64-v3", frozenset(_V3)),
    Level(
        "sandybridge",
        "x86_64",
        "-march=sandybridge",
        frozenset(_V2 | {"aes", "avx", "pclmulqdq", "xsave"}),
    ),
    Level("x86-64-v2", "x86_64", "-march=x86-64-v2", frozenset(_V2)),
    Level("armv8-a", "aarch64", "-march=armv8-a", frozenset({"asimd", "fp"})),
)


class Library(NamedTuple):
    """A library of the manifest, in the file `<level>.so`."""

    level: str
    sha256: str
    flags: list[str]


class Manifest(NamedTuple):
    """What was built, of what, by what and where."""

    sources: str  # SHA-256, see sources_digest
    compiler: str
    builder: str  # kind of the building machine's processor
    libraries: list[Library]


class Chosen(NamedTuple):
    """The library for a processor, as the manifest has it."""

    path: Path
    words: str  # for logs


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put it beside the libraries."""
    record = manifest._asdict() | {
        "libraries": [library._asdict() for library in manifest.libraries]
    }
    (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def choose_prebuilt(folder: Path, processor: Processor) -> Chosen | None:
    """The best library of `folder` for the processor; None where there are none, or none for it.

    Raises NativeError where that one, the manifest or the C files are not as they were when the
    package was made.
    """
    if not folder.is_dir():
        return None
    manifest = _read_manifest(folder / MANIFEST)
    library = _best(manifest, processor)
    if library is None:
        return None
    if manifest.sources != sources_digest():
        raise NativeError(
            f"the libraries of {folder} were made of other C files than those of {FOLDER}"
        )
    path = folder / f"{library.level}.so"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NativeError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(content).hexdigest() != library.sha256:
        raise NativeError(f"{path} is not what {MANIFEST} says (install the package again)")
    return Chosen(
        path, "prebuilt for this CPU" if library.level == BUILDER else f"prebuilt ({library.level})"
    )


def _read_manifest(path: Path) -> Manifest:
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return Manifest(
            **said | {"libraries": [Library(**library) for library in said["libraries"]]}
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise NativeError(f"{path} is damaged (install the package again)") from error


def _best(manifest: Manifest, processor: Processor) -> Library | None:
    held = {library.level: library for library in manifest.libraries}
    if BUILDER in held and processor.kind and manifest.builder == processor.kind:
        return held[BUILDER]
    fitting = (
        level
        for level in LEVELS
        if level.machine == processor.machine and level.needs <= processor.features
    )
    return next((held[level.name] for level in fitting if level.name in held), None)
