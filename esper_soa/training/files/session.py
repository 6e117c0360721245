"""A session surrounds the work in a run folder: claim, console, log, and what could not be written.

It is opened before anything is written to the folder. Needs no torch.
"""

import faulthandler
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console

from esper_soa.system.console import null_stream, safe_stream
from esper_soa.system.errors import PrunedError, RankLostError, UserError, printable
from esper_soa.system.files import LOGGER, IncompleteError, LineFile, WriteErrors, reason_of
from esper_soa.system.plain_files import list_folder, make_folder
from esper_soa.system.signals import Interrupted, Requests
from esper_soa.training.files.claims import Claim, drop_leftovers, lock_folder
from esper_soa.training.files.run_folder import RunFolder, remove_begun
from esper_soa.training.results.progress import ON_CONSOLE, say


class Log(logging.Handler):
    """Appends messages with their times to a file, where they wait until there is room, and prints
    those of `level` and above on the console, above a live bar.
    """

    def __init__(self, path: Path, console: Console, write_errors: WriteErrors, level: int) -> None:
        super().__init__()
        self._console_level = level
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._path = path
        self._lines = LineFile(path)
        self._console = console
        self._write_errors = write_errors

    def emit(self, record: logging.LogRecord) -> None:
        # not by `attempt`, whose warning would come back here
        try:
            self._lines.write(self.format(record))
        except OSError as error:
            self._write_errors.reasons[self._path.name] = reason_of(error)
        else:
            self._write_errors.reasons.pop(self._path.name, None)
        if record.levelno >= self._console_level and not ON_CONSOLE.items() <= vars(record).items():
            say(self._console, printable(record.getMessage()))

    def close(self) -> None:
        self._lines.close()
        super().close()


class Session:
    """The work of one process in one folder."""

    def __init__(self, folder: RunFolder, verbose: int = 1) -> None:
        """verbose: see `session`."""
        self.folder = folder
        self.begin = time.monotonic()
        self.part = ""  # name of the part that this folder is for, see `within`
        self.verbose = verbose
        self.stream = safe_stream(sys.stdout) if verbose else null_stream()
        self.console = Console(file=cast(TextIO, self.stream))
        self.write_errors = WriteErrors()
        self.requests = Requests()  # requests of signals
        self.claim: Claim | None = None  # on the folder, of a process that writes to it
        level = logging.DEBUG if verbose > 1 else logging.INFO
        self.log = Log(folder.log, self.console, self.write_errors, level=level)
        self._begun = folder.log.exists()
        self._fresh = not list_folder(folder.path)

    def within(self, name: str) -> "Session":
        """The part `name` of the same work, in a folder below, which is made; UserError for a link
        in its place or in it.
        """
        part = copy(self)
        part.part = name
        part.folder = RunFolder(self.folder.path / name)
        make_folder(part.folder.path)
        part.folder.check_plain()
        drop_leftovers(part.folder)
        part.write_errors = self.write_errors.within(name)
        return part

    @contextmanager
    def logging_output(self) -> Iterator[None]:
        """Messages within the context go to console and log, and what ends it early too, with its
        traceback unless it is a message of ours; but a refusal leaves the folder of a run as it is.
        """
        before = LOGGER.level, LOGGER.propagate
        LOGGER.setLevel(logging.DEBUG)
        LOGGER.propagate = False
        LOGGER.addHandler(self.log)
        try:
            yield
        finally:
            error = sys.exception()
            expected = IncompleteError | Interrupted | RankLostError | PrunedError
            if isinstance(error, expected) or (isinstance(error, UserError) and not self._begun):
                LOGGER.debug("ended: %s", error)
            elif error is not None and not isinstance(error, UserError):
                LOGGER.debug("ended by an error", exc_info=error)
            LOGGER.removeHandler(self.log)
            LOGGER.setLevel(before[0])
            LOGGER.propagate = before[1]

    def drop_refused(self) -> None:
        """Delete a folder that was empty, where a refusal ends the work before it has begun."""
        if self._fresh and isinstance(sys.exception(), UserError):
            remove_begun(self.folder)

    def check_console(self) -> None:
        """Say in the log, once, that nobody reads the console any more."""
        if self.stream.lost and not self.stream.logged:
            self.stream.logged = True
            message = "console  is gone (%s): the log alone has what is said"
            LOGGER.warning(message, self.stream.lost)

    def finish(self) -> None:
        """At the end of the work; raises IncompleteError where something is not written."""
        self.check_console()
        missing = str(self.write_errors)
        if missing:
            raise IncompleteError(f"{self.folder.path}: {missing}")


@contextmanager
def session(folder: RunFolder, verbose: int = 1) -> Iterator[Session]:
    """A session in a folder that it claims; raises UserError where another process works there.

    A refusal before anything is played leaves no folder that was not there.

    verbose: what the console shows: 0 nothing, 1 progress, messages and tables, 2 debug messages.
    """
    opened = Session(folder, verbose)
    with lock_folder(folder) as opened.claim, traced_crashes():
        try:
            with opened.logging_output():
                yield opened
        finally:
            opened.log.close()
            opened.drop_refused()


@contextmanager
def traced_crashes() -> Iterator[None]:
    """Within the context, a crash of a library prints by which functions it was called, to the
    standard error output, where there is one.
    """
    with ExitStack() as stack:
        if not faulthandler.is_enabled():
            with suppress(AttributeError, OSError, RuntimeError, ValueError):
                faulthandler.enable()
                stack.callback(faulthandler.disable)
        yield


@contextmanager
def quiet_warnings() -> Iterator[None]:
    """Without a warning that no user can do anything about, whatever filters (python -W) others
    were asked for: records of the env state are locked as they are made, in compiled kernels too.
    """
    with warnings.catch_warnings():
        about = r"Using lock_\(\) inside a compiled graph"
        warnings.filterwarnings("ignore", about, UserWarning, r"tensordict\.utils")
        yield
