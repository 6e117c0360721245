"""What a C compiler is asked and told: by stand-ins that say that they are another."""

import os
import platform
import select
from pathlib import Path

import pytest

from esper_soa.nets.engines.cpu import cache, compiler
from esper_soa.system import cores as processor


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
