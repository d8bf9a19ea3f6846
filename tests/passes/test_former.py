"""Former keywords of `compile` and of the drop-in: the hint of the error is what to write now, to the letter."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

import meshweave as mw
from meshweave.compile import CompileOptions
from meshweave.passes import Carry, Decompose, Overlap, Prefetch, Recompute, Split, pass_list

RENAMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"autocast": torch.bfloat16}, {"precision": mw.Precision(autocast=torch.bfloat16)}),
    (
        {"param_dtype": torch.bfloat16, "reduce_after_cast": True, "accumulate_in": "shards"},
        {"precision": mw.Precision(param_dtype=torch.bfloat16, reduce_after_cast=True, accumulate_in="shards")},
    ),
    (
        {"backend": "inductor", "keep_gradients": True, "pad": {"x": 0}},
        {"run": mw.RunOptions(backend="inductor", keep_gradients=True, pad={"x": 0})},
    ),
    (
        {"cuda_graphs": False, "check_finite": False, "max_programs": 3, "on_different_weights": "error"},
        {"run": mw.RunOptions(cuda_graphs=False, check_finite=False, max_programs=3, on_different_weights="error")},
    ),
    ({"passes_seconds": 5.0}, {"run": mw.RunOptions(passes_seconds=5.0)}),
    ({"recompute": "full"}, {"passes": "recompute=full"}),
    ({"recompute": "full", "prefetch": 2}, {"passes": "recompute=full,prefetch=2"}),
    ({"recompute": "full", "passes": "default,split=2"}, {"passes": "default,split=2,recompute=full"}),
    ({"overlap": True, "split": 4, "decompose": True}, {"passes": "carry,overlap,split=4,decompose"}),
    ({"split": True}, {"passes": "split"}),
    ({"overlap": False}, {"passes": "none"}),
    ({"recompute": None}, {"passes": None}),
    (
        {"overlap": mw.OverlapOptions(bucket=False), "prefetch": 1},
        {"passes": (Prefetch(1), Carry(), Overlap(bucket=False))},
    ),
    (
        {"decompose": Decompose(when="always", accumulate=torch.float32), "passes": "keep,recompute=full"},
        {"passes": (*pass_list("keep,recompute=full"), Decompose(when="always", accumulate=torch.float32))},
    ),
    (
        {"split": Split((2,), "always"), "recompute": "full", "backend": "eager", "autocast": torch.bfloat16},
        {
            "passes": (Recompute("full"), Split((2,), "always")),
            "run": mw.RunOptions(backend="eager"),
            "precision": mw.Precision(autocast=torch.bfloat16),
        },
    ),
]


def compiled(**options: Any) -> CompileOptions:
    """What `compile` is asked for, without compiling it."""
    asked: list[CompileOptions] = []
    with (
        patch.object(CompileOptions, "compiled", lambda self: asked.append(self)),
        patch("meshweave.compile.TrainStep"),
    ):
        mw.compile(
            torch.nn.Linear(2, 2), loss=lambda out, _: out.sum(), example=(torch.ones(2, 2),), mesh="", **options
        )
    return asked[0]


@pytest.mark.parametrize(("former", "now"), RENAMED, ids=[", ".join(former) for former, _ in RENAMED])
def test_the_hint_is_what_to_write(former: dict[str, Any], now: dict[str, Any]) -> None:
    with pytest.raises(mw.MeshweaveError, match=r"compile\(\) takes no .*= any more") as error:
        compiled(**former)
    written = eval(f"dict({error.value.hint})", {"mw": mw, "torch": torch})
    taken = compiled(**written)
    expected = {"passes": former.get("passes"), "run": mw.RunOptions(), "precision": mw.Precision()} | now
    assert taken.run == expected["run"]
    assert taken.capture.precision == expected["precision"]
    known, wanted = (p if p is None or isinstance(p, str) else tuple(p) for p in (taken.passes, expected["passes"]))
    if not isinstance(wanted, tuple):
        assert known == wanted
    else:
        assert set(pass_list(known)) == set(wanted)


def test_a_function_is_named() -> None:
    with pytest.raises(mw.MeshweaveError) as error:
        compiled(progress=print)
    assert error.value.hint == "run=mw.RunOptions(progress=progress)"


def test_a_list_of_passes_is_kept() -> None:
    passes = [Overlap()]
    with pytest.raises(mw.MeshweaveError) as error:
        compiled(recompute="full", passes=passes)
    now = eval(f"dict({error.value.hint})", {"mw": mw, "passes": passes})
    assert now == {"passes": [Overlap(), Recompute("full")]}


@pytest.mark.parametrize("function", [mw.backend, mw.inductor_pass])
@pytest.mark.parametrize(
    ("former", "expected"),
    [
        ({"split": 2, "decompose": True}, (Split((2,)), Decompose(), Overlap())),
        ({"options": mw.OverlapOptions(bucket=False)}, (Overlap(bucket=False),)),
        ({"split": 2, "passes": "decompose"}, (Split((2,)), Decompose())),
    ],
)
def test_the_drop_in(function: Any, former: dict[str, Any], expected: tuple[Any, ...]) -> None:
    with pytest.raises(mw.MeshweaveError, match="takes no") as error:
        function(**former)
    now = eval(f"dict({error.value.hint})", {"mw": mw})
    assert mw.backend(**now).settings.passes == expected


def test_what_never_was_an_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'autocats'"):
        compiled(autocats=torch.bfloat16)
    with pytest.raises(TypeError, match="unexpected keyword argument 'overlap'"):
        mw.backend(overlap=True)  # type: ignore[arg-type]
