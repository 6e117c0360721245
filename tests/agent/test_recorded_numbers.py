"""Numbers of updates as they were recorded: all diagnostics, and all that the learner keeps."""

import pytest
import torch

from esper_soa.agent import objective
from esper_soa.agent.ppo import Learner
from esper_soa.agent.rollout import Rollout
from esper_soa.config.agent import ImitationConfig, PPOConfig
from tests.builders.agent_world import CPU, random_rollout, small_policy
from tests.builders.recorded_numbers import assert_recorded, fingerprints

# Steps are large, so that every term of the loss moves something.
PPO = {
    "lr": 0.01,
    "adam_eps": 1e-2,
    "epochs": 3,
    "minibatches": 2,
    "target_kl": 0.003,
    "clip_ratio": 0.1,
    "max_grad_norm": 0.7,
    "entropy_anneal_rounds": 4,
    "entropy_coef_end": 0.3,
    "value_warmup_rounds": 3,
    "contribution_warmup": 2,
    "reward_clip": 1.5,
}


def lively(rollout: Rollout, learner: Learner, seed: int) -> Rollout:
    """The rollout with rewards, ends of trajectories, vetoed ops and rows that do not count."""
    rows = rollout.rows
    draw = torch.rand(4, *rows.shape, generator=torch.Generator().manual_seed(seed))
    vetoed = draw[0] < 0.2
    changed = {
        "terminal": draw[1] < 0.15,
        "valid": draw[2] > 0.1,
        "effective_op": torch.where(vetoed, 0, rows.effective_op),
    }
    lived = rollout._replace(rows=rows.replace(**changed))
    learner.fill_rewards_(lived, 3 * draw[3].double() - 1)
    return lived


def test_updates_are_those_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "CONTRIBUTION_CLIP", 0.9)  # below what occurs here
    policy = small_policy(3, layers=2, observation_clip=1.2)
    imitation = ImitationConfig(rounds=1, epochs=2, lr=0.02)
    learner = Learner(policy, PPOConfig(**PPO), 8, seed=3, imitation=imitation)
    found = {}
    for update in range(4):
        rollout = lively(random_rollout(policy, 6, 7, seed=update), learner, update)
        if update == 0:
            other = random_rollout(policy, 6, 7, seed=9).rows.action
            report = learner.imitate(rollout._replace(taught=other))
        else:
            report = learner.update(rollout)
        found |= {f"{update}.{name}": torch.tensor(number) for name, number in report.items()}
    state = learner.state_dict()
    kept = {name: state[name] for name in ("policy", "adam", "reward", "value")}
    counts = {name: torch.tensor(state[name]) for name in ("rounds", "train_steps", "skipped")}
    memory = policy.start(2, CPU)
    assert_recorded("updates", fingerprints(found | kept | counts | {"memory": memory[0]}), 1e-3)
