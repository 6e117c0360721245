"""Kernels that came with the package: which are taken for which processor, which are refused, and
what follows then.

The libraries here are copies of the one that was compiled for this machine, under the names of the
levels.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from esper_soa.nets.engines.cpu import cache, library, prebuilt
from esper_soa.nets.engines.cpu.prebuilt import BUILDER_LEVEL, choose_prebuilt, write_manifest
from esper_soa.system.cores import Processor, this_processor

V2 = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3", "sse2"}
V3 = V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
V4 = V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
NAMES = ("x86-64-v2", "sandybridge", "x86-64-v3", "x86-64-v4", "armv8-a")
NO_COMPILER = "/nonexistent/cc"


def processor(features: set[str], machine: str = "x86_64", kind: str = "here") -> Processor:
    return Processor(machine, frozenset(features), kind)


def packed(
    folder: Path, names: tuple[str, ...], content: bytes = b"", builder: str = "elsewhere"
) -> Path:
    """A folder of libraries of these levels, each of which ends with its name, as in a wheel."""
    folder.mkdir()
    listed = []
    for name in names:
        own = content + name.encode()
        (folder / f"{name}.so").write_bytes(own)
        listed.append({"level": name, "sha256": hashlib.sha256(own).hexdigest()})
    write_manifest(folder, "gcc 12.2.0", builder, listed)
    return folder


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (processor(V2), "x86-64-v2"),
        (processor(V3), "x86-64-v3"),
        (processor(V4), "x86-64-v4"),
        (processor(V4 - {"avx512vl"}), "x86-64-v3"),
        (processor(V3 - {"fma"}), "x86-64-v2"),
        (processor(V3 - {"fma"} | {"aes", "pclmulqdq"}), "sandybridge"),
        (processor(V2 | {"aes", "pclmulqdq", "xsave"}), "x86-64-v2"),
        (processor(V2 - {"ssse3"}), None),
        (processor(set()), None),
        (processor({"fp", "asimd"}, "aarch64"), "armv8-a"),
        (processor(V4, "ppc64le"), None),
    ],
)
def test_the_best_level_that_fits_is_taken(
    tmp_path: Path, given: Processor, name: str | None
) -> None:
    folder = packed(tmp_path / "libraries", NAMES)
    expected = None if name is None else (folder / f"{name}.so", f"prebuilt ({name})")
    assert choose_prebuilt(folder, given) == expected


@pytest.mark.parametrize(
    ("name", "needs", "machine"),
    [
        ("x86-64-v2", V2 - {"sse2"}, "x86_64"),
        ("sandybridge", V2 - {"sse2"} | {"aes", "avx", "pclmulqdq", "xsave"}, "x86_64"),
        ("x86-64-v3", V3 - {"sse2"}, "x86_64"),
        ("x86-64-v4", V4 - {"sse2"}, "x86_64"),
        ("armv8-a", {"asimd", "fp"}, "aarch64"),
    ],
)
def test_a_level_is_for_processors_with_all_that_it_needs(
    tmp_path: Path, name: str, needs: set[str], machine: str
) -> None:
    folder = packed(tmp_path / "libraries", (name,))
    assert choose_prebuilt(folder, processor(needs, machine)) is not None
    for one in needs:
        assert choose_prebuilt(folder, processor(needs - {one}, machine)) is None, one


@pytest.mark.parametrize(
    ("names", "builder", "given", "name"),
    [
        ((*NAMES, BUILDER_LEVEL), "here", processor(V3), BUILDER_LEVEL),
        ((*NAMES, BUILDER_LEVEL), "here", processor(V3, kind="there"), "x86-64-v3"),
        ((*NAMES, BUILDER_LEVEL), "", processor(V3, kind=""), "x86-64-v3"),
        (("x86-64-v2", "armv8-a"), "here", processor(V4), "x86-64-v2"),
    ],
    ids=["of this kind", "of another", "of none", "not built"],
)
def test_a_processor_of_the_building_kind_has_its_own_and_what_is_missing_is_passed_over(
    tmp_path: Path, names: tuple[str, ...], builder: str, given: Processor, name: str
) -> None:
    folder = packed(tmp_path / "libraries", names, builder=builder)
    words = "prebuilt for this CPU" if name == BUILDER_LEVEL else f"prebuilt ({name})"
    assert choose_prebuilt(folder, given) == (folder / f"{name}.so", words)
    assert choose_prebuilt(tmp_path / "none", given) is None


def other_sources(folder: Path) -> None:
    path = folder / prebuilt.MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sources": "0" * 64}))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def exchange(folder: Path) -> None:
    (folder / "x86-64-v2.so").replace(folder / "x86-64-v3.so")


NOT_AS_SAID = r"{}/x86-64-v3\.so is not what manifest\.json says \(install the package again\)"
DAMAGED = r"{}/manifest\.json is damaged \(install the package again\)"
OTHERS = rf"the libraries of {{}} were made of other C files than those of {prebuilt.SOURCE_FOLDER}"


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("x86-64-v3.so", cut, NOT_AS_SAID),
        ("x86-64-v3.so", flip, NOT_AS_SAID),
        ("x86-64-v3.so", lambda path: os.truncate(path, 0), NOT_AS_SAID),
        ("", exchange, NOT_AS_SAID),
        ("x86-64-v3.so", Path.unlink, "{}/x86-64-v3.so cannot be read: No such file or directory"),
        (prebuilt.MANIFEST_NAME, Path.unlink, DAMAGED),
        (prebuilt.MANIFEST_NAME, cut, DAMAGED),
        (prebuilt.MANIFEST_NAME, lambda path: path.write_text("[1]"), DAMAGED),
        (prebuilt.MANIFEST_NAME, lambda path: path.write_text("{}"), DAMAGED),
        ("", other_sources, OTHERS),
    ],
)
def test_what_is_not_as_it_was_packed_is_refused_with_a_reason(
    tmp_path: Path, file: str, damage: Callable[[Path], object], reason: str
) -> None:
    folder = packed(tmp_path / "libraries", NAMES)
    damage(folder / file)
    with pytest.raises(cache.NativeError, match=f"^{reason.format(folder)}$"):
        choose_prebuilt(folder, processor(V3))


# --- in the order of library.py

native = pytest.mark.usefixtures("native")
NAME = prebuilt.BUILDER_LEVEL


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of this process as one that came with the package; cache empty, no compiler."""
    content = library.build().read_bytes()
    monkeypatch.setenv("CC", NO_COMPILER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return packed(tmp_path / "libraries", (NAME,), content, this_processor().kind)


@native
def test_the_shipped_library_is_taken_and_nothing_written(shipped: Path, tmp_path: Path) -> None:
    found = library.find_kernels(shipped, this_processor())
    assert found.words == "prebuilt for this CPU"
    assert found.functions._name == str(shipped / f"{NAME}.so")
    assert found.sha256 == hashlib.sha256((shipped / f"{NAME}.so").read_bytes()).hexdigest()
    assert not (tmp_path / "cache").exists()


@native
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=["own", "of anybody"])
def test_a_cached_library_is_first_where_trusted(shipped: Path, tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache" / "esper_soa"
    cache.open_folder(folder)
    draft = folder / "nets.so"
    draft.write_bytes((shipped / f"{NAME}.so").read_bytes() + b"cached")
    path = cache.store(folder, library.library_key(), draft)
    folder.chmod(mode)
    found = library.find_kernels(shipped, this_processor())
    trusted = mode == 0o700
    assert found.words == ("compiled for this CPU" if trusted else "prebuilt for this CPU")
    assert found.functions._name == str(path if trusted else shipped / f"{NAME}.so")


@native
@pytest.mark.slow  # a process of its own tries what the compiler makes
def test_a_refused_one_is_followed_by_the_compiler_and_the_log_says_why(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tmp_path / "good.so"
    shutil.copy(shipped / f"{NAME}.so", good)
    flip(shipped / f"{NAME}.so")
    reason = f"{shipped / NAME}.so is not what manifest.json says (install the package again)"
    with pytest.raises(cache.NativeError) as refused:
        library.find_kernels(shipped, this_processor())
    assert str(refused.value).startswith(f"{reason}, and no C compiler: {NO_COMPILER} is not there")
    stand_in = tmp_path / "copying"
    answer = 'case "$*" in *-dM*) exit;; esac; while [ "$1" != -o ]; do shift; done'
    stand_in.write_text(f'#!/bin/sh\n{answer}; cp {good} "$2"\n')
    stand_in.chmod(0o700)
    monkeypatch.setenv("CC", str(stand_in))
    for why in (f", as {reason}", ""):
        found = library.find_kernels(shipped, this_processor())
        assert found.words == f"compiled for this CPU{why}"


@native
def test_one_that_cannot_be_loaded_is_refused(shipped: Path) -> None:
    other = (shipped / f"{NAME}.so").read_bytes().replace(b"train_networks", b"train_nothings")
    for content in (b"no library", other):
        shutil.rmtree(shipped)
        packed(shipped, (NAME,), content, this_processor().kind)
        told = rf"^{shipped}/native\.so cannot be loaded: .+, and "
        with pytest.raises(cache.NativeError, match=f"{told}no C compiler"):
            library.find_kernels(shipped, this_processor())
    # none for this processor is no reason to say anything
    with pytest.raises(cache.NativeError, match=r"^no C compiler"):
        library.find_kernels(shipped, processor(set()))
