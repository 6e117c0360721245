"""Gymnasium environments: N hosts as one vector env, or a single host.

    import gymnasium, esper_soa.adapters.gymnasium
    mode = "vector_entry_point"
    envs = gymnasium.make_vec("esper_soa/cifar_3seed-v0", num_envs=16, vectorization_mode=mode)

Settings of the top level are keywords (`steps=50`, `device="cpu"`), as in `esper_soa.make`.
Importing this module registers an id for every experiment that ships.
"""

import numpy as np
import torch

from esper_soa.adapters.flat import FlatEnvs, FlatObservation, Turn, flat_envs
from esper_soa.config.compose import experiments
from esper_soa.simulator import Info, Value

try:
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError as error:
    raise ImportError(f"{__name__} needs gymnasium: pip install 'esper-soa[envs]'") from error

Arrays = dict[str, np.ndarray]
Facts = dict[str, object]
Shown = tuple[Arrays, Facts]


def observation_space(envs: FlatEnvs) -> spaces.Dict:
    """The space of an env's observation: float32 [F], and a mask int8 [K] in which 1 is legal."""
    features = spaces.Box(-np.inf, np.inf, (envs.num_features,), np.float32)
    return spaces.Dict({"features": features, "action_mask": spaces.MultiBinary(envs.num_actions)})


def action_space(envs: FlatEnvs) -> spaces.Space:
    """The space of an env's action: a joint action, or a choice per head."""
    if envs.joint:
        return spaces.Discrete(envs.num_actions)
    return spaces.MultiDiscrete(list(envs.head_sizes))


def arrays(observation: FlatObservation) -> Arrays:
    """An observation of N envs."""
    return {
        "features": observation.features.cpu().numpy(),
        "action_mask": observation.action_mask.cpu().numpy().astype(np.int8),
    }


def facts(info: Info) -> Facts:
    """Info of N envs: accuracy (percent), illegal last action, round, env-step."""
    return {
        "accuracy": info.accuracy.cpu().numpy(),
        "illegal": info.illegal.cpu().numpy(),
        "round": np.full(len(info.illegal), info.round),
        "env_step": np.full(len(info.illegal), info.env_step),
    }


def of_env(batch: dict, env: int = 0) -> dict:
    """The entries of one env in `arrays` or `facts` of N."""
    return {name: values[env] for name, values in batch.items()}


class GrowthVectorEnv(VectorEnv):
    """N hosts. Where a trajectory ends, the next begins; `final_obs` in info is its last one."""

    metadata: Facts = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(
        self,
        experiment: str,
        num_envs: int = 1,
        actions: str = "joint",
        render_mode: str | None = None,
        **settings: Value,
    ) -> None:
        """experiment: one that ships. actions: "joint" or "heads". settings: as in `make`.

        render_mode: whatever a library hands to every env; nothing is drawn.
        """
        self.flat = flat_envs(experiment, actions, settings | {"envs": num_envs})
        self.num_envs = num_envs
        self.single_observation_space = observation_space(self.flat)
        self.single_action_space = action_space(self.flat)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: Facts | None = None) -> Shown:
        """Begin the next round, or round 0 of `seed`; options are not used."""
        flat_observation, info = self.flat.reset(seed)
        super().reset(seed=None if seed is None else int(seed), options=options)
        return arrays(flat_observation), facts(info)

    def step(self, actions: np.ndarray) -> tuple[Arrays, np.ndarray, np.ndarray, np.ndarray, Facts]:
        """Carry out an action per env; an illegal one becomes WAIT, and info says so."""
        turn = self.flat.step(torch.as_tensor(np.asarray(actions), device=self.flat.sim.device))
        ended = turn.terminated.cpu().numpy(), turn.truncated.cpu().numpy()
        values = facts(turn.info)
        over = ended[0] | ended[1]
        if over.any():  # the last observations, as gymnasium's vector envs tell them
            last = {**arrays(turn.last), "_features": over, "_action_mask": over}
            values |= {"final_obs": last, "_final_obs": over}
            values |= {"final_info": facts(turn.last_info), "_final_info": over}
        return arrays(turn.shown), turn.reward.cpu().numpy(), *ended, values


class GrowthEnv(gymnasium.Env):
    """A single host. After a rollback `reset` goes on from its snapshot, else afresh."""

    metadata: Facts = {"render_modes": []}

    def __init__(
        self,
        experiment: str,
        actions: str = "joint",
        render_mode: str | None = None,
        **settings: Value,
    ) -> None:
        """experiment and settings: as in esper_soa.make; actions: "joint" or "heads".

        render_mode: as of GrowthVectorEnv.
        """
        self.flat = flat_envs(experiment, actions, settings | {"envs": 1})
        self.observation_space = observation_space(self.flat)
        self.action_space = action_space(self.flat)
        self.continues: Turn | None = None  # after a rollback: what comes next

    def reset(self, *, seed: int | None = None, options: Facts | None = None) -> Shown:
        """Begin the next round, round 0 of `seed`, or go on after a rollback; no options."""
        turn = self.continues if seed is None else None
        self.continues = None
        shown, info = self.flat.reset(seed) if turn is None else (turn.shown, turn.info)
        super().reset(seed=None if seed is None else int(seed), options=options)
        return of_env(arrays(shown)), of_env(facts(info))

    def step(self, action: int | np.ndarray) -> tuple[Arrays, float, bool, bool, Facts]:
        """Carry out an action; an illegal one becomes WAIT, and info says so."""
        chosen = torch.as_tensor(np.asarray([action]), device=self.flat.sim.device)
        turn = self.flat.step(chosen, go_on=False)
        ended = bool(turn.terminated[0]), bool(turn.truncated[0])
        self.continues = turn if ended[0] and not turn.over else None
        last = of_env(arrays(turn.last))
        return last, float(turn.reward[0]), *ended, of_env(facts(turn.info))

    def action_masks(self) -> np.ndarray:
        """bool [K]: what is legal now, as sb3-contrib asks for it."""
        return self.flat.action_mask[0].cpu().numpy()


for _name in experiments():
    gymnasium.register(
        f"esper_soa/{_name}-v0",
        entry_point=f"{__name__}:GrowthEnv",
        vector_entry_point=f"{__name__}:GrowthVectorEnv",
        kwargs={"experiment": _name},
        disable_env_checker=True,
    )
