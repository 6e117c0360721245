"""Grids of values: what tune= takes, and how a grid goes on where the best value is its last."""

import math

import pytest

from esper_soa.lab.compare.grid import configurations_of, edges, grid_of, widened
from esper_soa.system.errors import UserError


def test_a_grid_has_lists_and_geometric_ranges() -> None:
    grid = grid_of("task.host_lr=log(0.02,0.3) task.momentum=[0.9,0.5] reward.mode=[net,shaped]")
    assert grid["task.host_lr"] == pytest.approx((0.02, 0.04, 0.08, 0.16))
    assert grid["task.momentum"] == (0.9, 0.5)
    assert grid["reward.mode"] == ("net", "shaped")
    assert len(configurations_of(grid)) == 16
    assert configurations_of(grid)[1] == tuple(zip(grid, (0.02, 0.9, "shaped"), strict=True))


def test_the_ends_of_a_grid_go_on_by_the_factor_that_they_have() -> None:
    grid = {"task.host_lr": (0.02, 0.04, 0.12), "task.momentum": (0.9, 0.5), "data.name": ("a",)}

    def beyond(rate: float, momentum: float) -> dict[str, float]:
        return edges(
            grid, (("task.host_lr", rate), ("task.momentum", momentum), ("data.name", "a"))
        )

    assert beyond(0.04, 0.5) == {"task.momentum": pytest.approx(0.25 / 0.9)}
    assert beyond(0.02, 0.5)["task.host_lr"] == 0.01
    further = beyond(0.12, 0.9)  # momentum must be below 1
    assert further["task.host_lr"] == 0.36
    assert math.isnan(further["task.momentum"])
    wider = widened(grid, [further, beyond(0.02, 0.9), further])
    assert wider == grid | {"task.host_lr": (0.02, 0.04, 0.12, 0.36, 0.01)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "^tune='': must be settings, such as"),
        ("task.host_lr", "^task.host_lr='': must be a list of two values or more"),
        ("task.host_lr=[0.1]", r"^task.host_lr=\[0.1\]: must be a list of two"),
        ("task.host_lr=[0.1,0.10]", "^task.host_lr=.*: must be a list of two"),
        ("task.host_lr=log(0.1,0)", "^task.host_lr=.*: must be .* or log"),
        ("task.host_lr=log(x,1)", "^task.host_lr=.*: must be .* or log"),
        ("task.host_lr=[0.1,-1]", "^task.host_lr=-1"),
        ("task.host_lr=[0.1,x]", "^task.host_lr="),
        ("rounds=[1,2]", r"^tune=rounds=\[1,2\]: must be settings that can differ by env"),
        ("task.host_lr=log(1e-30,1)", "^task.host_lr=.*at most 64"),
        ("task.host_lr=log(0.001,0.3) task.seed_lr=log(0.001,0.3)", "at most 64 .*, not 81"),
    ],
)
def test_what_is_no_grid_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        grid_of(text)
