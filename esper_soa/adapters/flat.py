"""The base of all adapters: a flat observation, a mask over joint actions, episodes without a gap.

A rollback ends the trajectory of an env (terminated), which goes on at once from its snapshot. The
episode ends for all envs together (terminated or truncated, as reward.episode_end says), and the
next round begins at once. The last observations of ended trajectories are kept.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper_soa.env.observation import feature_names
from esper_soa.simulator import Info, Simulator, Value, play_settings, with_policy
from esper_soa.state import Masks, Observation
from esper_soa.system.errors import SettingError, check
from esper_soa.system.torch_state import package_state
from esper_soa.vocabulary import HEADS, Blueprint, head_sizes

ACTIONS = ("joint", "heads")  # one number per env, or one choice per head


class FlatObservation(NamedTuple):
    """Observation of N envs."""

    # Float32 [N, F]: those of the policy, then one-hot which blueprint stands in each slot.
    features: Tensor
    # Bool [N, K] over joint actions, or [N, sum of head sizes], head after head.
    action_mask: Tensor


class Turn(NamedTuple):
    """Result of an env-step."""

    shown: FlatObservation  # where a trajectory ended, the first of the next
    last: FlatObservation  # where a trajectory ended, what it showed last; else as `shown`
    reward: Tensor  # float64 [N]
    terminated: Tensor  # bool [N]
    truncated: Tensor  # bool [N]
    info: Info  # beside `shown`; `illegal` is of the action
    last_info: Info  # beside `last`
    # The episode is over, for all envs: the next round has begun, or is to be begun by the caller.
    over: bool


class FlatEnvs:
    """N envs with flat observations and actions that are numbers."""

    def __init__(self, sim: Simulator, actions: str) -> None:
        """actions: "joint" for joint actions [N], "heads" for choices [N, 8], heads in order.

        Heads are masked one by one: a choice of every head may be legal, and all of them together
        not. Such an action becomes WAIT. Joint actions have no such combinations. sim: one with
        illegal="wait", as agents of other libraries choose illegal actions.
        """
        check(actions in ACTIONS, "actions", actions, allowed=" or ".join(ACTIONS))
        early = sim.settings.early_stop
        if early.enabled and sim.num_envs > 1:
            given = f"(patience={early.patience}, rollbacks={early.rollbacks})"
            allowed = f"off in environments of other libraries with {sim.num_envs} envs"
            reason = (
                "There an env that has ended begins anew at once and alone, and the hosts of a "
                "simulator all begin together."
            )
            remedy = "Take one env, or several of one in the library's own vector env."
            raise SettingError("early_stop", given, allowed, remedy=f"{reason} {remedy}")
        self.sim = sim
        self.joint = actions == "joint"
        self.codes = sim.world.rules.blueprints.nonzero().flatten()
        names = feature_names(sim.slots, sim.world.rules.observed)
        self.num_features = len(names) + len(sim.slots) * len(self.codes)
        self.head_sizes = head_sizes(len(sim.slots), len(sim.world.rules.blueprints))
        # entries of the mask
        self.num_actions = len(sim.joint) if self.joint else sum(self.head_sizes)
        self._shown: FlatObservation | None = None

    @property
    def shown(self) -> FlatObservation:
        """The observation that the next action answers; RuntimeError before `reset`."""
        if self._shown is None:
            raise RuntimeError("call reset first")
        return self._shown

    @property
    def action_mask(self) -> Tensor:
        """bool [N, K]: what is legal now; before `reset`, where an episode begins."""
        if self._shown is not None:
            return self._shown.action_mask
        view = self.sim.env.current_view()
        return self._show(view.observation, view.masks).action_mask

    @package_state()
    def reset(self, seed: int | None = None) -> tuple[FlatObservation, Info]:
        """Begin the next round, or round 0 of `seed`."""
        observation, info = self.sim.reset(seed)
        self._shown = self._show(observation, info.masks)
        return self._shown, info

    @package_state()
    def step(self, action: Tensor, go_on: bool = True) -> Turn:
        """Carry out actions int64 [N] or [N, 8]. Raises RuntimeError before `reset`.

        go_on: begin the next round where the episode is over; else the caller resets.
        """
        before = self.shown
        observation, reward, terminated, truncated, info = self.sim.step(action)
        last_info = info
        over = bool(truncated.all())
        observation_row = self._show(observation, info.masks)
        ended = terminated[:, None]
        last = FlatObservation(
            torch.where(ended, before.features, observation_row.features),
            torch.where(ended, before.action_mask, observation_row.action_mask),
        )
        terminated = terminated | self.sim.env.terminated
        if go_on and over:
            initial, fresh = self.sim.reset()
            observation_row = self._show(initial, fresh.masks)
            info = fresh._replace(illegal=info.illegal)
        self._shown = observation_row
        return Turn(
            shown=observation_row,
            last=last,
            reward=reward,
            terminated=terminated,
            truncated=truncated & ~terminated,
            info=info,
            last_info=last_info,
            over=over,
        )

    def _show(self, observation: Observation, masks: Masks) -> FlatObservation:
        present = observation.blueprints[:, :, None] == self.codes
        features = torch.cat((observation.features, present.flatten(1)), 1)
        if self.joint:
            return FlatObservation(features, self.sim.joint.mask(masks))
        # NOOP stands for no blueprint, which agents that mask need where nothing is legal
        parts = {head.name: masks.get(head.name).clone() for head in HEADS}
        parts["blueprint"][:, Blueprint.NOOP] = True
        return FlatObservation(features, torch.cat(list(parts.values()), 1))


@package_state()
def flat_envs(experiment: str, actions: str, settings: Mapping[str, Value]) -> FlatEnvs:
    """Envs of `make(experiment, illegal="wait", **settings)`; raises UserError as there."""
    played = with_policy(play_settings(experiment, (), settings), "wait")
    return FlatEnvs(Simulator(played, illegal="wait"), actions)
