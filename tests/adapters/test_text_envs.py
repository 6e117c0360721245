"""A run on text is an environment of other libraries like any other."""

import pytest
import torch

import esper_soa

TINY = {
    "task.transformer.context": 8,
    "task.transformer.width": 8,
    "batch_size": 4,
    "train_samples": 16,
    "val_samples": 16,
    "steps": 6,
    "max_seeds": 3,
}


def test_a_host_of_text_grows_by_actions_with_names() -> None:
    sim = esper_soa.make("text_3seed", envs=2, **TINY)
    sim.reset()
    action = {"op": "germinate", "slot": "r0c0", "blueprint": "lora"}
    _, reward, _, _, _ = sim.step(action)
    assert reward.shape == (2,)
    assert sim.state.slots.blueprint[:, 0].tolist() == [8, 8]
    with pytest.raises(ValueError, match="conv_light"):
        sim.step({"op": "germinate", "slot": "r0c1", "blueprint": "conv_light"})
    assert sim.export(1)(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 256)


@pytest.mark.filterwarnings("ignore:.*Box observation space m.* value is -?infinity")
def test_gymnasium_takes_text() -> None:
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    from esper_soa.adapters.gymnasium import GrowthEnv

    checker.check_env(GrowthEnv("text_3seed", **TINY), skip_render_check=True)
