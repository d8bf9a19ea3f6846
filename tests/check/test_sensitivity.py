"""The check sees small faults: terms of optimizers and of clipping, masks, groups, the numbers of a checkpoint.

A mutant is the source of a function with one place changed. Each makes the check fail; unchanged, all pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshweave as mw
from meshweave.capture import optimizers, step, updates
from meshweave.capture.trace import Provenance
from meshweave.check.numerics import CHECK_LR, NumericsReport, check_numerics
from meshweave.check.runs import Recipe, Training, in_float64
from meshweave.ir import ops
from meshweave.ir.collectives import COLLECTIVES
from meshweave.ir.mesh import Mesh
from meshweave.ops.pieces import OnPiece, PieceCall
from meshweave.ops.registry import TABLE
from meshweave.train_step import CompiledStep, TrainStep

Make = Callable[..., torch.optim.Optimizer]
ADAMW, ADAM = torch.optim.AdamW, torch.optim.Adam
SGD = partial(torch.optim.SGD, momentum=0.9, weight_decay=0.01)


class Net(nn.Module):
    """A checkpointed block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(torch.tanh(self.norm(self.up(x))), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.block, x, use_reentrant=False)


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return ((out - batch["y"]) ** 2).mean()


def make_batch(index: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(index)
    return {name: torch.randn(8, 6, generator=made) for name in "xy"}


def check(
    make: Make = ADAMW,
    lr: float = CHECK_LR,
    mesh: str = "dp=2",
    clip: float | None = None,
    change: Callable[[TrainStep], None] = lambda step: None,
    runs_float64: bool = True,
) -> NumericsReport:
    def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Net()
        return model, make(model.parameters(), lr=lr)

    def compiler(model: nn.Module, optimizer: Any, on: Mesh, plan: Any) -> TrainStep:
        is_wide = runs_float64 and next(model.parameters()).dtype == torch.float64
        example = in_float64(make_batch(0)) if is_wide else make_batch(0)
        found = mw.compile(
            model,
            loss=loss,
            example=example,
            optimizer=optimizer,
            mesh=on,
            clip_grad_norm=clip,
            run=mw.RunOptions(keep_gradients=True),
        )
        if on.num_devices > 1:
            change(found)
            found = TrainStep(
                CompiledStep(found.program, model, optimizer, found.session.world, found.session.settings)
            )
        return found

    recipe = Recipe(loss=loss, clip_grad_norm=clip)
    return check_numerics(Training(make_model, make_batch, recipe, steps=2), Mesh(mesh), None, compiler)


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` in the source of `function` becomes `new`; `make` and `clip` are of the run that shows it."""

    function: Callable[..., Any]
    old: str
    new: str
    make: Make = ADAMW
    clip: float | None = None

    def __str__(self) -> str:
        return f"{self.function.__name__.strip('_')}: {self.old} -> {self.new}"

    def changed(self) -> Callable[..., Any]:
        source = inspect.getsource(self.function)
        assert source.count(self.old) == 1, f"{self} is of another source"
        scope = dict(self.function.__globals__)
        exec(
            compile("from __future__ import annotations\n" + source.replace(self.old, self.new), "mutant", "exec"),
            scope,
        )
        return scope[self.function.__name__]


counted, decay, decayed = (partial(Mutant, f) for f in (updates._counted, updates._decay, updates._decayed))
averaged, means = partial(Mutant, updates._averaged), partial(Mutant, updates._means)
adam, adam_numbers = partial(Mutant, updates._adam), partial(Mutant, updates._adam_numbers)
sgd, sgd_numbers = partial(Mutant, updates._sgd), partial(Mutant, updates._sgd_numbers)
clipped, norm = step._clip, step._norm
MUTANTS = [
    decayed('param if n["shrink"] is None else param * n["shrink"]', "param"),
    decay('1 - o["lr"] * decay', "1 - decay"),
    adam('square.sqrt() / n["root"] + n["eps"]', 'square.sqrt() / n["root"]'),
    adam_numbers('-o["lr"] / (1 - beta1**count)', '-o["lr"]'),
    adam_numbers("(1 - beta2**count) ** 0.5", "1.0"),
    adam_numbers("(1 - beta2**count) ** 0.5", "1 - beta2**count"),
    counted("return step, float(step)", "return step, float(step) + 1"),
    averaged('grad * n["rest1"]', 'grad * n["beta1"]'),
    averaged('n["rest2"] * grad * grad', "grad * grad"),
    means('"rest2": 1 - beta2', '"rest2": 1.0'),
    decayed('grad + param * n["decay"]', "grad", partial(ADAM, weight_decay=0.01)),
    adam('torch.maximum(state["max_exp_avg_sq"], square)', "square", partial(ADAM, amsgrad=True)),
    decayed("-grad if", "grad if", partial(ADAMW, maximize=True)),
    decayed('grad + param * n["decay"]', "grad", SGD),
    sgd('state["momentum_buffer"] * n["momentum"] +', 'state["momentum_buffer"] * 0.0 +', SGD),
    sgd_numbers('1 - o["dampening"]', "1.0", partial(SGD, dampening=0.1)),
    sgd_numbers('1.0 if "momentum_buffer" not in state else ', "", partial(SGD, dampening=0.1)),
    sgd('grad + buffer * n["momentum"] if', "buffer if", partial(SGD, nesterov=True)),
    decayed("-grad if", "grad if", partial(SGD, maximize=True)),
    Mutant(clipped, "norm + 1e-6", "norm", SGD, 0.1),
    Mutant(clipped, "g * scale", "g", SGD, 0.1),
    Mutant(clipped, "g * scale", "g", ADAMW, 0.1),
    Mutant(clipped, "max=1.0", "max=2.0", SGD, 1e3),
    Mutant(norm, "square_sum(norms).sqrt()", "norms.max()", SGD, 0.1),
    adam('n["size"] * new["exp_avg"] / (', 'new["exp_avg"] / ('),
    adam('n["size"] * new["exp_avg"] / (', 'n["size"] * new["exp_avg"] * ('),
]
QUICK = (0, 19)
SLOW = [pytest.param(m, id=str(m), marks=() if i in QUICK else pytest.mark.slow) for i, m in enumerate(MUTANTS)]


def apply(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    if mutant.function in (clipped, norm):
        monkeypatch.setattr(step, mutant.function.__name__, mutant.changed())
        return
    monkeypatch.setattr(optimizers, "_traced", optimizers._traced.__wrapped__)
    changed = mutant.changed()
    monkeypatch.setattr(updates, mutant.function.__name__, changed)
    for cls, rule in updates.TABLE.items():
        own = {f.name: changed for f in fields(rule) if getattr(rule, f.name) is mutant.function}
        monkeypatch.setitem(updates.TABLE, cls, replace(rule, **own))


@pytest.mark.parametrize("mutant", SLOW)
def test_a_wrong_term_of_an_update_is_seen(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    apply(monkeypatch, mutant)
    report = check(mutant.make, clip=mutant.clip)
    assert {e.kind for e in report.failed} & {"updated parameter", "updated state"}, report.note


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in MUTANTS[:19] if "eps" not in m.old], ids=str)
def test_float32_alone_shows_a_wrong_term_too(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Where float64 does not run, one step at a higher rate shows what the rate of the check does not.

    Not Adam's eps, which is 1e-8 beside roots of 1e-2: less than float32 rounds.
    """
    apply(monkeypatch, mutant)
    report = check(mutant.make, clip=mutant.clip, runs_float64=False)
    assert "does not run float64" in report.note
    assert {e.kind for e in report.failed} & {"updated parameter", "updated state"}


SOUND = [
    (ADAMW, None),
    (partial(ADAM, weight_decay=0.01, amsgrad=True, maximize=True), 0.1),
    (partial(SGD, dampening=0.1), 0.1),
    (partial(SGD, nesterov=True, maximize=True), 1e3),
]


SOUND_CASES = [pytest.param(*case, wide, marks=pytest.mark.slow) for case in SOUND for wide in (True, False)]


@pytest.mark.parametrize(("make", "clip", "runs_float64"), [(*SOUND[1], False), *SOUND_CASES])
def test_sound_updates_pass(make: Make, clip: float | None, runs_float64: bool) -> None:
    assert check(make, clip=clip, runs_float64=runs_float64).failed == ()


@pytest.mark.slow
def test_an_offset_of_zero_for_every_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TABLE[torch.ops.meshweave.chance.default]

    def whole(call: PieceCall) -> fx.Node:
        made = plain.on_piece.write(call)
        assert made is not None
        made.args = (*made.args[:4], [0] * len(call.shape), *made.args[5:])
        return made

    op = replace(plain, on_piece=OnPiece(whole))
    monkeypatch.setitem(TABLE, torch.ops.meshweave.chance.default, op)
    assert not check().ok


@pytest.mark.slow
def test_a_sum_over_the_wrong_group_is_seen() -> None:
    def wrong(step: TrainStep) -> None:
        sums = [n for n in step.program.rank.graph.nodes if n.target in COLLECTIVES and n.args[-1] == "dp"]
        sums[-1].args = (*sums[-1].args[:-1], "tp")

    assert not check(mesh="dp=2,tp=2", change=wrong).ok


def test_a_checkpoint_that_draws_other_numbers_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers in the order of the calls, whatever the state of the generator says."""

    class Counts(Provenance):
        drawn = 0

        def chance(self, shape: Any, p: float) -> Tensor:
            self.drawn += 1
            size = [int(s) for s in shape]
            return ops.chance(self.step, self.seed, self.drawn, size, [0] * len(size), size, p)

    monkeypatch.setattr(step, "Provenance", Counts)
    failed = check().failed
    in_float64 = {"mesh in float64"} if torch.__version__ >= (2, 13) else set()
    assert {e.run for e in failed} >= {"one device", *in_float64}
    assert "down.weight" not in {e.name for e in failed if e.kind == "gradient 1" and e.run == "mesh"}


def test_an_eps_of_a_norm_is_seen() -> None:
    """1e-5 beside a variance of about 1."""

    def without(step: TrainStep) -> None:
        norm = next(n for n in step.program.rank.graph.nodes if "native_layer_norm.default" in str(n.target))
        norm.args = (*norm.args[:4], 0.0)

    assert not check(change=without).ok
