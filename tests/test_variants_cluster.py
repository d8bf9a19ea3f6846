"""Batches of any shape on a cluster: handed in whole, or by each rank its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import Job
from tests.test_variants import Eager, Net, adamw, loss_of, tokens
from torch import Tensor

import meshweave as mw
from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.multiprocess


def job_shapes(pipe: Connection, mesh: str, rows: str) -> dict[str, Any]:
    def part(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return (
            batch if rows == "all" else {k: v.chunk(dist.get_world_size())[dist.get_rank()] for k, v in batch.items()}
        )

    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    step = mw.compile(
        model, loss=loss_of, example=part(tokens(8, 6)), optimizer=adamw(model), mesh=mesh, profile="alpha-beta",
        batch="global" if rows == "all" else "local",
    )  # fmt: skip
    eager = Eager(twin, adamw(twin))
    for i, size in enumerate((4, 8, 4, 8, 4)):  # the first has as many rows as a rank's part of the example, or less
        batch = tokens(size, 6, seed=i)
        assert step(part(batch)) == pytest.approx(eager(batch), rel=1e-5)
        assert step.evaluate(part(batch)) == pytest.approx(eager.evaluate(batch), rel=1e-5)
    found = step.forward_only(part({"ids": tokens(8, 6)["ids"]}))["logits"]
    torch.testing.assert_close(found, eager.forward_only(tokens(8, 6))["logits"], rtol=1e-3, atol=1e-4)
    shutdown(step.session.world)
    return {"programs": len(step._compiled.variants.all)}


@pytest.mark.slow_rows("fsdp=2-all")
@pytest.mark.parametrize(("mesh", "rows"), [("fsdp=2", "all"), ("dp=2", "own")])
def test_short_batches_and_evaluation_share_one_state(start: Callable[..., Job], mesh: str, rows: str) -> None:
    for outcome in start("tests.test_variants_cluster:job_shapes", 2, mesh, rows).finish(200):
        assert "error" not in outcome, outcome["text"]
        assert outcome == {"programs": 5}  # two shapes to train on and to evaluate, outputs
