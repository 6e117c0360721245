"""What CUDA graphs need of an env-step, shown without a GPU: a round of steps on static buffers
gives the same bits.

Inside of such a step nothing waits for the device, nothing is uploaded, and no buffer moves: what a
capture would refuse, or what a replay would not notice.
"""

import io
from collections.abc import Hashable, Sequence

import torch
from rich.console import Console

from benchmarks.sync_guard import SyncGuard
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.config.agent import NetworkConfig, PPOConfig
from esper_soa.env.world import World
from esper_soa.nets.graphs import CachedStep, StaticStep, StepCache
from esper_soa.training.loop.build import build_world
from esper_soa.training.loop.collect import Player, Round, play_round
from esper_soa.training.loop.players import build_player
from esper_soa.training.loop.recorder import NO_RECORDER, Recorder
from esper_soa.training.results.progress import Progress
from tests.builders.tiny_world import CPU, tiny_settings

STEPS = 5


class WatchedSteps(StepCache[StaticStep]):
    """Runs every step as a capture would see it, and looks at the addresses before and after."""

    def run_(self, key: Hashable, fresh: StaticStep, variants: Sequence[int]) -> StaticStep:
        step = super().run_(key, fresh, variants)
        places = [buffer.data_ptr() for buffer in step.buffers() if buffer.numel()]
        assert len(set(places)) == len(places)
        return step

    def advance_(self, kept: CachedStep[StaticStep], variant: int) -> None:
        places = [buffer.data_ptr() for buffer in kept.step.buffers()]
        with SyncGuard():
            super().advance_(kept, variant)
        assert [buffer.data_ptr() for buffer in kept.step.buffers()] == places


class Asking(Recorder):
    """Asks for all probabilities, as telemetry.level=full does."""

    full = True


def test_rounds_whose_decisions_lie_on_static_buffers_teach_the_same_bit_for_bit() -> None:
    settings = tiny_settings(4, 3, STEPS)
    settings.compute.engine = "torch"
    settings.policy.network = NetworkConfig(hidden=32, features=16)
    settings.policy.ppo = PPOConfig(
        epochs=2, minibatches=2, entropy_anneal_rounds=4, entropy_coef_end=0.01
    )
    found = []
    for captured_decisions in (False, True):
        world = build_world(settings, CPU)
        player = build_player(settings.policy, world)
        kept = [WatchedSteps(capture=False) for _ in range(3)]
        if captured_decisions:
            learner = player.learner
            assert isinstance(player.agent, RecurrentPolicy)
            assert learner is not None
            world.kernels = world.kernels._replace(steps=kept[0])
            learner.steps = kept[1]
            player.agent.steps = kept[2]
        found.append(learned(world, player))
        if captured_decisions:
            assert [steps.counts["plain"] for steps in kept] == [
                3 * 3 * STEPS,
                3 * 2 * 2,
                3 * (STEPS + 1),
            ]
            assert [len(steps._cached) for steps in kept] == [3, 2, 1]
    ordinary, same = found
    assert same.keys() == ordinary.keys()
    for name, value in ordinary.items():
        assert torch.equal(same[name], value), name


def learned(world: World, player: Player) -> dict[str, torch.Tensor]:
    """Weights of policy and optimiser after three rounds, and what the rounds reported."""
    assert player.learner is not None
    found = {}
    for number in range(3):
        quiet = Progress(4 * STEPS, Console(file=io.StringIO()), "off")
        recorder = Asking() if number == 2 else NO_RECORDER
        result, rollout = play_round(world, player, Round(number, quiet, recorder=recorder))
        assert rollout is not None
        # a restart, as after a rollback: other stretches in one of the updates
        rollout.rows.reset[2, 1] = number == 1
        report = player.learner.update(rollout)
        assert report["steps"] > 0
        found |= {
            f"{number}/{name}": torch.tensor(value).nan_to_num() for name, value in report.items()
        }
        numbers = {name: value for name, value in result.record.items() if isinstance(value, float)}
        assert numbers
        found |= {
            f"{number}/{name}": torch.tensor(value).nan_to_num() for name, value in numbers.items()
        }
    found |= {name: value.clone() for name, value in player.learner.policy.state_dict().items()}
    return found | dict(player.learner.adam._asdict())
