"""Builds the C kernels of this folder with the system's compiler, once per kind of CPU, and loads them through ctypes.

The library lands in a cache folder (cache.py) under a key of everything that decides its content but the compiler: once
it is there, no compiler is needed and another one changes nothing. `library` is called by sheet.py for every kernel;
the record here mirrors sheet.h field by field.
"""

import ctypes
import hashlib
import os
import platform
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
from esper_soa.nets.engines.cpu.compiler import (
    FAMILY_FLAGS,
    FLAGS,
    LINK,
    NATIVE,
    ask_compiler,
    compile_kernels,
    compiler_command,
    sources_digest,
)
from esper_soa.nets.engines.cpu.processor import this_processor

LANES = 8  # floats in a vector of vec.h

KERNELS = ("block_train", "block_backward", "block_infer", "seed_forward", "seed_backward", "pool_forward",
           "pool_backward", "head_forward", "head_backward", "sgd_step", "cut_images",
           "train_networks", "validate_networks")  # fmt: skip
POINTER = ctypes.c_void_p


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


def library_key() -> str:
    """What the library is made of and for: sources, flags, processor, and the C library that it will be linked with."""
    name = "CS_GNU_LIBC_VERSION"
    libc = os.confstr(name) if name in os.confstr_names else None
    machine, _, kind = this_processor()
    digest = hashlib.sha256()
    flags = (*FLAGS, *LINK, repr((FAMILY_FLAGS, NATIVE)))
    for part in (platform.system(), machine, kind or platform.processor(), libc or "", sources_digest(), *flags):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def build() -> Path:
    """Path of the compiled kernels, compiled if they are not in the cache; raises NativeError."""
    folder, key = cache_folder(), library_key()
    open_folder(folder)
    return stored(folder, key) or _compiled(folder, key)


def _compiled(folder: Path, key: str) -> Path:
    command = compiler_command()
    try:
        drop_old_drafts(folder)
        with tempfile.TemporaryDirectory(prefix=DRAFT, dir=folder, ignore_cleanup_errors=True) as drafts:
            draft = Path(drafts) / "nets.so"
            compile_kernels(ask_compiler(command, draft.parent), draft)
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
