"""Layouts of stages: their text, the default cut by work, and steps whose stages follow them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshweave as mw
from meshweave.errors import PlanError
from meshweave.ir.graph import origin_of
from meshweave.place.plan_text import parse_plan
from meshweave.place.stage_layout import StageLayout
from meshweave.place.stage_split import balanced_sizes

# the text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Et*3|t*5|t*5|t*3L", "Et*3|t*5|t*5|t*3L"),
        ("Ettt|(tt|)*3,L", "Et*3|t*2|t*2|t*2|L"),  # the form of Megatron's own example
        (" E t , t\n| (t*2|t)*2 | L ", "Et*2|t*2|t*3|t|L"),
        ("E|((t|)*2t*2|)*2,tL", "E|t|t|t*2|t|t|t*2|tL"),  # groups within groups
        ("(t)*3", "t*3"),
        ("(t)", "t"),
        ("t|t", "t|t"),
    ],
)
def test_a_layout_is_read_as_in_megatron(text: str, expected: str) -> None:
    assert str(StageLayout.parse(text)) == expected
    assert StageLayout.parse(expected) == StageLayout.parse(text)


def random_text(chance: Random) -> tuple[str, list[int]]:
    """A layout in any of its spellings, and the layers of each stage."""
    stages, text = list[int](), ""
    for _ in range(chance.randint(1, 6)):
        size, times = chance.randint(1, 12), chance.choice([1, 1, 2, 5])
        one = chance.choice(
            [f"t*{size}", "t" * size, f"(t)*{size}", f"(t*{size})", f" t*{size - 1},t" if size > 1 else "t"]
        )
        text += chance.choice([f"({one}|)*{times}", f"({one} | ) *{times}", "|".join([one] * times) + "|"])
        stages += [size] * times
    ends = chance.choice(["", "E", "E|"]), chance.choice(["", "L", "|L"])
    stages = [*([0] if ends[0] == "E|" else []), *stages, *([0] if ends[1] == "|L" else [])]
    if ends[1] != "|L":  # the last | separates nothing
        text, stages = text + "t" + ends[1], [*stages, 1]
    else:
        text += "L"
    return ends[0] + text, stages


@pytest.mark.parametrize("seed", range(100))
def test_random_layouts_are_printed_and_read_again(seed: int) -> None:
    text, sizes = random_text(Random(seed))
    layout = StageLayout.parse(text)
    assert list(layout.sizes) == sizes
    assert StageLayout.parse(str(layout)) == layout
    plan = mw.Plan.stages("pp", layout=text, order="v")
    assert parse_plan(f"dp:dp+stages:pp:layout={layout}:order=v") == mw.Plan.dp("dp") + plan


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "nothing in stage 0 of 1"),
        ("Et|", "nothing in stage 1 of 2"),
        ("Et||tL", "nothing in stage 1 of 3"),
        ("E|t|mL", "multi-token prediction"),
        ("EL", "EL"),
        ("tE|tL", "tEtL"),
        ("Et|LtL", "EtLtL"),
        ("EEt", "EEt"),
        ("Et|x", "'x'"),
        ("*3t", "'*3'"),
        ("t**3", "'*'"),
        ("t*", "'*'"),
        ("t*0", "'*0'"),
        ("t*2*3", "'*3'"),
        ("t*x", "'*'"),
        ("()*2t", "'*2'"),
        ("(t|t", "not closed"),
        ("t)|t", "')'"),
        ("t*999999", "more than 100000 parts"),
        ("((((t*99)*99)*99)*99)*99", "more than 100000 parts"),
        ("t*" + "9" * 5000, "more than"),
        ("t*٣", "'*'"),
        ("e|t", "'e'"),
    ],
)
def test_text_that_is_no_layout(text: str, got: str) -> None:
    with pytest.raises(PlanError, match="invalid layout of stages") as error:
        mw.Plan.stages("pp", layout=text)
    assert got in error.value.got
    assert "for example" in error.value.hint


@pytest.mark.parametrize("seed", range(100))
def test_any_text_is_a_layout_or_an_error(seed: int) -> None:
    chance = Random(seed)
    text = "".join(chance.choice("EtttL||()*23, m:x") for _ in range(chance.randint(0, 12)))
    try:
        layout = StageLayout.parse(text)
    except PlanError:
        return
    assert StageLayout.parse(str(layout)) == layout


def test_arguments_of_plans_by_name() -> None:
    assert parse_plan("stages:pp:layout=Et|t t,L") == mw.Plan.stages("pp", layout="Et|ttL")
    assert parse_plan("stages:pp:2:order=v") == mw.Plan.stages("pp", 2, "v") == parse_plan("stages:pp:2:v")
    assert parse_plan("cp:cp:balance=none") == mw.Plan.cp("cp", balance="none")
    for text in (
        "stages:pp:layers=Et",
        "stages:pp:axis=pp",
        "stages:pp:layout=Et:2",
        "stages:layout=Et",
        "ep:ep:batch=no",
    ):
        with pytest.raises(PlanError, match="is not a scheme of plans"):
            parse_plan(text)
    with pytest.raises(PlanError, match="invalid stages"):
        mw.Plan.stages("pp", 2, layout="Et|tL")
    with pytest.raises(PlanError, match="invalid stages"):
        mw.Plan.stages("pp", order="w", layout="Et|tL")


# the cut by work


def cuts(layers: int, count: int) -> Any:
    for at in combinations(range(1, layers), count - 1):
        ends = [0, *at, layers]
        yield tuple(j - i for i, j in pairwise(ends))


def loads(work: list[int], sizes: tuple[int, ...]) -> list[int]:
    return [sum(work[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_has_the_least_largest_stage_of_all(seed: int) -> None:
    chance = Random(seed)
    work = [chance.choice([0, 1, 5, 5, 5, 9]) for _ in range(chance.randint(1, 9))]
    for count in range(1, len(work) + 1):
        all_cuts = [(max(its := loads(work, c)), sum(x * x for x in its), c) for c in cuts(len(work), count)]
        assert balanced_sizes(work, count) == min(all_cuts)[2]


def test_equal_layers_are_divided_evenly_the_first_stages_with_fewer() -> None:
    assert balanced_sizes([7] * 8, 2) == (4, 4)
    assert balanced_sizes([7] * 10, 4) == (2, 2, 3, 3)
    assert balanced_sizes([7] * 500, 64)[-1] == 8


# models


class Language(nn.Module):
    """An embedding, layers, a norm and a head for a vocabulary."""

    def __init__(self, vocabulary: int = 16, depth: int = 8, backwards: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.backwards = backwards

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in [*self.layers][:: -1 if self.backwards else 1]:
            h = h + torch.tanh(layer(h))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def tokens(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 16, (8, 3), generator=made) for name in "xy"}


def compiled(mesh: str, model: nn.Module | None = None, **options: Any) -> mw.TrainStep:
    torch.manual_seed(0)
    model = Language().double() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mw.compile(
        model, loss=lambda out, _: out, example=tokens(0), optimizer=optimizer, mesh=mesh, accumulate=4,
        profile="alpha-beta", **options,
    )  # fmt: skip


def trained(mesh: str, **options: Any) -> tuple[mw.TrainStep, list[float]]:
    step = compiled(mesh, **options)
    return step, [float(step(tokens(i))) for i in range(3)]


@cache
def on_one_device() -> tuple[dict[str, Tensor], list[float]]:
    step, losses = trained("")
    return step.parameters(), losses


def stages_of(step: mw.TrainStep) -> list[list[str]]:
    """The modules of each stage, as the plan numbers them."""
    stages = step.program.resolved.stages
    return [[name for name, its in stages.items() if its == number] for number in range(max(stages.values()) + 1)]


def sizes_of(step: mw.TrainStep) -> list[int]:
    return [len(modules) for modules in stages_of(step)]


RUNS = [
    ("pp=2", "1f1b", "Et*3|t*5L", None),
    ("pp=4", "zb-h1", "Et*3|t|t*2|t*2L", None),
    ("pp=4", "1f1b", "E|t*5|t*3|L", None),
    ("pp=2", "interleaved", "Et|t*3|t*2|t*2L", None),
    ("pp=2", "interleaved", "E|t*3|t*5|L", "looped"),
    ("pp=2", "zbv", "E|t*3|t*5|L", None),  # in the order of the schedule
    ("pp=2", "zbv", "Et*3|t|t*3|tL", "v"),
    ("pp=2,dp=2", "gpipe", "E|t*8L", None),
    ("fsdp=2,pp=2", None, "Et*8|L", None),
]


@pytest.mark.parametrize(("mesh", "pipeline", "layout", "order"), RUNS)
def test_each_layout_trains_as_one_device(mesh: str, pipeline: str | None, layout: str, order: str | None) -> None:
    alone, expected = on_one_device()
    fsdp = mw.Plan.fsdp("fsdp") if "fsdp" in mesh else mw.Plan.dp("dp") if "dp" in mesh else mw.Plan()
    step, losses = trained(mesh, pipeline=pipeline, plan=mw.Plan.stages("pp", layout=layout, order=order) + fsdp)
    assert losses == pytest.approx(expected, rel=1e-12)
    for name, value in alone.items():
        torch.testing.assert_close(step.parameters()[name], value, rtol=1e-10, atol=1e-12)
    layers = [sum("layers" in name for name in modules) for modules in stages_of(step)]
    assert tuple(layers) == StageLayout.parse(layout).sizes


def test_parts_of_their_own_run_where_the_layout_says() -> None:
    step = compiled("pp=4", plan="stages:pp:layout=E|t*4|t*4|L", pipeline="1f1b")
    modules = stages_of(step)
    assert (modules[0], modules[3]) == (["embedding"], ["norm", "head"])
    homes = step.program.placement.homes
    of_head = [n for n in homes if n.op == "call_function" and origin_of(n).module in ("norm", "head")]
    assert {homes[node].devices for node in of_head} == {(3,)}


def test_embeddings_of_a_language_model_run_alone_beside_tables_of_positions() -> None:
    """The tables follow from constants, and are computed on all devices, also on those that have no layer."""
    model, batch, loss = hugging_face("llama", batch=4)
    made: dict[str, Any] = {"loss": loss, "example": batch, "accumulate": 2, "profile": "alpha-beta"}
    sgd = torch.optim.SGD
    step = mw.compile(
        model,
        mesh="pp=4",
        plan="stages:pp:layout=E|t|t|L",
        pipeline="1f1b",
        optimizer=sgd(model.parameters(), 0.1),
        **made,
    )
    losses = [float(step(batch)) for _ in range(2)]
    model, _, _ = hugging_face("llama", batch=4)
    alone = mw.compile(model, mesh="", optimizer=sgd(model.parameters(), 0.1), **made)
    assert losses == pytest.approx([float(alone(batch)) for _ in range(2)], rel=1e-6)


def test_the_stage_of_a_large_head_has_fewer_layers() -> None:
    assert sizes_of(compiled("pp=2", Language(16))) == [5, 3]  # the head is the work of two layers
    assert sizes_of(compiled("pp=4", Language(32, depth=12))) == [3, 4, 4, 1]  # of four
    assert sizes_of(compiled("pp=2", Language(32, depth=12), pipeline="interleaved")) == [3, 4, 4, 1]


def test_the_table_of_an_embedding_is_no_work() -> None:
    class Only(Language):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.embedding(x)
            for layer in self.layers:
                h = h + torch.tanh(layer(h))
            return h.square().mean()

    assert sizes_of(compiled("pp=2", Only(1000))) == [4, 4]


def test_a_model_without_matmuls_is_cut_by_parameters() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.LayerNorm(size) for size in (8, 2, 2, 4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = x[:, :1].float().expand(-1, 8)
            for layer in self.layers:
                h = layer(h[:, : layer.normalized_shape[0]].repeat(1, 4)[:, : layer.normalized_shape[0]])
            return h.square().mean()

    assert sizes_of(compiled("pp=2", Scales())) == [1, 3]


def test_layers_are_counted_as_forward_comes_to_them() -> None:
    step = compiled("pp=2", Language(backwards=True), plan="stages:pp:layout=Et*3|t*5L")
    assert stages_of(step)[0] == ["layers.7", "layers.6", "layers.5"]


def test_layers_without_parameters_are_none() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
    step = mw.compile(
        model, loss=lambda out, _: out.mean(), example=torch.randn(4, 3), mesh="pp=2", plan="stages:pp:layout=t|t",
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
    )  # fmt: skip
    assert step.program.resolved.stages == {"0": 0, "2": 1}


class Entries(nn.Module):
    """Layers in a list, a dict or a Sequential with names of its own; only those in `called` run, from the first on."""

    def __init__(self, layers: nn.Module, called: str = "") -> None:
        super().__init__()
        self.net, self.called = layers, called.split()

    def forward(self, x: Tensor) -> Tensor:
        named = dict(self.net.named_children())
        for name in self.called or named:
            x = named[name](x).tanh()
        return x


def two_losses(model: Callable[[], nn.Module], mesh: str, *, rows: int, **options: Any) -> tuple[Any, list[float]]:
    """A compiled step of a model on so many rows of random numbers, and the losses of its first two steps."""
    torch.manual_seed(0)
    net, data = model(), torch.randn(rows, 8)
    step = mw.compile(
        net, loss=lambda out, _: out.square().mean(), example=data, mesh=mesh,
        optimizer=torch.optim.SGD(net.parameters(), 0.1), **options,
    )  # fmt: skip
    return step, [float(step(data)) for _ in range(2)]


def linears(names: str) -> OrderedDict[str, nn.Module]:
    return OrderedDict((name, nn.Linear(8, 8)) for name in names.split())


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: Entries(nn.Sequential(linears("inner between outer"))), ["net.inner", "net.between", "net.outer"]),
        (lambda: Entries(nn.ModuleDict(linears("0 1 2"))), ["net.0", "net.1", "net.2"]),
        (lambda: Entries(nn.ModuleDict(linears("a b c d")), "d b"), ["net.d", "net.b"]),
        (lambda: Entries(nn.ModuleList([*linears("0 1 2 3").values()]), "0 3"), ["net.0", "net.3"]),
        (
            lambda: Entries(nn.ModuleList([nn.Sequential(nn.Linear(8, 8), *[nn.Tanh()] * 4) for _ in range(3)])),
            ["net.0", "net.1", "net.2"],
        ),
        (  # lists within equal layers are parts of these, however long they are
            lambda: Entries(nn.ModuleList([nn.Sequential(linears("a b c")) for _ in range(2)])),
            ["net.0", "net.1"],
        ),
        (
            lambda: Entries(nn.Sequential(nn.Sequential(linears("a b c")), nn.Linear(8, 8))),
            ["net.0.a", "net.0.b", "net.0.c"],
        ),
    ],
)
def test_layers_are_the_entries_that_forward_calls_by_their_names(
    model: Callable[[], Entries], expected: list[str]
) -> None:
    step, found = two_losses(model, "pp=2", rows=4, accumulate=2, pipeline="1f1b")
    assert found == pytest.approx(two_losses(model, "", rows=4, accumulate=2)[1], rel=1e-5)
    stages = step.program.resolved.stages
    assert sorted(stages, key=expected.index) == expected
    assert {stages[name] for name in (expected[0], expected[-1])} == {0, 1}


class Recomputed(nn.Module):
    """Blocks of PyTorch's modules that run again in backward, where no line of the model's forward does."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(parts)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("pp=2,fsdp=2", {"pipeline": "zb-h1"}),
        ("pp=2", {"pipeline": "interleaved", "plan": "stages:pp:2"}),
        ("pp=2", {"pipeline": "zbv", "plan": "stages:pp:2:v"}),
    ],
)
def test_a_block_that_is_recomputed_stays_on_its_stage(mesh: str, options: dict[str, Any]) -> None:
    step, found = two_losses(Recomputed, mesh, rows=8, accumulate=4, **options)
    assert found == pytest.approx(two_losses(Recomputed, "", rows=8, accumulate=4)[1], rel=1e-5)
    stages = step.program.resolved.stages
    gelus = [n for n in step.program.placed.graph.nodes if n.target is torch.ops.aten.gelu.default]
    assert len(gelus) == 8
    for node in gelus:
        assert origin_of(node).stage == stages[origin_of(node).module.rpartition(".")[0]]


# layouts that do not fit


def test_a_layout_with_another_number_of_layers() -> None:
    with pytest.raises(PlanError, match="another number of layers than the model") as error:
        compiled("pp=2", plan="stages:pp:layout=Et*3|t*3L")
    assert (error.value.got, error.value.expected) == (
        "6 layers",
        "8: those with parameters in layers that forward calls",
    )
    assert error.value.hint.startswith("balanced: Et*")


def test_a_layout_whose_stages_do_not_divide_over_the_axis() -> None:
    with pytest.raises(PlanError, match="do not divide over the axis") as error:
        compiled("pp=2", plan="stages:pp:layout=Et*3|t*3|t*2L")
    assert "3 stages" in error.value.got


def test_a_layout_with_other_stages_than_the_schedule() -> None:
    with pytest.raises(PlanError, match="fixed number of stages per rank") as error:
        compiled("pp=2", plan="stages:pp:layout=Et*2|t*2|t*2|t*2L", pipeline="1f1b")
    assert ("2" in error.value.got, "1" in error.value.expected) == (True, True)
    with pytest.raises(PlanError, match="the stages of the plan are not those of schedule zbv"):
        compiled("pp=2", plan="stages:pp:layout=Et*2|t*2|t*2|t*2L:order=looped", pipeline="zbv")


def test_parts_that_a_model_lacks() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 4))
    for layout, side in (("E|ttL", "before"), ("Et*2|L", "after")):
        with pytest.raises(PlanError, match=f"no module with parameters of its own runs {side} the layers"):
            mw.compile(
                model, loss=lambda out, _: out.mean(), example=torch.randn(4, 3), mesh="pp=2",
                optimizer=torch.optim.SGD(model.parameters(), 0.1), plan=mw.Plan.stages("pp", layout=layout),
            )  # fmt: skip


def test_more_stages_than_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    made: dict[str, Any] = {"loss": lambda out, _: out.mean(), "example": torch.randn(4, 2), "mesh": "pp=2"}
    for each in (model, nn.Linear(2, 2)):
        with pytest.raises(PlanError, match="fewer layers than there are stages") as error:
            mw.compile(each, optimizer=torch.optim.SGD(each.parameters(), 0.1), plan="stages:pp", **made)
        assert error.value.expected == "at least 2"
        assert "mw.on" in error.value.hint


def test_sums_of_gradients_for_a_stage_with_a_single_layer() -> None:
    """The gradient of a residual is added up on a device whose first stage comes later."""
    _, expected = trained("")
    step, losses = trained("pp=2", plan="stages:pp:layout=Et|t*2|t*2|t*3L", pipeline="interleaved")
    assert losses == pytest.approx(expected, rel=1e-12)
    assert sizes_of(step) == [1, 2, 2, 3]


@pytest.mark.parametrize(("mesh", "layout"), [("pp=4", "E|t|t|L"), ("pp=2,fsdp=2", "Et|tL")])
def test_tied_weights_in_lower_precision(mesh: str, layout: str) -> None:
    """Casts stand on the side of a move on which the value is smaller, on devices that lack the stage of the op."""

    def losses(mesh: str, **options: Any) -> list[float]:
        model, batch, loss = hugging_face("gpt2", batch=4)
        optimizer, precision = torch.optim.SGD(model.parameters(), 0.1), mw.Precision(autocast=torch.bfloat16)
        step = mw.compile(
            model, loss=loss, example=batch, accumulate=2, profile="alpha-beta", mesh=mesh, optimizer=optimizer,
            precision=precision, **options,
        )  # fmt: skip
        return [float(step(batch)) for _ in range(3)]

    plan = f"stages:pp:layout={layout}" + ("+fsdp:fsdp" if "fsdp" in mesh else "")
    assert losses(mesh, plan=plan, pipeline="1f1b") == pytest.approx(losses(""), rel=1e-3)
