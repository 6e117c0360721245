"""Keeps what a trial of engines (trial.py) or of graphs (ops/replay.py) has found in the user's
cache.

Under a key of all that decides it: device, driver, versions, the sources of what was tried, the
shapes of the run. Jobs of a sweep and a run that goes on so take the same engine, although times
differ from one trial to the next.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from esper_soa.nets.trial import Trial
from esper_soa.user_cache import FolderError, cache_folder, open_folder

NETS = Path(__file__).parent
SOURCES = (".py", ".c", ".h", ".cu")
DRIVER = Path("/proc/driver/nvidia/version")
MEMORY = "out of memory"  # in the words of an engine that may fit at another time


class Verdict(Protocol):
    """A named tuple about one thing that was tried."""

    @property
    def dropped(self) -> str:
        """Why a run cannot have it; "" where it can."""
        ...

    def _asdict(self) -> Mapping[str, object]: ...


Found = TypeVar("Found")


def verdict_key(trial: Trial, device: torch.device, layers: Sequence[str]) -> str:
    """What a verdict holds for; layers: the settings that decide how an engine of some name
    computes.
    """
    nets = trial.nets
    sizes = (
        trial[1:],
        nets.detached_stages,
        nets.env_chunk,
        nets.eval_batch,
        nets.rows,
        nets.workers,
        nets.precision,
    )
    slots = [spec.name for spec in nets.shape.slots]
    facts = (*device_facts(device), torch.__version__, sources_digest(), *layers)
    return key_of((facts, asdict(nets.task), slots, sizes))


def key_of(facts: object) -> str:
    """A name for a verdict that holds where all of `facts` do, which say what they are as they are
    printed.
    """
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def device_facts(device: torch.device) -> tuple[object, ...]:
    """What a verdict depends on of the device and its driver."""
    if device.type != "cuda":
        return (str(device),)
    found = torch.cuda.get_device_properties(device)
    driver = DRIVER.read_text(encoding="utf-8") if DRIVER.exists() else ""
    return found.name, found.major, found.minor, found.total_memory, torch.version.cuda, driver


@cache
def sources_digest(folder: Path = NETS) -> str:
    """SHA-256 of the files that decide what is computed: by engines, those of NETS."""
    digest = hashlib.sha256()
    for path in sorted(one for one in folder.rglob("*") if one.suffix in SOURCES):
        digest.update(
            path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return digest.hexdigest()


def kept_verdict(key: str, kind: Callable[..., Found]) -> list[Found] | None:
    """What was found before, each as a `kind`; None where nothing is kept, or what is kept cannot
    be read.
    """
    try:
        said = json.loads(_path(key).read_text(encoding="utf-8"))
        return [kind(**one) for one in said]
    except (FolderError, OSError, ValueError, TypeError):
        return None


def keep_verdict(key: str, found: Sequence[Verdict]) -> str:
    """Keep it for the next run; says why where it is not kept."""
    if any(MEMORY in one.dropped for one in found):
        return "not kept, as memory was short"
    try:
        path = _path(key)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as draft:
            json.dump([one._asdict() for one in found], draft)
        os.replace(draft.name, path)
    except (FolderError, OSError) as error:
        return f"not kept, {error}"
    return ""


def _path(key: str) -> Path:
    """The file of a verdict, in a folder that is this user's alone; raises FolderError where there
    can be none.
    """
    own = cache_folder()
    for folder in (own, own / "engines"):
        open_folder(folder)
    return own / "engines" / f"{key}.json"
