"""The learned policy as a stand-alone module with memory: observation in, legal action out.

It is built from a description, so that its file can be loaded without the run.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.protocol import Memory, restart
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.env import ENV_SETTINGS
from esper_soa.config.nets import SlotSpec
from esper_soa.env.observation import feature_names
from esper_soa.state import Decision, Masks, Observation, View
from esper_soa.system.torch_state import package_state
from esper_soa.vocabulary import BLUEPRINT_NAMES, HEAD_NAMES, head_sizes


class Controller(nn.Module):
    """The policy network with its observation normaliser and its memory of N envs.

    `reset` begins an episode; each call is an env-step. `spec` is what it was made from: plain
    values, as JSON has them. It takes the likeliest choices if `deterministic`, else it samples.
    """

    def __init__(self, spec: dict) -> None:
        """Fresh weights; LookupError, TypeError or SettingError for what describes no policy."""
        super().__init__()
        self.spec = spec
        floors = spec["probability_floor"]
        ppo = PPOConfig(probability_floor=floors, observation_clip=spec["observation_clip"])
        network = NetworkConfig(**spec["network"])
        config = PolicyConfig(network=network, deterministic=spec["deterministic"], ppo=ppo)
        config.observe = [name for name in spec["features"] if name in ENV_SETTINGS]
        slots = [SlotSpec(**slot) for slot in spec["slots"]]
        self.policy = RecurrentPolicy(config, slots, 0, num_blueprints=spec["heads"]["blueprint"])
        self.memory: Memory = ()  # of the envs that it plays in; empty before the first env-step

    @property
    def deterministic(self) -> bool:
        """Whether the likeliest choices are taken."""
        return self.policy.deterministic

    @deterministic.setter
    def deterministic(self, likeliest: bool) -> None:
        self.policy.deterministic = likeliest

    def reset(self) -> None:
        """Forget all envs: the next call begins an episode, of any number of envs."""
        self.memory = ()

    @package_state()
    @torch.no_grad()
    def forward(
        self,
        features: Tensor,
        blueprints: Tensor,
        masks: Mapping[str, Tensor],
        noise: Tensor | None = None,
        restarted: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One legal action per env: int64 [N] by head.

        features: float32 [N, 23 + 31 S], as they are; blueprints: int64 [N, S], -1 in an empty
        slot; masks: bool, by the names of state.Masks; noise: float32 [N, 8] in [0, 1), one number
        per head, which draws the choices; torch's own generator where None. restarted: bool [N],
        envs that were rolled back. Raises ValueError for another number of envs than before.
        """
        num_envs = features.shape[0]
        fresh = self.policy.start(num_envs, features.device)
        memory = self.memory or fresh
        if memory[0].shape[0] != num_envs:
            remembered = f"the memory is of {memory[0].shape[0]}: call reset() first"
            raise ValueError(f"{num_envs} envs, where {remembered}")
        if restarted is not None:
            memory = restart(memory, fresh, restarted)
        if noise is None:
            noise = torch.rand(num_envs, len(HEAD_NAMES), device=features.device)
        observation = Observation(features=features, blueprints=blueprints, batch_size=[num_envs])
        legal = Masks.from_dict(dict(masks), batch_size=[num_envs])
        decide = self.policy.decide_with_probabilities
        decision, self.memory, _ = decide(observation, legal, noise, memory)
        return {name: decision.action.get(name) for name in HEAD_NAMES}

    @package_state()
    def start(self, num_envs: int, device: torch.device) -> Memory:
        """Initial memory of N envs, for a caller that manages memory itself."""
        return self.policy.start(num_envs, device)

    @package_state()
    def act(self, view: View, memory: Memory) -> tuple[Decision, Memory]:
        """One action per env and the new memory; the memory of this object is not used."""
        return self.policy.act(view, memory)


def controller_spec(
    config: PolicyConfig, slots: Sequence[SlotSpec], blueprints: Sequence[str] = BLUEPRINT_NAMES
) -> dict:
    """The policy with these settings, for hosts with these slots; blueprints: names by code."""
    places = [slot._asdict() for slot in slots]
    for place in places:
        del place["axes"]  # which no policy sees
    names = tuple(slot.name for slot in slots)
    return {
        "network": dict(vars(config.network)),
        "deterministic": config.deterministic,
        "probability_floor": dict(config.ppo.probability_floor),
        "observation_clip": config.ppo.observation_clip,
        "slots": places,
        "features": list(feature_names(names, config.observe)),
        "heads": dict(zip(HEAD_NAMES, head_sizes(len(slots), len(blueprints)), strict=True)),
        "blueprints": list(blueprints),
    }


def controller_of(spec: dict, tensors: Mapping[str, Tensor]) -> Controller:
    """The policy of a `spec` with these `tensors`; RuntimeError where they do not fit."""
    with torch.device("meta"):  # sizes are compared before anything is allocated
        Controller(spec).load_state_dict(dict(tensors), assign=True)
    controller = Controller(spec)
    controller.load_state_dict(dict(tensors))
    return controller.eval()
