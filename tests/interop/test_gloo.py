"""All-gathers over Gloo in two processes: many in flight, of every kind of tensor, and only once something runs."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.torch_compile.test_gloo import run_job
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import meshweave as mw
from meshweave.interop.gloo import let_gathers_overlap
from meshweave.ir.collectives import WAIT, functional

pytestmark = pytest.mark.multiprocess
ROUNDS = 400


def in_flight(rank: int) -> Any:
    """Gathers that end, two at a time, while nobody waits for them: without our kernels a process died of it."""
    let_gathers_overlap()
    group, flying, wrong = dist.group.WORLD.group_name, deque[tuple[int, Tensor]](), 0
    for i in range(4 * ROUNDS):
        x = torch.full((256,), float(2 * i + rank))
        flying.append((i, functional.all_gather_into_tensor.default(x, 2, group)))
        if i % 4 == 0:
            time.sleep(0.01)
        while len(flying) > 4:
            at, whole = flying.popleft()
            rows = WAIT(whole).view(2, 256)
            wrong += not (bool((rows[0] == 2 * at).all()) and bool((rows[1] == 2 * at + 1).all()))
    for _, whole in flying:
        WAIT(whole)
    return wrong


def test_many_gathers_in_flight_end_and_bring_what_they_should() -> None:
    assert run_job(in_flight) == [0, 0]


def tensors(rank: int) -> dict[str, Tensor]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)
    return {
        "float32": x,
        "a row": x[0],
        "empty": torch.zeros(0, 3),
        "of a parameter": x.clone().requires_grad_(),
        "complex": torch.complex(x, -x),
        "conjugate": torch.complex(x, -x).conj(),
        **{str(kind): (x * 9).to(kind) for kind in kinds},
    }


def all_kinds(rank: int) -> Any:
    let_gathers_overlap()
    group, wrong = dist.group.WORLD.group_name, []
    mine, both = tensors(rank), [tensors(0), tensors(1)]
    gather, each = functional.all_gather_into_tensor.default, functional.all_gather_into_tensor_coalesced.default
    with torch.no_grad():
        coalesced = each(list(mine.values()), 2, group)
        for (name, x), again in zip(mine.items(), coalesced, strict=True):
            expected = torch.cat([one[name] for one in both])
            for whole in (WAIT(gather(x, 2, group)), WAIT(again)):
                if whole.dtype != expected.dtype or not torch.equal(whole, expected):
                    wrong.append(name)
    return wrong


def test_tensors_of_every_kind_are_gathered() -> None:
    assert run_job(all_kinds) == [[], []]


def refused(rank: int) -> Any:
    let_gathers_overlap()
    try:
        functional.all_gather_into_tensor.default(torch.zeros(2, dtype=torch.float8_e4m3fn), 2, "nobody")
    except RuntimeError as error:
        return str(error)
    return "gathered"


def test_an_unknown_group_is_an_error_still() -> None:
    for told in run_job(refused):
        assert "nobody" in told


def is_overridden() -> bool:
    """Whether this process runs all-gathers of CPU tensors by a kernel that torch does not register itself."""
    name = "_c10d_functional::all_gather_into_tensor"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


def gathered_sum(x: Tensor) -> Tensor:
    group = dist.group.WORLD.group_name
    return (
        WAIT(functional.all_gather_into_tensor.default(x, 2, group)) + WAIT(functional.all_reduce(x, "sum", group))[0]
    )


def seconds(node: Any, num_bytes: int = 0) -> float:
    return 1e-3


def planned_and_run(rank: int) -> Any:
    states = [is_overridden()]
    x = torch.arange(4.0) + 4 * rank
    traced = make_fx(gathered_sum, tracing_mode="fake")(x)
    ordered, _ = mw.overlap(traced, cost=seconds)
    mw.backend(cost=seconds, inner="aot_eager")
    states.append(is_overridden())
    found = ordered(x)
    return [*states, is_overridden(), torch.equal(found, torch.arange(8.0) + 4)]


def test_a_planned_graph_changes_the_process_when_it_runs() -> None:
    assert run_job(planned_and_run) == [[False, False, True, True]] * 2


def compiled_and_run(rank: int) -> Any:
    drop_in = mw.backend(cost=seconds, inner="aot_eager")
    before = is_overridden()
    found = torch.compile(gathered_sum, backend=drop_in, fullgraph=True)(torch.arange(4.0) + 4 * rank)
    return [before, is_overridden(), torch.equal(found, torch.arange(8.0) + 4)]


def test_the_drop_in_changes_the_process_when_it_compiles_what_will_run() -> None:
    assert run_job(compiled_and_run) == [[False, True, True]] * 2


def compiled_in_the_context(rank: int) -> Any:
    states = [is_overridden()]
    with mw.inductor_pass(cost=seconds):
        states.append(is_overridden())
    return states


def test_the_context_changes_the_process_when_it_is_entered() -> None:
    assert run_job(compiled_in_the_context) == [[False, True]] * 2
