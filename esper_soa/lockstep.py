"""Several runs in one process that take turns round by round, so that whatever befalls the machine
befalls them all.

What esper_soa.compare plays a seed with. Every run has its own world, policy, normaliser and
folder, so that it is the run that it would be alone, to the bit; they share the process, one after
the other, and so its memory at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

from esper_soa.compose import compose_settings
from esper_soa.config import settings_yaml
from esper_soa.errors import OutOfRoomError, UserError
from esper_soa.ops.files import IncompleteError
from esper_soa.ops.interrupt import Interrupted, signals_noted
from esper_soa.ops.rundir import write_config
from esper_soa.ops.session import Session, silent_session, unheard
from esper_soa.ops.start import find_start, folder_for
from esper_soa.running import Run
from esper_soa.trainer import ended, played, ready

# Is told the round, from 1, and the runs in the order of their turns.
TurnBegins: TypeAlias = Callable[[int, list[str]], None]


def train_in_turns(
    runs: Mapping[str, Sequence[str]], turn_begins: TurnBegins, experiment: str = ""
) -> dict[str, str]:
    """Train the runs, each by its overrides as `esper_soa.train` does, a round of each at a time.

    Those that are behind play, in the order given and its reverse by turns. A run that cannot go
    on, or lacks a file at its end, does not end the others: the result says why, by the run's name.
    An interrupt ends all with a checkpoint; raises Interrupted.
    """
    failed = dict[str, str]()
    threads = torch.get_num_threads()
    try:
        with ExitStack() as held, unheard():
            players = {}
            for name, overrides in runs.items():
                with _noting(failed, name):
                    players[name] = _Player(held, experiment, overrides)
            _take_turns(players, failed, turn_begins)
    finally:
        torch.set_num_threads(threads)
    return failed


class _Player:
    """A run that is ready for its next round."""

    def __init__(self, held: ExitStack, experiment: str, overrides: Sequence[str]) -> None:
        given = [f"+experiment={experiment}"] * bool(experiment) + list(overrides)
        settings = compose_settings(experiment, overrides)
        self.within: Session = held.enter_context(
            silent_session(folder_for(settings, settings.run_dir))
        )
        with self.within.speaking():
            folder = self.within.folder
            start = find_start(settings, folder)
            if start.checkpoint is None:
                with self.within.unwritten.noting(folder.config.name):
                    write_config(folder, settings_yaml(settings), given)
            self.job: Run = ready(self.within, settings, start.checkpoint)
        self._rounds = played(self.job)
        held.callback(self._rounds.close)

    @property
    def rounds_done(self) -> int:
        """Of the run, those of earlier processes included."""
        return self.job.done.rounds_done

    @property
    def unfinished(self) -> bool:
        """Whether there are rounds left; behind the last the control plays."""
        return self.rounds_done < self.job.cfg.rounds

    def play(self) -> bool:
        """Play a round; whether the run goes on, which is summed up at its end."""
        with self.within.speaking():
            self.job.take_turn()
            try:
                next(self._rounds)
            except StopIteration as end:
                ended(self.job, end.value)
                return False
        return True

    def save(self) -> None:
        """Write the checkpoint of the rounds done."""
        with self.within.speaking():
            self.job.write()


def _take_turns(
    players: dict[str, _Player], failed: dict[str, str], turn_begins: TurnBegins
) -> None:
    """Play all rounds of `players`, which loses those that have come to their end."""
    with signals_noted() as requests:
        for player in players.values():
            player.job.requests = requests
        while players:
            behind = min(player.rounds_done for player in players.values())
            due = [name for name, player in players.items() if player.rounds_done == behind]
            due = due[:: -1 if behind % 2 else 1]
            begins = [name for name in due if players[name].unfinished]
            if begins:
                turn_begins(behind + 1, begins)
            for name in due:
                try:
                    with _noting(failed, name):
                        if players[name].play():
                            continue
                    del players[name]
                except Interrupted:
                    for other in players.keys() - {name}:
                        players[other].save()
                    raise


@contextmanager
def _noting(failed: dict[str, str], name: str) -> Iterator[None]:
    """Note under `name` what ends the context early, where it is one that ends a single run."""
    try:
        yield
    except (UserError, IncompleteError, OutOfRoomError) as error:
        failed[name] = str(error)
