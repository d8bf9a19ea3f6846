"""Questions about a step: few of many equal layers are built, and say the same as all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import MeshweaveError, PlanError
from meshweave.report.spans import class_sums

WIDTH, LAYERS, TOKENS = 256, 14, 128


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, 512, bias=False)
        self.layers = nn.ModuleList(Block(i) for i in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(out: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), batch["ids"].flatten())


def make_study(model: nn.Module | None = None, **kwargs: Any) -> mw.Study:
    with torch.device("meta"):
        model = model or Model()
    return mw.Study(model, loss=loss_of, optimizer=torch.optim.AdamW(model.parameters()), **kwargs)


def batch_of(rows: int) -> dict[str, Tensor]:
    return {"ids": torch.empty(rows, TOKENS, dtype=torch.long, device="meta")}


def is_from_few(simulation: mw.Simulation) -> bool:
    return any("equal layers" in note for note in simulation.notes)


@pytest.fixture(scope="module")
def study() -> mw.Study:
    return make_study()


def both(study: mw.Study, rows: int, **how: Any) -> tuple[mw.Simulation, mw.Simulation]:
    """The answer from few layers and that from all, compared."""
    question: dict[str, Any] = {"profile": "h100", "clip_grad_norm": 1.0, "precision": torch.bfloat16, **how}
    few, whole = (study.simulate(batch_of(rows), every_layer=each, **question) for each in (False, True))
    assert not is_from_few(whole)
    assert few.seconds == pytest.approx(whole.seconds, rel=1e-6)
    assert few.exposed_seconds == pytest.approx(whole.exposed_seconds, rel=1e-6, abs=1e-12)
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-6)
    assert few.flops == pytest.approx(whole.flops)
    assert few.mfu == pytest.approx(whole.mfu)
    assert (few.verdict, few.fit, few.tokens) == (whole.verdict, whole.fit, whole.tokens)
    for a, b in zip(few.roles, whole.roles, strict=True):
        assert a.persistent_bytes == b.persistent_bytes
        assert a.compute_seconds == pytest.approx(b.compute_seconds, rel=1e-6)
        assert sum(live.bytes for live in a.at_peak) == sum(live.bytes for live in b.at_peak)
    sums = [class_sums(each.spans) for each in (few, whole)]
    assert {name: its.count for name, its in sums[0].items()} == {name: its.count for name, its in sums[1].items()}
    return few, whole


@pytest.mark.parametrize(
    ("rows", "how"),
    [
        (8, {"mesh": "fsdp=8", "passes": "none"}),
        (8, {"mesh": "fsdp=8", "framework": "torchtitan"}),
        (32, {"mesh": "fsdp=8", "framework": "torchtitan", "passes": "recompute=full", "accumulate": 4}),
        (16, {"mesh": "dp=2,fsdp=4", "framework": "fsdp1"}),
        pytest.param(16, {"mesh": "fsdp=4,tp=2", "passes": "prefetch=1"}, marks=pytest.mark.slow),
        pytest.param(
            16, {"mesh": "dp=8", "plan": "zero1:dp", "passes": "none", "accumulate": 2}, marks=pytest.mark.slow
        ),
        pytest.param(8, {"mesh": "fsdp=8", "framework": "torchtitan", "fusion": "blocks"}, marks=pytest.mark.slow),
        pytest.param(8, {"mesh": "dp=8", "passes": "recompute=selective"}, marks=pytest.mark.slow),
    ],
)
def test_few_layers_say_what_all_say(study: mw.Study, rows: int, how: dict[str, Any]) -> None:
    few, _ = both(study, rows, **how)
    assert is_from_few(few) or "tp" in how["mesh"] or how.get("framework") == "fsdp1"  # steady after more layers


@pytest.mark.parametrize("share", [*(pytest.param(share, marks=pytest.mark.slow) for share in (0.9, 0.5)), 0.3])
def test_memory_decides_as_with_all_layers(study: mw.Study, share: float) -> None:
    """Where gradients of microbatches are added up, for machines with less and less memory."""
    question: dict[str, Any] = {"mesh": "fsdp=8", "passes": "none", "accumulate": 4}
    roomy = study.simulate(batch_of(32), profile="h100", clip_grad_norm=1.0, precision=torch.bfloat16, **question)
    machine = mw.load_profile("h100").scaled(memory_bytes=int(share * roomy.peak_bytes))
    both(study, 32, **question | {"profile": machine})


def test_the_next_question_is_answered_from_what_is_known() -> None:
    stages = list[str]()
    study = make_study(progress=stages.append)
    for mesh in ("fsdp=8", "fsdp=4", "dp=2,fsdp=4"):
        study.simulate(batch_of(8), mesh=mesh, profile="h100", passes="none")
    assert stages.count("capture") == 3  # of three depths
    study.simulate(batch_of(8), mesh="fsdp=8", profile="h100", passes="none", framework="torchtitan")
    study.simulate(batch_of(8), mesh="fsdp=8", profile="h100", passes="none")
    assert stages.count("capture") == 3
    study.simulate(batch_of(16), mesh="fsdp=8", profile="h100", passes="none")
    assert stages.count("capture") == 6


@pytest.mark.parametrize(("framework", "where"), [("torchtitan", "in shards"), ("meshweave", "whole")])
def test_a_note_says_where_gradients_are_added_up(study: mw.Study, framework: str, where: str) -> None:
    how: dict[str, Any] = {"profile": "h100", "passes": "none", "accumulate": 2, "framework": framework}
    notes = study.simulate(batch_of(16), mesh="fsdp=8", **how).notes
    assert [note for note in notes if note.startswith(f"gradients of 2 microbatches are added up {where}")]
    assert not [note for note in notes if "added up" in note and "MiB a device" in note]


def test_answers_do_not_depend_on_the_questions_before() -> None:
    """Of other meshes, plans and stages, which number the same captured step otherwise."""
    questions: list[dict[str, Any]] = [
        {"mesh": "pp=2,dp=2", "pipeline": "1f1b", "accumulate": 4},
        {"mesh": "fsdp=4"},
        {"mesh": "pp=4", "pipeline": "1f1b", "accumulate": 4},
        {"mesh": "dp=4"},
    ]
    one = make_study(Model(4))
    for question in (*questions, *questions[::-1]):
        asked, alone = (
            each.simulate(batch_of(16), profile="h100", passes="none", **question)
            for each in (one, make_study(Model(4)))
        )
        assert asked == alone


@pytest.mark.parametrize(
    "how",
    [
        {"mesh": "fsdp=8", "plan": mw.Plan.fsdp("fsdp") + mw.Plan.keep("layers.5")},
        {"mesh": "dp=2,tp=4", "plan": mw.Plan.dp("dp") + mw.Plan.tp("tp", {"layers.3.up": "colwise"})},
        {"mesh": "fsdp=8", "framework": "megatron"},
        {"mesh": "pp=2,dp=4", "pipeline": "1f1b", "accumulate": 4},
    ],
    ids=["keep", "tp of one layer", "buckets that span layers", "pipeline"],
)
def test_what_does_not_follow_from_few_layers_is_built_whole(study: mw.Study, how: dict[str, Any]) -> None:
    few, _ = both(study, 8 if "accumulate" not in how else 16, **{"passes": "none"} | how)
    assert not is_from_few(few)


class Skipping(Model):
    """Every layer also reads what comes out of its mirror image, as in a U-Net."""

    def forward(self, ids: Tensor) -> Tensor:
        x, ahead = self.embed(ids), list[Tensor]()
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if 2 * i < len(self.layers):
                ahead.append(x)
            else:
                x = x + ahead[len(self.layers) - 1 - i]
        return self.head(x)


def test_layers_that_read_far_back_are_not_taken_for_a_chain() -> None:
    with torch.device("meta"):
        model = Skipping()
    both(make_study(model), 8, mesh="fsdp=8", passes="none")


def test_layers_on_devices_of_their_own_are_built_whole() -> None:
    class OnTwo(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(mw.on(ids, mw.Mesh(devices=[0])))
            for i, layer in enumerate(self.layers):
                x = layer(mw.on(x, mw.Mesh(devices=[i % 2])))
            return self.head(x)

    with torch.device("meta"):
        model = OnTwo()
    few, _ = both(make_study(model), 8, mesh="pp=2", plan=mw.Plan(), passes="none")
    assert not is_from_few(few)


def test_errors_name_what_is_wrong_with_the_whole_model(study: mw.Study) -> None:
    with pytest.raises(PlanError, match=r"layers\.99"):
        study.simulate(batch_of(8), mesh="fsdp=8", profile="h100", plan=mw.Plan({"layers.99.*": "[{fsdp}]"}))
    with pytest.raises(MeshweaveError, match="unknown machine profile"):
        study.simulate(batch_of(8), mesh="fsdp=8", profile="no-such-machine")


def test_a_step_that_cannot_be_is_refused_before_it_is_built(study: mw.Study) -> None:
    with pytest.raises(MeshweaveError, match="too large"):
        study.simulate(batch_of(8), mesh="fsdp=8192,tp=64", profile="h100")
    with pytest.raises(PlanError, match="clip_grad_norm"):
        mw.Study(Model(2), loss=loss_of).simulate(batch_of(8), mesh="dp=2", profile="h100", clip_grad_norm=1.0)


def test_an_optimizer_of_groups_is_that_of_the_layers_that_are_built() -> None:
    with torch.device("meta"):
        model = Model()
    weights = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    study = mw.Study(model, loss=loss_of, optimizer=torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    few, _ = both(study, 8, mesh="fsdp=8", passes="none")
    assert is_from_few(few)


class Supervised(Model):
    """The loss reads what comes out of every layer."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        outs = [x := layer(x) for layer in self.layers]
        return torch.stack([self.head(out) for out in outs]).mean(0)


class Gained(Model):
    """Each layer has a row of a parameter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(LAYERS, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for gain, layer in zip(self.gains, self.layers, strict=False):
            x = layer(x * gain)
        return self.head(x)


@pytest.mark.parametrize("kind", [Supervised, Gained])
def test_what_is_beside_the_layers_does_not_grow_with_them(kind: type[Model]) -> None:
    with torch.device("meta"):
        model = kind()
    few, _ = both(make_study(model), 8, mesh="fsdp=4", passes="none")
    assert not is_from_few(few)


@pytest.mark.parametrize("blocks", [3, 5])
def test_parameters_gathered_far_ahead(study: mw.Study, blocks: int) -> None:
    both(study, 8, mesh="fsdp=4", passes=f"prefetch={blocks}")


@pytest.mark.parametrize("layers", [slice(0, 8), slice(0, -1), slice(1, None)])
def test_an_optimizer_that_leaves_layers_out(layers: slice) -> None:
    with torch.device("meta"):
        model = Model()
    study = mw.Study(model, loss=loss_of, optimizer=torch.optim.AdamW(model.layers[layers].parameters()))
    few, _ = both(study, 8, mesh="fsdp=4", passes="none")
    assert not is_from_few(few)


def test_layers_of_a_sequential_model() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(512, WIDTH), *(Block(i) for i in range(1, LAYERS + 1)), nn.Linear(WIDTH, 512)
        )
    optimizer = torch.optim.AdamW(model.parameters())
    study = mw.Study(model, loss=loss_of, optimizer=optimizer, forward=lambda own, batch: own(batch["ids"]))
    few, _ = both(study, 8, mesh="fsdp=4", passes="none")
    assert is_from_few(few)
