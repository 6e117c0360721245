"""Sizes of tensors that are told before anything is built, against those that a pass makes."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper_soa.config.compose import compose_settings
from esper_soa.config.nets import TaskConfig, sort_slots
from esper_soa.config.settings import ComputeConfig
from esper_soa.nets.data.datasets import synthetic
from esper_soa.nets.data.images import IMAGES
from esper_soa.nets.engines.torch.engine import TorchEngine
from esper_soa.nets.model.blueprints import BLUEPRINTS
from esper_soa.nets.model.host import MOST_INDEXED, activation_elements, host_shape
from esper_soa.nets.setup import Setup
from esper_soa.nets.trial import Workload
from esper_soa.training.loop.build import make_setup
from esper_soa.vocabulary import Blend, Blueprint, Stage
from tests.builders.tiny_world import (
    CPU,
    planned,
    play_state,
    seeds_where,
    tiny_rules,
    tiny_settings,
)

META = torch.device("meta")


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator makes; views are of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        for one in [] if func.is_view else found if isinstance(found, tuple | list) else [found]:
            self.elements = max(self.elements, one.numel() if isinstance(one, Tensor) else 0)
        return found


def shape_of(task: TaskConfig, slots: list[str], *rows: int) -> int:
    shape = host_shape(task, sort_slots(task, slots), BLUEPRINTS)
    return activation_elements(shape, IMAGES.elements, *rows)


def test_the_largest_is_that_of_the_first_block_or_the_images() -> None:
    assert shape_of(TaskConfig(), ["r0c0"]) == 8 * 32 * 32
    # the images; seeds lie in a map of 8 x 8
    assert shape_of(TaskConfig(base_channels=1), ["r0c2"]) == 3 * 32 * 32
    # 2 rows of 8 channels, 4 of 16 and 8 of 32
    assert shape_of(TaskConfig(), ["r0c0", "r0c1", "r0c2"], 8) == 2 * 8 * 32 * 32


def grown_alike(setup: Setup, blueprint: int) -> Workload:
    """Networks with blending seeds of one kind in all slots."""
    workload = Workload(setup, synthetic)
    full = np.ones(workload.seeds.running.shape, dtype=bool)
    workload.seeds = seeds_where(full, Stage.BLENDING, blueprint, Blend.ADD)
    workload.alpha = torch.full(full.shape, 0.5, dtype=torch.float64, device=setup.device)
    return workload


@pytest.mark.parametrize("batch_size", [10, 13])
def test_a_pass_makes_no_larger_tensor(batch_size: int) -> None:
    cfg = tiny_settings(4, 3, 4)
    cfg.task = TaskConfig()
    cfg.compute = ComputeConfig(workers=1)
    cfg.batch_size = cfg.train_samples = batch_size
    setup = make_setup(cfg, CPU)
    workload = grown_alike(setup, Blueprint.CONV_LIGHT)
    training, validation = workload.training, workload.validation
    nets = setup._replace(env_chunk=4)
    plan = planned(TorchEngine(), nets, workload.seeds)
    given = (nets, workload.weights, workload.alpha, plan)
    with Largest() as trained:
        TorchEngine().train_(*given, training, 1)
    assert trained.elements <= 4 * batch_size * activation_elements(nets.shape, IMAGES.elements)
    with Largest() as tested:
        TorchEngine().validate(*given, validation)
    images = min(nets.eval_batch, workload.val_samples)
    bound = 4 * images * activation_elements(nets.shape, IMAGES.elements, 8)
    assert bound / 4 < tested.elements <= bound


MANY = 65_536


def test_very_many_hosts_step_on_a_device_without_values_and_no_tensor_exceeds_its_bound() -> None:
    words = ["task=cifar_minimal", f"envs={MANY}", "slots=[r0c0,r0c1]", "data=synthetic"]
    setup = make_setup(compose_settings("", words), META)
    assert setup.env_chunk < MANY
    with Largest() as made:
        workload = grown_alike(setup, Blueprint.BOTTLENECK)  # 8 channels in slots of 2
        training, validation = workload.training, workload.validation
        plan = planned(TorchEngine(), setup, workload.seeds)
        given = (setup, workload.weights, workload.alpha, plan)
        report = TorchEngine().train_(*given, training, 1)
        tested = TorchEngine().validate(*given, validation)
    assert report.loss.shape == (MANY,)
    assert tested.accuracy.shape == (MANY, 4)
    assert MOST_INDEXED / 8 < made.elements <= MOST_INDEXED


def test_the_env_state_of_very_many_hosts_steps_within_the_bound() -> None:
    with Largest() as made:
        steps = play_state(tiny_rules(3, 1, device=META), MANY, seed=0, device=META)
        assert next(iter(steps)).result.terms.total.shape == (MANY,)
    assert made.elements <= MOST_INDEXED
