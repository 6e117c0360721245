"""Builds the C kernels of this folder with the system's compiler, once per kind of CPU, and loads them through ctypes.

The library lands in a cache folder (cache.py) under a key of everything that decides its content but the compiler: once
it is there, no compiler is needed and another one changes nothing. `library` is called by sheet.py for every kernel;
the record here mirrors sheet.h field by field.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from esper_soa.nets.engines.cpu.cache import (
    DRAFT,
    NativeError,
    cache_folder,
    drop_old_drafts,
    open_folder,
    store,
    stored,
)

FOLDER = Path(__file__).parent
# Predictive commoning carries neighbouring pixels through registers that the tiles of taps.c need for their sums.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-predictive-commoning")
LINK = ("-shared", "-fPIC")
LANES = 8  # floats in a vector of vec.h
TIMEOUT = 120  # seconds for the compiler
MESSAGE = 300  # letters of a compiler's complaint that are passed on

KERNELS = ("block_train", "block_backward", "block_infer", "seed_forward", "seed_backward", "pool_forward",
           "pool_backward", "head_forward", "head_backward", "sgd_step", "cut_images",
           "train_networks", "validate_networks")  # fmt: skip
POINTER = ctypes.c_void_p


class Sheet(ctypes.Structure):
    """sheet of sheet.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "nets", "in_channels", "out_channels", "height", "width")),
        *((name, ctypes.c_int64) for name in ("kernel", "x_pixel", "x_net", "out_net", "pooled", "groups")),
        *((name, ctypes.c_int64) for name in ("linear", "own_residual", "through", "detached")),
        *((name, ctypes.c_double) for name in ("momentum", "eps")),
        *((name, POINTER) for name in ("x", "weight", "scale", "shift", "residual", "alpha", "out")),
        *((name, POINTER) for name in ("conv", "peak", "place")),
        *((name, POINTER) for name in ("mean", "rstd", "running_mean", "running_var", "grad_out", "grad_x")),
        *((name, POINTER) for name in ("grad_weight", "grad_scale", "grad_shift")),
    ]


def compiler() -> list[str]:
    """The command that compiles C: $CC or cc; raises NativeError where $CC is no command."""
    said = os.environ.get("CC", "")
    try:
        return shlex.split(said) or ["cc"]
    except ValueError as error:
        raise NativeError(f"CC={said} is no command: {error}".replace("\n", " ")) from error


def _run(command: list[str], folder: Path) -> None:
    """Run a compiler that keeps its own files in `folder`, in a process group that ends with this call."""
    name = shlex.join(command[:1])
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", process_group=0, env=os.environ | {"TMPDIR": str(folder)},
        )  # fmt: skip
    except FileNotFoundError as error:
        raise NativeError(f"no C compiler: {command[0]} is not there (install gcc or clang, or set CC)") from error
    except (OSError, ValueError) as error:
        raise NativeError(f"{name} failed: {error}") from error
    try:
        said = process.communicate(timeout=TIMEOUT)[1]
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"{name} failed: it took more than {TIMEOUT} seconds") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        lines = said.splitlines() or [f"status {process.returncode}"]
        complaint = next((line for line in lines if "error" in line), lines[-1])
        raise NativeError(f"{name} failed: {complaint[:MESSAGE]}")


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def library_key() -> str:
    """What the library is made of and for: sources, flags, processor, and the C library that it will be linked with."""
    name = "CS_GNU_LIBC_VERSION"
    libc = os.confstr(name) if name in os.confstr_names else None
    digest = hashlib.sha256()
    for part in (platform.system(), platform.machine(), _cpu(), libc or "", *FLAGS, *LINK):
        digest.update(part.encode() + b"\0")
    for source in sorted(FOLDER.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


def build() -> Path:
    """Path of the compiled kernels, compiled if they are not in the cache; raises NativeError."""
    folder, key = cache_folder(), library_key()
    open_folder(folder)
    return stored(folder, key) or _compiled(folder, key)


def _compiled(folder: Path, key: str) -> Path:
    command = compiler()
    sources = [str(source) for source in sorted(FOLDER.glob("*.c"))]
    try:
        drop_old_drafts(folder)
        with tempfile.TemporaryDirectory(prefix=DRAFT, dir=folder, ignore_cleanup_errors=True) as drafts:
            draft = Path(drafts) / "nets.so"
            _run([*command, *FLAGS, *LINK, *sources, "-o", str(draft), "-lm"], Path(drafts))
            if not draft.is_file():
                raise NativeError(f"{shlex.join(command[:1])} failed: it made no library")
            return store(folder, key, draft)
    except OSError as error:
        raise NativeError(f"the cache folder {folder} cannot be written: {error}") from error


@cache
def library() -> ctypes.CDLL:
    """The kernels, ready to be called, built at the first call; raises NativeError.

    They are proven (proof.py) before a run takes them.
    """
    path = build()
    try:
        library = ctypes.CDLL(str(path))
        for name in KERNELS:
            function = library[name]
            function.argtypes, function.restype = [POINTER], ctypes.c_int
    except (OSError, AttributeError) as error:
        raise NativeError(f"{path} cannot be loaded (delete it to have it built again): {error}") from error
    return library
