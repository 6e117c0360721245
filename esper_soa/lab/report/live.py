"""Runs while they go on: `esper-watch RUN... [port=8765]` shows their report in a browser of this
machine, always new.

A small server on the loopback that only reads run folders; runs do not know of it. Also
`python -m esper_soa.lab.report.live`. Needs no torch. Exit status: 0 stopped, as by Ctrl-C, 2 a
mistake that we found.
"""

import argparse
import json
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from esper_soa.lab.report.bundle import bundle
from esper_soa.lab.report.page import CONTENT_POLICY, Parts, page_html, parts_of
from esper_soa.lab.report.run_files import find_runs
from esper_soa.lab.report.sections import asset
from esper_soa.lab.telemetry.schema import TABLES
from esper_soa.system.console import ending_with_status, parser
from esper_soa.system.errors import UserError, check
from esper_soa.system.files import reason_of
from esper_soa.system.plain_files import FILE, NotPlainError, list_folder
from esper_soa.system.signals import Interrupted
from esper_soa.training.files.run_folder import RunFolder

HOST = "127.0.0.1"
PORT = 8765
LOCAL_HOST = re.compile(r"(?:127\.0\.0\.1|localhost)(?::\d{1,5})?")  # as a browser here says it
NICENESS = 10  # lower priority than the runs that are watched
MIN_SECONDS = 2.0  # between two readings of run folders
WATCHED_SUFFIXES = (".json", ".jsonl", ".yaml", ".parquet", ".npz")  # of files of a run folder
LIVE_POLICY = f"{CONTENT_POLICY}; connect-src 'self'".replace("script-src", "script-src 'self'")
LIVE_HEAD = (
    '<script src="/vega.js"></script>'
    '<div class="state" id="live" role="status" data-stamp="{stamp}" '
    'data-changed="{changed}" data-state="{state}" data-ended="{ended}"></div>'
)
HELP = f"""\
  RUN...        run folders, or folders that hold some, as a sweep does; new jobs of a sweep come in
                as they begin
  port={PORT}     of the address that the page is at, on this machine alone; 0 = any that is free

  esper-watch runs/cifar_3seed/2026-01-31_12-00-00
"""


def state_of(paths: Sequence[Path]) -> tuple[str, float]:
    """A stamp of all that is read of the runs; when it was last written (seconds since 1970)."""
    stats = []
    tables = [RunFolder(path).tables / table for path in paths for table in TABLES]
    for folder in (*paths, *tables):
        with suppress(NotPlainError, FileNotFoundError):  # a resumed run has removed it just now
            files = (path for path, kind in list_folder(folder).items() if kind == FILE)
            stats += [path.stat() for path in files if path.suffix in WATCHED_SUFFIXES]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return f"{len(stats)}-{newest}-{sum(one.st_size for one in stats)}", newest / 1e9


class Handler(BaseHTTPRequestHandler):
    """Serves the page and its updates, read-only."""

    server: "Server"
    timeout = 5.0  # seconds that a request may be silent, as each holds a thread

    def do_GET(self) -> None:  # noqa: N802, a name that http.server calls
        """The page, what draws it, or what is new in it."""
        # A page of elsewhere whose name was made to lead here must not read runs.
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not LOCAL_HOST.fullmatch(hosts[0]):
            self.answer(403, "text/plain", "this address is 127.0.0.1 alone")
            return
        try:
            self.answer(*self.server.answer_to(self.path))
        except (UserError, OSError) as error:  # the folder may be gone
            self.answer(503, "text/plain", str(error))

    def answer(self, status: int, kind: str, text: str) -> None:
        """Send `text`; ignore a client that has disconnected."""
        content = text.encode(errors="backslashreplace")
        cache_control = "max-age=3600" if self.path == "/vega.js" else "no-store"
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", cache_control)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("X-Frame-Options", "DENY")
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, its name in http.server
        """Requests come every other second, and are not logged."""


class Server(ThreadingHTTPServer):
    """Serves the page of runs, read anew as they write; raises OSError for a port that is taken."""

    def __init__(self, folders: Sequence[str], program: str, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.folders = folders
        self.program = program
        self.turn = threading.Lock()
        self.read_at = -MIN_SECONDS
        self.stamp = ""
        self.written = 0.0  # when anything was last written, seconds since 1970
        self.parts = Parts("", "", "", data="", state="", ended=False)

    def look(self) -> tuple[Parts, str]:
        """The parts of the page, and a stamp that changes with them; UserError where no run is."""
        with self.turn:
            if time.monotonic() - self.read_at >= MIN_SECONDS:
                runs = find_runs(self.folders)
                stamp, self.written = state_of([run.path for run in runs])
                if stamp != self.stamp:
                    self.parts = parts_of(runs)
                    self.stamp = stamp
                self.read_at = time.monotonic()
            return self.parts, self.stamp

    def answer_to(self, path: str) -> tuple[int, str, str]:
        """Status, type and text for what is asked; UserError, OSError where runs cannot be read."""
        url = urlsplit(path)
        if url.path == "/vega.js":
            return 200, "text/javascript", self.program
        if url.path not in ("/", "/news"):
            return 404, "text/plain", "there is no such page"
        parts, stamp = self.look()
        changed = max(0, round(time.time() - self.written))  # seconds since something was
        if url.path == "/":
            ended = str(parts.ended).lower()
            live = LIVE_HEAD.format(stamp=stamp, changed=changed, state=parts.state, ended=ended)
            programs = [asset("page.js"), asset("live.js")]
            return 200, "text/html", page_html(parts, programs, LIVE_POLICY, live=live)
        message: dict[str, object] = {"changed": changed}
        if parse_qs(url.query).get("since") != [stamp]:
            data = json.loads(parts.data)
            message |= {"stamp": stamp, "state": parts.state, "ended": parts.ended}
            message |= {"main": parts.main, "data": data}
        return 200, "application/json", json.dumps(message)


def main(arguments: list[str] | None = None) -> None:
    usage = f"esper-watch RUN... [port={PORT}]"
    words = parser(usage, "Show runs in a browser of this machine as they go on.", HELP)
    words.add_argument("runs", metavar="RUN", nargs="+", help=argparse.SUPPRESS)
    targets = words.parse_args(arguments).runs
    with ending_with_status(), suppress(Interrupted):
        watch([target for target in targets if not target.startswith("port=")], port_of(targets))


def port_of(targets: Sequence[str]) -> int:
    """The port that is asked for; raises SettingError for what is none."""
    named = [target.removeprefix("port=") for target in targets if target.startswith("port=")]
    value = [str(PORT), *named][-1]
    check(
        value.isdecimal() and int(value) < 2**16, "port", value, allowed="a number from 0 to 65535"
    )
    return int(value)


def watch(folders: Sequence[str], port: int) -> None:
    """Serve until the process is stopped (Interrupted); UserError for what cannot be served."""
    check(bool(folders), "RUN", "", allowed="the folder of a run, or one that holds some")
    os.nice(NICENESS)
    program = bundle()
    try:
        server = Server(folders, program, port)
    except OSError as error:
        reason = f"{reason_of(error)}. port=0 takes one that is free"
        raise UserError(f"port={port}: {reason}") from error
    with server:
        server.look()
        address = f"http://{HOST}:{server.server_address[1]}/"
        print(f"{address}  (Ctrl-C ends this, and no run)", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
