"""The kernels in a wheel: what the build puts there, and what a machine without gcc does."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from esper_soa.nets.engines.cpu import compiler, prebuilt
from esper_soa.system.cores import this_processor

pytest.importorskip("hatchling", reason="makes the wheel")

from hatchling.bridge.app import Application

import hatch_build

ROOT = Path(__file__).resolve().parents[1]
MACHINE = platform.machine()
LEVELS = [level for level in prebuilt.PROCESSOR_LEVELS if level.machine == MACHINE]
FITTING = [level.name for level in LEVELS if level.needs <= this_processor().features]
HERE = f"linux-{MACHINE}"
pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and LEVELS),
    reason="kernels are built on Linux for x86-64 and arm64",
)


def stand_in(folder: Path, machine: str = MACHINE, refused: str = "no such target") -> str:
    """A gcc for `machine` that obeys, with symbols of glibc 2.27, but where `refused` is asked."""
    path = folder / "cc"
    path.write_text(
        f"""#!/bin/sh
case "$*" in
*-dM*) echo '#define __GNUC__ 12'; echo '#define __VERSION__ "12.2.0"'; echo '#define __{machine}__ 1'; exit;;
*"{refused}"*) echo "error: {refused}" >&2; exit 1;;
esac
told=$*
while [ "$1" != -o ]; do shift; done
echo "$told GLIBC_2.2.5 GLIBC_2.27 libm.so.6 libc.so.6" > "$2"
"""  # noqa: E501
    )
    path.chmod(0o700)
    return str(path)


ALL = [f"{name}.so" for name in (*(level.name for level in LEVELS), prebuilt.BUILDER_LEVEL)]


def built_by(cc: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list, list]:
    """What the build says of a compiler, and the names of the libraries that it leaves."""
    monkeypatch.setenv("CC", cc)
    folder.mkdir()
    failed, libraries = hatch_build.build_kernels(folder, HERE)
    return failed, [library.name for library in libraries]


def test_every_level_and_this_machine_are_built_and_listed_with_digest_flags_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "built"
    assert built_by(stand_in(tmp_path), folder, monkeypatch) == ([], ALL)
    manifest = json.loads((folder / prebuilt.MANIFEST_NAME).read_text())
    assert manifest["compiler"] == "gcc 12.2.0"
    assert manifest["sources"] == compiler.sources_digest()
    assert manifest["builder"] == this_processor().kind
    for name, listed, level in zip(ALL, manifest["libraries"], [*LEVELS, None], strict=True):
        library = folder / name
        assert name == f"{listed['level']}.so"
        target = level.target if level else compiler.NATIVE_TARGETS[MACHINE]
        assert listed["flags"][-1] == target
        assert library.read_text().startswith(f"{' '.join(listed['flags'])} -shared")
        assert listed["sha256"] == hatch_build.digest_of(library)
    found = prebuilt.choose_prebuilt(folder, this_processor())
    assert found == (folder / "native.so", "prebuilt for this CPU")


def hook(folder: Path) -> hatch_build.KernelHook:
    return hatch_build.KernelHook(str(ROOT), {}, None, None, str(folder), "wheel", Application())


def test_a_hook_makes_a_wheel_for_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", stand_in(tmp_path))
    built = hook(tmp_path)
    data = {"pure_python": True, "force_include": {}}
    built.initialize("standard", data)
    assert data["tag"] == f"py3-none-manylinux_2_27_{MACHINE}"
    assert data["pure_python"] is False
    place = "esper_soa/nets/engines/cpu/libraries"
    included = data["force_include"]
    assert isinstance(included, dict)
    assert [*included.values()] == [f"{place}/{name}" for name in (*ALL, prebuilt.MANIFEST_NAME)]
    assert all(Path(file).is_file() for file in included)
    built.finalize("standard", data, "")
    assert not any(Path(file).parent.exists() for file in included)


# --- a machine without a compiler

CHOOSE = (
    "import torch; from esper_soa.nets.engines.cpu.proof import choose_native; "
    "from esper_soa.nets.engines.torch.engine import TorchEngine; "
    "print(choose_native(torch.device('cpu'), TorchEngine()).reason)"
)
SMOKE = ["+experiment=smoke", "rounds=1", "steps=2"]


def wheel_of(folder: Path, **environment: str) -> Path:
    asked = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    env = os.environ | environment
    subprocess.run(asked, cwd=ROOT, env=env, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def installed(folder: Path, wheel: Path) -> Path:
    """A fresh environment with the wheel; torch and other libraries are this process's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "libraries-of-tests.pth").write_text(
        "".join(f"{path}\n" for path in sys.path if "site-packages" in path)
    )
    return site / "esper_soa" / "nets" / "engines" / "cpu" / "libraries"


def without_compiler(environment: Path, *arguments: str) -> str:
    """What a Python of the environment prints where there is no compiler, no home and no cache."""
    env = {"PATH": str(environment / "bin"), "HOME": ""}
    env |= {"XDG_CACHE_HOME": str(environment / "cache")}
    asked = [environment / "bin" / "python", *arguments]
    done = subprocess.run(asked, cwd=environment, text=True, capture_output=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def played(environment: Path, name: str) -> tuple[str, dict[str, str]]:
    """Of a run: the line of its log about kernels, and the entry of versions.json."""
    run = environment / name
    without_compiler(environment, "-m", "esper_soa.train", *SMOKE, f"run_dir={run}")
    (line,) = (line for line in (run / "log.txt").read_text().splitlines() if "kernels  " in line)
    versions = json.loads((run / "versions.json").read_text())
    return line.partition("kernels  ")[2], versions["kernels"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # it compiles six libraries, on a busy machine for minutes
def test_a_machine_without_a_compiler_is_fast_and_refuses_what_was_changed(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path / "dist")
    assert re.fullmatch(
        rf"esper_soa-[\d.]+-py3-none-(linux|manylinux_2_\d+)_{MACHINE}\.whl", wheel.name
    )
    environment = tmp_path / "fresh"
    libraries = installed(environment, wheel)
    shipped = json.loads((libraries / prebuilt.MANIFEST_NAME).read_text())
    digests = {library["level"]: library["sha256"] for library in shipped["libraries"]}
    assert [*digests] == [*(level.name for level in LEVELS), prebuilt.BUILDER_LEVEL]
    words, entry = played(environment, "own")
    assert words == "native, prebuilt for this CPU"
    sha256 = digests[prebuilt.BUILDER_LEVEL]
    assert entry == {"kind": words, "sha256": sha256, "engine": "native", "tried": ""}
    for level in FITTING:  # each is proven before it is taken, as if nothing else had been built
        left = [library for library in shipped["libraries"] if library["level"] == level]
        (libraries / prebuilt.MANIFEST_NAME).write_text(json.dumps(shipped | {"libraries": left}))
        assert without_compiler(environment, "-c", CHOOSE) == f"native, prebuilt ({level})\n"
    # the report keeps what draws its figures there
    assert not list((environment / "cache").rglob("*.so"))
    os.truncate(libraries / f"{FITTING[-1]}.so", 5000)
    words, entry = played(environment, "tampered")
    path = libraries / f"{FITTING[-1]}.so"
    why = f"{path} is not what manifest.json says (install the package again), "
    why += "and no C compiler: cc is not there (install gcc or clang, or set CC)"
    assert words == f"plain torch, slower: no native kernels, {why}"
    assert entry == {"kind": words, "sha256": "", "engine": "torch", "tried": ""}
