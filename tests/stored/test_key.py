"""Everything that the stages after capture read is in the key: each change gives another key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tests.models import mlp
from tests.stored.starts import Start
from torch import nn

import meshweave as mw
from meshweave import build, stored
from meshweave.capture.step import CaptureOptions, Precision
from meshweave.ops.registry import TABLE
from meshweave.passes import Keep, Overlap, PassList, Split
from meshweave.program import PlanInputs
from meshweave.stored import NoFormError, key_of, storage_of

BASE = Start(lambda: mlp(batch=4), "dp=2,tp=2", passes="exact")


@pytest.fixture
def inputs_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlanInputs]:
    """The inputs with which a start would look for its program."""
    seen: list[PlanInputs] = []

    class Seen(Exception):
        pass

    def stop(inputs: PlanInputs) -> Any:
        seen.append(inputs)
        raise Seen

    monkeypatch.setattr(build, "storage_of", stop)

    def inputs(start: Start, **changes: Any) -> PlanInputs:
        with pytest.raises(Seen):
            start.program(**changes)
        return seen.pop()

    return inputs


def other_model(change: Callable[[nn.Sequential], object]) -> Callable[[], tuple[Any, Any, Any]]:
    def model() -> tuple[Any, Any, Any]:
        made, batch, loss = mlp(batch=4)
        assert isinstance(made, nn.Sequential)
        change(made)
        return made, batch, loss

    return model


class Scale(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def with_constant(value: float) -> Callable[[], tuple[Any, Any, Any]]:
    """The model adds a tensor that its code creates from data: a constant of the captured step."""

    class Plus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(batch=4)[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + torch.tensor([value] * 7)

    def model() -> tuple[Any, Any, Any]:
        _, batch, loss = mlp(batch=4)
        return Plus(), batch, loss

    return model


CHANGES: dict[str, Start] = {
    "code of the model": replace(BASE, model=other_model(lambda m: m.__setitem__(3, nn.Sigmoid()))),
    "a number in the code": replace(BASE, model=other_model(lambda m: m.__setitem__(1, nn.LeakyReLU(0.2)))),
    "another number in the code": replace(BASE, model=other_model(lambda m: m.__setitem__(1, nn.LeakyReLU(0.3)))),
    "a frozen parameter": replace(BASE, model=other_model(lambda m: m[0].requires_grad_(False))),
    "a scale": replace(BASE, model=other_model(lambda m: m.append(Scale(torch.float32)))),
    "dtype of the scale": replace(BASE, model=other_model(lambda m: m.append(Scale(torch.bfloat16)))),
    "shape of a parameter": replace(BASE, model=other_model(lambda m: m.insert(4, nn.Linear(30, 30)))),
    "shape of the batch": replace(BASE, model=lambda: mlp(batch=8)),
    "a constant": replace(BASE, model=with_constant(1.0)),
    "another constant": replace(BASE, model=with_constant(2.0)),
    "mesh": replace(BASE, mesh="dp=4,tp=2"),
    "names of axes": replace(BASE, mesh="dp=2,fsdp=2"),
    "plan": replace(BASE, plan=mw.Plan.dp("dp") + mw.Plan.replicate("tp")),
    "profile": replace(BASE, profile="a100"),
    "a figure of the profile": replace(BASE, profile=mw.load_profile("h100").scaled(latency=1.01)),
    "alpha-beta": replace(BASE, profile=mw.AlphaBeta(), passes="none"),
    "another alpha-beta": replace(BASE, profile=mw.AlphaBeta(alpha_s=1.0), passes="none"),
    "passes": replace(BASE, passes="default"),
    "an option of a pass": replace(BASE, passes=[Keep(), Overlap(bucket=False)]),
    "another option": replace(BASE, passes=[Keep(), Overlap(choose="nominal")]),
    "chunks": replace(BASE, passes="split=2,overlap"),
    "recomputation": replace(BASE, passes="exact,recompute=full"),
    "cap": replace(BASE, pass_list={"memory_cap_bytes": 1 << 30}),
    "kept gradients": replace(BASE, pass_list={"keeps_gradients": True}),
    "clipping": replace(BASE, options=CaptureOptions(clip_grad_norm=1.0)),
    "microbatches": replace(BASE, options=CaptureOptions(accumulate=2)),
    "where sums are": replace(BASE, options=CaptureOptions(precision=Precision(accumulate_in="shards"))),
    "autocast": replace(BASE, options=CaptureOptions(precision=Precision(autocast=torch.bfloat16))),
    "seed": replace(BASE, options=CaptureOptions(seed=1)),
    "casts before sums": replace(BASE, options=CaptureOptions(precision=Precision(reduce_after_cast=True))),
    "dtype of parameters": replace(BASE, options=CaptureOptions(precision=Precision(param_dtype=torch.float32))),
}


@pytest.mark.slow
def test_every_change_of_a_start_gives_another_key(inputs_of: Callable[..., PlanInputs]) -> None:
    keys = {"": key_of(inputs_of(BASE))}
    assert key_of(inputs_of(BASE)) == keys[""]
    for name, start in CHANGES.items():
        keys[name] = key_of(inputs_of(start))
    keys["least gain"] = key_of(inputs_of(BASE, least_gain=0.08))
    keys["default"] = key_of(inputs_of(BASE, is_default=True))
    groups: dict[str, list[str]] = {}
    for name, key in keys.items():
        groups.setdefault(key, []).append(name)
    assert [names for names in groups.values() if len(names) > 1] == []


def test_settings_and_versions_give_another_key(
    inputs_of: Callable[..., PlanInputs], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(BASE)

    def path() -> str:
        storage, _ = storage_of(inputs)
        assert storage is not None
        return storage.entry.path.name

    paths = [path()]
    torch.set_default_dtype(torch.float64)
    try:
        paths.append(path())
    finally:
        torch.set_default_dtype(torch.float32)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        paths.append(path())
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)
    assert path() == paths[0]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9")
        paths.append(path())
    with monkeypatch.context() as patch:
        patch.setattr(stored, "package_digest", lambda: "another version of meshweave")
        paths.append(path())
    assert len(set(paths)) == len(paths) == 5


@pytest.fixture
def restored_table() -> Iterator[None]:
    rows = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(rows)


def test_registered_rules_are_in_the_key(inputs_of: Callable[..., PlanInputs], restored_table: None) -> None:
    inputs = inputs_of(BASE)
    keys = [key_of(inputs)]
    mw.register_rule(torch.ops.aten.tanh.default, "a b -> a b")
    keys.append(key_of(inputs))
    mw.register_rule(torch.ops.aten.tanh.default, "a b! -> a b!")
    keys.append(key_of(inputs))
    mw.register_rule(torch.ops.aten.tanh.default, "a b! -> a b!", linear=(0,))
    keys.append(key_of(inputs))
    assert len(set(keys)) == 4
    mw.register_rule(torch.ops.aten.tanh.default, TABLE[torch.ops.aten.tanh.default].rule)
    with pytest.raises(NoFormError, match="registered"):
        key_of(inputs)
    storage, why = storage_of(inputs)
    assert storage is None
    assert "a registered rule or cost is a function" in why


def test_the_code_of_others_cannot_be_in_a_key(inputs_of: Callable[..., PlanInputs]) -> None:
    class Mine(Split):
        pass

    class Costs(mw.AlphaBeta):
        pass

    for changed in (replace(BASE, passes=[Mine((2,))]), replace(BASE, profile=Costs(), passes="none")):
        with pytest.raises(NoFormError, match="is not code of meshweave"):
            key_of(inputs_of(changed))


def test_no_option_of_a_pipeline_is_forgotten() -> None:
    """Those that are not in the key decide only when, or by whom, a program is built."""
    absent = {"budget", "recalls"}
    read = {"passes", "memory_cap_bytes", "keeps_gradients", "least_gain", "is_default"}
    assert {each.name for each in fields(PassList)} == absent | read
