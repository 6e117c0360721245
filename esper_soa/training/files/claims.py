"""Claims on run folders: one run at a time writes to a folder. Needs no torch."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from esper_soa.system.errors import UserError
from esper_soa.system.files import IncompleteError
from esper_soa.system.plain_files import FOLDER, drop_drafts, list_folder, open_plain
from esper_soa.training.files.run_folder import RunFolder, unwritable


class Claim:
    """The lock of a run folder, which the processes of one run share; a killed process lets go."""

    def __init__(self, folder: Path, shared: bool = False) -> None:
        """Lock the folder; shared: together with the process that started this one.

        Raises BlockingIOError where another run has locked it, OSError where it cannot be written,
        and NotPlainError for links, pipes and devices among what a run writes.
        """
        run_folder = RunFolder(folder)
        self._path = run_folder.lock
        self._file = os.fdopen(open_plain(self._path, os.O_WRONLY | os.O_CREAT), "wb")
        try:
            run_folder.check_plain()
            if not shared:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            self.release()
            raise

    def check(self) -> None:
        """Raise IncompleteError where somebody has deleted the lock, so that others may enter."""
        if not os.fstat(self._file.fileno()).st_nlink:
            why = f"{self._path.name} was deleted, so another run may enter; this run stops"
            raise IncompleteError(f"{self._path.parent}: {why}")

    def release(self) -> None:
        """Let others lock the folder."""
        self._file.close()


@contextmanager
def lock_folder(folder: RunFolder, shared: bool = False) -> Iterator[Claim]:
    """Keep other processes out of the folder in the context, before which nothing is written there.

    shared: see Claim. What killed processes left half written is removed, and what this one
    does. Raises UserError where another process writes to the folder, and where nobody can.
    """
    try:
        claim = Claim(folder.path, shared)
    except BlockingIOError as error:
        raise UserError(f"run_dir={folder.path}: another process is writing to this run") from error
    except OSError as error:
        raise unwritable(folder.path, "run_dir", error) from error
    try:
        drop_leftovers(folder)
        yield claim
    finally:
        drop_leftovers(folder)
        claim.release()


def drop_leftovers(folder: RunFolder) -> None:
    """Delete what processes that are gone have left half written in the folder of a run or task."""
    with suppress(OSError):
        tables = [path for path, kind in list_folder(folder.tables).items() if kind == FOLDER]
        for place in (folder.path, folder.networks, folder.hydra, *tables):
            drop_drafts(place)
