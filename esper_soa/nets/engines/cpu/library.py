"""Finds the C kernels of this folder for the processor of this machine; loads them with ctypes.

Those in the cache folder (cache.py) come first: they were compiled here, for this processor. Then
those that came with the package (prebuilt.py), which cost no time. Else they are compiled, once per
kind of processor; the cache has them under a key of everything that decides their content but the
compiler: once they are there, no compiler is needed and another one changes nothing.
"""

import ctypes
import hashlib
import os
import platform
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from esper_soa.nets.engines.cpu.cache import NativeError, load_cached, load_stored, store
from esper_soa.nets.engines.cpu.compiler import (
    COMMON_FLAGS,
    FAMILY_FLAGS,
    LINK_FLAGS,
    NATIVE_TARGETS,
    compile_kernels,
    compiler_command,
    identify_compiler,
    sources_digest,
)
from esper_soa.nets.engines.cpu.prebuilt import LIBRARY_FOLDER, choose_prebuilt
from esper_soa.system.caches import DRAFT_PREFIX, FolderError, drop_old_drafts, open_cache
from esper_soa.system.cores import Processor, this_processor

COMPILED_HERE = "compiled for this CPU"
KERNEL_NAMES = ("train_networks", "validate_networks", "sequence_block_pass", "sequence_head_pass")


class Kernels(NamedTuple):
    """A library that is loaded."""

    functions: ctypes.CDLL
    words: str  # where it comes from, for logs
    sha256: str


def library_key(processor: Processor | None = None) -> str:
    """Digest of sources, flags, processor and the C library, which decide a library's content."""
    name = "CS_GNU_LIBC_VERSION"
    libc = os.confstr(name) if name in os.confstr_names else None
    machine, _, kind = processor or this_processor()
    platform_key = platform.system(), machine, kind or platform.processor(), libc
    source_key = sources_digest(), COMMON_FLAGS, LINK_FLAGS, FAMILY_FLAGS, NATIVE_TARGETS
    return hashlib.sha256(repr(platform_key + source_key).encode()).hexdigest()[:20]


def build() -> Path:
    """Path of the compiled kernels, compiled if they are not in the cache; raises NativeError."""
    try:
        folder = open_cache()
    except FolderError as error:
        raise NativeError(str(error)) from error
    key = library_key()
    library = load_stored(folder, key)
    if library is not None:
        return library
    command = compiler_command()
    try:
        drop_old_drafts(folder)
        place = tempfile.TemporaryDirectory(
            prefix=DRAFT_PREFIX, dir=folder, ignore_cleanup_errors=True
        )
        with place as drafts:
            draft = Path(drafts) / "nets.so"
            compile_kernels(identify_compiler(command, draft.parent), draft)
            return store(folder, key, draft)
    except OSError as error:
        raise NativeError(f"the cache folder {folder} cannot be written: {error}") from error


def find_kernels(libraries: Path, processor: Processor) -> Kernels:
    """Kernels for this processor, compiled where neither cache nor `libraries` has them.

    libraries: the folder of those that came with the package, if any. Raises NativeError.
    """
    path = load_cached(library_key(processor))
    if path is not None:
        return _load(path, COMPILED_HERE)
    try:
        prebuilt = choose_prebuilt(libraries, processor)
        if prebuilt is not None:
            return _load(*prebuilt)
        reasons = ""
    except NativeError as error:
        reasons = str(error)
    try:
        return _load(build(), f"{COMPILED_HERE}, as {reasons}" if reasons else COMPILED_HERE)
    except NativeError as error:
        raise NativeError(f"{reasons}, and {error}" if reasons else str(error)) from error


def _load(path: Path, words: str) -> Kernels:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        functions = ctypes.CDLL(str(path))
        for name in KERNEL_NAMES:
            functions[name].argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError) as error:
        remedy = "delete it to have it built again"
        raise NativeError(f"{path} cannot be loaded ({remedy}): {error}") from error
    return Kernels(functions, words, digest)


@cache
def kernels() -> Kernels:
    """The kernels of this process, found at the first call; raises NativeError.

    They are proven (proof.py) before a run takes them.
    """
    return find_kernels(LIBRARY_FOLDER, this_processor())
