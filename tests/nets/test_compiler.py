"""What a C compiler is asked and told: by stand-ins that say that they are another."""

import os
import platform
import select
from pathlib import Path

import pytest

from esper_soa.nets.engines.cpu import cache, compiler
from esper_soa.system import cores as processor

COMMON = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")
GCC = ("__GNUC__ 12", '__VERSION__ "12.2.0"')
DEBIAN = "Debian Clang 14.0.6"
CLANG = ("__clang__ 1", "__GNUC__ 4", f'__VERSION__ "{DEBIAN}"')
TAME = "-fno-predictive-commoning"
FAST = "-ffp-contract=fast"
ARM64 = "-mcpu=native"


def stand_in(folder: Path, macros: tuple[str, ...]) -> str:
    """A compiler with these macros, which writes what it is told into what it should make."""
    said = "".join(f"echo '#define {macro}'\n" for macro in macros)
    path = folder / "cc"
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *-dM*)\n{said}exit;; esac\necho "$TMPDIR $*" > {folder}/nets.so\n'
    )
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("macros", "kind", "own"),
    [
        ((*GCC, "__x86_64__ 1"), ("gcc", "x86_64", "12.2.0"), (TAME, "-march=native")),
        ((*GCC, "__aarch64__ 1"), ("gcc", "aarch64", "12.2.0"), (TAME, ARM64)),
        ((*CLANG, "__x86_64__ 1"), ("clang", "x86_64", DEBIAN), (FAST, "-march=native")),
        ((*CLANG, "__aarch64__ 1", "__GXX_WEAK__"), ("clang", "aarch64", DEBIAN), (FAST, ARM64)),
        (("__TINYC__ 928",), ("", "", ""), ()),
        ((*GCC, "__powerpc64__ 1"), ("gcc", "", "12.2.0"), (TAME,)),
    ],
    ids=["gcc x86-64", "gcc arm64", "clang x86-64", "clang arm64", "neither", "gcc elsewhere"],
)
def test_flags_are_those_of_the_compiler_and_of_what_it_compiles_for(
    tmp_path: Path, macros: tuple[str, ...], kind: tuple[str, str, str], own: tuple[str, ...]
) -> None:
    found = compiler.identify_compiler([stand_in(tmp_path, macros)], tmp_path)
    assert found[1:] == kind
    assert compiler.kernel_flags(found) == (*COMMON, *own)
    compiler.compile_kernels(found, tmp_path / "nets.so")
    folder, *told = (tmp_path / "nets.so").read_text().split()
    assert folder == str(tmp_path)
    assert told[: len(COMMON) + len(own)] == [*COMMON, *own]
    assert told[-3:] == ["-o", str(tmp_path / "nets.so"), "-lm"]
    sources = sorted(str(source) for source in compiler.SOURCE_FOLDER.glob("*.c"))
    assert [source for source in told if source.endswith(".c")] == sources


def test_another_processor_is_asked_for_in_place_of_this_one(tmp_path: Path) -> None:
    found = compiler.identify_compiler([stand_in(tmp_path, (*GCC, "__x86_64__ 1"))], tmp_path)
    flags = compiler.kernel_flags(found, "-march=x86-64-v3")
    assert flags == (*COMMON, TAME, "-march=x86-64-v3")


@pytest.mark.usefixtures("native")
def test_the_compiler_of_this_machine_is_known(tmp_path: Path) -> None:
    found = compiler.identify_compiler(compiler.compiler_command(), tmp_path)
    assert found.family in ("gcc", "clang")
    assert found.machine == platform.machine().replace("arm64", "aarch64")
    assert found.version


def test_a_compiler_that_answers_with_an_error_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cc"
    told = "no licence \\377: error " + 400 * "7"
    path.write_text(f"#!/bin/sh\nprintf 'cc:\\n{told}\\nover\\n' >&2\nexit 3\n")
    path.chmod(0o700)
    with pytest.raises(cache.NativeError, match=rf"^{path} failed: no licence .: error 7{{280}}$"):
        compiler.identify_compiler([str(path)], tmp_path)


def test_a_compiler_that_takes_too_long_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    path = tmp_path / "cc"
    path.write_text(f"#!/bin/sh\nsleep 60 > {tmp_path / 'held'} &\nwait\n")
    path.chmod(0o700)
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(cache.NativeError, match=f"^{path} failed: it took more than 1 seconds$"):
        compiler.compile_kernels(compiler.Compiler((str(path),), "", "", ""), tmp_path, timeout=1)
    assert select.select([held], [], [], 10)[0]  # nobody has it open for writing
    os.close(held)


# --- processors

X86 = "processor : 0\nmodel name\t: A\ncpu MHz : {mhz}\nflags\t\t: fpu avx2 fma\n"
ARM = (
    "processor : 0\nBogoMIPS : 50\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU part : {part}\n"
)


def test_a_processor_is_its_machine_its_features_and_what_compilers_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = processor.processor_of("x86_64", 2 * X86.format(mhz=2000.1))
    assert found[:2] == ("x86_64", {"fpu", "avx2", "fma"})
    assert found.kind == processor.processor_of("x86_64", X86.format(mhz=2400.0)).kind
    for old, new in ((": A", ": B"), ("fma", "fma f16c")):
        other = processor.processor_of("x86_64", X86.format(mhz=2000.1).replace(old, new))
        assert found.kind != other.kind
    arm = processor.processor_of("aarch64", ARM.format(part="0xd0c"))
    assert arm[:2] == ("aarch64", {"fp", "asimd"})
    others = (ARM.format(part="0xd40"), ARM.format(part="0xd0c").replace("0x41", "0x42"))
    assert arm.kind not in [processor.processor_of("aarch64", other).kind for other in others]
    assert processor.processor_of("x86_64", "") == ("x86_64", frozenset(), "")
    monkeypatch.setattr(processor, "CPUINFO", Path("/nowhere"))
    assert processor.this_processor() == (platform.machine(), frozenset(), "")
