"""Env-steps per second under agents of other libraries, beside the same hosts without them.

    python -m benchmarks.environments                       16 hosts of cifar_3seed, 5 turns
    python -m benchmarks.environments --envs 64 --results ''

Every side plays a round of the same number of env-steps per turn, in turns: `simulator` by the
package's own policy of random choices, `gymnasium` by random legal actions, `MaskablePPO` of
sb3-contrib with its update of ten epochs, the `Collector` of torchrl by a masked linear policy
without an update. Needs the extra `envs`. Prints a table, and a JSON line, which is also appended
to benchmarks/results/environments.jsonl.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import gymnasium
import torch
from sb3_contrib import MaskablePPO
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import ActionMask
from torchrl.modules import MaskedCategorical, ProbabilisticActor

from benchmarks import sections
from benchmarks.records import command_line, origin, report
from benchmarks.timing import in_turns
from esper_soa.adapters.gymnasium import GrowthVectorEnv
from esper_soa.adapters.sb3 import GrowthVecEnv
from esper_soa.adapters.torchrl import TorchRLGrowthEnv
from esper_soa.simulator import Simulator, make

Round = Callable[[], object]  # plays one


def random_rounds(env: gymnasium.vector.VectorEnv, steps: int) -> None:
    """`steps` env-steps of random legal actions, from a reset."""
    observation, _ = env.reset()
    for _ in range(steps):
        legal = torch.as_tensor(observation["action_mask"], dtype=torch.float32)
        observation, *_ = env.step(torch.multinomial(legal, 1)[:, 0].numpy())


def collected(env: TorchRLGrowthEnv, steps: int) -> Iterator[object]:
    """Rounds as a Collector gives them, without end."""
    masked = TransformedEnv(env, ActionMask())
    logits = nn.Linear(env.observation_spec["features"].shape[-1], env.action_spec.n)
    policy = ProbabilisticActor(
        TensorDictModule(logits, in_keys=["features"], out_keys=["logits"]),
        in_keys={"logits": "logits", "mask": "action_mask"},
        out_keys=["action"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    frames = env.batch_size[0] * steps
    auto = {"auto_register_policy_transforms": True}
    return iter(Collector(masked, policy, frames_per_batch=frames, total_frames=-1, **auto))


def exhausted(sim: Simulator) -> int:
    """Env-steps of a round of the simulator."""
    return sum(1 for _ in sim.episode())


def sides(experiment: str, envs: int, steps: int) -> dict[str, Round]:
    """What plays a round, by name."""
    sim = make(experiment, policy="random", envs=envs, steps=steps)
    vector = GrowthVectorEnv(experiment, envs, steps=steps)
    hosts = GrowthVecEnv(experiment, envs, steps=steps)
    model = MaskablePPO("MultiInputPolicy", hosts, n_steps=steps, batch_size=envs * steps // 4)
    frames = collected(TorchRLGrowthEnv(experiment, envs, steps=steps), steps)
    return {
        "simulator": partial(exhausted, sim),
        "gymnasium": partial(random_rounds, vector, steps),
        "MaskablePPO": partial(model.learn, envs * steps, reset_num_timesteps=False),
        "Collector": partial(next, frames),
    }


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--experiment", default="cifar_3seed")
    for name, value in {"envs": 16, "steps": 75, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    report(parser.parse_args(arguments), measure, sections.environments)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """The record: seconds of a round by side, of `repeats` turns after one that does not count."""
    work = {name: getattr(options, name) for name in ("experiment", "envs", "steps", "repeats")}
    players = sides(options.experiment, options.envs, options.steps)
    seconds: dict[str, list[float]] = {name: [] for name in players}
    for name in itertools.chain(players, in_turns([*players], options.repeats)):
        begun = time.perf_counter()
        players[name]()
        seconds[name].append(time.perf_counter() - begun)
    count = options.envs * options.steps
    rows = [
        {
            "side": name,
            "eps": count / statistics.median(found[1:]),
            "low": count / max(found[1:]),
            "high": count / min(found[1:]),
        }
        for name, found in seconds.items()
    ]
    return origin("environments", torch.device("cpu")) | work | {"rows": rows}


if __name__ == "__main__":
    main()
