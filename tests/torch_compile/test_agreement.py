"""Ranks agree over a store: each is a thread here, and what one says reaches the others through a HashStore alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import WAIT, functional
from meshweave.optimize.overlap.prices import CostNumbers
from meshweave.torch_compile.agreement import Agreement, communications, world_agreement

SECONDS = 20.0


def together(
    does: Callable[[Agreement], Any],
    ranks: Sequence[int] = (0, 1, 2),
    absent: Sequence[int] = (),
    seconds: float = SECONDS,
    store: dist.Store | None = None,
) -> dict[int, Any]:
    """What each rank that is there returns or raises."""
    store = dist.HashStore() if store is None else store

    def run(rank: int) -> Any:
        try:
            return does(Agreement(store, rank, tuple(ranks), seconds))
        except MeshweaveError as error:
            return error

    here = [rank for rank in ranks if rank not in absent]
    with ThreadPoolExecutor(len(here)) as pool:
        return dict(zip(here, pool.map(run, here), strict=True))


def errors(found: Mapping[int, Any]) -> set[str]:
    assert all(isinstance(one, MeshweaveError) for one in found.values()), found
    return {str(one) for one in found.values()}


@pytest.mark.parametrize("ranks", [(0, 1, 2), (3, 7)])
def test_all_take_the_figures_of_the_lowest_rank_to_the_bit(ranks: tuple[int, ...]) -> None:
    found = together(lambda a: a.figures(CostNumbers("f", (a.rank / 3, 1e-300, float("inf")))), ranks)
    assert found == {rank: CostNumbers("f", (ranks[0] / 3, 1e-300, float("inf"))) for rank in ranks}


def test_exchanges_follow_each_other_and_those_of_other_ranks() -> None:
    store = dist.HashStore()

    def some(agreement: Agreement) -> list[float]:
        return [agreement.figures(CostNumbers(f"graph {i}", (agreement.rank + i / 8,))).numbers[0] for i in range(3)]

    assert together(some, (0, 1), store=store) == {0: [0.0, 0.125, 0.25], 1: [0.0, 0.125, 0.25]}
    assert together(some, (1, 2), store=store) == {1: [1.0, 1.125, 1.25], 2: [1.0, 1.125, 1.25]}
    # the ranks count on where another object left off
    assert together(some, (0, 1), store=store) == {0: [0.0, 0.125, 0.25], 1: [0.0, 0.125, 0.25]}


def test_a_rank_with_another_graph_is_named_on_every_rank() -> None:
    found = together(lambda a: a.figures(CostNumbers("other" if a.rank == 2 else "one", (1.0,))))
    assert errors(found) == {
        "ranks compile different graphs: their communications may not meet\n"
        "  where: rank 2\n"
        "  got: graph other on rank 2\n"
        "  expected: the graph of rank 0\n"
        "  hint: if ranks run different graphs (stages of a pipeline), pass ranks=, those with this graph"
    }


def test_a_rank_with_other_options_is_named_on_every_rank() -> None:
    found = together(lambda a: a.figures(CostNumbers("f", ()), settings=f"factor={2 if a.rank == 1 else 1}"))
    assert errors(found) == {
        "ranks have different options\n"
        "  where: rank 1\n"
        "  got: factor=2 on rank 1\n"
        "  expected: factor=1, as on rank 0\n"
        "  hint: decide on one rank and broadcast: costs may differ between ranks, options may not"
    }


@pytest.mark.parametrize(("absent", "seconds"), [((1,), "0.4"), ((1, 2), "0.4"), ((0,), "0.8")])
def test_ranks_that_do_not_come_are_named_in_time(absent: tuple[int, ...], seconds: str) -> None:
    began = time.monotonic()
    found = together(lambda a: a.figures(CostNumbers("f", ())), absent=absent, seconds=0.4)
    assert time.monotonic() - began < 60  # the store alone would wait for minutes
    (text,) = errors(found)
    named = f"rank {absent[0]}" if len(absent) == 1 else "ranks 1, 2"
    assert f"  where: {named}\n  got: nothing in {seconds} s\n  expected: ranks 0, 1, 2 compiling" in text


def test_after_a_rank_was_late_the_ranks_still_meet() -> None:
    store = dist.HashStore()
    first = together(lambda a: a.figures(CostNumbers("f", ())), (0, 1), absent=(1,), seconds=0.2, store=store)
    late = together(lambda a: a.figures(CostNumbers("f", ())), (0, 1), absent=(0,), seconds=0.2, store=store)
    assert errors(first) == errors(late)
    assert set(together(lambda a: a.figures(CostNumbers("f", (float(a.rank),))), (0, 1), store=store).values()) == {
        CostNumbers("f", (0.0,))
    }


def test_a_store_that_is_gone_is_said() -> None:
    class Gone(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            raise dist.DistNetworkError("Broken pipe\nmore")

    with pytest.raises(
        MeshweaveError, match=r"store of torch.distributed cannot be reached\n.*rank 1\n.*Broken pipe\n"
    ):
        Agreement(Gone(), 1, (0, 1), 1.0).figures(CostNumbers("f", ()))


@pytest.mark.parametrize(("rank", "ranks", "seconds"), [(2, (0, 1), 1.0), (0, (1, 0), 1.0), (0, (0, 1), 0.0)])
def test_ranks_that_make_no_sense_are_refused(rank: int, ranks: tuple[int, ...], seconds: float) -> None:
    with pytest.raises(MeshweaveError, match="these ranks cannot agree"):
        Agreement(dist.HashStore(), rank, ranks, seconds)


def test_a_process_alone_agrees_with_nobody() -> None:
    assert world_agreement(None) is None


# The proof

OPS = {"gather": functional.all_gather_into_tensor.default, "sum": functional.all_reduce.default}


def graph(*events: str) -> fx.Graph:
    """`gather:tp` starts a gather over group tp, `sum:tp` an all-reduce, `~0` waits for the first start."""
    made = fx.Graph()
    x = made.placeholder("x")
    starts = []
    for event in events:
        if event.startswith("~"):
            made.call_function(WAIT, (starts[int(event[1:])],))
            continue
        op, group = event.split(":")
        starts.append(made.call_function(OPS[op], (x, 2, group) if op == "gather" else (x, "sum", group)))
        starts[-1].meta["val"] = torch.empty(4, device="meta")
    return made


# 2 x 2 ranks: tp is {0, 1} and {2, 3}, dp is {0, 2} and {1, 3}; groups have another name on every rank, as with torch.
TP = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
DP = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}


def prove(
    events: Mapping[int, Sequence[str]], tables: Sequence[Mapping[int, tuple[int, ...]]] = (TP, DP)
) -> dict[int, Any]:
    def does(agreement: Agreement) -> Any:
        rank = agreement.rank
        own = [e if e.startswith("~") else f"{e}{rank}" for e in events[rank]]
        groups = {f"{name}{rank}": table[rank] for name, table in zip(("tp", "dp"), tables, strict=True)}
        return agreement.prove(graph(*own), groups)

    return together(does, tuple(events))


def test_the_same_order_over_groups_that_fit_is_proven() -> None:
    order = ("gather:tp", "sum:dp", "~0", "gather:tp", "~1", "~2")
    assert prove(dict.fromkeys(range(4), order)) == dict.fromkeys(range(4))


def test_starts_and_waits_in_a_circle_are_found() -> None:
    one = ("gather:tp", "~0", "sum:dp", "~1")
    other = ("sum:dp", "~0", "gather:tp", "~1")
    (text,) = errors(prove({0: one, 1: one, 2: other, 3: one}))
    assert text.startswith("ranks would communicate in different orders, which can deadlock\n  where: rank 2\n")
    assert "of 4 starts and waits on rank 2" in text


@pytest.mark.parametrize(
    "other",
    [("sum:tp", "~0"), ("gather:tp",), ("gather:tp", "gather:tp", "~0"), ("gather:tp", "gather:tp", "~1", "~0")],
)
def test_any_difference_between_orders_is_found(other: tuple[str, ...]) -> None:
    one = ("gather:tp", "~0") if len(other) < 4 else ("gather:tp", "gather:tp", "~0", "~1")
    (text,) = errors(prove({0: one, 1: other}))
    assert "different orders" in text
    assert "where: rank 1\n" in text


def test_groups_that_do_not_fit_are_found() -> None:
    order = ("gather:tp", "sum:dp", "~0", "~1")
    crossed = {**TP, 1: (1, 3)}
    (text,) = errors(prove(dict.fromkeys(range(4), order), (crossed, DP)))
    assert "do not match\n  where: rank 0, group 0 in order of appearance\n" in text
    assert "got: ranks [0, 1]; on rank 1 it is [1, 3]" in text


def test_a_group_that_reaches_ranks_outside_is_found() -> None:
    (text,) = errors(prove({0: ("sum:dp", "~0"), 1: ("sum:dp", "~0")}))
    assert "got: ranks [0, 2]\n" in text
    assert "hint: rank 2 did not agree: add them to ranks=" in text


@pytest.mark.skipif(not hasattr(functional, "isend"), reason="this torch has no messages in graphs")
def test_messages_between_two_ranks_are_no_part_of_the_proof() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    made.call_function(functional.isend.default, (x, 1, 0, "tp"))
    with pytest.raises(MeshweaveError, match="are not matched by order"):
        Agreement(dist.HashStore(), 0, (0, 1), 1.0).prove(made)


def test_an_unknown_group_is_named_with_its_node() -> None:
    with pytest.raises(MeshweaveError, match=r"group of a collective is unknown\n.*all_gather_into_tensor"):
        Agreement(dist.HashStore(), 0, (0, 1), 1.0).prove(graph("gather:nobody", "~0"))


def test_waits_for_inputs_and_views_are_part_of_the_sequence() -> None:
    """An input that an earlier graph began to fill is named by its place, which every rank has alike."""
    graph = fx.Graph()
    x, early = graph.placeholder("x"), graph.placeholder("early")
    start = graph.call_function(functional.all_reduce.default, (x, "sum", "a"))
    shown = graph.call_function(torch.ops.aten.view.default, (start, [-1]))
    done = graph.call_function(WAIT, (shown,))
    graph.output((done, graph.call_function(WAIT, (done,)), graph.call_function(WAIT, (early,))))
    events, _ = communications(graph)
    assert events[1:] == ["wait 0", "wait 0", "wait for input 1"]
