"""MachineProfile: communication on real topologies, work, what-ifs and what it refuses."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshweave.cost.hardware import (
    AlphaBeta,
    Attention,
    Costs,
    MachineProfile,
    Matmul,
    MemoryWork,
    load_profile,
    nccl,
    profile_names,
)
from meshweave.cost.hardware.nccl import Shape, shapes
from meshweave.cost.hardware.schema import Fit, Links
from meshweave.errors import MeshError, MeshweaveError
from meshweave.ir.collectives import RECEIVED
from meshweave.ir.mesh import Mesh

H100 = load_profile("h100")
OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "transfer")
MESHES = ("a=2", "a=8", "a=16", "a=2,b=8", "a=8,b=2", "a=3,b=5", "a=4,b=4,c=4", "a=16,b=8")
BF16 = torch.bfloat16


def cases(mesh: Mesh) -> list[tuple[str, ...]]:
    names = mesh.axis_names
    return [(name,) for name in names] + ([names] if len(names) > 1 else [])


def test_the_groups_of_a_mesh_lie_where_their_ids_say() -> None:
    mesh = Mesh("dp=2,tp=8")
    assert shapes(mesh.groups(("tp",)), 8, 8) == (Shape(8, 1, 8, 8, 1.0, 1.0),)
    assert shapes(mesh.groups(("dp",)), 8, 8) == (Shape(2, 2, 1, 1, 1.0, 1.0),)
    assert shapes(mesh.groups(("dp", "tp")), 8, 8) == (Shape(16, 2, 8, 8, 8.0, 1.0),)
    uneven = Mesh("a=2,b=6")  # ids 0-5 and 6-11: one group inside a node, one over both
    assert shapes(uneven.groups(("b",)), 8, 8) == (Shape(6, 1, 6, 6, 1.0, 1.0), Shape(6, 2, 2, 4, 2.0, 1.0))


def test_adapters_are_shared_by_the_devices_that_use_them() -> None:
    """8 groups of 2 nodes have an adapter each, or a quarter of one where 8 devices share 2."""
    mesh = Mesh("dp=2,tp=8")
    assert shapes(mesh.groups(("dp",)), 8, 2) == (Shape(2, 2, 1, 1, 0.25, 0.25),)
    assert shapes(mesh.groups(("dp", "tp")), 8, 2) == (Shape(16, 2, 8, 8, 2.0, 0.25),)
    assert shapes([(0, 8)], 8, 2) == (Shape(2, 2, 1, 1, 1.0, 1.0),)
    few = replace(H100, name="few", links=Links(H100.links.node, replace(H100.links.net, ports=2)))
    slow, alone = (few.seconds("all_gather", m, ("dp",), 1e9) for m in (mesh, Mesh("dp=2", devices=[0, 8])))
    assert slow == pytest.approx(4 * alone, rel=0.01)
    assert H100.seconds("all_gather", mesh, ("dp",), 1e9) == alone


def test_links_inside_a_node_beat_those_between_nodes() -> None:
    """The same mesh on other ids: 2 ranks in a node, or in two."""
    near, far = Mesh("a=2", devices=[0, 1]), Mesh("a=2", devices=[0, 8])
    for op in OPS:
        assert H100.seconds(op, near, ("a",), 1e8) < H100.seconds(op, far, ("a",), 1e8) / 5
    assert H100.seconds("all_gather", near, ("a",), 1e9) == pytest.approx(1e9 / (450e9 * 0.79), rel=0.02)
    assert H100.seconds("all_gather", far, ("a",), 1e9) == pytest.approx(1e9 / (50e9 * 0.855), rel=0.02)


@pytest.mark.parametrize("name", ["h100", "a100", "gb200", "cpu-gloo"])
@pytest.mark.parametrize("spec", MESHES)
def test_seconds_rise_with_bytes_and_never_beat_the_links(name: str, spec: str) -> None:
    profile, mesh = load_profile(name), Mesh(spec)
    for axes in cases(mesh):
        size = mesh.flat_size(axes)
        peak = sum(profile.bandwidth_of(mesh, axis) for axis in axes)
        for op in OPS:
            times = [profile.seconds(op, mesh, axes, b) for b in (0, 1, 1e3, 1e5, 1e6, 3e6, 1e7, 1e8, 1e10)]
            assert times[0] > 0
            assert all(a <= b for a, b in pairwise(times)), (op, axes)
            assert times[1] < times[-1], (op, axes)
            received = profile.bytes_received(op, size, 1e10)
            assert times[-1] >= received / peak, (op, axes)
            assert times[0] >= profile.alpha_s


def test_no_collective_beats_the_line_rate_of_a_node() -> None:
    """An all-reduce in the switch sends each byte at least once; everything else receives over the links."""
    mesh = Mesh("a=8")
    for op in OPS:
        at_least = 1e9 if op == "all_reduce" else H100.bytes_received(op, 8, 1e9)
        assert H100.seconds(op, mesh, ("a",), 1e9) > at_least / 450e9


@pytest.mark.parametrize("name", profile_names())
def test_groups_of_one_and_local_ops_are_free(name: str) -> None:
    profile, mesh = load_profile(name), Mesh("a=2,one=1")
    for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"):
        assert profile.seconds(op, mesh, ("one",), 1e6) == 0.0
    for op in ("slice", "to_partial", "scale"):
        assert profile.seconds(op, mesh, ("a",), 1e6) == 0.0
        assert profile.usage(op, mesh, ("a",)) == ()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**34), st.integers(0, 2**34))
def test_every_size_is_monotone(one: int, other: int) -> None:
    mesh, (low, high) = Mesh("dp=4,tp=8"), sorted((one, other))
    for op in OPS:
        for axes in (("dp",), ("tp",), ("dp", "tp")):
            assert H100.seconds(op, mesh, axes, low) <= H100.seconds(op, mesh, axes, high)


def test_more_nodes_never_make_a_collective_faster() -> None:
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        times = []
        for num_nodes in (1, 2, 4, 16, 64):
            mesh = Mesh(f"a={8 * num_nodes}")
            local = 2**30 / mesh.num_devices if op == "all_gather" else 2**30
            times.append(H100.seconds(op, mesh, ("a",), local))
        assert all(a < b for a, b in pairwise(times)), op


def test_usage_names_the_links_that_a_collective_fills() -> None:
    mesh = Mesh("dp=2,tp=8")
    assert H100.usage("all_gather", mesh, ("tp",)) == (("node", 1.0),)
    assert H100.usage("all_gather", mesh, ("dp",)) == (("net", 1.0),)
    both = dict(H100.usage("all_gather", mesh, ("dp", "tp")))
    assert both["net"] == 1.0
    assert both["node"] == pytest.approx(8 * 50 * 0.855 / (450 * 0.79), rel=1e-6)
    spread = dict(H100.usage("all_to_all", mesh, ("dp", "tp")))
    assert spread["net"] == 1.0
    assert 0 < spread["node"] < 0.2
    for spec in MESHES:
        for op in OPS:
            used = H100.usage(op, Mesh(spec), cases(Mesh(spec))[-1])
            assert used
            assert all(0 < share <= 1 for _, share in used)


def test_a_message_costs_by_where_its_ends_are() -> None:
    assert H100.transfer_seconds(3, 3, 1e9) == 0.0
    assert H100.transfer_usage(3, 3) == ()
    assert H100.transfer_seconds(0, 7, 1e9) == pytest.approx(1e9 / (450e9 * 0.79), rel=0.01)
    assert H100.transfer_seconds(0, 8, 1e9) == pytest.approx(1e9 / (50e9 * 0.855), rel=0.01)
    assert H100.transfer_usage(0, 7) == (("node", 1.0),)
    assert H100.transfer_usage(0, 8) == (("net", 1.0),)
    assert H100.seconds("transfer", Mesh("a=8"), (), 1e9) == H100.transfer_seconds(0, 8, 1e9)
    one_node = H100.scaled(num_devices=8)
    assert one_node.seconds("transfer", Mesh("a=4"), (), 1e9) == H100.transfer_seconds(0, 7, 1e9)


def test_compute_slows_while_links_are_busy() -> None:
    assert H100.compute_slowdown(frozenset()) == 1.0
    assert H100.compute_slowdown(frozenset({"node"})) == 1.22
    assert H100.compute_slowdown(frozenset({"node", "net"})) == pytest.approx(1.36)
    with pytest.raises(MeshweaveError, match="no links of the level 'net'"):
        load_profile("cpu-gloo").compute_slowdown(frozenset({"net"}))
    with pytest.raises(MeshweaveError, match="no links of the level 'rack'"):
        H100.compute_slowdown(frozenset({"rack"}))


def test_what_it_does_not_know_is_never_free() -> None:
    mesh = Mesh("a=2,b=8")
    with pytest.raises(MeshweaveError, match=r"no known cost of 'broadcast'\n  where: profile h100"):
        H100.seconds("broadcast", mesh, ("a",), 8)
    for size in (-1, math.nan):
        with pytest.raises(MeshweaveError, match="local_bytes is not a cost"):
            H100.seconds("all_gather", mesh, ("a",), size)
    with pytest.raises(MeshError, match="the mesh has no axis 'c'"):
        H100.seconds("all_gather", mesh, ("c",), 8)
    gloo = load_profile("cpu-gloo")
    with pytest.raises(MeshweaveError, match=r"no links of the level 'net'(.|\n)*scaled\(devices_per_node"):
        gloo.seconds("all_gather", Mesh("a=2", devices=[0, 1024]), ("a",), 8)
    deaf = replace(gloo, name="deaf", collectives=gloo.collectives[:1])
    with pytest.raises(MeshweaveError, match=r"has no cost of 'all_reduce'(.|\n)*measured: all_gather"):
        deaf.seconds("all_reduce", mesh, ("a",), 8)
    for work in (
        Matmul(8, 8, 8, 1, torch.int64, 1),
        Attention(1, 8, 8, 8, False, False, torch.complex64, 1),
        MemoryWork("sort", 8, 8, BF16),
    ):
        with pytest.raises(MeshweaveError, match="the profile has no figure for"):
            H100.compute_seconds(work)
    assert H100.compute_seconds(Matmul(8, 8, 8, 1, torch.complex64, 1)) == H100.compute_seconds(
        Matmul(8, 8, 8, 4, torch.float32, 1)
    )
    with pytest.raises(MeshweaveError, match=r"no figure for float8_e4m3fn\n  where: profile a100, \[peak\]"):
        load_profile("a100").peak_flops(torch.float8_e4m3fn)


def test_nccls_model_prices_what_is_received_and_refuses_anything_else() -> None:
    (shape,) = shapes([range(8)], 8, 8)
    assert H100.nccl is not None
    for op in RECEIVED:
        assert nccl.lines(op, shape, H100.nccl, H100.links)
    with pytest.raises(MeshweaveError, match="no cost of 'permuted_all_gather'"):
        nccl.lines("permuted_all_gather", shape, H100.nccl, H100.links)


def test_a_mesh_that_the_machine_cannot_hold() -> None:
    small = H100.scaled(num_devices=64)
    assert small.name == "h100 num_devices=64"
    small.check_mesh(Mesh("a=64"))
    with pytest.raises(MeshweaveError, match=r"the machine cannot hold the mesh(.|\n)*got: device 64\n"):
        small.check_mesh(Mesh("a=65"))
    with pytest.raises(MeshweaveError, match="the machine cannot hold the mesh"):
        small.seconds("all_gather", Mesh("a=65"), ("a",), 8)
    with pytest.raises(MeshweaveError, match="the machine cannot hold the mesh"):
        small.transfer_seconds(0, 64, 8)


def test_a_scaled_profile_says_so_and_changes_only_that() -> None:
    mesh = Mesh("dp=2,tp=8")
    net = H100.scaled(net_bandwidth=2.0)
    assert (net.name, H100.scaled() is H100) == ("h100 x2 net", True)
    assert net.seconds("all_gather", mesh, ("tp",), 1e9) == H100.seconds("all_gather", mesh, ("tp",), 1e9)
    assert net.seconds("all_gather", mesh, ("dp",), 1e9) == pytest.approx(
        H100.seconds("all_gather", mesh, ("dp",), 1e9) / 2, rel=0.01
    )
    links = H100.scaled(bandwidth=2.0, latency=0.5)
    for op in OPS:
        for axes in (("dp",), ("tp",), ("dp", "tp")):
            both = links.seconds(op, mesh, axes, 1e6)
            assert both == pytest.approx(H100.seconds(op, mesh, axes, 1e6) / 2, rel=1e-9), (op, axes)
    work = Matmul(8192, 8192, 8192, 1, BF16, 6 * 8192**2)
    fast = H100.scaled(compute=2.0, memory_bandwidth=2.0)
    assert fast.name == "h100 x2 compute x2 memory bandwidth"
    assert fast.compute_seconds(work) - H100.launch_s == pytest.approx((H100.compute_seconds(work) - H100.launch_s) / 2)
    assert H100.scaled(memory_bytes=160e9).usable_bytes == pytest.approx((160e9 - 2e9) * 0.97)
    pairs = H100.scaled(devices_per_node=2)
    assert dict(pairs.usage("all_gather", Mesh("a=2,b=2"), ("a",))) == {"net": 1.0}
    for wrong in ({"compute": 0.0}, {"latency": math.nan}, {"num_devices": 0}, {"memory_bytes": -1.0}):
        with pytest.raises(MeshweaveError, match="invalid factor of"):
            H100.scaled(**wrong)


def test_a_scaled_measured_profile_keeps_its_start_up() -> None:
    gloo, mesh = load_profile("cpu-gloo"), Mesh("a=2")
    fast = gloo.scaled(bandwidth=2.0)
    slow_time, fast_time = (p.seconds("all_gather", mesh, ("a",), 2**20) for p in (gloo, fast))
    assert fast_time == pytest.approx(1e-4 + (slow_time - 1e-4) / 2)
    work = Matmul(64, 64, 64, 1, torch.float32, 3 * 4 * 64 * 64)
    assert gloo.scaled(compute=2.0).compute_seconds(work) < gloo.compute_seconds(work)


def test_small_matmuls_pay_for_tiles_waves_and_launches() -> None:
    def rate(m: int, n: int, k: int, batch: int = 1) -> float:
        work = Matmul(m, n, k, batch, BF16, 2 * batch * (m * k + k * n + m * n))
        return work.flops / H100.compute_seconds(work)

    rates = [rate(s, s, s) for s in (256, 512, 1024, 2048, 4096, 8192)]
    assert all(a < b for a, b in pairwise(rates))
    assert rates[0] < 0.05 * H100.peak_flops(BF16)
    assert rates[-1] < 0.72 * H100.peak_flops(BF16)
    assert rate(129, 8192, 8192) < 0.7 * rate(256, 8192, 8192)  # two rows of tiles, one almost empty
    assert rate(133 * 128, 256, 8192) < 0.75 * rate(132 * 128, 256, 8192)  # a second wave for one tile
    assert rate(1024, 1024, 65536) > 2 * rate(1024, 1024, 1024)  # k is split: 32 tiles do not fill 132 units
    assert rate(64, 64, 64, 4096) > 50 * rate(64, 64, 64)
    vector = Matmul(1, 8192, 8192, 1, BF16, 2 * 8192 * 8193 + 16384)
    assert H100.compute_seconds(vector) > vector.bytes / 3.35e12


def test_empty_work_is_a_launch() -> None:
    assert H100.compute_seconds(Matmul(0, 8, 8, 1, BF16, 0)) == H100.launch_s
    assert H100.compute_seconds(Attention(0, 8, 8, 64, False, False, BF16, 0)) == H100.launch_s
    assert H100.compute_seconds(MemoryWork("copy", 0, 0, BF16)) == H100.launch_s


def test_attention_depends_on_direction_mask_dtype_and_filling() -> None:
    def seconds(heads: int = 64, keys: int = 4096, causal: bool = False, back: bool = False, dtype=BF16) -> float:
        return H100.compute_seconds(Attention(heads, keys, keys, 128, causal, back, dtype, 1))

    assert 1.6 < seconds() / seconds(causal=True) < 2
    assert 2.5 < seconds(back=True) / seconds() < 3.5
    assert seconds(dtype=torch.float32) == pytest.approx(seconds() * 989.4 / 66.9, rel=0.01)
    assert seconds(heads=1) > 0.9 * seconds(heads=4)  # 32 blocks or 128, one wave


def test_memory_work_has_a_launch_and_a_bandwidth_by_kind() -> None:
    def seconds(kind: str, size: int) -> float:
        return H100.compute_seconds(MemoryWork(kind, size, size // 2, BF16))

    assert seconds("copy", 2**30) == pytest.approx(3e-6 + 2**30 / (3.35e12 * 0.89))
    assert seconds("scatter", 2**30) > seconds("strided", 2**30) > seconds("copy", 2**30)
    assert seconds("copy", 1024) == pytest.approx(3e-6, rel=0.01)


def measured(**changes: object) -> MachineProfile:
    return replace(load_profile("cpu-gloo"), name="measured", **changes)


def test_dtypes_that_were_not_measured_are_priced_as_the_nearest_that_was() -> None:
    from meshweave.cost.hardware.schema import AttentionModel, AttentionPoints, MatmulModel, MatmulPoints

    tables = tuple(
        MatmulPoints(name, ((64, 64, 64, 1, seconds),)) for name, seconds in (("float32", 1e-3), ("float64", 4e-3))
    )
    rows = tuple(
        AttentionPoints("float32", d, ((4, 128, 128, 64, 0, s),)) for d, s in (("forward", 1e-2), ("backward", 3e-2))
    )
    profile = measured(
        peak=(("float32", 4e9), ("float64", 1e9)),
        matmul=MatmulModel(measured=tables),
        attention=AttentionModel(measured=rows),
    )
    nearest = {
        torch.float16: 1e-3,
        torch.int32: 1e-3,
        torch.int64: 4e-3,
        torch.complex64: 4e-3,
        torch.complex128: 16e-3,
    }
    for dtype, seconds in nearest.items():
        assert profile.compute_seconds(Matmul(64, 64, 64, 1, dtype, 1)) == pytest.approx(seconds)
    for is_backward, seconds in ((False, 1e-2), (True, 3e-2)):
        for dtype, factor in ((torch.float32, 1), (torch.float16, 1), (torch.float64, 4)):  # the ratio of their matmuls
            work = Attention(4, 128, 128, 64, False, is_backward, dtype, 1)
            assert profile.compute_seconds(work) == pytest.approx(factor * seconds)
    assert profile.peak_flops(torch.int64) == 1e9


def test_measured_points_are_kept_and_followed() -> None:
    from meshweave.cost.hardware.schema import AttentionPoints, MatmulPoints, MemoryCurve

    gloo = load_profile("cpu-gloo")
    points = ((64, 64, 64, 1, 1e-5), (512, 512, 512, 1, 2e-3), (512, 64, 512, 1, 4e-4), (4096, 64, 64, 1, 5e-4))
    rows = ((4, 128, 128, 64, 0, 1e-3), (4, 128, 128, 64, 1, 8e-4), (4, 1024, 1024, 64, 0, 3e-2))
    profile = measured(
        matmul=replace(gloo.matmul, measured=(MatmulPoints("float32", points),)),
        attention=replace(gloo.attention, measured=(AttentionPoints("float32", "forward", rows),)),
        memory=replace(gloo.memory, measured=(MemoryCurve("copy", ((1e3, 1e-5), (1e6, 1e-4))),)),
    )
    for m, n, k, batch, seconds in points:
        assert profile.compute_seconds(Matmul(m, n, k, batch, torch.float32, 1)) == pytest.approx(seconds, rel=1e-4)
    between = profile.compute_seconds(Matmul(256, 256, 256, 1, torch.float32, 1))
    assert 2 * 256**3 / 1.4e11 < between < 2 * 256**3 / 5e10
    assert profile.compute_seconds(Matmul(2, 2, 2, 1, torch.float32, 1)) == profile.launch_s  # not less than any op
    twice = profile.compute_seconds(Matmul(8192, 8192, 8192, 1, torch.float32, 1))
    assert twice == pytest.approx(2e-3 * 16**3, rel=0.5)
    for heads, queries, keys, head_dim, causal, seconds in rows:
        work = Attention(heads, queries, keys, head_dim, bool(causal), False, torch.float32, 1)
        assert profile.compute_seconds(work) == pytest.approx(seconds, rel=1e-4)
    copies = [profile.compute_seconds(MemoryWork("copy", b, b, BF16)) for b in (10, 1000, 500_500, 10**6, 2 * 10**6)]
    assert copies == pytest.approx([1e-5, 1e-5, 5.5e-5, 1e-4, 1e-4 + 1e6 * 9e-5 / 999e3])
    assert profile.compute_seconds(MemoryWork("fill", 10**6, 1, BF16)) == gloo.compute_seconds(
        MemoryWork("fill", 10**6, 1, BF16)
    )


def test_measured_collectives_carry_over_to_other_group_sizes() -> None:
    fit = Fit("all_gather", "node", 2, ((0, 1e-4), (1e6, 1.1e-3)))
    profile = measured(collectives=(fit, Fit("permute", "node", 2, ((0, 1e-4), (1e6, 1.1e-3)))))
    assert profile.seconds("all_gather", Mesh("a=2"), ("a",), 5e5) == pytest.approx(6e-4)
    # 3 peers: three start-ups, and as many bytes received take as long
    assert profile.seconds("all_gather", Mesh("a=4"), ("a",), 1e6 / 3) == pytest.approx(1.1e-3 + 2e-4)
    assert profile.seconds("permute", Mesh("a=4"), ("a",), 1e6) == pytest.approx(1.1e-3)
    assert profile.alpha_s == 0.0
    exact = replace(
        profile, name="exact", collectives=(*profile.collectives, Fit("all_gather", "node", 4, ((0, 7e-4),)))
    )
    assert exact.seconds("all_gather", Mesh("a=4"), ("a",), 0) == 7e-4
    assert exact.seconds("all_gather", Mesh("a=2"), ("a",), 0) == 1e-4


def test_both_kinds_of_costs_answer_the_same_questions() -> None:
    def ask(costs: Costs) -> tuple[str, float, float]:
        return costs.name, costs.alpha_s, costs.seconds("all_gather", Mesh("a=2"), ("a",), 0)

    assert ask(AlphaBeta(1e-5)) == ("alpha-beta", 1e-5, 1e-5)
    name, alpha, start = ask(H100)
    assert name == "h100"
    assert alpha == pytest.approx(7.2e-6)
    assert start >= alpha
    with pytest.raises(MeshweaveError, match=r'use a machine profile such as load_profile\("h100"\)'):
        AlphaBeta().compute_seconds(MemoryWork("copy", 8, 8, BF16))
