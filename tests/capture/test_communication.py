"""A model or a loss that asks torch.distributed for its ranks, or communicates, is an error: the step is global."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from tests.training import mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import CaptureError


@pytest.fixture(params=[False, True], ids=["alone", "in a job"])
def _job(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if request.param:
        dist.destroy_process_group()


def gathered(loss: Tensor) -> Tensor:
    parts = [torch.empty_like(loss)]
    dist.all_gather(parts, loss)
    return parts[0]


def reduced(loss: Tensor) -> Tensor:
    dist.all_reduce(loss)
    return loss


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "get_world_size": lambda loss: loss * dist.get_world_size(),
    "get_rank": lambda loss: loss * (1 + dist.get_rank()),
    "all_gather": gathered,
    "all_reduce": reduced,
    "all_reduce of torch.distributed.nn": lambda loss: differentiable.all_reduce(loss),
    "all_reduce of functional collectives": lambda loss: functional.all_reduce(loss, "sum", "0"),
}


def compiled(model: nn.Module, scaled: Callable[[Tensor], Tensor] = lambda loss: loss) -> mw.TrainStep:
    example = {"input": torch.ones(4, 3), "y": torch.zeros(4, 2)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mw.compile(
        model, loss=lambda out, batch: scaled(mse(out, batch)), example=example, optimizer=optimizer,
        mesh={"dp": 1 if dist.is_initialized() else 2}, profile="alpha-beta",
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_reduce is deprecated:FutureWarning")  # 2.13
@pytest.mark.usefixtures("_job")
@pytest.mark.parametrize("name", CALLS)
def test_a_query_or_a_collective_is_an_error(name: str) -> None:
    with pytest.raises(CaptureError, match=f"a call of {name.partition(' ')[0]}\n") as error:
        compiled(nn.Linear(3, 2), CALLS[name])
    assert "test_communication.py" in str(error.value)
    assert "loss * world_size" in str(error.value)


@pytest.mark.usefixtures("_job")
def test_whether_there_is_a_job_may_be_asked() -> None:
    assert compiled(nn.Linear(3, 2), lambda loss: loss * (2 if dist.is_initialized() else 1)) is not None
    if dist.is_initialized():
        assert dist.get_world_size() == 1  # as before


@pytest.mark.usefixtures("_job")
def test_synchronised_batch_norm_is_batch_norm() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*plain))
    assert isinstance(model[1], nn.SyncBatchNorm)
    batch = {"input": torch.randn(4, 3), "y": torch.randn(4, 2)}
    expected = mse(plain(batch["input"]), batch).detach()
    torch.testing.assert_close(compiled(model)(batch), expected)
