"""A run on text is an environment of other libraries like any other."""

import pytest
import torch

import esper_soa
from tests.builders.adapter_sizes import TEXT


def test_a_host_of_text_grows_by_actions_with_names() -> None:
    sim = esper_soa.make(TEXT.experiment, envs=2, **TEXT.sizes)
    sim.reset()
    action = {"op": "germinate", "slot": "r0c0", "blueprint": "lora"}
    _, reward, _, _, _ = sim.step(action)
    assert reward.shape == (2,)
    assert sim.state.slots.blueprint[:, 0].tolist() == [8, 8]
    with pytest.raises(ValueError, match="conv_light"):
        sim.step({"op": "germinate", "slot": "r0c1", "blueprint": "conv_light"})
    assert sim.export(1)(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 256)
