"""Twins: hosts beside those of a run, each of which is a copy of one of them from an action on.

A row sleeps, and costs memory alone, until `wake_` makes a twin of it. A twin waits instead of its
source's action, and takes all that follow where they are legal for it and about other slots; so the
slot stays as it was. A placebo takes every action: one of its weights is moved instead.
"""

import torch
from torch import Tensor

from esper_soa.env.early_stop import Cause
from esper_soa.env.env import Env
from esper_soa.env.legal import obey
from esper_soa.env.parameters import total_params
from esper_soa.env.step import EnvView, initial_state
from esper_soa.env.topology import host_states
from esper_soa.env.world import World
from esper_soa.nets.seeds.snapshot import copy_envs_
from esper_soa.state import STATE_FLOAT, Action, EnvState, select
from esper_soa.training.results.final_test import measure_test
from esper_soa.vocabulary import Op

PLACEBO_MOVE = 1e-6  # share of itself by which a placebo's weight is moved

# Columns of `measured`.
ACCURACY, LOSS, FLOP, PARAMETERS = range(4)


class Twins:
    """R rows beside the N envs of a world, sleeping or twins of one of them each."""

    def __init__(self, world: World, rows: int) -> None:
        self.origin = world
        self.env = Env(world.beside(rows))
        self.device = world.device
        none = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.source = none  # int64 [R], the env that each row is a twin of
        self.slot = none  # int64 [R], the slot that stays as it was; -1 of a placebo
        self.fresh = none > 0  # bool [R], the action of this env-step made it a twin
        self.begin_()

    def begin_(self) -> None:
        """Begin the round that the run plays now; all rows sleep."""
        self.source = torch.zeros_like(self.source)
        world = self.env.world
        world.follow_(self.origin, self.source)
        self.env.observed = None
        self.env.state = initial_state(world.rules, len(self.source), self.device)
        self.sleep_(torch.ones_like(self.fresh))
        self.sources_at_end = self.env.state  # of the sources that have ended, by row

    def sleep_(self, where: Tensor) -> None:
        """Let the rows `where` (bool [R]) sleep as they are."""
        env = self.env
        env.state = _asleep(env.state, where)
        if env.observed is not None:
            view = env.observed.view
            view = view.replace(state=_asleep(view.state, where))
            ended = env.world.rules.ended(view.state)
            env.observed = env.observed._replace(view=view, ended=ended)

    def observe_(self, step: int) -> Tensor:
        """Train and validate all twins in env-step `step`, from 0; what is measured, [R, 4]."""
        self.env.step_number = step
        view = self.env.observe_().view
        return measured(self.env.world, view.state)

    def wake_(self, seen: EnvView, source: Tensor, slot: Tensor, fresh: Tensor) -> None:
        """Make the rows `fresh` (bool [R]) twins of the envs source[i], as these were `seen`.

        source: int64 [R], of all rows. slot: int64 [R], which stays as it is; -1 of a placebo.
        """
        self.source = source
        self.slot = torch.where(fresh, slot, self.slot)
        self.fresh = fresh
        self.env.take_envs_(self.origin, seen, source, where=fresh)

    def move_(self, row: int, place: int) -> None:
        """Move a weight of the host of a placebo."""
        self.env.world.weights["host", "params"][row, place].mul_(1 + PLACEBO_MOVE)

    def act_(self, action: Action) -> None:
        """Carry out the actions [N] of the sources, as far as twins take them."""
        seen = self.env.observed
        if seen is None:
            return
        wanted = action[self.source]
        spared = (self.slot >= 0) & (self.fresh | (wanted.slot == self.slot))
        wanted = wanted.replace(op=torch.where(spared, Op.WAIT, wanted.op))
        self.env.apply_action_(obey(wanted, seen.view.masks)[0])
        self.fresh = torch.zeros_like(self.fresh)

    def end_(self, seen: EnvView, where: Tensor) -> None:
        """The episodes of the twins `where` (bool [R]) end here, with the sources as `seen`."""
        state = seen.view.state[self.source]
        self.sources_at_end = select(where, state, self.sources_at_end)
        self.sleep_(where)

    def test_(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """Accuracy and loss on the test images, float64 [2, R] on the host: of the sources of the
        twins `where` (bool [R]), whose episodes have ended, and their own; then the rows sleep.
        """
        world = self.env.world
        observed = self.env.observed
        state = self.env.state if observed is None else observed.view.state
        over = ~where[:, None].expand_as(state.slots.stage)
        own = measure_test(world, host_states(state, state), over=over)[:2]
        copy_envs_(world.weights, self.origin.weights, self.source, where=where)
        state = self.sources_at_end
        theirs = measure_test(world, host_states(state, state), over=over)[:2]
        return torch.tensor(theirs, dtype=STATE_FLOAT), torch.tensor(own, dtype=STATE_FLOAT)


def measured(world: World, state: EnvState) -> Tensor:
    """Validation accuracy and loss (NaN of hosts that were rolled back), training FLOP of the
    episode and parameters, float64 [N, 4].
    """
    signals = state.signals
    scores = torch.stack((signals.val_accuracy, signals.val_loss), 1)
    scores = torch.where(state.guard.panic[:, None], torch.nan, scores)
    flop = world.setup.train_samples * state.totals.train_flop
    sizes = torch.stack((flop, total_params(state.slots, world.rules.reward.counts)), 1)
    return torch.cat((scores, sizes), 1)


def _asleep(state: EnvState, where: Tensor) -> EnvState:
    ending = state.ending
    cause = torch.where(where, Cause.LENGTH, ending.cause)
    return state.replace(ending=ending.replace(cause=cause))
