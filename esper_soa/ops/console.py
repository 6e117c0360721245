"""Standard output and error that a program can lose without dying of it.

The reader of a pipe may go away (`| head -1`), a terminal may be closed, a file may be full: what
is written then is dropped, and whoever keeps a log says so once. Needs no torch.
"""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

CLOSED = "it was closed before the start"


class Outlet(io.TextIOBase):
    """A text stream that drops what it can no longer write; `lost` then says why."""

    def __init__(self, stream: TextIO, lost: str = "") -> None:
        self._stream = stream
        self.lost = lost  # "" while there is somebody to write to
        self.told = False  # whether the log has it

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal that is still there."""
        return not self.lost and self._stream.isatty()

    def fileno(self) -> int:
        """That of the stream."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Write `text`, or drop it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Pass on what the stream has kept, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Lead the stream's descriptor nowhere: what it still holds must not fail at its end."""
        self.lost = self.lost or error.strerror or str(error)
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):  # no descriptor to lead anywhere
            return


def outlet(stream: TextIO | None) -> Outlet:
    """`stream` as an outlet; one that was closed before the start (None) is lost already."""
    if isinstance(stream, Outlet):
        return stream
    if stream is None:
        return Outlet(open(os.devnull, "w", encoding="utf-8"), CLOSED)  # noqa: SIM115
    return Outlet(stream)


@contextmanager
def standing_streams() -> Iterator[None]:
    """Standard output and error as outlets while the context lasts.

    Descriptors 0 to 2 are open from here on, so that no file of ours gets the number of a closed
    stream.
    """
    number = 0
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    streams = outlet(sys.stdout), outlet(sys.stderr)
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            yield
        finally:
            # what is left for the interpreter to write at its end could fail there
            for stream in streams:
                stream.flush()
