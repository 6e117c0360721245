"""Progress: what plain lines say and when, the pace behind them, the log file."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from esper_soa.training.files.run_folder import RunFolder
from esper_soa.training.files.session import session
from esper_soa.training.results.progress import LOGGER, Progress, duration, say


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_console() -> Console:
    return Console(file=io.StringIO(), width=40)


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_pace_forgets_a_slow_start() -> None:
    clock = Clock()
    console = plain_console()
    with Progress(total=151, console=console, interval=1000, clock=clock) as progress:
        clock.now += 500.0
        for number in range(1, 152):
            clock.now += 25.5 if number == 102 else 0.5
            progress.advance(1, "round 1/1", accuracy=10.0, reward=0.0)
    # the last 50 reports, the first of which took 25.5 s and the others half a second each
    assert "1.0 EPS" in written(console)[0]


def test_plain_lines_come_at_the_interval_and_at_the_end() -> None:
    clock = Clock()
    console = plain_console()
    with Progress(total=40, console=console, interval=10.0, clock=clock) as progress:
        for number in range(5):
            clock.now += 4.0
            progress.below = f"table {number}" if number > 2 else None
            progress.advance(8, "round 1/1", accuracy=10.0 + number, reward=-0.5)
    # 8 env-steps every 4 s; lines at 12 s (first after 10 s) and at the end (20 s)
    assert written(console) == [
        "round 1/1  24/40 env-steps  left 8s  2.0 EPS  accuracy 12.00 %  reward -0.50",
        "round 1/1  40/40 env-steps  left 0s  2.0 EPS  accuracy 14.00 %  reward -0.50",
        "table 4",
    ]


@pytest.mark.parametrize("live", [False, True])
def test_env_steps_that_are_left_out_are_no_longer_waited_for(live: bool) -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=live, width=200)
    with Progress(total=40, console=console, clock=clock) as progress:
        for played, left_out in ((8, 0), (4, 4), (4, 20)):
            clock.now += 4.0
            progress.skip_env_steps(left_out)
            progress.advance(played, "round 1/1", accuracy=10.0, reward=0.0)
    shown = "\n".join(written(console))
    for fact in ("16/16 env-steps", "1.3 EPS", "left 0s"):  # 16 in 12 s
        assert fact in shown


def test_a_terminal_gets_a_live_bar_with_the_same_facts() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    clock = Clock()
    with Progress(total=16, console=console, clock=clock) as progress:
        clock.now += 4.0
        progress.advance(8, "round 1/2", accuracy=12.5, reward=1.0)
        progress.below = "table"
    shown = "\n".join(written(console))
    assert shown.endswith("\x1b[?25h")  # the cursor is there again
    for fact in (
        " 0/16 env-steps",
        "round 1/2",
        "8/16 env-steps",
        "2.0 EPS",
        "accuracy 12.50 %",
        "reward +1.00",
        "left 4s",
        "\ntable",
    ):
        assert fact in shown


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185.0, "3m05s"),
        (7620.0, "2h07m"),
        (math.nan, "--"),
    ],
)
def test_durations_read_well(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_log_lines_go_to_console_as_they_are_and_to_the_file_with_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "data: fashion32 [embedded], a line that is longer than the console is wide, of 80 signs"
    with session(RunFolder(tmp_path)):
        LOGGER.info(said)
    LOGGER.info("after the run")
    assert capsys.readouterr().out == f"{said}\n"
    terminal = Console(file=io.StringIO(), force_terminal=True, width=40)
    say(terminal, said)
    assert written(terminal) == [said]
    assert (tmp_path / "log.txt").read_text().endswith(f" INFO {said}\n")
