"""Puts compiled kernels into a wheel, so that a machine without a compiler has them from `pip
install` on.

Called by hatchling, as pyproject.toml says, whenever it makes a wheel that is not editable. On
Linux with a C compiler (cc or $CC) the kernels are built for each level of prebuilt.py and for the
processor of this machine; the wheel is then one for this platform. Where nothing can be built it
holds Python alone, as a wheel for any platform, and says so.
"""

import hashlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # a build's environment has hatchling alone

if sys.platform == "linux":
    from esper_soa.nets.engines.cpu import compiler, prebuilt
    from esper_soa.nets.engines.cpu.cache import NativeError
    from esper_soa.system.cores import this_processor

C_LIBRARIES = {
    b"libc.so.6",
    b"libm.so.6",
    b"ld-linux-x86-64.so.2",
    b"ld-linux-aarch64.so.1",
}  # glibc's
TIMEOUT = 1800  # seconds for a library, on machines that have much else to do


class KernelHook(BuildHookInterface):
    """Hatchling's custom hook of the target `wheel`."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Build the kernels into a folder of their own, which is then part of the wheel."""
        if version == "editable":
            return
        self.folder = Path(tempfile.mkdtemp(prefix="esper-soa-kernels-"))
        said = ["kernels are built on Linux only"]
        libraries = list[Path]()
        if sys.platform == "linux":
            said, libraries = build_kernels(self.folder, sysconfig.get_platform())
        for line in said:
            self.app.display_warning(f"kernels: {line}")
        if not libraries:
            self.app.display_warning(
                "kernels: none in this wheel, they will be compiled on first use"
            )
            return
        tag = platform_tag(
            sysconfig.get_platform(), (library.read_bytes() for library in libraries)
        )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"
        target = prebuilt.LIBRARY_FOLDER.relative_to(ROOT)
        for file in (*libraries, self.folder / prebuilt.MANIFEST_NAME):
            build_data["force_include"][str(file)] = str(target / file.name)  # type: ignore[index]

    def finalize(self, version: str, build_data: dict[str, object], artifact_path: str) -> None:
        """Delete them."""
        if version != "editable":
            shutil.rmtree(self.folder)


def build_kernels(folder: Path, platform: str) -> tuple[list[str], list[Path]]:
    """Compile all levels of `platform` (linux-x86_64) into `folder`; what failed, and libraries."""
    try:
        found = compiler.identify_compiler(compiler.compiler_command(), folder)
    except NativeError as error:
        return [str(error)], []
    if platform != f"linux-{found.machine}" or sys.maxsize < 2**32:
        return [
            (
                f"{found.command[0]} compiles for {found.machine or 'an unknown machine'}, not for "
                f"{platform}"
            )
        ], []
    targets = {
        level.name: level.target
        for level in prebuilt.PROCESSOR_LEVELS
        if level.machine == found.machine
    }
    processor = this_processor()
    if processor.kind and processor.machine == found.machine:
        targets[prebuilt.BUILDER_LEVEL] = ""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = list(pool.map(lambda name: compiled(found, folder / name, targets[name]), targets))
    made = [folder / f"{name}.so" for name, error in zip(targets, errors, strict=True) if not error]
    listed = [
        {
            "level": path.stem,
            "sha256": digest_of(path),
            "flags": compiler.kernel_flags(found, targets[path.stem]),
        }
        for path in made
    ]
    words = f"{found.family} {found.version}"
    prebuilt.write_manifest(folder, words, processor.kind, listed)
    return [error for error in errors if error], made


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def compiled(found: "compiler.Compiler", folder: Path, target: str) -> str:
    """Make <folder>.so; returns why it cannot be made, "" where it was."""
    folder.mkdir()
    try:
        compiler.compile_kernels(found, folder / "nets.so", target, TIMEOUT)
    except NativeError as error:
        return f"{folder.name}: {error}"
    os.chmod(folder / "nets.so", 0o755)
    (folder / "nets.so").rename(folder.with_suffix(".so"))
    return ""


def platform_tag(platform: str, libraries: Iterable[bytes]) -> str:
    """The wheel's platform: manylinux of the youngest glibc whose symbols the libraries ask for.

    Just Linux where they ask for other libraries, for a C library that is not glibc, or for what
    has no number there.
    """
    content = b"".join(libraries)
    needed = set(re.findall(rb"(?:lib|ld-)[\w+.-]*\.so[.\d]*", content))
    symbols = re.findall(rb"GLIBC_(\w[\w.]*)", content)
    numbers = [re.fullmatch(rb"(\d+)\.(\d+)[.\d]*", symbol) for symbol in symbols]
    system, _, machine = platform.partition("-")
    if not symbols or not all(numbers) or needed - C_LIBRARIES:
        return f"{system}_{machine}"
    major, minor = max((int(number[1]), int(number[2])) for number in numbers if number)
    return f"many{system}_{major}_{minor}_{machine}"
