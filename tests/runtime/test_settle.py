"""What `settle` records of a bound tensor, and which writes by the user show afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.runtime.bindings import Bound, Form

ITEM = Input("param", "w", Spec((4, 2), torch.float32))


def bound(form: Form, tensor: Tensor | None = None) -> Bound:
    own = nn.Parameter(torch.arange(8.0).reshape(4, 2)) if tensor is None else tensor
    return Bound(ITEM, Layout.replicated(Mesh("d=2"), 2), own, form)


@torch.no_grad()
def in_place(x: Tensor) -> None:
    x.mul_(2.0)


def by_data(x: Tensor) -> None:
    x.data.mul_(2.0)


def assigned(x: Tensor) -> None:
    x.data = x.data * 2.0


@torch.no_grad()
def through_a_view(x: Tensor) -> None:
    x[1].add_(1.0)


def nothing(x: Tensor) -> None:
    pass


Write = Callable[[Tensor], None]
# Whether address and version show a write.
SHOWN: list[tuple[Write, bool]] = [
    (in_place, True), (through_a_view, True), (assigned, True), (by_data, False), (nothing, False)
]  # fmt: skip


@pytest.mark.parametrize("form", ["shared", "copy"])
@pytest.mark.parametrize(("write", "is_shown"), SHOWN)
def test_a_tensor_is_unwritten_until_the_user_writes_it_and_again_once_settled(
    write: Write, is_shown: bool, form: Form
) -> None:
    """Of a copy every write shows by its values; shared memory has what left no trace, too."""
    its = bound(form)
    assert its.is_written  # no step has seen it
    its.settle()
    assert not its.is_written
    write(its.tensor)
    assert its.is_written == (is_shown or (form == "copy" and write is not nothing))
    its.settle()
    assert not its.is_written
    assert its.mark[0] == its.tensor.data_ptr()


def test_a_tensor_that_gets_a_piece_is_settled() -> None:
    its, piece = bound("shared"), torch.ones(4, 2)
    its.settle()
    its.share(piece)
    assert its.tensor.data_ptr() == piece.data_ptr()
    assert not its.is_written


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Any]:
    """A mesh of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh: Any, factor: float = 1.0) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(factor * torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)]))


def test_of_a_dtensor_the_piece_is_marked(single: Any) -> None:
    its = bound("dtensor", sharded(single))
    its.settle()
    assert its.memory.data_ptr() == its.tensor.to_local().data_ptr() == its.mark[0]  # type: ignore[attr-defined]
    in_place(its.tensor.to_local())  # type: ignore[attr-defined]
    assert its.is_written
    its.settle()
    assert not its.is_written


def test_a_write_in_place_to_a_dtensor_shows(single: Any) -> None:
    """An op on a DTensor increases its own version, and not that of its piece."""
    its = bound("dtensor", sharded(single))
    its.settle()
    in_place(its.tensor)
    assert its.is_written
    its.settle()
    assert not its.is_written
