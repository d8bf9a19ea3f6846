"""What `settle` records of a bound tensor, and which writes by the user show afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshweave.errors import StepError
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.runtime.bindings import Bindings, Bound, Form
from meshweave.runtime.fingerprint import fingerprint

ITEM = Input("param", "w", Spec((4, 2), torch.float32))


@dataclass
class Alone:
    """A world without other processes, or with them."""

    is_distributed: bool = False


@dataclass
class WholeValue:
    """A state with a single value."""

    value: Tensor

    def matches(self, item: Input, layout: Layout, tensor: Tensor) -> bool:
        return torch.equal(self.value, tensor)


def bound(form: Form, tensor: Tensor | None = None) -> Bound:
    own = nn.Parameter(torch.arange(8.0).reshape(4, 2)) if tensor is None else tensor
    return Bound(ITEM, Layout.replicated(Mesh("d=2"), 2), own, form)


def bindings(its: Bound, *, is_distributed: bool) -> Bindings:
    return Bindings(Alone(is_distributed), {its.key: its})  # type: ignore[arg-type]


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
    its = bound(form)
    assert not its.is_unwritten  # no step has seen it
    its.settle()
    assert its.is_unwritten
    write(its.tensor)
    assert its.is_unwritten == (not is_shown)
    its.settle()
    assert its.is_unwritten
    assert its.mark[0] == its.tensor.data_ptr()


@pytest.mark.parametrize("is_distributed", [False, True])
@pytest.mark.parametrize("write", [write for write, _ in SHOWN])
def test_of_a_copy_every_write_shows_by_its_values(write: Write, is_distributed: bool) -> None:
    """Of what has no trace: alone by the pieces, with other processes by the fingerprint when it was settled."""
    its = bound("copy")
    table, state = bindings(its, is_distributed=is_distributed), WholeValue(its.tensor.detach().clone())
    table.settle(its)
    assert its.values == (int(fingerprint(its.tensor)) if is_distributed else 0)
    assert not table.differs(state, its)  # type: ignore[arg-type]
    write(its.tensor)
    assert table.differs(state, its) == (write is not nothing)  # type: ignore[arg-type]
    state.value = its.tensor.detach().clone()
    table.settle(its)
    assert not table.differs(state, its)  # type: ignore[arg-type]


def test_values_of_shared_memory_are_not_read() -> None:
    its = bound("shared")
    table = bindings(its, is_distributed=True)
    table.settle(its)
    assert its.values == 0
    by_data(its.tensor)  # the piece has it, too
    assert not table.differs(WholeValue(torch.zeros(0)), its)  # type: ignore[arg-type]


def test_a_tensor_that_gets_a_piece_is_settled() -> None:
    its, piece = bound("shared"), torch.ones(4, 2)
    its.settle()
    its.share(piece)
    assert its.tensor.data_ptr() == piece.data_ptr()
    assert its.is_unwritten


def test_a_write_of_the_step_counts_for_autograd_and_not_as_one_of_the_users() -> None:
    its = bound("shared")
    table = bindings(its, is_distributed=False)
    table.settle(its)
    loss = (its.tensor * its.tensor).sum()
    table.written_by_step([its.key])
    assert its.is_unwritten
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_that_was_never_settled_stays_so_after_a_step() -> None:
    its = bound("shared")
    bindings(its, is_distributed=False).written_by_step([its.key])
    assert its.mark == (0, -1)


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
    assert not its.is_unwritten
    its.settle()
    assert its.is_unwritten


def test_a_write_in_place_to_a_dtensor_shows(single: Any) -> None:
    """An op on a DTensor increases its own version, and not that of its piece."""
    its = bound("dtensor", sharded(single))
    its.settle()
    in_place(its.tensor)
    assert not its.is_unwritten
    its.settle()
    assert its.is_unwritten


def test_values_assigned_to_a_dtensor_are_lost_and_an_error(single: Any) -> None:
    """However often the tensor is settled: its first storage is compared."""
    its = bound("dtensor", sharded(single))
    its.check_assigned()  # nothing is known of it yet
    its.settle()
    its.check_assigned()
    its.tensor.data = sharded(single, 3.0).data
    its.settle()
    with pytest.raises(
        StepError, match=r"other values were assigned to \.data of the parameter 'w', and are lost"
    ) as e:
        its.check_assigned()
    assert e.value.hint == "with torch.no_grad(): p.copy_(values), or p.data.copy_(values)"


def test_a_dtensor_that_was_swapped_has_another_storage_from_then_on(single: Any) -> None:
    its = bound("dtensor", sharded(single))
    its.settle()
    torch.utils.swap_tensors(its.tensor, sharded(single, 3.0))
    its.check_assigned()
    assert not its.is_unwritten
    its.settle()
    its.check_assigned()
    assert its.is_unwritten
