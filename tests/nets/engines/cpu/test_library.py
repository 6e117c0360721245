"""The compiled kernels on the disk: what is run, what is built again, what is refused, and what a
stop leaves behind.

All of it with real files and real processes. A compiler stands in that copies a library made
before, so that no test waits for the real one; it notes how often it was asked.
"""

import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from esper_soa.nets.engine import TrainReport
from esper_soa.nets.engines.cpu import cache, compiler, library, proof, records
from esper_soa.nets.engines.cpu.proof import choose_native
from esper_soa.nets.engines.cpu.records import PointingRecord
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.setup import Setup
from esper_soa.nets.sgd import rules_of
from esper_soa.system.cores import this_processor
from tests.builders.lanes import some_of
from tests.builders.warm import Popen

pytestmark = pytest.mark.usefixtures("native")

ROOT = Path(__file__).resolve().parents[4]
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


PARTS = pytest.mark.parametrize("part", [0, 1], ids=["library", "digest"])


@PARTS
@pytest.mark.parametrize("damage", cases(DAMAGES))
def test_what_has_changed_is_not_run(warm: Path, damage: str, part: int) -> None:
    key = library.library_key()
    assert cache.load_stored(warm, key) == files(warm)[0]
    DAMAGES[damage](files(warm)[part])
    assert cache.load_stored(warm, key) is None


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "part"), [("cut", 0), ("a link", 0), ("cut", 1)])
def test_what_has_changed_is_built_again(
    warm: Path, tmp_path: Path, damage: str, part: int
) -> None:
    good = files(warm)[0].read_bytes()
    DAMAGES[damage](files(warm)[part])
    status, out, err = ended(start(XDG_CACHE_HOME=str(tmp_path), CC=copying(tmp_path)))
    assert (status, asked(tmp_path)) == (0, 1), err
    found, digest = files(warm)
    assert out == str(found)
    assert found.read_bytes() == good
    assert not found.is_symlink()
    assert not digest.is_symlink()
    assert cache.load_stored(warm, library.library_key()) == found


def refusal(folder: Path) -> str:
    """Why the folder is refused, as a process says that finds no compiler either."""
    status, _, err = ended(start(XDG_CACHE_HOME=str(folder.parent), CC=NO_COMPILER))
    assert status == 1
    return err.splitlines()[-1]


def test_a_folder_that_is_not_the_users_own_alone_is_refused(warm: Path) -> None:
    warm.chmod(0o722)
    told = f"others can write in the cache folder {warm} (mode 722): delete it"
    assert told in refusal(warm)


def test_processes_that_compile_at_once_get_kernels_closed_to_others_with_a_digest_for_sha256sum(
    tmp_path: Path,
) -> None:
    slow = script(tmp_path / "slow", f"sleep 0.3; exec {copying(tmp_path)} $*")
    given = {"XDG_CACHE_HOME": str(tmp_path), "CC": slow}
    begun = [start(f"import os; os.umask(0); {LOAD}", **given) for _ in range(2)]
    outs = [ended(process) for process in begun]
    folder = tmp_path / "esper_soa"
    found, digest = files(folder)
    assert [one[:2] for one in outs] == [(0, str(found))] * 2
    assert cache.load_stored(folder, library.library_key()) == found
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, found, digest)]
    assert modes == [0o700, 0o700, 0o600]
    sha256 = hashlib.sha256(found.read_bytes()).hexdigest()
    assert digest.read_text() == f"{sha256}  {found.name}\n"


# Libraries that are none of ours: their C, and what is said of them.
STUBS = "".join(f"void {name}(void) {{}}\n" for name in library.KERNEL_NAMES)
BAD_LIBRARIES = {
    "no records": (f"{STUBS}long record_fields(void **all) {{ return 0; }}", "another record"),
    "no kernels": ("int nothing;", "cannot be loaded"),
    "crashes": ("__attribute__((constructor)) void f(void) { __builtin_trap(); }", "SIGILL"),
    "ends the process": (
        "void _exit(int); __attribute__((constructor)) void f(void) { _exit(3); }",
        "status 3",
    ),
}


def bad_compiler(folder: Path, name: str) -> str:
    """A compiler that makes a bad library of whatever it is given."""
    (folder / "bad.c").write_text(BAD_LIBRARIES[name][0])
    return script(folder / "bad", f"{TARGET}; exec cc -shared -fPIC {folder}/bad.c -o $to")


@pytest.mark.parametrize("name", some_of(BAD_LIBRARIES, "crashes"))
def test_what_a_bad_compiler_makes_is_tried_elsewhere_and_not_kept(
    tmp_path: Path, name: str
) -> None:
    bad = bad_compiler(tmp_path, name)
    status, _, err = ended(start(XDG_CACHE_HOME=str(tmp_path), CC=bad))
    told = err.splitlines()[-1]
    assert (status, "NativeError" in told, BAD_LIBRARIES[name][1] in told) == (1, True, True), err
    assert list((tmp_path / "esper_soa").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no records", "no kernels"])
def test_a_library_that_fails_once_it_is_kept_is_built_anew(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "esper_soa"
    cache.open_folder(folder)
    (folder / "draft").mkdir()
    draft = folder / "draft" / "nets.so"
    subprocess.run([bad_compiler(tmp_path, name), "-o", draft], check=True)
    bad = cache.store(folder, library.library_key(), draft)
    good = {"XDG_CACHE_HOME": str(tmp_path), "CC": copying(tmp_path)}
    for _ in range(2):
        status, out, err = ended(start(CHOOSE, **good))
        assert (status, out.count("(True")) == (0, 2), out + err
    assert asked(tmp_path) == 1
    assert cache.load_stored(folder, library.library_key()) not in (bad, None)


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
    made = [*ctypes.Structure.__subclasses__(), *PointingRecord.__subclasses__()]
    ours = {kind.__name__: kind for kind in made if str(kind.__module__).startswith("esper_soa.")}
    for name, kind in proof.NATIVE_RECORDS.items():
        if name not in {"operation", "module_seed"}:  # numpy makes them
            assert ours.pop(kind.__name__) is kind
    # what every record is described by, and the base of those with pointers
    assert ours.keys() == {"_Field", "PointingRecord"}


def test_every_pointer_is_of_a_record_that_checks_where_it_leads() -> None:
    for kind in proof.NATIVE_RECORDS.values():
        pointers = {name for name, field, *_ in kind._fields_ if field is records.POINTER}
        checked = set(kind.POINTERS) if issubclass(kind, PointingRecord) else set()
        # parameters of sequences, of which networks have steps, are checked by network
        assert pointers - checked <= {"scale", "shift", "table"}, kind


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, dtype=torch.float16),
        torch.zeros(2, dtype=torch.float32),
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(4, dtype=torch.float64)[::2],
        torch.zeros(2, dtype=torch.float64, device="meta"),
        np.zeros(2, dtype=np.int32),
        np.zeros((2, 2))[:, 0],
    ],
    ids=lambda wrong: f"{wrong.dtype} {list(wrong.shape)}",
)
def test_what_native_code_would_read_or_write_as_something_else_is_refused(wrong) -> None:
    record = records.Validation(count=2)
    with pytest.raises(TypeError, match="loss is"):
        records.point(record, {"loss": wrong})
    assert not record.loss
    assert records.point(record, {"loss": torch.zeros(2, dtype=torch.float64)}).loss


CASES = [(proof.image_case, sizes) for sizes in proof.IMAGE_SIZES]
CASES += [(proof.sequence_case, sizes) for sizes in proof.SEQUENCE_SIZES]
# Further sizes, below vectors, tiles and chunks, at them and above them.
FURTHER_SEQUENCES = ((12, 15, 13), (16, 16, 16), (36, 40, 37), (32, 33, 256), (80, 17, 32))
FURTHER = [(proof.sequence_case, proof.SequenceSizes(*sizes)) for sizes in FURTHER_SEQUENCES]
FURTHER_IMAGES = ((4, 2, "r0c1"), (8, 2, "r0c1"), (16, 2, "r1c1"), (12, 3, "r1c1"))
FURTHER += [(proof.image_case, proof.ImageSizes(*sizes)) for sizes in FURTHER_IMAGES]


@pytest.mark.parametrize(("make", "sizes"), CASES + FURTHER)
def test_kernels_of_all_sizes_come_to_what_torch_does(make, sizes: NamedTuple) -> None:
    errors = dict(proof.differences(make(sizes), TorchEngine()))
    assert all(error < 1e-5 for error in errors.values()), errors


@pytest.mark.parametrize(("make", "sizes"), CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_proof_compares_all_that_a_step_changes(make, sizes: NamedTuple, seed: int) -> None:
    case = make(sizes)
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

    def train_(self, nets: Setup, weights: TensorDict, *given: object) -> TrainReport:
        return super().train_(nets, weights.clone(), *given)


@dataclass(frozen=True)
class Faster(TorchEngine):
    """Learns at twice the rate."""

    factor = 2.0

    def train_(self, nets: Setup, *given: object) -> TrainReport:
        return super().train_(nets, *given, rules_of(nets.task, self.factor))


class Nowhere(Faster):
    factor = float("nan")


OF_A_PARAMETER = r" computes host.params of a small network otherwise than torch, by "
OF_A_PARAMETER += r"(nan|\d\.\de[+-]\d\d) \(CC=<command> names another compiler\)$"


@pytest.mark.parametrize("engine", [Faster, Nowhere])
def test_a_library_that_computes_something_else_is_not_proven(engine: type[Faster]) -> None:
    path = library.kernels().functions._name
    with pytest.raises(cache.NativeError, match=f"^{path}{OF_A_PARAMETER}"):
        proof.prove(engine())


@pytest.mark.slow  # a process of its own tries it once more
def test_a_library_that_is_not_proven_is_not_taken() -> None:
    chosen = choose_native(CPU, Faster())
    assert (chosen.native, chosen.fallback) == (False, True)
    path = library.kernels().functions._name
    told = f"^plain torch, slower: no native kernels, {path}{OF_A_PARAMETER}"
    assert re.search(told, chosen.reason)


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
    "two vectors of keys": ("sequence.c", "j < count; j +=", "j < 2 * LANES; j +=", OTHERWISE),
    "wide layers": ("winograd.h", "out, y, lines, o, 2,", "out, y, 0, o, 2,", OTHERWISE),
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
