"""AlphaBeta: the formulas, the slowest axis of a flattened group, and what it refuses."""

import math

import pytest

from meshweave.cost.hardware import AlphaBeta
from meshweave.errors import MeshError, MeshweaveError
from meshweave.ir.mesh import Mesh

MESH = Mesh("a=2,b=4,one=1")
PROFILE = AlphaBeta(alpha_s=1e-5, bandwidth={"a": 50e9, "b": 400e9, "one": 1e9})


@pytest.mark.parametrize(
    ("op", "received"),
    [
        ("slice", 0),
        ("to_partial", 0),
        ("scale", 0),
        ("all_gather", 3000),
        ("reduce_scatter", 750),
        ("all_reduce", 1500),
        ("all_to_all", 750),
        ("permute", 1000),
        ("transfer", 1000),
    ],
)
def test_bytes_and_seconds_of_each_op_in_groups_of_four(op: str, received: float) -> None:
    assert PROFILE.bytes_received(op, 4, 1000) == received
    assert PROFILE.seconds(op, MESH, ("b",), 1000) == (1e-5 + received / 400e9 if received else 0.0)


def test_a_flattened_group_has_its_slowest_axis() -> None:
    assert PROFILE.seconds("all_gather", MESH, ("b", "a"), 1000) == 1e-5 + 7000 / 50e9
    assert PROFILE.seconds("all_gather", MESH, ("a", "b"), 1000) == 1e-5 + 7000 / 50e9


def test_groups_of_one_device_do_not_communicate() -> None:
    assert PROFILE.seconds("all_reduce", MESH, ("one",), 1000) == 0.0
    assert PROFILE.seconds("permute", MESH, ("one",), 1000) == 0.0
    assert PROFILE.bytes_received("permute", 1, 1000) == 0


def test_a_transfer_between_meshes_has_the_slowest_bandwidth_of_the_profile() -> None:
    """The stages of a pipeline lack the axis between them; a mesh of one device has none at all."""
    assert PROFILE.seconds("transfer", Mesh("b=4"), (), 1000) == 1e-5 + 1000 / 1e9
    assert PROFILE.seconds("transfer", Mesh(), (), 1000) == 1e-5 + 1000 / 1e9
    assert PROFILE.seconds("transfer", MESH, ("b",), 1000) == 1e-5 + 1000 / 400e9
    assert AlphaBeta(0.0, 1e9).seconds("transfer", Mesh(), (), 1000) == 1e-6
    with pytest.raises(MeshweaveError) as error:
        AlphaBeta(bandwidth={}).seconds("transfer", MESH, (), 1000)
    assert str(error.value) == (
        "the profile has no bandwidth\n  where: AlphaBeta\n  got: an empty table\n"
        "  expected: a bandwidth for every axis, or a single number"
    )


def test_one_number_serves_every_axis() -> None:
    assert AlphaBeta(0.0, 1e9).seconds("all_gather", MESH, ("a",), 1000) == 1e-6
    assert AlphaBeta().seconds("all_gather", MESH, ("b",), 0) == 10e-6


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"alpha_s": -1.0}, "alpha_s is not a cost"),
        ({"alpha_s": math.nan}, "alpha_s is not a cost"),
        ({"alpha_s": math.inf}, "alpha_s is not a cost"),
        ({"bandwidth": 0.0}, "the bandwidth is not a cost"),
        ({"bandwidth": math.nan}, "the bandwidth is not a cost"),
        ({"bandwidth": {"a": 1e9, "b": -1.0}}, "the bandwidth of axis 'b' is not a cost"),
    ],
)
def test_impossible_figures_are_refused(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(MeshweaveError, match=message):
        AlphaBeta(**kwargs)


def test_an_axis_without_bandwidth_is_named() -> None:
    with pytest.raises(MeshweaveError, match=r"no bandwidth for axis 'b'(.|\n)*got: bandwidths of a\n"):
        AlphaBeta(bandwidth={"a": 50e9}).seconds("all_gather", MESH, ("a", "b"), 8)
    with pytest.raises(MeshError, match="the mesh has no axis 'c'"):
        PROFILE.seconds("all_gather", MESH, ("c",), 8)


def test_an_unknown_op_is_never_free() -> None:
    with pytest.raises(MeshweaveError, match="no known cost of 'broadcast'"):
        PROFILE.seconds("broadcast", MESH, ("a",), 8)
    with pytest.raises(MeshweaveError, match="group_size is not a cost"):
        PROFILE.bytes_received("all_gather", 0, 8)
