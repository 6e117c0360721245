"""The cache of step kernels that were compiled ahead of time (env/ahead.py), and who fills it.

A folder of the cache has the libraries for one key: sources, versions, processor, and the structure
of the rules (`structure_of`). It is written whole by a process of its own (compile_step.py) and
renamed to its place, with the digests of its files; what differs from them is never run. Kernels
are taken only where they equal the eager ones to the bit, so that no number depends on what the
cache has.
"""

import fcntl
import hashlib
import json
import os
import pickle
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import tensordict
import torch

from esper_soa.env.ahead import (
    ENDING,
    KERNELS,
    LibraryError,
    given_by_env,
    load_kernels,
    structure_of,
)
from esper_soa.env.step import EAGER, EnvRules, StepKernels
from esper_soa.nets.seeds.subsets import EXACT_SLOTS
from esper_soa.system.caches import FolderError, open_cache, open_folder, read_user_file
from esper_soa.system.cores import this_processor

STEP_FOLDER = "step"  # folder of all keys, in the user's cache
MANIFEST_FILE = "sha256.json"
REFUSAL_ENTRY = "refused"  # the entry of a manifest that says why there are no libraries
LIBRARY_FILES = tuple(name + ENDING for name in KERNELS)
QUIET = "-quiet"  # in the place of a key: locked, shared, by whoever wants no compiler beside runs
REFUSED_SECONDS = 24 * 3600.0  # that a refusal holds: the compiler may have lacked memory
KEPT_KEYS = 32  # a key takes about a megabyte; those that were used longest ago go
BACKGROUND_STEPS = (
    64  # env-steps of each env, in the shortest run that has kernels compiled beside it
)


def unsupported(rules: EnvRules) -> str:
    """Why kernels for these rules are not compiled ahead of time; "" where they are."""
    if rules.blueprints.device.type != "cpu":
        return f"not for {rules.blueprints.device.type}"
    if rules.reward.user_name:
        return f"not with the reward {rules.reward.user_name} of your own"
    if len(rules.setup.shape.slots) > EXACT_SLOTS:
        return f"not for more than {EXACT_SLOTS} slots"
    return ""


def step_key(rules: EnvRules) -> str:
    """Digest of all that decides what the libraries of these rules are."""
    processor = this_processor()
    made_for = processor.machine, processor.kind or platform.processor()
    versions = torch.__version__, tensordict.__version__
    facts = sources_digest(), versions, made_for, structure_of(rules)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def sources_digest() -> str:
    """SHA-256 of the sources that kernels are compiled from, and of how that is done."""
    package = Path(__file__).parents[1]
    files = [package / name for name in ("state.py", "vocabulary.py", "config/env.py")]
    files += [*package.glob("runtime/*step*.py"), *package.glob("env/*.py")]
    contents = (source.read_bytes() for source in sorted(files))
    return hashlib.sha256(b"".join(contents)).hexdigest()


def find(folder: Path, key: str) -> dict[str, str] | None:
    """The manifest of `key`, of unchanged files of this user; None where there is none, or an old
    refusal.
    """
    place = folder / key
    with suppress(FolderError, ValueError):
        if not place.is_dir():
            return None
        open_folder(place)
        manifest = json.loads(read_user_file(place / MANIFEST_FILE) or "null")
        if not isinstance(manifest, dict):
            return None
        if REFUSAL_ENTRY in manifest:
            age = time.time() - (place / MANIFEST_FILE).stat().st_mtime
            return manifest if age < REFUSED_SECONDS else None
        if manifest == digests(place):
            return manifest
    return None


def digests(place: Path) -> dict[str, str]:
    """SHA-256 by name of the files of a key; of no content where one is missing."""
    contents = {name: read_user_file(place / name) or b"" for name in LIBRARY_FILES}
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def store(draft: Path, folder: Path, key: str, manifest: dict[str, str]) -> None:
    """Put the folder `draft` of finished files in the place of `key`, whatever is there; OSError.

    KEPT_KEYS keys stay.
    """
    (draft / MANIFEST_FILE).write_text(json.dumps(manifest))
    for path in draft.iterdir():
        path.chmod(0o600)
    remove(folder / key)
    draft.rename(folder / key)
    keys = sorted(folder.glob(f"*/{MANIFEST_FILE}"), key=lambda path: path.stat().st_mtime)
    for manifest_file in keys[:-KEPT_KEYS]:
        remove(manifest_file.parent)
        remove(folder / f"lock{manifest_file.parent.name}")


def remove(place: Path) -> None:
    """Delete a folder, a file or a link; nothing where nothing is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


@contextmanager
def only_compiler(folder: Path, key: str = "", wait: bool = False) -> Iterator[bool]:
    """Whether this process is the one that compiles `key` in `folder`, or of all the one whose turn
    it is, for as long as the context.

    wait: until it is.
    """
    with open(folder / f"lock{key}", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            yield False
        else:
            yield True


def stored_kernels(rules: EnvRules, num_envs: int, env_steps: int, wait: bool) -> StepKernels:
    """The kernels for a run of so many env-steps: from the cache, or the eager ones.

    Where the cache lacks them they are compiled: with `wait` before this returns, else beside the
    run, which awaits them, at low priority and one after the other; not beside runs of fewer than
    BACKGROUND_STEPS env-steps, as tests are.
    """
    reason = unsupported(rules)
    if reason:
        return EAGER._replace(reason=f"not compiled: {reason}")
    try:
        folder = open_cache(STEP_FOLDER)
        key = step_key(rules)
        look = partial(kept_kernels, folder, key, rules, num_envs=num_envs)
        kernels = look()
        if kernels is None:
            said = _compile(folder, key, rules, env_steps=env_steps, wait=wait)
            kernels = (
                look() if wait else EAGER._replace(awaited=look, reason=f"not compiled: {said}")
            )
    except (FolderError, OSError) as error:
        return EAGER._replace(reason=f"not compiled: {error}")
    return kernels or EAGER._replace(reason="not compiled: the compiler failed")


def kept_kernels(folder: Path, key: str, rules: EnvRules, num_envs: int) -> StepKernels | None:
    """The kernels of the cache, or the eager ones where it refuses; None where it lacks them."""
    try:
        manifest = find(folder, key)
        if manifest is None:
            return None
        if REFUSAL_ENTRY in manifest:
            return EAGER._replace(reason=f"not compiled: {manifest[REFUSAL_ENTRY]}")
        kernels = load_kernels(folder / key, rules, num_envs)
    except (LibraryError, OSError) as error:
        return EAGER._replace(reason=f"not compiled: {error}")
    with suppress(OSError):
        os.utime(folder / key / MANIFEST_FILE)  # used now
    return kernels._replace(reason=f"compiled ahead of time, equal to the bit: {folder / key}")


def _compile(folder: Path, key: str, rules: EnvRules, env_steps: int, wait: bool) -> str:
    """Have `key` compiled; why this run goes without, where it does."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} is not there (install g++, or set CXX)"
    if not wait and env_steps < BACKGROUND_STEPS:
        return f"the cache lacks them, and runs below {BACKGROUND_STEPS} env-steps compile nothing"
    with only_compiler(folder, key) as free, only_compiler(folder, QUIET) as may_start:
        if not wait and not may_start:
            return "the cache lacks them, and another process wants none compiled"
        if not wait and not free:
            return "the cache lacks them; the run takes them once another process has compiled them"
    process = start_compiler(folder, key, rules, niceness=0 if wait else 19)
    if not wait:
        return "the cache lacks them; the run takes them once a process beside it has compiled them"
    try:
        os.waitpid(process, 0)
    except BaseException:
        os.killpg(process, signal.SIGTERM)
        os.waitpid(process, 0)
        raise
    return ""


def start_compiler(folder: Path, key: str, rules: EnvRules, niceness: int) -> int:
    """Start compile_step.py in a session of its own, which says nothing; its process number."""
    program = [sys.executable, "-m", "esper_soa.runtime.compile_step", str(folder), key]
    with tempfile.TemporaryFile() as given, open(os.devnull, "w") as nothing:
        # an engine may hold what cannot be sent, and kernels never ask it
        pickle.dump(given_by_env(rules)._replace(engine=None), given)  # type: ignore[arg-type]
        given.seek(0)
        streams = [(os.POSIX_SPAWN_DUP2, given.fileno(), 0)]
        streams += [(os.POSIX_SPAWN_DUP2, nothing.fileno(), number) for number in (1, 2)]
        return os.posix_spawn(
            sys.executable,
            [*program, str(niceness)],
            os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"},
            file_actions=streams,
            setsid=True,
        )
