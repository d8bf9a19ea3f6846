"""Where starts and waits stand, in rank graphs written by hand: gathers ahead of their block, waits a block later."""

from __future__ import annotations

import pytest
import torch
from tests.decompose.lockstep import results
from tests.decompose.programs import integers
from tests.prefetch.written import Written, order

from meshweave.errors import PlanError
from meshweave.ir.graph import Origin, copied_graph
from meshweave.ir.rank import RankGraph
from meshweave.optimize.prefetch import delay_gradient_waits, prefetch


def assert_same_values(role: RankGraph, before: object) -> None:
    """On both devices; each has its own inputs."""
    inputs = [{item.name: integers(*item.spec.shape, seed=10 * i + r) for i, item in enumerate(role.inputs)}
              for r in range(2)]  # fmt: skip
    for expected, got in zip(results(before, inputs), results(role.graph, inputs), strict=True):  # type: ignore[arg-type]
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))


# gathers ahead

UNITS = [f"scaled_{i} cast_{i} gather_{i}" for i in range(4)]
USES = [f"full_{i} mm_{i}" for i in range(4)]


def layers(phase: str = "forward", num: int = 4) -> RankGraph:
    """Each layer scales and casts its weight, gathers it, and multiplies."""
    w = Written()
    x = w.input("x", "batch")
    weights = [w.input(f"w_{i}", rows=2) for i in range(num)]
    for i, weight in enumerate(weights):
        w.at = Origin(phase, f"model.layers.{i}.linear")
        cast = w.relu(f"cast_{i}", w.add(f"scaled_{i}", weight, weight))
        x = w.mm(f"mm_{i}", x, w.wait(f"full_{i}", w.gather(f"gather_{i}", cast)))
    return w.role(("loss", x))


def expected(ahead: int) -> str:
    """Before the uses of block i stand the gathers up to those of block i + ahead."""
    parts, done = [], 0
    for i in range(4):
        until = min(i + ahead + 1, 4)
        parts += [*UNITS[done:until], USES[i]]
        done = until
    return " ".join(parts)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 9])
def test_gathers_start_so_many_blocks_ahead(ahead: int, phase: str) -> None:
    role = layers(phase)
    before = copied_graph(role.graph)
    assert prefetch(role, ahead) is role
    assert order(role) == expected(ahead)
    assert_same_values(role, before)


@pytest.mark.parametrize("phase", ["loss", "update"])
def test_other_phases_stay(phase: str) -> None:
    assert order(prefetch(layers(phase), 1)) == expected(0)


def test_starts_do_not_leave_their_phase() -> None:
    """The first block of backward is gathered at its own place, the next before the wait of that."""
    w = Written()
    x = w.input("x", "batch")
    weights = [w.input(f"w_{i}", rows=2) for i in range(2)]
    for phase, blocks in (("forward", (0, 1)), ("backward", (1, 0))):
        for i in blocks:
            w.at = Origin(phase, f"layers.{i}")
            name = f"{phase[0]}{i}"
            x = w.mm(f"mm_{name}", x, w.wait(f"full_{name}", w.gather(f"gather_{name}", weights[i])))
    role = w.role(("loss", x))
    before = copied_graph(role.graph)
    forward = "gather_f0 gather_f1 full_f0 mm_f0 full_f1 mm_f1"
    assert order(prefetch(role, 1)) == f"{forward} gather_b1 gather_b0 full_b1 mm_b1 full_b0 mm_b0"
    assert_same_values(role, before)


def test_a_negative_number_of_blocks_is_an_error() -> None:
    with pytest.raises(PlanError, match="the number of blocks to prefetch is negative") as error:
        prefetch(layers(), -1)
    assert (error.value.got, error.value.expected) == ("prefetch=-1", "0 or more")


def test_a_block_is_due_at_its_first_wait() -> None:
    """The second block is gathered before the first wait of the first, wherever its other wait stands."""
    w = Written()
    x, a, b, c = w.input("x", "batch"), *(w.input(name, rows=2) for name in "abc")
    w.at = Origin("forward", "layers.0")
    starts = [w.gather("gather_a", a), w.gather("gather_b", b)]
    x = w.mm("mm_b", x, w.wait("full_b", starts[1]))
    x = w.mm("mm_a", x, w.wait("full_a", starts[0]))
    w.at = Origin("forward", "layers.1")
    x = w.mm("mm_c", x, w.wait("full_c", w.gather("gather_c", c)))
    role = prefetch(w.role(("loss", x)), 1)
    assert order(role) == "gather_a gather_b gather_c full_b mm_b full_a mm_a full_c mm_c"


@pytest.mark.parametrize(("kind", "is_moved"), [("param", True), ("buffer", True), ("state", True), ("batch", False)])
def test_what_depends_on_the_batch_stays(kind: str, is_moved: bool) -> None:
    w = Written()
    x, a, other = w.input("x", "batch"), w.input("a", rows=2), w.input("other", kind, rows=2)
    w.at = Origin("forward", "layers.0")
    x = w.mm("mm_0", x, w.wait("full_0", w.gather("gather_0", a)))
    w.at = Origin("forward", "layers.1")
    x = w.mm("mm_1", x, w.wait("full_1", w.gather("gather_1", other)))
    moved, still = "gather_0 gather_1 full_0 mm_0 full_1 mm_1", "gather_0 full_0 mm_0 gather_1 full_1 mm_1"
    assert order(prefetch(w.role(("loss", x)), 1)) == (moved if is_moved else still)


def test_steps_after_a_communication_start_ahead_too() -> None:
    w = Written()
    x, a, b = w.input("x", "batch"), w.input("a", rows=2), w.input("b", rows=2)
    w.at = Origin("forward", "layers.0")
    x = w.mm("mm_0", x, w.wait("full_0", w.gather("gather_0", a)))
    w.at = Origin("forward", "layers.1")
    own = w.wait("own", w.scatter("scatter", w.wait("near", w.gather("far", b))))
    x = w.mm("mm_1", x, w.wait("full_1", w.gather("gather_1", own)))
    ahead = "gather_0 far near scatter own gather_1 full_0 mm_0 full_1 mm_1"
    assert order(prefetch(w.role(("loss", x)), 1)) == ahead


def test_what_depends_on_the_wait_of_an_earlier_block_stays_behind_it() -> None:
    w = Written()
    x, a = w.input("x", "batch"), w.input("a", rows=2)
    w.at = Origin("forward", "layers.0")
    full = w.wait("full_0", w.gather("gather_0", a))
    x = w.mm("mm_0", x, full)
    w.at = Origin("forward", "layers.1")
    own = w.wait("own", w.scatter("scatter", full))
    x = w.mm("mm_1", x, w.wait("full_1", w.gather("gather_1", own)))
    role = prefetch(w.role(("loss", x)), 1)
    assert order(role) == "gather_0 full_0 mm_0 scatter own gather_1 full_1 mm_1"
    role.graph.lint()


@pytest.mark.parametrize(("group", "is_moved"), [("d", True), ("p", False)])
def test_collectives_with_other_roles_keep_their_places(group: str, is_moved: bool) -> None:
    """Devices 0 and 1 are a role: the groups of d are within it, those of p are with the devices of another."""
    w = Written("p=2,d=2", (0, 1))
    x, a, b = w.input("x", "batch"), w.input("a", rows=2), w.input("b", rows=2)
    w.at = Origin("forward", "layers.0")
    x = w.mm("mm_0", x, w.wait("full_0", w.gather("gather_0", a)))
    w.at = Origin("forward", "layers.1")
    x = w.mm("mm_1", x, w.wait("full_1", w.gather("gather_1", b, group)))
    moved, still = "gather_0 gather_1 full_0 mm_0 full_1 mm_1", "gather_0 full_0 mm_0 gather_1 full_1 mm_1"
    assert order(prefetch(w.role(("loss", x)), 1)) == (moved if is_moved else still)


# waits a block later


def backward(blocks: dict[int, str], *, has_update: bool = True, phase: str = "backward") -> RankGraph:
    """By block its gradients: each is computed, reduced and waited for at once; parameters are updated at the end."""
    w = Written()
    x = w.input("x", "batch")
    named = [(name, w.input(f"w_{name}", rows=2)) for names in blocks.values() for name in names]
    gradients = []
    for i, names in blocks.items():
        for name in names:
            w.at = Origin(phase, f"layers.{i}")
            x = w.mm(f"g{name}", x, x)
            gradients.append(w.wait(f"w{name}", w.scatter(f"s{name}", x)))
    w.at = Origin("update")
    new = [w.add(f"u{name}", p, g) for (name, p), g in zip(named, gradients, strict=True)] if has_update else []
    return w.role(*(("grad", g) for g in gradients), *(("param", p) for p in new))


SETTLED = {
    "a gradient of each block": (
        backward, {2: "c", 1: "b", 0: "a"}, "gc sc gb wc sb ga wb sa wa uc ub ua",
    ),
    "the last gradients of blocks correspond": (
        backward, {1: "ab", 0: "cd"}, "ga sa gb sb gc wa sc gd wb sd wc wd ua ub uc ud",
    ),
    "of a shorter block the first stands for those before it": (
        backward, {1: "abc", 0: "d"}, "ga sa gb sb gc sc gd wa wb wc sd wd ua ub uc ud",
    ),
    "of a longer block the first has no counterpart": (
        backward, {1: "a", 0: "bc"}, "ga sa gb sb gc wa sc wb wc ua ub uc",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTLED)
def test_a_gradient_is_waited_for_when_its_counterpart_in_the_next_block_starts(name: str) -> None:
    build, blocks, expected = SETTLED[name]
    role = build(blocks)
    before = copied_graph(role.graph)
    assert delay_gradient_waits(role) is role
    assert order(role) == expected
    assert_same_values(role, before)
    assert order(delay_gradient_waits(role)) == expected


def test_without_an_update_the_last_block_keeps_its_place() -> None:
    role = backward({1: "b", 0: "a"}, has_update=False)
    assert order(delay_gradient_waits(role)) == "gb sb ga wb sa wa"


def test_a_wait_that_is_late_comes_forward() -> None:
    """All gradients are waited for after all are computed: as if each had been waited for at once."""
    w = Written()
    x, gradients, starts = w.input("x", "batch"), [], []
    for name in "cba":
        w.at = Origin("backward", f"layers.{name == 'c':d}{name == 'b':d}")
        x = w.mm(f"g{name}", x, x)
        starts.append(w.scatter(f"s{name}", x))
    for name, start in zip("cba", starts, strict=True):
        gradients.append(w.wait(f"w{name}", start))
    assert order(delay_gradient_waits(w.role(*(("grad", g) for g in gradients)))) == "gc sc gb wc sb ga wb sa wa"


def test_a_gradient_that_is_used_earlier_is_waited_for_there() -> None:
    """The second block needs the first one's reduced gradient."""
    w = Written()
    x = w.input("x", "batch")
    w.at = Origin("backward", "layers.1")
    first = w.wait("w1", w.reduce("s1", w.mm("g1", x, x)))
    w.at = Origin("backward", "layers.0")
    other = w.wait("w0", w.reduce("s0", w.mm("g0", x, first)))
    assert order(delay_gradient_waits(w.role(("grad", first), ("grad", other)))) == "g1 s1 w1 g0 s0 w0"


def two_steps(num: int, mesh: str = "a=2,b=2", devices: tuple[int, ...] = ()) -> RankGraph:
    """Gradients are scattered over a, then reduced over b."""
    w = Written(mesh, devices)
    x, gradients = w.input("x", "batch"), []
    for i in reversed(range(num)):
        w.at = Origin("backward", f"layers.{i}")
        x = w.mm(f"g{i}", x, x)
        part = w.wait(f"v{i}", w.scatter(f"s{i}", x, "a"))
        gradients.append(w.wait(f"w{i}", w.reduce(f"r{i}", part, "b")))
    w.at = Origin("update")
    return w.role(*(("grad", g) for g in gradients), *(("param", w.relu(f"u{g.name[1]}", g)) for g in gradients))


def test_each_step_of_a_move_has_a_block() -> None:
    """The second step begins a block after the first, and is waited for another block later."""
    expected = "g3 s3 g2 v3 r3 s2 g1 w3 v2 r2 s1 g0 w2 v1 r1 s0 w1 v0 r0 w0 u3 u2 u1 u0"
    assert order(delay_gradient_waits(two_steps(4))) == expected


def test_a_step_with_devices_of_other_roles_begins_where_it_did() -> None:
    """Groups of b are shared with the other role: their order among all roles stays."""
    role = delay_gradient_waits(two_steps(2, "b=2,a=2", (0, 1)))
    names = order(role).split()
    assert order(role, [n for n in names if n[0] not in "gsvr"]) == "g1 s1 v1 r1 g0 s0 v0 r0"
    assert names.index("w1") > names.index("g0")
