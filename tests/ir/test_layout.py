"""Layout: text form, invariants, the table of pieces and the normal form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshweave.errors import LayoutError, MeshError
from meshweave.ir.layout import REDUCE_OPS, WHOLE, DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box

MESH = Mesh("pp=2,dp=3,tp=2")


@st.composite
def layouts(draw: st.DrawFn, num_dims: int | None = None) -> Layout:
    """Any layout over 1 to 3 axes: each axis shards a dim, makes the value partial or replicates it."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    names = [f"a{i}" for i in range(len(sizes))]
    count = 1
    for size in sizes:
        count *= size
    mesh = Mesh(dict(zip(names, sizes, strict=True)), devices=draw(st.permutations(range(count))))
    if num_dims is None:
        num_dims = draw(st.integers(0, 3))
    axes: list[list[str]] = [[] for _ in range(num_dims)]
    partial = []
    for axis in draw(st.permutations(names)):
        use = draw(st.sampled_from([*range(num_dims), "replicate", *REDUCE_OPS]))
        if isinstance(use, int):
            axes[use].append(axis)
        elif use != "replicate":
            partial.append((axis, use))
    dims = tuple(DimSharding(tuple(a), draw(st.sampled_from([1, 1, 2, 3]))) for a in axes)
    return Layout(mesh, dims, tuple(partial))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    layout = draw(layouts())
    return layout, tuple(draw(st.integers(0, 7)) for _ in layout.dims)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout.replicated(MESH, 0), "[]"),
        (Layout.replicated(MESH, 2), "[{}, {}]"),
        (Layout.of(MESH, 2, {0: ["dp"], 1: ["tp"]}), "[{dp}, {tp}]"),
        (Layout.of(MESH, 1, {0: ["tp", "pp"]}), "[{tp,pp}]"),
        (Layout(MESH, (WHOLE, DimSharding(("tp",), 16))), "[{}, {tp}x16]"),
        (Layout.of(MESH, 2, {}, {"tp": "sum"}), "[{}, {}] partial(sum: tp)"),
        (Layout.of(MESH, 1, {}, {"tp": "sum", "pp": "sum"}), "[{}] partial(sum: pp,tp)"),
        (Layout.of(MESH, 1, {0: ["dp"]}, {"tp": "max", "pp": "avg"}), "[{dp}] partial(avg: pp; max: tp)"),
    ],
)
def test_text_form(layout: Layout, text: str) -> None:
    assert str(layout) == text
    assert Layout.parse(text, MESH) == layout
    assert repr(layout) == f"Layout({text} on pp=2,dp=3,tp=2)"


@pytest.mark.parametrize("text", [" [ {tp , pp} , { }x4 ]  partial( sum : dp ) ", "[{tp,pp},{}]partial(sum:dp)"])
def test_blanks_do_not_count(text: str) -> None:
    assert str(Layout.parse(text, MESH)) == "[{tp,pp}, {}] partial(sum: dp)"


@given(layouts())
def test_text_form_reads_back(layout: Layout) -> None:
    assert Layout.parse(str(layout), layout.mesh) == layout


def test_rows_that_devices_own() -> None:
    text = "[{dp}, {}] partial(sum: pp) owned(tp: 0 by ends)"
    layout = Layout.parse(text, MESH)
    assert str(layout) == text
    assert layout.owned == (("tp", 0, "ends"),)
    assert Layout.parse("[{dp}, {}]", MESH).local_shape((18, 4)) == (6, 4)
    assert layout.local_shape((18, 4)) == (3, 4)  # an equal share of the rows of a piece, whatever it will be
    assert str(layout.owned_as_parts()) == "[{dp}, {}] partial(sum: pp,tp)"
    assert str(layout.without_owned()) == "[{dp}, {}] partial(sum: pp)"
    assert layout.replicated_axes == ()
    assert hash(layout) != hash(layout.without_owned())
    with pytest.raises(LayoutError, match="used twice"):
        Layout.parse("[{tp}, {}] owned(tp: 0 by ends)", MESH)
    with pytest.raises(LayoutError, match="this is not a layout"):
        Layout.parse("[{}, {}] owned(tp by ends)", MESH)


def test_axes_by_use() -> None:
    layout = Layout.parse("[{tp}, {}] partial(sum: dp)", MESH)
    assert (layout.sharded_axes, layout.partial_axes, layout.replicated_axes) == (("tp",), ("dp",), ("pp",))
    assert (layout.dim_of("tp"), layout.dim_of("dp"), layout.parts(0), layout.parts(1)) == (0, None, (2,), ())
    assert str(layout.with_dim(1, DimSharding(("pp",)))) == "[{tp}, {pp}] partial(sum: dp)"


def test_axis_order_is_a_difference() -> None:
    assert Layout.parse("[{tp,pp}]", MESH) != Layout.parse("[{pp,tp}]", MESH)
    assert Layout.parse("[{tp,pp}]", MESH).pieces((4,))[1] == Box((2,), (1,))
    assert Layout.parse("[{pp,tp}]", MESH).pieces((4,))[1] == Box((1,), (1,))


def test_pieces_by_device_id() -> None:
    mesh = Mesh("dp=2,tp=2", devices=[3, 1, 0, 2])
    assert Layout.parse("[{dp}, {tp}]", mesh).pieces((4, 6)) == {
        3: Box((0, 0), (2, 3)),
        1: Box((0, 3), (2, 3)),
        0: Box((2, 0), (2, 3)),
        2: Box((2, 3), (2, 3)),
    }


@given(cases())
def test_pieces_cover_every_element_once_per_replica_group(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    pieces = layout.pieces(shape)
    assert set(pieces) == set(layout.mesh.devices)
    for group in layout.mesh.groups(layout.sharded_axes):
        count = torch.zeros(shape, dtype=torch.int)
        for device in group:
            count[pieces[device].slices()] += 1
        assert torch.equal(count, torch.ones(shape, dtype=torch.int))
    for group in layout.mesh.groups((*layout.replicated_axes, *layout.partial_axes)):
        assert len({pieces[device] for device in group}) == 1


@given(cases())
def test_local_shape_is_the_largest_piece(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    sizes = [box.size for box in layout.pieces(shape).values()]
    assert layout.local_shape(shape) == sizes[0] == tuple(max(s[d] for s in sizes) for d in range(len(shape)))


@given(cases())
def test_normalized_keeps_pieces_and_is_its_own_normal_form(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    normal = layout.normalized(shape)
    assert normal.pieces(shape) == layout.pieces(shape)
    assert normal.normalized(shape) is normal
    assert all(layout.mesh.size(axis) > 1 for axis in (*normal.sharded_axes, *normal.partial_axes))
    kept = {(axis, op) for axis, op in layout.partial if layout.mesh.size(axis) > 1}
    assert set(normal.partial) == kept


@given(cases())
def test_a_unit_that_changes_nothing_makes_no_other_normal_form(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    plain = Layout(layout.mesh, tuple(DimSharding(dim.axes) for dim in layout.dims), layout.partial)
    same_pieces = plain.pieces(shape) == layout.pieces(shape)
    assert same_pieces or plain.normalized(shape) != layout.normalized(shape)
    for d, size in enumerate(shape):
        one = Layout(layout.mesh, (layout.dims[d],))
        one_plain = Layout(layout.mesh, (plain.dims[d],))
        equal = one.pieces((size,)) == one_plain.pieces((size,))
        assert equal == (one.normalized((size,)) == one_plain.normalized((size,)))


@pytest.mark.parametrize(
    ("text", "shape", "normal"),
    [
        ("[{one,tp}, {}] partial(sum: one2)", (4, 4), "[{tp}, {}]"),
        ("[{tp}x2, {}]", (8, 4), "[{tp}, {}]"),
        ("[{tp}x2, {}]", (6, 4), "[{tp}x2, {}]"),
        ("[{tp}x3, {}]", (5, 4), "[{tp}, {}]"),
        ("[{one}x3, {}]", (5, 4), "[{}, {}]"),
    ],
)
def test_normal_form(text: str, shape: tuple[int, ...], normal: str) -> None:
    mesh = Mesh("one=1,one2=1,tp=2")
    assert str(Layout.parse(text, mesh).normalized(shape)) == normal


NOT_A_LAYOUT = "something like [{dp}, {tp}] or [{}, {}] partial(sum: tp)"


@pytest.mark.parametrize(
    "text", ["", "{dp}", "[dp]", "[{dp} {tp}]", "[{dp}", "[{dp}x0]", "[{dp}] partial(tp)", "[{}] sum"]
)
def test_text_that_is_not_a_layout(text: str) -> None:
    with pytest.raises(LayoutError, match="this is not a layout") as caught:
        Layout.parse(text, MESH)
    error = caught.value
    assert (error.where, error.got, error.expected) == ("the text of a layout", repr(text), NOT_A_LAYOUT)
    assert error.hint == "a pair of braces per tensor dim, with the axes that shard it"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Layout.parse("[{tp}, {tp}]", MESH),
            "axis 'tp' is used twice in a layout|mesh pp=2,dp=3,tp=2|[{tp}, {tp}]|every axis at most once",
        ),
        (
            lambda: Layout.parse("[{tp}] partial(sum: tp)", MESH),
            "axis 'tp' is used twice in a layout|mesh pp=2,dp=3,tp=2|[{tp}] partial(sum: tp)|every axis at most once",
        ),
        (
            lambda: Layout.parse("[{}] partial(mul: tp)", MESH),
            "'mul' is not a reduce op|axis 'tp' of mesh pp=2,dp=3,tp=2|mul: tp|one of sum, avg, max, min",
        ),
        (
            lambda: DimSharding(("tp",), 0),
            "a dim is cut in blocks of at least 1 element|{tp}|unit 0|1 or more",
        ),
        (
            lambda: Layout.of(MESH, 1, {1: ["tp"]}),
            "there is no dim 1 to shard|a layout on mesh pp=2,dp=3,tp=2|dim 1|0 to 0",
        ),
        (
            lambda: Layout.of(MESH, 0, {0: ["tp"]}),
            "there is no dim 0 to shard|a layout on mesh pp=2,dp=3,tp=2|dim 0|"
            "no sharded dim, because the value has no dims",
        ),
        (
            lambda: Layout.parse("[{tp}]", MESH).pieces((2, 2)),
            "the layout and the tensor differ in their number of dims|a tensor of shape (2, 2)|"
            "[{tp}] with 1 dims|2 dims",
        ),
    ],
)
def test_errors_say_where_got_and_expected(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(LayoutError) as caught:
        make()
    error = caught.value
    assert "|".join([error.what, error.where, error.got, error.expected]) == message


def test_unknown_axis_is_a_mesh_error() -> None:
    with pytest.raises(MeshError, match="the mesh has no axis 'cp'") as caught:
        Layout.parse("[{cp}]", MESH)
    assert (caught.value.where, caught.value.expected) == ("mesh pp=2,dp=3,tp=2", "one of pp, dp, tp")
