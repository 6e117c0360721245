"""Finds the C kernels of this folder for the processor of this machine; loads them with ctypes.

Those in the cache folder (cache.py) come first: they were compiled here, for this processor. Then
those that came with the package (prebuilt.py), which cost no time. Else they are compiled, once per
kind of processor; the cache has them under a key of everything that decides their content but the
compiler: once they are there, no compiler is needed and another one changes nothing. What was
compiled is tried in a process of its own (proof.py) before it is kept, so that what a compiler gets
wrong costs this process nothing, and is not found there by the next.
"""

import ctypes
import hashlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from esper_soa.nets.engines.cpu.cache import (
    NativeError,
    drop_stored,
    load_cached,
    load_stored,
    store,
)
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
KEPT_WHEN_TRIED = 1  # part of the key: no library counts that was kept before any were tried
# Variable of a process that is to prove a library: its path.
TRIED_LIBRARY = "ESPER_SOA_TRIED_LIBRARY"
TRIAL_SECONDS = 120  # seconds that the proof of a library may take with the start of its process
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
    whole_key = *platform_key, *source_key, KEPT_WHEN_TRIED
    return hashlib.sha256(repr(whole_key).encode()).hexdigest()[:20]


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
            problem = problem_of(draft)
            if problem:
                raise NativeError(f"what {command[0]} made is not kept: {problem}")
            return store(folder, key, draft)
    except OSError as error:
        raise NativeError(f"the cache folder {folder} cannot be written: {error}") from error


def problem_of(library: Path) -> str:
    """Why a process of its own, which may crash, does not prove the library; "" where it does."""
    paths = os.pathsep.join(filter(None, sys.path))
    known = {"PYTHONPATH": paths, TRIED_LIBRARY: str(library), "OMP_NUM_THREADS": "1"}
    try:
        tried = subprocess.run(
            [sys.executable, "-m", "esper_soa.nets.choose"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            env=os.environ | known,
            timeout=TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"its proof takes more than {TRIAL_SECONDS} seconds"
    if tried.returncode < 0:
        return f"its proof is ended by {signal.Signals(-tried.returncode).name}"
    lines = tried.stderr.splitlines() or [f"its proof ends with status {tried.returncode}"]
    return lines[-1] if tried.returncode else ""


def replace_kernels() -> bool:
    """Have the kernels of this process, which failed, compiled anew where they fail in a process of
    their own as well, and whether they were; raises NativeError where none come of it.
    """
    if not problem_of(Path(kernels().functions._name)):
        return False
    drop_stored(library_key())
    build()
    kernels.cache_clear()
    return True


def find_kernels(libraries: Path, processor: Processor) -> Kernels:
    """Kernels for this processor, compiled where neither cache nor `libraries` has them.

    libraries: the folder of those that came with the package, if any. Raises NativeError.
    """
    key = library_key(processor)
    path = load_cached(key)
    try:
        if path is not None:
            return _load(path, COMPILED_HERE)
        prebuilt = choose_prebuilt(libraries, processor)
        if prebuilt is not None:
            return _load(*prebuilt)
        reasons = ""
    except NativeError as error:
        reasons = str(error)
        drop_stored(key)
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
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    return Kernels(functions, words, digest)


@cache
def kernels() -> Kernels:
    """The kernels of this process, found at the first call; raises NativeError.

    They are proven (proof.py) before a run takes them.
    """
    path = os.environ.get(TRIED_LIBRARY)
    if path:
        return _load(Path(path), "to be tried")
    return find_kernels(LIBRARY_FOLDER, this_processor())
