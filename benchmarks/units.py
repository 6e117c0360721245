"""Results of long benchmarks as files, one per unit of work, so that what a folder holds is not
done again.

A folder belongs to one set of facts (code, settings, versions): units are only read and added under
the same ones. Every file is written whole or not at all, and names the facts that it was made
under.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.processes import ROOT
from benchmarks.timing import BenchmarkError
from esper_soa.ops.files import write_text
from esper_soa.ops.rundir import RunFolder, claimed

FACTS = "facts.json"
WORDS = (
    "commit",
    "settings_given",
)  # facts that say where results come from, and decide nothing: code and settings do
LOCK = ".lock"  # of the folder's claim
CODE = ("esper_soa", "configs", "benchmarks/proof_play.py")  # that decides results

Key = tuple[str | int, ...]


class Units:
    """The units of a folder that were made under `stamp`, the hash of its facts."""

    def __init__(self, folder: Path, stamp: str) -> None:
        self.folder = folder
        self.stamp = stamp

    def path(self, key: Key) -> Path:
        """The file of a unit."""
        return self.folder / ("-".join(map(str, key)) + ".json")

    def held(self, keys: Sequence[Key]) -> list[Key]:
        """Those of `keys` that need not be done again."""
        return [key for key in keys if self.path(key).exists()]

    def read(self, key: Key) -> Mapping:
        """A unit; raises BenchmarkError where its file is damaged or was made under other facts."""
        path = self.path(key)
        try:
            unit = json.loads(path.read_text(encoding="utf-8"))
            stamp = unit["stamp"]
        except (ValueError, LookupError, TypeError) as error:
            raise BenchmarkError(
                f"{path} is no result of this command ({error}). Delete it"
            ) from error
        if stamp != self.stamp:
            raise BenchmarkError(
                f"{path} comes from another folder: it was made under other facts. Delete it"
            )
        return unit

    def write(self, key: Key, unit: Mapping) -> None:
        """Keep a unit, whole or not at all."""
        write_text(self.path(key), json.dumps({"stamp": self.stamp, **unit}) + "\n")


def stamp_of(facts: Mapping) -> str:
    """A hash of what units are made under."""
    decisive = {name: fact for name, fact in facts.items() if name not in WORDS}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def code_stamp(root: Path = ROOT) -> str:
    """A hash of all files that decide results: package, weights, settings, and the player."""
    digest = hashlib.sha256()
    for name in CODE:
        top = root / name
        files = (
            [path for path in sorted(top.rglob("*")) if path.is_file()] if top.is_dir() else [top]
        )
        for path in files:
            if "__pycache__" not in path.parts:
                content = path.read_bytes()
                digest.update(
                    f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content
                )
    return digest.hexdigest()[:16]


@contextmanager
def opened(folder: Path, facts: Mapping, fresh: bool) -> Iterator[Units]:
    """The units of `folder`, which is made where there is none, and in which no other process works
    meanwhile.

    `fresh` first deletes what it holds. Raises BenchmarkError where that is of other facts, which
    are named, or nothing of ours; UserError where another process works there.
    """
    facts = json.loads(json.dumps(facts))
    folder.mkdir(parents=True, exist_ok=True)
    strangers = [path for path in folder.iterdir() if path.name != LOCK]
    if strangers and not (folder / FACTS).exists():
        raise BenchmarkError(f"{folder} holds files of something else. Give another with --folder")
    with claimed(RunFolder(folder)):
        if fresh:
            _empty(folder)
        for left_over in folder.glob("*.tmp"):
            left_over.unlink()
        if (folder / FACTS).exists():
            _check(folder, json.loads((folder / FACTS).read_text(encoding="utf-8")), facts)
        else:
            write_text(folder / FACTS, json.dumps(facts, indent=2) + "\n")
        yield Units(folder, stamp_of(facts))


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _check(folder: Path, there: Mapping, now: Mapping) -> None:
    if stamp_of(there) == stamp_of(now):
        return
    old = _flat(there)
    new = _flat(now)
    names = sorted(
        name
        for name in old.keys() | new.keys()
        if name not in WORDS and old.get(name) != new.get(name)
    )
    changed = [
        f"{name}: {old.get(name, 'nothing')} there, {new.get(name, 'nothing')} now"
        for name in names
    ]
    raise BenchmarkError(
        f"{folder} holds results of commit {there.get('commit')}, this is {now['commit']}, and "
        f"they do not belong together ({'; '.join(changed)}). Give another folder with --folder, "
        "or delete what it holds with --fresh"
    )


def _flat(facts: object, prefix: str = "") -> dict[str, object]:
    """Nested facts as one table, by dotted names."""
    if not isinstance(facts, Mapping):
        return {prefix.rstrip("."): facts}
    return {
        name: fact
        for key, part in facts.items()
        for name, fact in _flat(part, f"{prefix}{key}.").items()
    }
