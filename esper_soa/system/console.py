"""Output streams that survive a closed console; parser and status of the commands without Hydra.

The reader of a pipe may go away (`| head -1`), a terminal may be closed, a file may be full: what
is written then is dropped, and whoever keeps a log says so once. Needs no torch.
"""

import argparse
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import NoReturn, TextIO, cast

from esper_soa.system.errors import RankLostError, RunMemoryError, UserError, printable
from esper_soa.system.files import IncompleteError, reason_of
from esper_soa.system.signals import stop_at_once

CLOSED_AT_START = "it was closed before the start"
# Errors of which a user is told the message alone.
KNOWN_ERRORS = (UserError, IncompleteError, RunMemoryError, RankLostError)


class SafeStream(io.TextIOBase):
    """A text stream that drops what it can no longer write; `lost` then says why."""

    def __init__(self, stream: TextIO, reason: str = "") -> None:
        self._stream = stream
        self.lost = reason  # "" while there is somebody to write to
        self.logged = False  # whether the log has it

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return not self.lost and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # of a terminal without these signs
            known = text.encode(self.encoding, "replace").decode(self.encoding)
            return self._stream.write(known)
        except OSError as error:
            self._detach(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._detach(error)

    def _detach(self, error: OSError) -> None:
        """Redirect the stream's descriptor to the null device, so that no flush of it can fail."""
        self.lost = self.lost or reason_of(error)
        with suppress(OSError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self._stream.fileno())


def safe_stream(stream: TextIO | None) -> SafeStream:
    """`stream` as an outlet; one that was closed before the start (None) is lost already."""
    if isinstance(stream, SafeStream):
        return stream
    return null_stream(CLOSED_AT_START) if stream is None else SafeStream(stream)


def null_stream(reason: str = "") -> SafeStream:
    """A stream that drops everything; reason: what `lost` says of it."""
    return SafeStream(open(os.devnull, "w", encoding="utf-8"), reason)  # noqa: SIM115


@contextmanager
def safe_streams() -> Iterator[None]:
    """Standard output and error as outlets while the context lasts.

    Descriptors 0 to 2 are open from here on: no file of ours gets the number of a closed one.
    """
    number = 0
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    output = safe_stream(sys.stdout)
    errors = safe_stream(sys.stderr)
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            yield
        finally:
            # the interpreter would fail to write the rest at its end
            output.flush()
            errors.flush()


def exit_with(error: Exception) -> NoReturn:
    """Print the message of `error`; end the interpreter with 2 for a user's mistake, else 1."""
    print(f"error: {printable(str(error))}", file=sys.stderr)
    sys.exit(2 if isinstance(error, UserError) else 1)


def parser(usage: str, purpose: str, words: str) -> argparse.ArgumentParser:
    """The parser of the arguments of a command. Arguments are added with help=argparse.SUPPRESS.

    usage: one line that begins with its name. words: describe each argument, shown as they stand.
    """
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(usage.split()[0], usage, purpose, words, formatter_class=form)


@contextmanager
def ending_with_status() -> Iterator[None]:
    """The work of a command; ends the interpreter with 2 for a mistake that we found, 1 for a file
    that could not be written, each told in one line, and at once when it is asked to stop.
    """
    with safe_streams(), stop_at_once():
        try:
            yield
            sys.stdout.flush()
            lost = cast(SafeStream, sys.stdout).lost
            if lost not in ("", CLOSED_AT_START, os.strerror(errno.EPIPE)):
                raise IncompleteError(f"standard output could not be written ({lost})")
        except (UserError, IncompleteError) as error:
            exit_with(error)
        except OSError as error:
            problem = f"cannot be written ({reason_of(error)})"
            exit_with(IncompleteError(f"{error.filename}: {problem}"))
