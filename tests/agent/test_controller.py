"""The policy as a module that stands alone decides as the policy does, and remembers by itself."""

import json

import pytest
import torch

from esper_soa.agent.controller import Controller, controller_of, controller_spec
from esper_soa.agent.policy import RecurrentPolicy
from esper_soa.agent.protocol import restart
from esper_soa.config.agent import NetworkConfig, PolicyConfig, PPOConfig
from esper_soa.config.nets import SlotSpec
from esper_soa.env.observation import feature_names
from esper_soa.vocabulary import HEAD_NAMES
from tests.builders.tiny_world import CPU, EnvStep, play_state, tiny_rules

NUM_ENVS = 6
STEPS = 12
RULES = tiny_rules(3, STEPS)
PPO = PPOConfig(observation_clip=0.5, probability_floor=dict.fromkeys(HEAD_NAMES, 0.02))
CONFIG = PolicyConfig(network=NetworkConfig(hidden=16, features=8, slot_features=8), ppo=PPO)


def policy(config: PolicyConfig = CONFIG) -> RecurrentPolicy:
    """A policy that has seen something."""
    with torch.random.fork_rng(devices=[]):
        made = RecurrentPolicy(config, RULES.setup.shape.slots, seed=3)
    made.mean.add_(0.1)
    made.var.mul_(2.0)
    return made


def controller(config: PolicyConfig = CONFIG) -> Controller:
    """It, by way of JSON and tensors."""
    spec = json.loads(json.dumps(controller_spec(config, RULES.setup.shape.slots)))
    return controller_of(
        spec, {f"policy.{name}": value for name, value in policy(config).state_dict().items()}
    )


def call(
    module: Controller, played: EnvStep, **more: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The module on what an env-step shows, as plain tensors."""
    seen = played.view.observation
    masks = played.view.masks
    legal = {name: masks.get(name) for name in masks.keys()}  # noqa: SIM118 - of a record
    return module(seen.features, seen.blueprints, legal, **more)


@pytest.mark.parametrize("deterministic", [False, True])
def test_its_actions_are_those_of_the_policy_to_the_bit_with_envs_that_begin_again(
    deterministic: bool,
) -> None:
    config = PolicyConfig(network=CONFIG.network, ppo=PPO, deterministic=deterministic)
    original = policy(config)
    module = controller(config)
    memory = fresh = original.start(NUM_ENVS, CPU)
    assert module.deterministic is deterministic
    ops = set[int]()
    for step, played in enumerate(play_state(RULES, NUM_ENVS, 1)):
        again = (
            torch.arange(NUM_ENVS) % 4 == step % 4
            if step
            else torch.zeros(NUM_ENVS, dtype=torch.bool)
        )
        decision, memory = original.act(played.view, restart(memory, fresh, again))
        action = call(module, played, noise=played.view.noise, restarted=again)
        assert list(action) == list(HEAD_NAMES)
        for name in HEAD_NAMES:
            assert torch.equal(action[name], decision.action.get(name))
        for mine, its in zip(module.memory, memory, strict=True):
            assert torch.equal(mine, its)
            assert not mine.requires_grad
        ops |= set(action["op"].tolist())
    assert len(ops) > 1


def test_as_an_agent_it_is_the_policy_and_leaves_its_own_memory_alone() -> None:
    original = policy()
    module = controller()
    mine = module.start(NUM_ENVS, CPU)
    its = original.start(NUM_ENVS, CPU)
    for played in play_state(RULES, NUM_ENVS, 2):
        decision, mine = module.act(played.view, mine)
        wanted, its = original.act(played.view, its)
        assert (decision == wanted).all()
    assert module.memory == ()


def test_reset_forgets_and_another_number_of_envs_needs_it() -> None:
    module = controller()
    (played, *_) = play_state(RULES, NUM_ENVS, 3)
    first = call(module, played, noise=played.view.noise)
    remembered = [part.clone() for part in module.memory]
    call(module, played, noise=played.view.noise)
    assert not torch.equal(module.memory[0], remembered[0])
    module.reset()
    again = call(module, played, noise=played.view.noise)
    assert all(torch.equal(first[name], again[name]) for name in first)
    (fewer, *_) = play_state(RULES, 2, 3)
    with pytest.raises(ValueError, match=r"2 envs, where the memory is of 6: call reset\(\) first"):
        call(module, fewer)
    module.reset()
    assert call(module, fewer)["op"].shape == (2,)


def test_without_noise_it_draws_from_torch_and_every_choice_is_legal() -> None:
    module = controller()
    for played in play_state(RULES, NUM_ENVS, 4):
        torch.manual_seed(7)
        before = module.memory
        action = call(module, played)
        legal = played.view.masks.slot_by_op.gather(
            1, action["op"].view(-1, 1, 1).expand(-1, 1, 3)
        ).squeeze(1)
        assert legal.gather(1, action["slot"].unsqueeze(1)).all()
        assert played.view.masks.op.gather(1, action["op"].unsqueeze(1)).all()
        torch.manual_seed(7)
        module.memory = before
        same = call(module, played)
        assert all(torch.equal(action[name], same[name]) for name in action)
    module.deterministic = True
    module.memory = before
    one = call(module, played, noise=played.view.noise)
    module.memory = before
    other = call(module, played, noise=1 - played.view.noise)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_spec_says_all_of_a_policy_and_shares_nothing_with_its_settings() -> None:
    network = NetworkConfig(hidden=16, features=8, layers=2, slot_features=64)
    config = PolicyConfig(network=network, deterministic=True, observe=["task.host_lr"], ppo=PPO)
    sizes = {"hidden": 16, "features": 8, "layers": 2, "slot_features": 64}
    wanted = {
        "network": sizes | {"blueprint_embedding": 4},
        "deterministic": True,
        "probability_floor": dict.fromkeys(HEAD_NAMES, 0.02),
        "observation_clip": 0.5,
        "slots": [{"name": "late", "row": 1, "block": 2, "channels": 9, "size": 4, "depth": 0.75}],
        "features": list(feature_names(("late",), ["task.host_lr"])),
        "heads": dict(zip(HEAD_NAMES, (1, 2, 4, 3, 3, 4, 5, 6), strict=True)),
        "blueprints": ["noop", "own"],
    }
    slots = [SlotSpec("late", 1, 2, 9, size=4, depth=0.75, axes=1)]
    spec = controller_spec(config, slots, ("noop", "own"))
    assert spec == wanted
    made = Controller(spec)
    assert made.spec is spec
    assert made.policy.sizes == (24, 31)
    spec["network"].clear()
    spec["probability_floor"].clear()
    assert controller_spec(config, slots, ("noop", "own")) == wanted


def test_its_making_takes_nothing_from_the_random_numbers_of_the_process() -> None:
    before = torch.random.get_rng_state()
    controller()
    assert torch.equal(torch.random.get_rng_state(), before)
