"""Deadlock freedom: what compiles ends, orders that do not end are shown with their circle."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.check.mutants import copied
from tests.check.test_completeness import broken, find, program
from torch import fx

from meshweave.check.deadlock import DeadlockFreedom, check_deadlock
from meshweave.errors import VerifyError
from meshweave.ir.collectives import WAIT, functional, transfer
from meshweave.ir.graph import Origin, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, Transfer
from meshweave.program import Program

F32 = torch.float32
ALL = Mesh("r=2,s=2")


def links(pairs: dict[str, tuple[int, int]], mesh: Mesh) -> tuple[tuple[Mesh, ...], dict[str, Transfer]]:
    """Transfers of a vector from one device to another, and the meshes that this takes."""
    single = {d: Mesh("", devices=[d]) for d in mesh.devices}
    at = {d: Layout.replicated(one, 1) for d, one in single.items()}
    made = {key: Transfer(at[a], at[b], Spec((4,), F32)) for key, (a, b) in pairs.items()}
    return (mesh, *single.values()), made


def role(devices: Sequence[int], calls: Sequence[str], mesh: Mesh, pairs: dict[str, tuple[int, int]]) -> RankGraph:
    """A role that begins communications in this order: a transfer by its key, or a sum over axes."""
    meshes, transfers = links(pairs, mesh)
    graph = fx.Graph()
    value = graph.placeholder("x")
    for line, name in enumerate(calls, 1):
        target = transfer if name in pairs else functional.all_reduce.default
        given = value if name not in pairs or pairs[name][0] in devices else None
        start = graph.call_function(target, (given, *(() if name in pairs else ("sum",)), name))
        wait = graph.call_function(WAIT, (start,))
        start.meta["origin"] = wait.meta["origin"] = Origin("forward", source=f"model.py:{line}")
    graph.output([])
    own = {key: made for key, made in transfers.items() if any(d in pairs[key] for d in devices)}
    return RankGraph(graph, mesh, (), (), (), (), {}, tuple(devices), meshes, own)


RING = {"a": (0, 1), "b": (1, 2), "c": (2, 3), "d": (3, 0)}


def test_a_ring_of_roles_that_wait_for_each_other() -> None:
    """Each sends on before it takes: with nothing in between, nobody ever does."""
    orders = {0: ["a", "d"], 1: ["b", "a"], 2: ["c", "b"], 3: ["d", "c"]}
    roles = [role([d], calls, ALL, RING) for d, calls in orders.items()]
    with pytest.raises(VerifyError) as error:
        check_deadlock(roles)
    assert str(error.value) == (
        "devices wait for each other in a circle\n"
        "  got: \n"
        "    device 0 in transfer over a (transfer), model.py:1 [forward], waits for device 1\n"
        "    device 1 in transfer over b (transfer), model.py:1 [forward], waits for device 2\n"
        "    device 2 in transfer over c (transfer), model.py:1 [forward], waits for device 3\n"
        "    device 3 in transfer over d (transfer), model.py:1 [forward], waits for device 0\n"
        "  expected: a single order of all communications on every role"
    )


def test_a_ring_that_one_role_breaks() -> None:
    orders = {0: ["a", "d"], 1: ["a", "b"], 2: ["b", "c"], 3: ["c", "d"]}
    roles = [role([d], calls, ALL, RING) for d, calls in orders.items()]
    assert check_deadlock(roles) == DeadlockFreedom(num_roles=4, num_devices=4, num_communications=4, num_starts=8)


def test_a_sum_and_a_transfer_in_two_orders() -> None:
    """A circle through a collective and a message."""
    both, pairs = Mesh("r=2"), {"a": (0, 1)}
    with pytest.raises(VerifyError) as error:
        check_deadlock([role([0], ["a", "r"], both, pairs), role([1], ["r", "a"], both, pairs)])
    assert error.value.got.splitlines()[1:] == [
        "    device 0 in transfer over a (transfer), model.py:1 [forward], waits for device 1",
        "    device 1 in _c10d_functional.all_reduce over r (all_reduce_default), model.py:1 [forward], "
        "waits for device 0",
    ]


def test_a_circle_is_found_among_roles_that_get_on() -> None:
    """Two of four roles wait for each other; a third waits for them; the fourth ends."""
    pairs = {"a": (0, 1), "b": (1, 0), "c": (1, 2), "d": (2, 3)}
    orders = {0: ["a", "b"], 1: ["b", "a", "c"], 2: ["d", "c"], 3: ["d"]}
    with pytest.raises(VerifyError) as error:
        check_deadlock([role([d], calls, ALL, pairs) for d, calls in orders.items()])
    assert re.findall(r"device (\d) in transfer over (\w)", error.value.got) == [("0", "a"), ("1", "b")]


def test_a_transfer_to_which_one_end_never_comes() -> None:
    roles = [role([0], ["a"], ALL, RING), role([1], [], ALL, RING)]
    with pytest.raises(VerifyError, match="device 1 does not take part in start 1 of transfer a"):
        check_deadlock(roles)


def test_a_role_that_sums_over_a_group_another_reduction() -> None:
    first, second = role([0, 1], ["r"], ALL, {}), role([2, 3], ["r"], ALL, {})
    find(second, functional.all_reduce.default).update_arg(1, "max")
    with pytest.raises(
        VerifyError, match=r"start 1 of group r differs between its devices\n(.|\n)*all_reduce\(max, r\)"
    ):
        check_deadlock([first, second])


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2", "fsdp=3,tp=2", "pp=2", "pp=2,dp=3", "pp=2,tp=2"])
def test_what_compiles_ends(mesh: str) -> None:
    made = program(mesh, 5)
    report = check_deadlock(made.roles)
    starts = [n for r in made.roles for n in r.graph.nodes if any(u.target is WAIT for u in n.users)]
    assert report.num_starts == len(starts)
    assert report.num_devices == made.mesh.num_devices
    assert report.num_communications <= report.num_starts <= 2 * report.num_communications


def test_random_orders_end_exactly_if_there_is_no_circle() -> None:
    """Against a search of its own: repeatedly let any transfer run that both of its ends have come to."""
    chance, ended = random.Random(5), 0
    for _ in range(150):
        pairs = {f"t{i}": tuple(chance.sample(range(4), 2)) for i in range(chance.randrange(2, 7))}
        orders = {d: [key for key, ends in pairs.items() if d in ends] for d in range(4)}
        for order in orders.values():
            if chance.random() < 0.5:
                chance.shuffle(order)
        roles = [role([d], calls, ALL, pairs) for d, calls in orders.items()]
        if _ends({d: list(order) for d, order in orders.items()}, pairs):
            assert check_deadlock(roles).num_communications == len(pairs)
            ended += 1
            continue
        with pytest.raises(VerifyError, match="wait for each other in a circle"):
            check_deadlock(roles)
    assert 30 < ended < 120


def _ends(left: dict[int, list[str]], pairs: dict[str, tuple[int, int]]) -> bool:
    while any(left.values()):
        ready = [key for key, ends in pairs.items() if all(left[d] and left[d][0] == key for d in ends)]
        if not ready:
            return False
        for key in ready:
            for d in pairs[key]:
                left[d].pop(0)
    return True


def test_a_compiled_program_with_two_transfers_in_another_order() -> None:
    """The check of completeness refuses it too: roles have to agree."""
    made = program("pp=2,tp=2")

    def later(rank: RankGraph) -> None:
        first, second = find(rank, transfer, 3), find(rank, transfer, 4)
        second.append(first)

    with pytest.raises(VerifyError) as error:
        check_deadlock(_changed(made, later))
    assert [line.split(" in ")[0].strip() for line in error.value.got.splitlines()[1:]] == [
        "devices 0, 1",
        "devices 2, 3",
    ]
    assert "disagree about their next communication" in broken(made, later, 1)


def _changed(made: Program, change: Callable[[RankGraph], None]) -> list[RankGraph]:
    roles = [copied(rank) for rank in made.roles]
    change(roles[1])
    return roles
