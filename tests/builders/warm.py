"""Starts this Python as `subprocess` does, in a fork of a process that has torch and the package
imported: a start costs a tenth of a second in place of eight seconds of processor time.

The process that is forked, the parent of all starts, is a script of its own (warm_parent.py): it
computes nothing, so that it has no thread but its first. A process that it forks becomes a child of
the caller's (which adopts it), has the directory, environment, streams and session that it was
asked for, and runs as if it had just been started: it ends as an interpreter ends, and is waited
for, killed and limited as any other. What depends on what is not imported yet starts with
`subprocess` instead, and so does every command below that is not one of this Python, or one that
sets variables which the interpreter itself reads.
"""

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

PARENT = Path(__file__).parent / "warm_parent.py"
ADOPT = 36  # PR_SET_CHILD_SUBREAPER
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "TORCH_", "TORCHINDUCTOR_", "TRITON_")
LENGTH = 8  # bytes that say how long a message is


class Starter:
    """The parent of all starts, and the socket to it; it ends with this process."""

    def __init__(self) -> None:
        ours, its = socket.socketpair()
        self.socket = ours
        plain = {"TRITON_INTERPRET": "0", "HYDRA_FULL_ERROR": "0", "PYTHONUNBUFFERED": ""}
        self.environment = os.environ | plain
        command = [sys.executable, str(PARENT), str(its.fileno())]
        self.process = subprocess.Popen(
            command, env=self.environment, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL
        )
        its.close()

    def serves(self, args: Sequence[str], environment: dict[str, str] | None) -> bool:
        """Whether a fork is what `args` would be: this Python, with the same settings."""
        return (
            sys.platform == "linux"
            and args[0] == sys.executable
            and (args[1] in ("-m", "-c") or not args[1].startswith("-"))
            and settings_of_python(environment or self.environment)
            == settings_of_python(self.environment)
        )

    def start(self, told: dict[str, object], streams: list[int]) -> int:
        """The number of a new process, a child of this one, with these three streams."""
        message = json.dumps(told).encode()
        adopt(True)
        try:
            socket.send_fds(self.socket, [len(message).to_bytes(LENGTH, "big")], streams)
            self.socket.sendall(message)
            return int.from_bytes(received(self.socket, LENGTH), "big")
        finally:
            adopt(False)


def received(source: socket.socket, size: int) -> bytes:
    """The next `size` bytes; raises EOFError where the other side is gone."""
    found = b""
    while len(found) < size:
        more = source.recv(size - len(found))
        if not more:
            raise EOFError("the process that starts others has ended")
        found += more
    return found


def settings_of_python(environment: dict[str, str]) -> dict[str, str]:
    """The variables that an interpreter or torch reads at its start, but for its path."""
    return {
        name: text
        for name, text in environment.items()
        if name.startswith(READ_AT_START) and name != "PYTHONPATH" and text not in ("", "0")
    }


def adopt(orphans: bool) -> None:
    """Whether processes whose parent ends, below this one, become children of this one."""
    if ctypes.CDLL(None, use_errno=True).prctl(ADOPT, int(orphans), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "a process cannot adopt others")


STARTERS: dict[int, Starter] = {}  # by the process that asks


def starter() -> Starter:
    """That of this process."""
    if os.getpid() not in STARTERS:
        STARTERS[os.getpid()] = Starter()
    return STARTERS[os.getpid()]


class Popen(subprocess.Popen):
    """A process that is started by a fork where it can be.

    env: where there is none, that of a user. limits: by their number in `resource`.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        limits: dict[int, int] | None = None,
        env: dict[str, str] | None = None,
        cwd: str | Path | None = None,
        start_new_session: bool = False,
        **streams: object,
    ) -> None:
        self.told: dict[str, object] = {
            "args": list(map(os.fsdecode, args)),
            "environment": dict(starter().environment if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "session": start_new_session,
            "limits": list((limits or {}).items()),
        }
        self.forked = starter().serves(args, env)
        super().__init__(
            args,
            env=env,
            cwd=cwd,
            start_new_session=start_new_session,
            preexec_fn=None if self.forked or not limits else lambda: limit(limits),
            **streams,
        )

    def _execute_child(self, *given: object) -> None:
        if not self.forked:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        into, _, _, out, _, errors = given[10:16]
        streams = [
            number if said == -1 else said for number, said in enumerate((into, out, errors))
        ]
        self.pid = starter().start(self.told, streams)
        self._child_created = True
        self._close_pipe_fds(*given[10:16])  # type: ignore[attr-defined]


def limit(limits: dict[int, int]) -> None:
    """Limit this process."""
    for number, most in limits.items():
        resource.setrlimit(number, (most, most))


def run(args: Sequence[str], **given: object) -> subprocess.CompletedProcess:
    """As subprocess.run, by Popen above."""
    starter()
    with mock.patch("subprocess.Popen", Popen):
        return subprocess.run(args, **given)
