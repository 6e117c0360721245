"""Records of the reward: inputs, and readings per slot. The terms are in reward_terms.py.

Filled by `reward.py` from the env state, read by the terms and the modes. Accuracies, contributions
and improvements are percent points. N envs, S slots, D drip pools (one per slot in the simulator).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from tensordict import TensorClass
from torch import Tensor

from esper_soa.config.env import RewardConfig
from esper_soa.state import Costs


class RewardSettings(NamedTuple):
    """Constants of the reward, the same for every env."""

    config: RewardConfig
    counts: Costs
    flop: Costs
    # Env-steps per episode, int64 [N] where they differ by env; the last pays the terminal terms.
    max_steps: int | Tensor
    user_reward: "UserReward | None" = None  # the user's reward that config.mode names
    # Settings of each mode where modes differ by env; the value of reward.mode is an env's place.
    by_mode: "tuple[RewardSettings, ...]" = ()

    def ends_terminate(self, mode: Tensor | None) -> bool | Tensor:
        """Whether nothing follows an episode's planned end; bool [N] where modes differ by env.

        mode: float64 [N], the place of each env's mode in `by_mode`; None where all have one.
        """
        if mode is not None:
            terminate = [bool(part.ends_terminate(None)) for part in self.by_mode]
            return torch.tensor(terminate, device=mode.device)[mode.long()]
        end = self.config.episode_end
        return self.config.mode == "net" if end == "auto" else end == "terminated"

    def lasting(self, steps: int) -> "RewardSettings":
        """The same for episodes of so many env-steps."""
        parts = tuple(part.lasting(steps) for part in self.by_mode)
        return self._replace(max_steps=steps, by_mode=parts)

    @property
    def user_name(self) -> str:
        """Names of the users' rewards that are paid, in the order of modes; "" without any."""
        parts = self.by_mode or (self,)
        return "+".join(part.user_reward.name for part in parts if part.user_reward is not None)


class RewardInputs(TensorClass["tensor_only", "frozen"]):
    """All that a reward mode may look at; floats are float64, 0 where `known` is False."""

    # per slot [N, S], before the action takes effect
    has_seed: Tensor  # bool, a live seed
    target: Tensor  # bool, the slot of the action, one per env
    stage: Tensor  # int64, Stage
    stage_age: Tensor  # int64
    previous_stage: Tensor  # int64
    previous_stage_age: Tensor  # int64
    seed_age: Tensor  # int64, 1 at the first env-step after germination
    improvement: Tensor  # since the start of the stage
    improvement_known: Tensor  # bool
    contribution: Tensor  # measured at this env-step
    contribution_known: Tensor  # bool
    interaction_sum: Tensor
    accuracy_germination: Tensor
    germination_known: Tensor  # bool
    escrow: Tensor  # credit paid so far that is still to be confirmed

    # per drip pool [N, D]
    drip_live: Tensor  # bool, the pool pays
    drip_scale: Tensor  # payment per point of contribution
    drip_left: Tensor  # what the pool still holds, may be inf
    drip_contribution: Tensor  # of the pool's fossil, 0 where it was not measured at this env-step

    # per env [N]
    op: Tensor  # int64, Op; WAIT where the chosen op was not applicable
    val_accuracy: Tensor
    stable_accuracy: Tensor  # smallest of the last accuracies, this env-step's included
    accuracy_delta: Tensor
    val_loss: Tensor
    loss_delta: Tensor  # current - previous validation loss: positive means worse
    total: Tensor  # accuracy - accuracy with every ablated seed off
    total_known: Tensor  # bool
    committed_accuracy: Tensor  # with fossils only
    effective_params: Tensor  # parameters that pay rent, weighted with their alpha
    alpha_delta_sq: Tensor  # squared alpha moves, weighted with relative size
    total_params: Tensor
    host_params: Tensor
    fossilized_params: Tensor
    num_active: Tensor  # int64, slots with a seed or its remains, not fossils or just pruned ones
    num_fossilized: Tensor  # int64
    num_contributing: Tensor  # int64
    step: Tensor  # int64, 1-based
    max_steps: Tensor  # int64
    train_flop: Tensor  # of training so far, on an image per env-step
    host_flop: Tensor  # of these, what the host alone takes


class UserReward(NamedTuple):
    """A user's reward function; see user_reward.py."""

    name: str
    function: Callable[[RewardInputs], Tensor | Mapping[str, Tensor]]  # the reward or terms, [N]


class SlotReadings(NamedTuple):
    """Intermediate values of the reward, float64 [N, S] unless noted."""

    escrow_next: Tensor  # credit after this env-step
    drip_total: Tensor  # pool that this action creates, else 0
    drip_scale: Tensor
    drip_payment: Tensor  # [N, D]
