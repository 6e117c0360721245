"""The parent of all starts of warm.py: imports torch and the package, then forks for each start
that is asked for on the socket whose descriptor is its only argument, until the other end is gone.

It runs nothing but imports. A fork leaves the loop of `serve` and becomes the main program that it
was asked for, at the end of this file.
"""

import gc
import importlib
import io
import json
import os
import resource
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from types import ModuleType

from warm import LENGTH, received

# What a run, an evaluation, an export and a report import; no module that is itself started by -m.
IMPORTED = (
    "esper_soa.training.start.command",
    "esper_soa.training.start.job",
    "esper_soa.training.start.launch",
    "esper_soa.training.loop.evaluation",
    "esper_soa.simulator",
    "esper_soa.training.start.runs",
    "esper_soa.lab.report.page",
    "esper_soa.lab.report.groups",
    "esper_soa.grown.formats",
    "esper_soa.nets.engines.cpu.engine",
    "rich.progress",
    "rich.live",
)


def serve(asked: socket.socket) -> dict | None:
    """Fork for every start that is asked for; returns in a fork with what it is to be, here with
    None once nobody can ask any more.
    """
    while True:
        head, streams, _, _ = socket.recv_fds(asked, LENGTH, 3)
        if not head:
            return None
        told = json.loads(received(asked, int.from_bytes(head, "big")))
        number, first = os.pipe()
        between = os.fork()
        if between == 0:
            own = os.getpid()
            child = os.fork()
            if child == 0:
                while os.getppid() == own:  # until the process that asked has adopted this one
                    time.sleep(0.0005)
                for one in (asked.detach(), number, first):
                    os.close(one)
                become(told, streams)
                return told
            os.write(first, child.to_bytes(LENGTH, "big"))
            os._exit(0)
        os.waitpid(between, 0)
        asked.sendall(os.read(number, LENGTH))
        for one in (number, first, *streams):
            os.close(one)


def become(told: dict, streams: list[int]) -> None:
    """Give this process the session, signals, streams, limits, folder, environment and paths of the
    one that it is to be.
    """
    if told["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = opened(0, "r"), opened(1, "w"), opened(2, "w")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    for number, most in told["limits"]:
        resource.setrlimit(number, (most, most))
    os.chdir(told["folder"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    rest = [path for path in sys.path[1:] if path not in map(os.path.abspath, paths)]
    os.environ.clear()
    os.environ.update(told["environment"])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*map(os.path.abspath, paths), *rest]
    importlib.invalidate_caches()


def opened(number: int, mode: str) -> io.TextIOWrapper:
    """A standard stream as an interpreter opens it at its start."""
    raw = io.FileIO(number, mode, closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    buffer = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    return io.TextIOWrapper(
        buffer,
        errors="backslashreplace" if number == 2 else "strict",
        line_buffering=number == 2 or raw.isatty(),
    )


def play(args: list[str]) -> None:
    """Run as `python *args` would, from the arguments after the name of the interpreter."""
    sys.orig_argv = [sys.executable, *args]
    if args[0] == "-m":
        sys.argv[:] = args[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif args[0] == "-c":
        sys.argv[:] = ["-c", *args[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(args[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv[:] = args
        sys.path.insert(0, str(Path(args[0]).resolve().parent))
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # that of a terminal is for those who ask
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    start = serve(socket.socket(fileno=int(sys.argv[1])))
    if start is not None:
        play(start["args"][1:])
