"""A vector env of stable-baselines3, for its algorithms and for the masked ones of sb3-contrib.

    from sb3_contrib import MaskablePPO
    from esper_soa.adapters.sb3 import GrowthVecEnv
    model = MaskablePPO("MultiInputPolicy", GrowthVecEnv("cifar_3seed", envs=16)).learn(1000)

Rewards are float32 here, as that library wants them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from esper_soa.adapters.flat import flat_envs
from esper_soa.adapters.gymnasium import action_space, arrays, facts, observation_space, of_env
from esper_soa.simulator import Value

try:
    from stable_baselines3.common.vec_env import VecEnv
    from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices
except ImportError as error:
    remedy = "pip install 'esper-soa[envs]'"
    raise ImportError(f"{__name__} needs stable-baselines3: {remedy}") from error


class GrowthVecEnv(VecEnv):
    """N hosts; where trajectories end, info has `terminal_observation`, `TimeLimit.truncated`."""

    def __init__(
        self, experiment: str, envs: int, actions: str = "joint", **settings: Value
    ) -> None:
        """experiment: one that ships. actions: "joint" or "heads". settings: as in `make`."""
        self.flat = flat_envs(experiment, actions, settings | {"envs": envs})
        self.waiting: np.ndarray | None = None
        super().__init__(envs, observation_space(self.flat), action_space(self.flat))

    def reset(self) -> dict[str, np.ndarray]:
        """Begin the next round, or round 0 of the seed that `seed` was given."""
        flat_observation, info = self.flat.reset(self._seeds[0])
        self._reset_seeds()
        values = facts(info)
        self.reset_infos = [of_env(values, env) for env in range(self.num_envs)]
        return arrays(flat_observation)

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """The next `reset` begins at round 0 of `seed`, which is that of all envs together."""
        self._seeds = [seed] * self.num_envs
        return self._seeds

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions for `step_wait`."""
        self.waiting = actions

    def step_wait(self) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, list[dict]]:
        """Carry out an action per env; an illegal one becomes WAIT, and info says so."""
        if self.waiting is None:
            raise RuntimeError("call step_async first")
        actions = self.waiting
        self.waiting = None
        turn = self.flat.step(torch.as_tensor(np.asarray(actions), device=self.flat.sim.device))
        done = (turn.terminated | turn.truncated).cpu().numpy()
        values = facts(turn.last_info)
        infos = [of_env(values, env) for env in range(self.num_envs)]
        last = arrays(turn.last) if done.any() else {}
        for env in np.flatnonzero(done).tolist():
            infos[env]["terminal_observation"] = of_env(last, env)
            infos[env]["TimeLimit.truncated"] = bool(turn.truncated[env])
        return arrays(turn.shown), turn.reward.float().cpu().numpy(), done, infos

    def close(self) -> None:
        """Do nothing; the envs hold no resources."""

    def action_masks(self) -> np.ndarray:
        """bool [N, K]: the actions that are legal now."""
        return self.flat.action_mask.cpu().numpy()

    def env_method(
        self,
        method_name: str,
        *method_args: object,
        indices: VecEnvIndices = None,
        **method_kwargs: object,
    ) -> list[np.ndarray]:
        """`action_masks` of the envs; there is no other method of a single env."""
        if method_name != "action_masks":
            problem = f"the envs of one simulator have no method {method_name}"
            raise AttributeError(f"{problem}; there is action_masks")
        masks = self.action_masks()
        return [masks[env] for env in self._get_indices(indices)]

    def has_attr(self, attr_name: str) -> bool:
        """Whether the envs have it: `action_masks` and `render_mode`."""
        return attr_name in ("action_masks", "render_mode")

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[None]:
        """`render_mode`, None; AttributeError for anything else."""
        if attr_name != "render_mode":
            raise AttributeError(f"the envs of one simulator have no attribute {attr_name}")
        return [None for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """AttributeError: an env of a simulator has no attributes of its own."""
        raise AttributeError(f"the envs of one simulator have no attribute {attr_name} to set")

    def env_is_wrapped(self, wrapper_class: type, indices: VecEnvIndices = None) -> list[bool]:
        """False for every wrapper: the envs have none."""
        return [False for _ in self._get_indices(indices)]
