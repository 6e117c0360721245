"""The page of runs that go on: what the server answers, and that it only reads."""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from esper_soa.lab.report import live
from esper_soa.lab.report.live import HOST, Server
from tests.builders.report_runs import PROGRAM, line, make_run, summary, write_lines, write_round


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live, "MIN_SECONDS", 0.0)
    made = make_run(tmp_path / "run", [line(1, 40.0)])
    write_round(made, 1, envs=2, steps=6)
    return made


@pytest.fixture
def server(run: Path) -> Iterator[Server]:
    with Server([str(run)], PROGRAM, 0) as opened:
        threading.Thread(target=opened.serve_forever, args=(0.01,), daemon=True).start()
        yield opened
        opened.shutdown()


def asked(server: Server, path: str, method: str = "GET", host: str = HOST) -> tuple[int, str]:
    connection = HTTPConnection(HOST, server.server_address[1], timeout=30)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_the_page_has_what_was_written_so_far_and_then_tells_news(
    server: Server, run: Path
) -> None:
    status, text = asked(server, "/")
    assert status == 200
    assert "Not finished: 1 of 4 rounds are played" in text
    assert "connect-src 'self'" in text, "it may ask its own server alone"
    assert '<script src="/vega.js">' in text
    assert asked(server, "/vega.js")[1] == PROGRAM
    _, stamp = server.look()
    assert list(json.loads(asked(server, f"/news?since={stamp}")[1])) == ["changed"]
    for ago, least in ((3600, 3600), (-3600, 0)):  # also files of a clock that runs ahead
        written = time.time() - ago
        for file in (one for one in run.rglob("*") if one.is_file()):
            os.utime(file, (written, written))
        news = json.loads(asked(server, "/news")[1])
        page = re.search(r'data-changed="(\d+)"', asked(server, "/")[1])
        assert page is not None
        assert all(least <= int(seconds) < least + 60 for seconds in (news["changed"], page[1]))
    write_lines(run / "metrics.jsonl", [line(1, 40.0), line(2, 46.5)])
    news = json.loads(asked(server, f"/news?since={stamp}")[1])
    assert news["stamp"] != stamp
    assert "2 of 4 rounds" in news["main"]
    assert news["data"]["tables"]["rounds"]["accuracy"] == [40.0, 46.5]
    assert not news["ended"]
    (run / "summary.json").write_text(json.dumps(summary([50.0])))
    assert json.loads(asked(server, f"/news?since={stamp}")[1])["ended"]
    assert 'data-ended="true"' in asked(server, "/")[1]


def test_it_is_on_the_loopback_alone_and_other_names_are_refused(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    refused = (403, "this address is 127.0.0.1 alone")
    assert asked(server, "/", host="evil.example") == refused
    assert asked(server, "/", host="127.0.0.1@evil.example") == refused
    assert asked(server, "/", host="localhost:1")[0] == 200
    for first, second in ((HOST, "evil.example"), (HOST, HOST)):
        connection = HTTPConnection(HOST, server.server_address[1], timeout=30)
        connection.putrequest("GET", "/", skip_host=True)
        connection.putheader("Host", first)
        connection.putheader("Host", second)
        connection.endheaders()
        assert connection.getresponse().status == 403


def test_nothing_can_be_written_and_no_other_file_read(server: Server, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert asked(server, "/", method="POST")[0] == 501
    assert asked(server, "/config.yaml") == (404, "there is no such page")
    assert asked(server, "/../../etc/passwd")[0] == 404
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


FREE = ("Server", "Date")  # headers of http.server itself


def test_a_request_that_does_not_come_is_given_up_and_no_page_is_put_in_a_frame(
    server: Server, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.Handler, "timeout", 0.1)
    with socket.create_connection(server.server_address[:2], timeout=30) as half:
        half.sendall(b"GET / HTTP/1.1\r\n")
        assert half.recv(1) == b"", "the server has closed it"
    (run / "overrides.txt").write_text("x")
    (run / "versions.json").write_text('{"git": "\\ud800"}')
    for path, status, kind, kept in (
        ("/", 200, "text/html", "no-store"),
        ("/news", 200, "application/json", "no-store"),
        ("/vega.js", 200, "text/javascript", "max-age=3600"),
        ("/x", 404, "text/plain", "no-store"),
    ):
        connection = HTTPConnection(HOST, server.server_address[1], timeout=30)
        connection.request("GET", path)
        answer = connection.getresponse()
        told = {name: value for name, value in answer.getheaders() if name not in FREE}
        assert (answer.status, told) == (
            status,
            {
                "Content-Type": f"{kind}; charset=utf-8",
                "Content-Length": str(len(answer.read())),
                "Cache-Control": kept,
                "X-Content-Type-Options": "nosniff",
                "X-Frame-Options": "DENY",
            },
        )
