"""Progress of a run: a live bar on a terminal, plain lines elsewhere. No torch.

What is said beside, by the package's logger, a Session has in the log and above the bar.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress

from esper_soa.system.files import LOGGER

SPEED_WINDOW = 50  # reports over which the speed is averaged
ON_CONSOLE = {"printed": True}  # marks records of the log that are on the console already


def say(console: Console, text: str) -> None:
    """Print one line as it is: no markup, no colours, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show(console: Console, text: str) -> None:
    """Print lines on the console alone, and keep them in the log file where there is one."""
    for line in text.splitlines():
        say(console, line)
        LOGGER.debug("%s", line, extra=ON_CONSOLE)


def duration(seconds: float) -> str:
    """Seconds as 7s, 3m05s or 2h07m; -- where unknown."""
    if not math.isfinite(seconds):
        return "--"
    seconds_left = int(seconds + 0.5)
    if seconds_left < 60:
        return f"{seconds_left}s"
    if seconds_left < 3600:
        return f"{seconds_left // 60}m{seconds_left % 60:02d}s"
    return f"{seconds_left // 3600}h{seconds_left % 3600 // 60:02d}m"


class Progress:
    """Shows env-steps done, EPS, accuracy and reward of the round, and the time left.

    style: live, plain, off, or auto (live on a terminal, else plain). Plain lines come every
    `interval` seconds and at the end. `done` env-steps count as done from the start. `after_step`
    is called after every report; what it raises ends the round between two env-steps. `below` is
    shown under the bar, or under every plain line. Use as a context.
    """

    below: RenderableType | None = None

    def __init__(
        self,
        total: int,
        console: Console,
        style: str = "auto",
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        done: int = 0,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        live = style == "live" or (style == "auto" and console.is_terminal)
        self._plain = style == "plain" or (style == "auto" and not live)
        self._console = console
        self._interval = interval
        self._clock = clock
        self._after_step = after_step
        self._total = total
        self._marks = deque([(clock(), done)], maxlen=SPEED_WINDOW + 1)
        self._next_line = clock() + interval
        self._bar = _Bar(console, self) if live else None
        if self._bar is not None:
            self._bar.add_task("", total=total, label="", facts="")

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def skip_env_steps(self, env_steps: int) -> None:
        """Expect `env_steps` less, as episodes have ended early."""
        self._total -= env_steps

    def advance(self, env_steps: int, label: str, accuracy: float, reward: float) -> None:
        """Report `env_steps` more done, in the part of the run called `label`.

        accuracy (percent), reward (sum of the episode so far): means over envs; NaN shows as --.
        """
        now = self._clock()
        done = self._marks[-1][1] + env_steps
        total = self._total
        self._marks.append((now, done))
        start, before = self._marks[0]
        eps = (done - before) / (now - start) if now > start else math.nan
        remaining = (total - done) / eps if eps > 0 else math.nan
        facts = (
            f"left {duration(remaining)}  {_number(eps, '.1f')} EPS  "
            f"accuracy {_number(accuracy, '.2f')} %  reward {_number(reward, '+.2f')}"
        )
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=done, total=total, label=label, facts=facts)
        if self._plain and (now >= self._next_line or done >= total):
            self._next_line = now + self._interval
            show(self._console, f"{label}  {done}/{total} env-steps  {facts}")
            if self.below is not None:
                self._console.print(self.below)
        self._after_step()


class _Bar(RichProgress):
    def __init__(self, console: Console, progress: Progress) -> None:
        self._owner = progress
        super().__init__(
            TextColumn("{task.fields[label]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} env-steps"),
            TextColumn("{task.fields[facts]}"),
            console=console,
            refresh_per_second=2,  # drawing a table of envs takes ten milliseconds from the workers
        )

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self._owner.below is not None:
            yield self._owner.below


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "--"
