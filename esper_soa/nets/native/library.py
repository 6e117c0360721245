"""Builds the C kernels of this folder with the system's compiler, once per machine, and loads them through ctypes.

The library lands in a cache folder under a name made of everything that decides its content, so that processes and
versions never mix. `library` is called by sheet.py for every kernel; the record here mirrors sheet.h field by field.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
# Predictive commoning carries neighbouring pixels through registers that the tiles of taps.c need for their sums.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-predictive-commoning")
LINK = ("-shared", "-fPIC")
LANES = 8  # floats in a vector of vec.h
TIMEOUT = 120  # seconds for the compiler

KERNELS = ("block_train", "block_backward", "block_infer", "seed_forward", "seed_backward", "pool_forward",
           "pool_backward", "head_forward", "head_backward", "sgd_step", "cut_images",
           "train_networks", "validate_networks")  # fmt: skip
POINTER = ctypes.c_void_p


class NativeError(Exception):
    """Why there are no native kernels here, in words for the user."""


class Sheet(ctypes.Structure):
    """sheet of sheet.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "nets", "in_channels", "out_channels", "height", "width")),
        *((name, ctypes.c_int64) for name in ("kernel", "x_pixel", "x_net", "pooled", "groups", "linear")),
        *((name, ctypes.c_int64) for name in ("own_residual", "through", "detached")),
        *((name, ctypes.c_double) for name in ("momentum", "eps")),
        *((name, POINTER) for name in ("x", "weight", "scale", "shift", "residual", "alpha", "out")),
        *((name, POINTER) for name in ("conv", "peak", "place")),
        *((name, POINTER) for name in ("mean", "rstd", "running_mean", "running_var", "grad_out", "grad_x")),
        *((name, POINTER) for name in ("grad_weight", "grad_scale", "grad_shift")),
    ]


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/esper_soa or ~/.cache/esper_soa."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return Path(root or os.path.expanduser("~/.cache")) / "esper_soa"


def compiler() -> list[str]:
    """The command that compiles C: $CC or cc."""
    return shlex.split(os.environ.get("CC", "")) or ["cc"]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True)
    except FileNotFoundError as error:
        raise NativeError(f"no C compiler: {command[0]} is not there (install gcc or clang, or set CC)") from error
    except subprocess.CalledProcessError as error:
        raise NativeError(f"{shlex.join(command[:1])} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"{shlex.join(command[:1])} failed: {error}") from error
    return done.stdout


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def library_path(command: list[str]) -> Path:
    """The file that `command` would build from the sources as they are."""
    digest = hashlib.sha256()
    for part in (*command, _run([*command, "--version"]), _cpu(), *FLAGS, *LINK):
        digest.update(part.encode() + b"\0")
    for source in sorted(FOLDER.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_folder() / f"nets-{digest.hexdigest()[:20]}.so"


def build() -> Path:
    """Path of the compiled kernels, compiled if they are not in the cache; raises NativeError.

    Safe against other processes: the file appears whole, under its final name, or not at all.
    """
    command = compiler()
    path = library_path(command)
    if path.is_file():
        return path
    sources = [str(source) for source in sorted(FOLDER.glob("*.c"))]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            _run([*command, *FLAGS, *LINK, *sources, "-o", str(draft), "-lm"])
            os.replace(draft, path)
    except OSError as error:
        raise NativeError(f"the cache folder {path.parent} cannot be written: {error}") from error
    return path


@cache
def library() -> ctypes.CDLL:
    """The kernels, ready to be called, built at the first call; raises NativeError."""
    path = build()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    for name in KERNELS:
        function = library[name]
        function.argtypes, function.restype = [POINTER], ctypes.c_int
    return library
