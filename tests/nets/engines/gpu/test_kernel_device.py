"""The kernels' tests give them tensors of one device: that of a GPU where there is one."""

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

pytest.importorskip("triton", reason="the package triton is not installed (extra: test)")

from triton import knobs
from triton.runtime import JITFunction, interpreter

from tests.builders import gpu_mixtures
from tests.builders.gpu_mixtures import drawn, mixed_plan, random_weights, slot_shape
from tests.nets.engines.gpu import test_slots
from tests.nets.engines.gpu.kernels import test_block

META = torch.device("meta")  # where a tensor of the CPU raises beside one that is there


def test_all_that_kernels_are_given_lies_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[str]()

    def launch(self: object, *arguments: object, **options: object) -> None:
        given = [one for one in tree_leaves(arguments) if isinstance(one, Tensor)]
        found.extend(one.device.type for one in given)

    for module in (gpu_mixtures, test_block, test_slots):
        monkeypatch.setattr(module, "DEVICE", META)
    interpreted = knobs.runtime.interpret
    launched = interpreter.InterpretedFunction if interpreted else JITFunction
    monkeypatch.setattr(launched, "run", launch)
    case = test_block.CASES[1]
    test_block.block_results(case, *test_block.given(case))
    shape = slot_shape(4)
    x = drawn(1, 2, 1, 2, 2, 4)
    alpha = torch.zeros(2, 1, device=META)
    given = (shape, random_weights(shape, 2, 5), mixed_plan(2, 1, 0), alpha, x, x)
    test_slots.triton_slot(*given)
    assert set(found) == {"meta"}
    assert len(found) > 30
