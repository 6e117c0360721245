"""Compiles the C kernels of this folder with the system's compiler, which is asked what it is.

For this machine at first use, and for the levels of prebuilt.py while a wheel is built. Needs no
torch.
"""

import hashlib
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

from esper_soa.nets.engines.cpu.cache import NativeError

SOURCE_FOLDER = Path(__file__).parent
COMMON_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")
FAMILY_FLAGS = {
    # Predictive commoning carries neighbouring pixels through registers that the tiles of taps.c
    # need for their sums.
    "gcc": ("-fno-predictive-commoning",),
    # Products and sums become one instruction across statements too, which gcc does by itself.
    "clang": ("-ffp-contract=fast",),
    "": (),
}
# Asks for all that the processor of this machine has: of an x86-64 compiler by -march, of one for
# arm64 by -mcpu.
NATIVE_TARGETS = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "": ""}
LINK_FLAGS = ("-shared", "-fPIC", "-fvisibility=hidden")  # what is no entry point stays inside
COMPILER_SECONDS = 300  # seconds for the compiler, which a run waits for
MESSAGE_LETTERS = 300  # letters of a compiler's complaint that are passed on


class Compiler(NamedTuple):
    """A C compiler, as it describes itself."""

    command: tuple[str, ...]
    family: str  # gcc or clang; "" for any other
    machine: str  # what it compiles for: x86_64 or aarch64; "" for any other
    version: str


def compiler_command() -> list[str]:
    """The command that compiles C: $CC or cc; raises NativeError where $CC is no command."""
    command = os.environ.get("CC", "")
    try:
        return shlex.split(command) or ["cc"]
    except ValueError as error:
        raise NativeError(f"CC={command} is no command: {error}".replace("\n", " ")) from error


def identify_compiler(command: list[str], folder: Path) -> Compiler:
    """The compiler as its macros describe it; `folder`: where it may keep files.

    Raises NativeError where it cannot be run.
    """
    output = _run([*command, "-dM", "-E", "-x", "c", "-"], folder)
    macros = dict(re.findall(r'^#define (\w+) ?"?(.*?)"?$', output, re.MULTILINE))
    family = "clang" if "__clang__" in macros else "gcc" if "__GNUC__" in macros else ""
    machine = next((name for name in NATIVE_TARGETS if f"__{name}__" in macros), "")
    return Compiler(tuple(command), family, machine, version=macros.get("__VERSION__", ""))


def kernel_flags(compiler: Compiler, target: str = "") -> tuple[str, ...]:
    """Flags of the compiler for the kernels; target: the option for a processor, else ours."""
    flags = (
        *COMMON_FLAGS,
        *FAMILY_FLAGS[compiler.family],
        target or NATIVE_TARGETS[compiler.machine],
    )
    return tuple(flag for flag in flags if flag)


def compile_kernels(
    compiler: Compiler, library: Path, target: str = "", timeout: int = COMPILER_SECONDS
) -> None:
    """Make `library`, in a folder in which the compiler may keep files of its own.

    target: as in kernel_flags; timeout: seconds that it may take. Raises NativeError.
    """
    sources = [str(source) for source in sorted(SOURCE_FOLDER.glob("*.c"))]
    flags = (*kernel_flags(compiler, target), *LINK_FLAGS)
    _run([*compiler.command, *flags, *sources, "-o", str(library), "-lm"], library.parent, timeout)
    if library.is_symlink() or not library.is_file():
        raise NativeError(f"{shlex.join(compiler.command[:1])} failed: it made no library")


def sources_digest() -> str:
    """SHA-256 of the names and the contents of all C files of this folder."""
    digest = hashlib.sha256()
    for source in sorted(SOURCE_FOLDER.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _run(command: list[str], folder: Path, timeout: int = COMPILER_SECONDS) -> str:
    """Output of a compiler that keeps its files in `folder`; its process group ends with this."""
    name = shlex.join(command[:1])
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
            env=os.environ | {"TMPDIR": str(folder)},
        )
    except FileNotFoundError as error:
        missing = f"{command[0]} is not there (install gcc or clang, or set CC)"
        raise NativeError(f"no C compiler: {missing}") from error
    except OSError as error:
        raise NativeError(f"{name} failed: {error}") from error
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise NativeError(f"{name} failed: it took more than {timeout} seconds") from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        lines = errors.splitlines() or [f"status {process.returncode}"]
        message = next((line for line in lines if "error" in line), lines[-1])
        raise NativeError(f"{name} failed: {message[:MESSAGE_LETTERS]}")
    return output
