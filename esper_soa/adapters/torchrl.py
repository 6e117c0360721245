"""An environment of torchrl, with a mask over joint actions.

from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import ActionMask
from esper_soa.adapters.torchrl import TorchRLGrowthEnv
env = TransformedEnv(TorchRLGrowthEnv("cifar_3seed", envs=16), ActionMask())
rollout = env.rollout(75)
"""

import torch
from tensordict import TensorDict, TensorDictBase

from esper_soa.adapters.flat import FlatObservation, flat_envs
from esper_soa.simulator import Info, Value

try:
    from torchrl.data import Binary, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase
except ImportError as error:
    raise ImportError(f"{__name__} needs torchrl: pip install 'esper-soa[envs]'") from error


class TorchRLGrowthEnv(EnvBase):
    """N hosts, batch size [N]. A rollback terminates one env, which goes on from its snapshot when
    it is reset; the last env-step ends all episodes, and all envs begin the next round together.
    """

    def __init__(self, experiment: str, envs: int, **settings: Value) -> None:
        """experiment: one that ships. settings: as in `make`; `device` is the tensors' too."""
        self.flat = flat_envs(experiment, "joint", settings | {"envs": envs})
        super().__init__(device=self.flat.sim.device, batch_size=torch.Size([envs]))
        size = (envs,)
        place = {"device": self.flat.sim.device}
        self.observation_spec = Composite(
            features=Unbounded((*size, self.flat.num_features), dtype=torch.float32, **place),
            action_mask=Binary(
                self.flat.num_actions, (*size, self.flat.num_actions), dtype=torch.bool, **place
            ),
            accuracy=Unbounded((*size, 1), dtype=torch.float64, **place),
            shape=size,
            **place,
        )
        self.action_spec = Categorical(self.flat.num_actions, size, dtype=torch.int64, **place)
        self.reward_spec = Unbounded((*size, 1), dtype=torch.float64, **place)
        flag = Categorical(2, (*size, 1), dtype=torch.bool, **place)
        self.full_done_spec = Composite(
            done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=size, **place
        )
        self._next_seed: int | None = None
        self._over = True  # the next reset begins a round
        # at the last step
        self._rolled_back = torch.zeros(size, dtype=torch.bool, device=self.flat.sim.device)

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed
        self._over = True

    def _reset(self, tensordict: TensorDictBase | None = None, **_: object) -> TensorDictBase:
        """The next round; for envs just rolled back, the first observation behind that.

        Raises RuntimeError for others in mid-episode unless all are asked: they share env-steps.
        """
        all_envs = torch.ones_like(self._rolled_back)
        requested = all_envs if tensordict is None else tensordict.get("_reset", all_envs)
        requested = requested.reshape(self.batch_size)
        continues = not self._over and bool((self._rolled_back | ~requested).all())
        if not continues:
            if not bool(requested.all()):
                problem = "these envs have not ended, or all of them have"
                raise RuntimeError(f"{problem}: reset them all together")
            self._info = self.flat.reset(self._next_seed)[1]
            self._next_seed = None
            self._over = False
        self._rolled_back = ~all_envs
        return self._to_tensors(self.flat.shown, self._info)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        turn = self.flat.step(tensordict["action"].reshape(self.batch_size), go_on=False)
        self._rolled_back = turn.terminated
        self._info = turn.info
        self._over = turn.over
        tensors = self._to_tensors(turn.last, turn.info)
        numbers = {
            "reward": turn.reward,
            "terminated": turn.terminated,
            "truncated": turn.truncated,
            "done": turn.terminated | turn.truncated,
        }
        return tensors.update({name: values[:, None] for name, values in numbers.items()})

    def _to_tensors(self, observation: FlatObservation, info: Info) -> TensorDict:
        tensors = {
            "features": observation.features,
            "action_mask": observation.action_mask,
            "accuracy": info.accuracy[:, None],
        }
        return TensorDict(tensors, batch_size=self.batch_size, device=self.device)
