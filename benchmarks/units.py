"""Results of long benchmarks as files, one per unit of work, so that what a folder holds is not
done again.

A folder belongs to one set of facts (code, settings, versions), by whose hash it is named.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.processes import ROOT
from esper_soa.system.files import write_text
from esper_soa.training.files.claims import lock_folder
from esper_soa.training.files.run_folder import RunFolder

WORDS = ("commit", "settings_given")  # facts that decide nothing: code and settings do
CODE = ("esper_soa", "configs", "benchmarks/proof_play.py")  # that decides results

Key = tuple[str | int, ...]


class Units(NamedTuple):
    """The units of a folder."""

    folder: Path

    def path(self, key: Key) -> Path:
        """The file of a unit."""
        return self.folder / ("-".join(map(str, key)) + ".json")

    def missing(self, keys: Sequence[Key]) -> list[Key]:
        """Those of `keys` that are still to be done."""
        return [key for key in keys if not self.path(key).exists()]

    def read(self, key: Key) -> Mapping:
        """A unit."""
        return json.loads(self.path(key).read_text(encoding="utf-8"))

    def write(self, key: Key, unit: Mapping) -> None:
        """Keep a unit, whole or not at all."""
        write_text(self.path(key), json.dumps(unit) + "\n")


def stamp_of(facts: Mapping) -> str:
    """A hash of what units are made under."""
    decisive = {name: fact for name, fact in facts.items() if name not in WORDS}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


def code_stamp(root: Path = ROOT) -> str:
    """A hash of all files that decide results: package, weights, settings, and the player."""
    digest = hashlib.sha256()
    for top in (root / name for name in CODE):
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and "__pycache__" not in path.parts:
                content = path.read_bytes()
                name = path.relative_to(root).as_posix()
                digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


@contextmanager
def opened(top: Path, facts: Mapping) -> Iterator[Units]:
    """The units made under `facts`; UserError where another process works on them."""
    folder = top.resolve() / stamp_of(facts)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(RunFolder(folder)):
        write_text(folder / "facts.json", json.dumps(facts, indent=2) + "\n")
        yield Units(folder)
