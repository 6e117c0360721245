"""What training costs: counts by hand; test_blueprints.py has those of torch."""

import pytest
import torch

from esper_soa.nets.config import TaskConfig, enabled_slots
from esper_soa.nets.host import host_shape
from esper_soa.nets.model.flops import TrainingFlop, training_flop
from esper_soa.vocabulary import BLUEPRINT_NAMES, CNN_BLUEPRINTS, Blueprint

CPU = torch.device("cpu")
BASELINE = TaskConfig()  # 8, 16 and 32 channels on 32, 16 and 8 pixels, kernels of 3


def costs(task: TaskConfig, *slots: str) -> TrainingFlop:
    return training_flop(host_shape(task, enabled_slots(task, list(slots))), CPU)


def test_a_host_costs_its_convolutions_and_its_classifier_three_times_over() -> None:
    blocks = 32 * 32 * 3 * 9 * 8 + 16 * 16 * 8 * 9 * 16 + 8 * 8 * 16 * 9 * 32
    classifier = 32 * 10
    # two FLOP per multiplication and addition; forward, gradients of inputs, gradients of weights
    assert costs(BASELINE, "r0c0").host == 3 * 2 * (blocks + classifier)


@pytest.mark.parametrize(
    ("slot", "channels", "pixels"),
    [("r0c0", 8, 32 * 32), ("r1c0", 8, 16 * 16), ("r0c2", 32, 8 * 8), ("r1c2", 32, 4 * 4)],
)
def test_every_seed_costs_its_layers_on_the_pixels_of_its_slot(
    slot: str, channels: int, pixels: int
) -> None:
    c = channels
    narrow = max(8, channels // 4)
    reduced = max(1, channels // 4)
    by_hand = {
        "conv_light": pixels * c * c * 9,
        "conv_heavy": 2 * pixels * c * c * 9,
        "conv_small": pixels * c * c,
        "depthwise": pixels * (c * 9 + c * c),
        "bottleneck": pixels * (c * narrow + narrow * narrow * 9 + narrow * c),
        "attention": c * reduced + reduced * c,
        "norm": 0,
    }
    found = costs(BASELINE, slot)
    assert found.seed.shape == (1, len(BLUEPRINT_NAMES))
    for name, products in by_hand.items():
        assert found.seed[0, BLUEPRINT_NAMES.index(name)] == 3 * 2 * products, name
    assert found.gate.tolist() == [3 * 2 * (c * narrow + narrow)]


def test_what_is_no_cnn_blueprint_costs_nothing() -> None:
    found = costs(BASELINE, "r0c0", "r0c1")
    others = [code for code in range(len(BLUEPRINT_NAMES)) if code not in CNN_BLUEPRINTS]
    assert not found.seed[:, others].any()
    assert found.seed[:, Blueprint.CONV_LIGHT].all()


def test_hosts_that_end_in_one_pixel_are_counted() -> None:
    deep = TaskConfig(base_channels=1, num_blocks=7, kernel_size=3, num_pools=5)
    products = sum(
        (32 >> min(i, 5)) ** 2 * max(3 if i == 0 else 2 ** (i - 1), 1) * 9 * 2**i for i in range(7)
    )
    assert costs(deep, "r0c6").host == 3 * 2 * (products + 64 * 10)


def test_hosts_of_other_widths_are_counted() -> None:
    odd = TaskConfig(base_channels=7)
    assert costs(odd, "r0c0").host == 6 * (
        32**2 * 3 * 9 * 7 + 16**2 * 7 * 9 * 14 + 8**2 * 14 * 9 * 28 + 28 * 10
    )
    narrow = TaskConfig(base_channels=1, kernel_size=1)
    assert costs(narrow, "r0c0").host == 6 * (32**2 * 3 * 1 + 16**2 * 1 * 2 + 8**2 * 2 * 4 + 4 * 10)
