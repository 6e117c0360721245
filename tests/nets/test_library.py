"""The compiled kernels on the disk: what is run, what is built again, what is refused, and what a
stop leaves behind.

All of it with real files and real processes. A compiler stands in that copies a library made
before, so that no test waits for the real one; it notes how often it was asked.
"""

import ctypes
import hashlib
import os
import platform
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from esper_soa.nets.engine import NetsConfig, TrainReport
from esper_soa.nets.engines.cpu import cache, compiler, library, proof
from esper_soa.nets.engines.cpu.proof import choose_native
from esper_soa.nets.engines.cpu.records import call
from esper_soa.nets.engines.cpu.sequences import SequenceBlock
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.sgd import rules_of
from esper_soa.system.cores import this_processor
from tests.builders.program import wait_until
from tests.builders.warm import Popen

pytestmark = pytest.mark.usefixtures("native")

ROOT = Path(__file__).resolve().parents[2]
# needs no torch
LOAD = "from esper_soa.nets.engines.cpu import library; library.kernels(); print(library.build())"
CHOOSE = (
    "import torch; from esper_soa.nets.engines.cpu.proof import choose_native; "
    "from esper_soa.nets.engines.torch.engine import TorchEngine; "
    "found = [choose_native(torch.device('cpu'), TorchEngine(), sequences=many)[:3] "
    "for many in (False, True)]; print(*sorted(found))"
)
NO_COMPILER = "/nonexistent/cc"
CPU = torch.device("cpu")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs files of another user")


def script(path: Path, text: str) -> str:
    """An executable shell script; returns the command that runs it."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


# Says nothing of itself when it is asked what it is; finds what -o names.
TARGET = 'case "$*" in *-dM*) exit;; esac; while [ "$1" != -o ]; do shift; done; to=$2'


def copying(folder: Path) -> str:
    """A compiler that copies the library of this process."""
    noting = f"{TARGET}; echo asked >> {folder}/asked"
    return script(folder / "copying", f"{noting}; cp {library.build()} $to")


def asked(folder: Path) -> int:
    notes = folder / "asked"
    return len(notes.read_text().splitlines()) if notes.exists() else 0


def start(code: str = LOAD, **environment: str) -> subprocess.Popen[str]:
    env = os.environ | environment | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    pipe = subprocess.PIPE
    return Popen([sys.executable, "-c", code], env=env, stdout=pipe, stderr=pipe, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out.strip(), err


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A cache folder, within $XDG_CACHE_HOME=`tmp_path`, that holds the library and its digest."""
    folder = tmp_path / "esper_soa"
    cache.open_folder(folder)
    drafts = folder / "draft-mine"
    drafts.mkdir()
    draft = drafts / "nets.so"
    shutil.copy(library.build(), draft)
    cache.store(folder, library.library_key(), draft)
    drafts.rmdir()
    return folder


def files(folder: Path) -> tuple[Path, Path]:
    """The only library of a cache folder, and its digest."""
    held = sorted(folder.iterdir())
    assert [path.suffix for path in held] == [".so", ".sha256"]
    return held[0], held[1]


def test_a_cache_that_is_warm_needs_no_compiler(warm: Path) -> None:
    status, out, err = ended(start(XDG_CACHE_HOME=str(warm.parent), CC=NO_COMPILER, PATH=""))
    assert (status, out) == (0, str(files(warm)[0])), err


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zero_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2].ljust(len(content), b"\0"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x10
    path.write_bytes(content)


def link(path: Path) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "half zeroed": zero_half,
    "a bit flipped": flip,
    "a link": link,
    "open to others": lambda path: path.chmod(0o770),
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "of another user": lambda path: os.chown(path, 54321, 54321),
}


def cases(names: Iterable[str]) -> list:
    """For `parametrize`; only root can make something of another user."""
    return [pytest.param(one, marks=as_root if one == "of another user" else []) for one in names]


@pytest.mark.parametrize("part", [0, 1], ids=["library", "digest"])
@pytest.mark.parametrize("damage", cases(DAMAGES))
def test_what_has_changed_is_built_again(
    warm: Path, tmp_path: Path, damage: str, part: int
) -> None:
    good = files(warm)[0].read_bytes()
    key = library.library_key()
    assert cache.load_stored(warm, key) == files(warm)[0]
    DAMAGES[damage](files(warm)[part])
    assert cache.load_stored(warm, key) is None
    status, out, err = ended(start(XDG_CACHE_HOME=str(tmp_path), CC=copying(tmp_path)))
    assert (status, asked(tmp_path)) == (0, 1), err
    found, digest = files(warm)
    assert out == str(found)
    assert found.read_bytes() == good
    assert not found.is_symlink()
    assert not digest.is_symlink()
    assert cache.load_stored(warm, key) == found


def test_a_digest_that_a_power_cut_left_as_zeros_is_none(warm: Path) -> None:
    for left in (bytes(120), b"\xff" * 120):
        files(warm)[1].write_bytes(left)
        assert cache.load_stored(warm, library.library_key()) is None


def test_what_is_stored_is_closed_to_others_and_has_a_digest_for_sha256sum(tmp_path: Path) -> None:
    code = f"import os; os.umask(0); {LOAD}"
    assert ended(start(code, XDG_CACHE_HOME=str(tmp_path), CC=copying(tmp_path)))[0] == 0
    folder = tmp_path / "esper_soa"
    found, digest = files(folder)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, found, digest)]
    assert modes == [0o700, 0o700, 0o600]
    sha256 = hashlib.sha256(found.read_bytes()).hexdigest()
    assert digest.read_text() == f"{sha256}  {found.name}\n"


def test_files_are_on_the_disk_before_their_names(
    warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    really_sync = os.fsync
    really_replace = os.replace

    def sync(handle: int) -> None:
        done.append("sync " + Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        really_sync(handle)

    def replace(one: Path, other: Path) -> None:
        done.append("name " + other.suffix)
        really_replace(one, other)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    draft = warm / "nets.so"
    shutil.copy(library.build(), draft)
    cache.store(warm, "key", draft)
    ends = ["sync digest", "sync esper_soa", "name .sha256", "sync esper_soa"]
    assert done == ["sync nets.so", "name .so", *ends]


def refusal(folder: Path) -> str:
    """Why the folder is refused, as a process says that finds no compiler either."""
    status, _, err = ended(start(XDG_CACHE_HOME=str(folder.parent), CC=NO_COMPILER))
    assert status == 1
    return err.splitlines()[-1]


def test_a_folder_that_is_not_the_users_own_alone_is_refused(warm: Path) -> None:
    warm.chmod(0o722)
    told = f"others can write in the cache folder {warm} (mode 722): delete it"
    assert told in refusal(warm)


@pytest.mark.parametrize("part", [0, 1])
def test_a_folder_in_the_place_of_a_file_is_one_line_and_no_kernels(warm: Path, part: int) -> None:
    path = files(warm)[part]
    path.unlink()
    path.mkdir()
    assert refusal(warm).endswith(
        f"NativeError: no C compiler: {NO_COMPILER} is not there (install gcc or clang, or set CC)"
    )


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for parent in (tmp_path / "file", tmp_path / (999 * "x")):
        assert f"the cache folder {parent}/esper_soa cannot be written: " in refusal(
            parent / "esper_soa"
        )


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/h"}, "/h/.cache/esper_soa"),
        ({"HOME": "/nonexistent", "XDG_CACHE_HOME": "/x"}, "/x/esper_soa"),
        ({}, "/user/.cache/esper_soa"),
        ({"HOME": ""}, "/user/.cache/esper_soa"),
        ({"HOME": "relative"}, "/user/.cache/esper_soa"),
        ({"XDG_CACHE_HOME": "relative"}, "/user/.cache/esper_soa"),
    ],
)
def test_the_environment_else_the_user_database_says_where_the_cache_is(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: SimpleNamespace(pw_dir="/user"))
    assert str(cache.cache_folder()) == folder


def test_a_user_without_any_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(
        cache.FolderError,
        match=r"^there is no home folder to keep them in \(set HOME or XDG_CACHE_HOME\)$",
    ):
        cache.cache_folder()


@pytest.mark.parametrize(
    ("command", "word"),
    [
        ("gcc '\nx", "CC=gcc ' x is no command: No closing quotation"),
        ("true", "true failed: it made no library"),
        ("false", "false failed: status 1"),
        ("/", "/ failed: "),
        ("cp /dev/null", "cp failed: "),
    ],
)
def test_what_is_no_compiler_is_named_in_one_line(tmp_path: Path, command: str, word: str) -> None:
    code = (
        "from esper_soa.nets.engines.cpu import cache, library\n"
        "try:\n    library.kernels()\n"
        "except cache.NativeError as error:\n    print(error)"
    )
    status, out, err = ended(start(code, XDG_CACHE_HOME=str(tmp_path), CC=command))
    assert status == 0, err
    assert word in out
    assert len(out.splitlines()) == 1
    assert not list((tmp_path / "esper_soa").iterdir())


def test_processes_that_compile_at_once_all_get_the_kernels(tmp_path: Path) -> None:
    slow = script(tmp_path / "slow", f"sleep 0.3; exec {copying(tmp_path)} $*")
    outs = [ended(one) for one in [start(XDG_CACHE_HOME=str(tmp_path), CC=slow) for _ in range(4)]]
    found, _ = files(tmp_path / "esper_soa")
    assert [one[:2] for one in outs] == [(0, str(found))] * 4
    assert cache.load_stored(found.parent, library.library_key()) == found


# --- stops

TRAIN = (
    "import sys; sys.argv = ['train', '+experiment=smoke', {options}]; from esper_soa.train "
    "import main; main()"
)


def endless(folder: Path) -> str:
    """A compiler that writes half a library, notes its own and its helper's process ids, and goes
    on for ever.
    """
    here = f"{TARGET}; head -c 100000 {library.build()} > $to; touch $TMPDIR/more"
    ids = f"echo $$ $! > {folder}/new; mv {folder}/new {folder}/ids"
    return script(folder / "endless", f"{here}; sleep 300 & {ids}; wait")


def alive(number: str) -> bool:
    """Whether a process runs: not one that has ended and that nobody has asked for."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_run_stopped_while_it_compiles_ends_and_leaves_nothing(tmp_path: Path) -> None:
    cases = [("native", signal.SIGINT, 130), ("auto", signal.SIGTERM, 143)]
    begun = []
    for setting, _, _ in cases:
        folder = tmp_path / setting
        folder.mkdir()
        code = TRAIN.format(options=f"'run_dir={folder}/run', 'compute.engine={setting}'")
        begun.append(start(code, XDG_CACHE_HOME=str(folder), CC=endless(folder)))
    for (setting, number, status), process in zip(cases, begun, strict=True):
        ids = tmp_path / setting / "ids"
        wait_until(ids.exists, process)
        process.send_signal(number)
        assert ended(process)[0] == status
        wait_until(lambda ids=ids: not any(map(alive, ids.read_text().split())))
        assert not list((tmp_path / setting / "esper_soa").iterdir())


def test_a_build_that_is_killed_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "esper_soa"
    process = start(XDG_CACHE_HOME=str(tmp_path), CC=endless(tmp_path))
    wait_until((tmp_path / "ids").exists, process)
    process.kill()
    process.communicate()
    os.killpg(int((tmp_path / "ids").read_text().split()[0]), signal.SIGKILL)
    (left,) = folder.iterdir()
    assert (left / "nets.so").stat().st_size == 100_000
    assert cache.load_stored(folder, library.library_key()) is None
    assert ended(start(XDG_CACHE_HOME=str(tmp_path), CC=copying(tmp_path)))[0] == 0
    assert left.exists()  # it may be that of a process at work
    os.utime(left, (0, 0))
    cut(folder / next(folder.glob("*.so")))
    assert ended(start(XDG_CACHE_HOME=str(tmp_path), CC=copying(tmp_path)))[0] == 0
    assert not left.exists()
    assert asked(tmp_path) == 2


# --- proof


def test_every_record_lies_in_memory_as_ctypes_thinks() -> None:
    path = library.kernels().functions._name
    proof.compare_records(proof.NATIVE_RECORDS)
    for name, record in proof.NATIVE_RECORDS.items():
        fields = list(record._fields_)
        swapped = [*fields[:-2], fields[-1], fields[-2]]
        for changed in (fields[:-1], [*fields, ("more", ctypes.c_int64)], swapped):
            other = type(name, (ctypes.Structure,), {"_fields_": changed})
            told = rf"^{path} has another record {name}(\..*)?: \(\d+, \d+\) bytes expected$"
            with pytest.raises(cache.NativeError, match=told):
                proof.compare_records(proof.NATIVE_RECORDS | {name: other})
        others = {kept: one for kept, one in proof.NATIVE_RECORDS.items() if kept != name}
        with pytest.raises(cache.NativeError, match=f"^{path} has the unknown record {name}"):
            proof.compare_records(others)


def test_the_library_exports_its_entry_points_alone() -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not here")
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", library.build()], capture_output=True, text=True, check=True
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert exported == {*library.KERNEL_NAMES, "record_fields"}


def test_every_record_that_python_fills_is_compared() -> None:
    records = ctypes.Structure.__subclasses__()
    ours = {one for one in records if one.__module__.startswith("esper_soa.")}
    assert ours == {*proof.NATIVE_RECORDS.values(), proof._Field}


def test_memory_that_a_kernel_lacks_is_told() -> None:
    record = SequenceBlock(nets=1, batch=1, length=2**50, width=8, inner=8)
    with pytest.raises(MemoryError, match="^no memory for the scratch of sequence_block_pass$"):
        call("sequence_block_pass", record)


CASES = [(proof.image_case, size) for size in proof.IMAGE_SIZES]
CASES += [(proof.sequence_case, size) for size in proof.SEQUENCE_SIZES]


@pytest.mark.parametrize(("make", "size"), CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_proof_compares_all_that_a_step_changes(make, size: int, seed: int) -> None:
    case = make(size)
    errors = dict(proof.differences(case, TorchEngine(), seed))
    assert all(error < 1e-5 for error in errors.values()), errors
    given = (case, torch.float64, seed)
    before, after = (proof.results(engine, *given) for engine in (Idle(), TorchEngine()))
    assert errors.keys() == after.keys()
    measured = {"loss", "accuracy", "gradients"}
    measured |= {f"{kind} validation{end}" for kind in ("own", "shared") for end in ("", " loss")}
    assert {name for name in after if "." not in name} == measured
    has_statistics = len(case.shape.statistics.parameters) > 0
    assert len([name for name in after if "." in name]) == 4 + has_statistics
    for name in (name for name in after if "." in name):
        moved = (after[name] - before[name]).abs()
        assert (moved.amax(1) > 1e-4).all(), name  # in the network of every kind


@dataclass(frozen=True)
class Idle(TorchEngine):
    """Learns nothing."""

    def train_(self, nets: NetsConfig, weights: TensorDict, *given: object) -> TrainReport:
        return super().train_(nets, weights.clone(), *given)


@dataclass(frozen=True)
class Faster(TorchEngine):
    """Learns at twice the rate."""

    factor = 2.0

    def train_(self, nets: NetsConfig, *given: object) -> TrainReport:
        return super().train_(nets, *given, rules_of(nets.task, self.factor))


class Nowhere(Faster):
    factor = float("nan")


@pytest.mark.parametrize("engine", [Faster, Nowhere])
def test_a_library_that_computes_something_else_is_not_taken(engine: type[Faster]) -> None:
    chosen = choose_native(CPU, engine())
    assert (chosen.native, chosen.fallback) == (False, True)
    path = library.kernels().functions._name
    told = (
        f"plain torch, slower: no native kernels, {path} computes host.params of a small network "
    )
    told += r"otherwise than torch, by (nan|\d\.\de[+-]\d\d) \(delete it to have it built again, "
    assert re.fullmatch(told + r"by another compiler where this one fails\)", chosen.reason)


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", NO_COMPILER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = partial(library.find_kernels, library.LIBRARY_FOLDER, this_processor())
    monkeypatch.setattr(proof, "kernels", found)
    chosen = choose_native(CPU, Idle())
    assert (chosen.native, chosen.fallback) == (False, True)
    assert chosen.reason.startswith("plain torch, slower: no native kernels, no C compiler")
    assert "install gcc or clang, or set CC" in chosen.reason


def test_what_a_library_is_made_of_and_for_decides_which_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = this_processor()
    keys = {library.library_key(), library.library_key(here)}
    keys |= {
        library.library_key(one) for one in (here._replace(machine="x"), here._replace(kind="x"))
    }
    changes: list[tuple[object, str, object]] = [
        *(
            (library, name, ("x",))
            for name in ("COMMON_FLAGS", "LINK_FLAGS", "FAMILY_FLAGS", "NATIVE_TARGETS")
        ),
        (library, "sources_digest", lambda: "x"),
        (platform, "system", lambda: "x"),
        (os, "confstr", lambda name: "x"),
        (os, "confstr_names", {}),
    ]
    for place, name, other in changes:
        with monkeypatch.context() as changed:
            changed.setattr(place, name, other)
            keys.add(library.library_key())
    unknown = here._replace(kind="")
    for name in ("a", "b"):  # where the system does not tell the kind
        monkeypatch.setattr(platform, "processor", lambda name=name: name)
        keys.add(library.library_key(unknown))
    assert len(keys) == 1 + 2 + len(changes) + 2
    assert all(re.fullmatch("[0-9a-f]{20}", key) for key in keys)


def test_a_digest_of_the_sources_is_of_their_names_and_contents() -> None:
    paths = sorted(path for path in compiler.SOURCE_FOLDER.iterdir() if path.suffix in (".c", ".h"))
    parts = [one.name.encode() + b"\0" + hashlib.sha256(one.read_bytes()).digest() for one in paths]
    assert compiler.sources_digest() == hashlib.sha256(b"".join(parts)).hexdigest()


# What a broken compiler, or a library of other sources, might have in a kernel: a text of a source,
# another for it, and what is said then.
NINE = "f, f, f, f, f, f, f, f, f,"
OTHERWISE = "of a small network otherwise than torch, by "
BREAKS = {
    "no momentum": ("sgd.h", "= kept \\* momentum", "= 0 * momentum", f"host.params {OTHERWISE}"),
    "no gate": ("blend.h", "? \\*squeeze_out(&s->q, b) : 1", "? 1 : 1", OTHERWISE),
    "all seeds are on": ("validate.c", "net->v->ablated : 0", "0 : 0", "validation"),
    "other order": ("sgd.h", "rate, momentum", "momentum, rate", "record sgd.rate"),
    "wide vectors alone": ("vec.h", NINE, f"{NINE[:-2]}0,", OTHERWISE),
    "wide vectors of one pixel": ("pair.h", "0xaaaa", "0", OTHERWISE),
    "later keys are seen": ("sequence.c", "zero(row + count, N - count)", "", OTHERWISE),
    "no gradient of keys": ("sequence.c", "add_outer(grad_key.at", "(void)(grad_key.at", OTHERWISE),
}


def breaking(folder: Path, source: str, text: str, other: str) -> str:
    """The C compiler without optimisation, on sources of which one is changed."""
    copies = folder / "sources"
    shutil.copytree(compiler.SOURCE_FOLDER, copies)
    given = *compiler.kernel_flags(compiler.identify_compiler(["cc"], folder)), *compiler.LINK_FLAGS
    flags = " ".join(flag for flag in given if flag != "-O3")
    change = (
        f'cp {source} before; sed -i "s/{text}/{other}/" {source}; if cmp -s before '
        f"{source}; then exit 1; fi"
    )
    return script(
        folder / "breaking",
        f"set -e; {TARGET}; cd {copies}; {change}; exec cc {flags} *.c -o $to -lm",
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_kernel_of_any_kind_is_found(tmp_path: Path, name: str) -> None:
    if name.startswith("wide") and "avx512f" not in this_processor().features:
        pytest.skip("no vectors of 16 floats here")
    *change, word = BREAKS[name]
    wrong = {"CC": breaking(tmp_path, *change), "XDG_CACHE_HOME": str(tmp_path)}
    status, out, err = ended(start(CHOOSE, **wrong))
    assert (status, out[:6]) == (0, "(False"), err
    assert word in out
