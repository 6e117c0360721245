"""Records: what they refuse, what they share, and what becomes of their leading axes."""

import pytest
import torch
from torch import Tensor

from esper_soa.tensor_record import TensorRecord


class Inner(TensorRecord):
    count: Tensor  # [T, N]


class Outer(TensorRecord):
    wide: Tensor  # [T, N, 4]
    inner: Inner


def record(first: int = 2, second: int = 3) -> Outer:
    numbers = torch.arange(first * second).view(first, second)
    lead = [first, second]
    return Outer(wide=numbers[..., None] * torch.ones(4), inner=Inner(count=numbers, batch_size=lead), batch_size=lead)


def test_names_that_are_none_and_names_that_are_missing_are_refused() -> None:
    with pytest.raises(TypeError, match="Inner has count, not cuont"):
        Inner(cuont=torch.zeros(2), batch_size=[2])
    with pytest.raises(TypeError, match="Outer has wide, inner, not wide"):
        Outer(wide=torch.zeros(2), batch_size=[2])
    with pytest.raises(TypeError, match="Outer has wide, inner, not all of wdie"):
        record().replace(wdie=torch.zeros(2, 3))


def test_other_leading_axes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Inner.count begins with \[3, 2\], not with \[2, 3\]"):
        Inner(count=torch.zeros(3, 2), batch_size=[2, 3])


def test_a_record_stands_and_replacing_makes_another() -> None:
    one = record()
    with pytest.raises(AttributeError, match="Outer.wide stands"):
        one.wide = torch.zeros(2, 3)  # type: ignore[misc]
    other = one.replace(wide=torch.zeros(2, 3))
    assert (one.wide.shape, other.wide.shape) == ((2, 3, 4), (2, 3))
    assert other.inner is one.inner
    assert other.shape == (2, 3)


@pytest.mark.parametrize(
    ("index", "lead"),
    [(1, (3,)), (slice(0, 1), (1, 3)), ((slice(None), torch.tensor([2, 0])), (2, 2)), (None, (1, 2, 3))],
)
def test_an_index_into_the_leading_axes_reaches_every_field(index: object, lead: tuple[int, ...]) -> None:
    one, part = record(), record()[index]
    assert (part.shape, part.inner.shape) == (lead, lead)
    assert torch.equal(part.wide, one.wide[index])  # type: ignore[index]
    assert torch.equal(part.inner.count, one.inner.count[index])  # type: ignore[index]


def test_a_copy_has_its_own_tensors_and_takes_those_of_another() -> None:
    one, other = record(), record()
    copy = one.clone()
    copy[0].update_(other[1])
    assert copy.inner.count.tolist() == [[3, 4, 5], [3, 4, 5]]
    assert one.inner.count.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(copy.wide[0], other.wide[1])


def test_what_is_made_of_several_records_has_their_leading_axes() -> None:
    joined = record(2, 3).apply(lambda *parts: torch.cat(parts, 1), record(2, 5))
    assert (joined.shape, joined.inner.shape, joined.wide.shape) == ((2, 8), (2, 8), (2, 8, 4))


def test_tools_for_nested_tensors_see_through_records() -> None:
    leaves, spec = torch.utils._pytree.tree_flatten(record())
    again = torch.utils._pytree.tree_unflatten([leaf + 1 for leaf in leaves], spec)
    assert len(leaves) == 2
    assert isinstance(again.inner, Inner)
    assert again.inner.count[0, 0] == 1
    assert again.to_tensordict().batch_size == (2, 3)
