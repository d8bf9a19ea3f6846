"""Mesh: axes, ids, groups, sub-meshes and what is wrong with a bad one."""

import copy
import pickle
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.errors import MeshError
from meshweave.ir.mesh import Mesh

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = draw(SIZES)
    ids = draw(st.permutations(range(prod(sizes))))
    return Mesh({f"a{i}": size for i, size in enumerate(sizes)}, devices=ids)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh("dp=2,tp=2"), "dp=2,tp=2"),
        (Mesh(" dp = 2 , tp=4 "), "dp=2,tp=4"),
        (Mesh(dp=2, tp=2), "dp=2,tp=2"),
        (Mesh({"dp": 2}, tp=3), "dp=2,tp=3"),
        (Mesh("pp=2", devices=[3, 1]), "pp=2 on [3, 1]"),
        (Mesh("pp=2", devices=[0, 1]), "pp=2"),
        (Mesh(""), ""),
    ],
)
def test_text_form(mesh: Mesh, text: str) -> None:
    assert str(mesh) == text
    assert repr(mesh) == f"Mesh({text})"


@given(SIZES)
def test_text_form_of_default_devices_reads_back(sizes: list[int]) -> None:
    mesh = Mesh({f"a{i}": size for i, size in enumerate(sizes)})
    assert Mesh(str(mesh)) == mesh


def test_a_mesh_without_axes_is_one_device() -> None:
    mesh = Mesh("", devices=[5])
    assert (mesh.num_devices, mesh.devices, mesh.groups([]), mesh.coordinates(0)) == (1, (5,), ((5,),), {})


@given(meshes())
def test_position_inverts_coordinates(mesh: Mesh) -> None:
    for position in range(mesh.num_devices):
        coords = mesh.coordinates(position)
        assert mesh.position(coords) == position
        assert tuple(coords) == mesh.axis_names


def test_groups() -> None:
    mesh = Mesh("pp=2,dp=2,tp=2")
    assert mesh.groups(["tp"]) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups(["pp"]) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups(["dp", "tp"]) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups([]) == tuple((i,) for i in range(8))


def test_groups_of_axes_that_are_not_adjacent() -> None:
    mesh = Mesh("pp=2,dp=2,tp=2")
    assert mesh.groups(["pp", "tp"]) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.groups(["tp", "pp"]) == ((0, 4, 1, 5), (2, 6, 3, 7))


def test_groups_follow_the_ids() -> None:
    mesh = Mesh("a=2,b=2", devices=[7, 2, 9, 4])
    assert mesh.groups(["a"]) == ((7, 9), (2, 4))
    assert mesh.groups(["b"]) == ((7, 2), (9, 4))


@given(meshes(), st.data())
def test_groups_hold_every_device_once(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), unique=True))
    groups = mesh.groups(axes)
    assert sorted(d for group in groups for d in group) == sorted(mesh.devices)
    assert {len(group) for group in groups} == {mesh.flat_size(axes)}


def test_flatten() -> None:
    mesh = Mesh("pp=2,dp=2,tp=3")
    adjacent = mesh.flatten(["dp", "tp"], "x")
    assert (str(adjacent), adjacent.devices) == ("pp=2,x=6", mesh.devices)
    apart = mesh.flatten(["pp", "tp"], "x")
    assert str(apart) == "x=6,dp=2 on [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]"
    swapped = mesh.flatten(["tp", "pp"], "x")
    assert (swapped.axis_names, swapped.shape) == (("dp", "x"), (2, 6))
    assert mesh.flatten(["dp"], "dp") == mesh


@given(meshes(), st.data())
def test_flatten_keeps_groups(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.axis_names), unique=True, min_size=1))
    assert mesh.flatten(axes, "flat").groups(["flat"]) == mesh.groups(axes)


def test_sub_mesh_goes_through_index_0_of_the_others() -> None:
    mesh = Mesh("pp=2,dp=2,tp=2", devices=range(10, 18))
    assert str(mesh["tp"]) == "tp=2 on [10, 11]"
    assert str(mesh["pp"]) == "pp=2 on [10, 14]"
    assert str(mesh["pp", "tp"]) == "pp=2,tp=2 on [10, 11, 14, 15]"
    assert str(mesh["tp", "pp"]) == "tp=2,pp=2 on [10, 14, 11, 15]"


def test_index_of_an_axis_is_a_stage_over_all_other_axes() -> None:
    mesh = Mesh("pp=2,dp=2,tp=2")
    assert str(mesh["pp"][1]) == "dp=2,tp=2 on [4, 5, 6, 7]"
    assert str(mesh["tp"][1]) == "pp=2,dp=2 on [1, 3, 5, 7]"
    assert mesh[1] == mesh["pp"][1] == mesh.at(pp=1)
    assert mesh.at(pp=1, tp=0) == Mesh("dp=2", devices=[4, 6])
    assert mesh.at() == mesh


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_equal_and_still_knows_its_parent(twin: object) -> None:
    mesh = Mesh("pp=2,dp=2", devices=[3, 1, 0, 2])
    assert callable(twin)
    assert twin(mesh) == mesh
    assert hash(twin(mesh)) == hash(mesh)
    assert twin(mesh["pp"])[1] == mesh["pp"][1] == Mesh("dp=2", devices=[0, 2])


def test_immutable() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        Mesh("a=2").shape = (3,)


MESH = Mesh("dp=2,tp=2")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh("dp"), "a mesh axis is written name=size|mesh 'dp'|dp|something like dp=2,tp=4"),
        (
            lambda: Mesh("d p=2"),
            "'d p' cannot name an axis|axes d p=2|'d p'|letters, digits and _, no digit first",
        ),
        (lambda: Mesh("dp=2,dp=4"), "axis 'dp' is named twice|axes dp=2,dp=4|dp, dp|every axis at most once"),
        (lambda: Mesh("dp=0"), "axis 'dp' has no devices|axes dp=0|dp=0|a size of 1 or more"),
        (lambda: Mesh("dp=2", devices=[0]), "the devices do not fill the mesh|mesh dp=2|1 devices|2 devices"),
        (
            lambda: Mesh("dp=2", devices=[1, 1]),
            "a device is twice in the mesh|mesh dp=2|repeated: [1]|each device once",
        ),
        (lambda: Mesh("dp=2", devices=[0, -1]), "a device id is below 0|mesh dp=2|-1|0 or more"),
        (lambda: MESH.size("pp"), "the mesh has no axis 'pp'|mesh dp=2,tp=2|pp|one of dp, tp"),
        (
            lambda: MESH.groups(["dp", "dp"]),
            "axis 'dp' is named twice|axes dp=2,dp=2|dp, dp|every axis at most once",
        ),
        (
            lambda: MESH.flatten([], "x"),
            "no axis to flatten|mesh dp=2,tp=2|no axes|at least one axis of the mesh",
        ),
        (lambda: MESH["dp"][2], "no index 2 on axis 'dp'|mesh dp=2,tp=2|2|0 to 1"),
        (lambda: MESH.at(tp=-1), "no index -1 on axis 'tp'|mesh dp=2,tp=2|-1|0 to 1"),
        (
            lambda: Mesh("")[0],
            "a mesh without axes cannot be indexed|devices [0]|no axes|a mesh with an axis, such as mesh['pp']",
        ),
    ],
)
def test_errors_say_where_got_and_expected(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(MeshError) as caught:
        make()
    error = caught.value
    assert "|".join([error.what, error.where, error.got, error.expected]) == message
    assert all([error.where, error.got, error.expected])
