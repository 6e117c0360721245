"""torchrl on our envs: its check of specs, masked rollouts, a collector, an update of PPO."""

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from tests.builders.adapter_sizes import ENVS, IMAGES, SEED, STEPS, Case, Played

pytest.importorskip("torchrl")
adapter = pytest.importorskip("esper_soa.adapters.torchrl")
envs = pytest.importorskip("torchrl.envs")


def growth(case: Case = IMAGES):
    return adapter.TorchRLGrowthEnv(case.experiment, envs=ENVS, seed=SEED, **case.sizes)


def masked(case: Case = IMAGES):
    return envs.TransformedEnv(growth(case), envs.transforms.ActionMask())


def test_torchrl_finds_no_fault_in_the_specs(case: Case) -> None:
    envs.utils.check_env_specs(growth(case))


def test_masked_rollouts_take_legal_actions_for_three_episodes() -> None:
    torch.manual_seed(0)
    rollout = masked().rollout(3 * STEPS, break_when_any_done=False)
    chosen = rollout["action_mask"].gather(2, rollout["action"][:, :, None])
    assert chosen.all()
    ends = rollout["next", "done"].squeeze(-1)
    assert (
        ends.nonzero()[:, 1].reshape(ENVS, 3).tolist()
        == [[STEPS - 1, 2 * STEPS - 1, 3 * STEPS - 1]] * ENVS
    )
    assert torch.equal(rollout["next", "truncated"], rollout["next", "done"])


def test_the_same_actions_give_the_rewards_of_the_simulator_to_the_bit(
    case: Case, played: Played
) -> None:
    env = growth(case)
    shown = env.reset()
    for step in range(STEPS):
        assert torch.equal(shown["features"][:, : played.features.shape[2]], played.features[step])
        shown = env.step(shown.set("action", played.actions[step]))["next"]
        assert torch.equal(shown["reward"][:, 0], played.rewards[step])
        assert bool(shown["truncated"].all()) == (step == STEPS - 1)
    assert shown["accuracy"][:, 0].tolist() == played.accuracy.tolist()
    env.set_seed(SEED)
    assert torch.equal(env.reset()["features"][:, : played.features.shape[2]], played.features[0])


def test_a_breakdown_ends_one_trajectory_which_goes_on() -> None:
    env = growth()
    shown = env.reset()
    env.flat.sim.world.weights["host", "params"][1] = torch.nan
    ends = []
    for _ in range(STEPS - 1):
        stepped, shown = env.step_and_maybe_reset(
            shown.set("action", torch.zeros(ENVS, dtype=torch.int64))
        )
        assert stepped["next", "reward"].isfinite().all()
        assert torch.equal(shown["accuracy"], stepped["next", "accuracy"])
        ends.append(stepped["next", "terminated"][:, 0].tolist())
        if any(ends[-1]):
            assert not torch.equal(shown["features"][1], stepped["next", "features"][1])
            assert torch.equal(shown["features"][0], stepped["next", "features"][0])
    assert ends[1] == [False, True, False]
    assert sum(map(sum, ends)) == 1
    with pytest.raises(
        RuntimeError, match="^these envs have not ended, or all of them have: reset them all tog"
    ):
        env.reset(TensorDict({"_reset": torch.tensor([[True], [False], [False]])}, [ENVS]))


def test_a_collector_fills_its_frames_and_ppo_learns_from_them(case: Case) -> None:
    collectors = pytest.importorskip("torchrl.collectors")
    modules = pytest.importorskip("torchrl.modules")
    objectives = pytest.importorskip("torchrl.objectives")
    nested = pytest.importorskip("tensordict.nn")
    torch.manual_seed(0)
    env = masked(case)
    size = env.observation_spec["features"].shape[-1]
    actions = env.action_spec.n
    logits = nested.TensorDictModule(
        nn.Linear(size, actions), in_keys=["features"], out_keys=["logits"]
    )
    actor = modules.ProbabilisticActor(
        logits,
        in_keys={"logits": "logits", "mask": "action_mask"},
        out_keys=["action"],
        distribution_class=modules.MaskedCategorical,
        return_log_prob=True,
    )
    critic = modules.ValueOperator(nn.Linear(size, 1), in_keys=["features"])
    kind = (
        collectors.Collector if hasattr(collectors, "Collector") else collectors.SyncDataCollector
    )
    frames = 0
    for batch in kind(env, actor, frames_per_batch=ENVS * 50, total_frames=ENVS * 100):
        frames += batch.numel()
        assert batch["action_mask"].gather(2, batch["action"][:, :, None]).all()
    assert frames == ENVS * 100
    loss = objectives.ClipPPOLoss(actor, critic)
    batch["next", "reward"] = batch["next", "reward"].float()
    objectives.value.GAE(gamma=0.99, lmbda=0.95, value_network=critic)(batch)
    found = loss(batch.reshape(-1))
    total = found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]
    total.backward()
    assert total.isfinite()
    assert all(parameter.grad is not None for parameter in loss.parameters())
