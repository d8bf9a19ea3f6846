"""The table of op traits: every name in it is an op, its sets agree with the ops' schemas, and nobody keeps another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshweave.errors
from meshweave.ir import attention, blocks, grouped, local_ops, traits

PACKAGE = Path(meshweave.errors.__file__).parent
aten = torch.ops.aten
HIGHER_ORDER = {"flex_attention", "flex_attention_backward"}


def is_annotated(op: torch._ops.OpOverload) -> bool:
    """Whether the schema says that the result is a view of the first operand."""
    (result,) = op._schema.returns
    return result.alias_info is not None and not result.alias_info.is_write


@pytest.mark.parametrize("kind", sorted(traits._WORK))
def test_every_name_with_a_kind_of_work_is_an_op(kind: str) -> None:
    homes = (aten, torch.ops.meshweave, attention, local_ops, grouped, blocks)
    missing = {name for name in traits.names_of(kind) if not any(hasattr(home, name) for home in homes)}
    assert missing <= HIGHER_ORDER
    assert len(set(traits.names_of(kind))) == len(traits.names_of(kind))


def test_a_name_has_one_kind_of_work() -> None:
    names = [name for kind in traits._WORK for name in traits.names_of(kind)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("op", sorted(traits.VIEWS | traits.RESHAPES | traits.RANK_CHANGES, key=str), ids=str)
def test_views_are_views_by_their_schema(op: torch._ops.OpOverload) -> None:
    assert is_annotated(op) or op is aten._unsafe_view.default
    assert traits.work_kind(op) == "strided" or op is aten._unsafe_view.default


@pytest.mark.parametrize("op", sorted(traits.MATMULS, key=str), ids=str)
def test_matmuls_are_matmuls(op: torch._ops.OpOverload) -> None:
    assert traits.work_kind(op) == "matmul"


def test_tags_and_names_give_the_kind_of_work() -> None:
    assert traits.work_kind(aten.relu.default) == "pointwise"
    assert traits.work_kind(aten.sum.dim_IntList) == "reduction"
    assert traits.work_kind(aten.linalg_qr.default) == ""
    assert traits.is_random(aten.native_dropout.default)
    assert not traits.is_random(aten.relu.default)
    assert not traits.is_pointwise(local_ops.gather)


def test_tags_are_read_in_the_table_alone() -> None:
    """Rooms before it have torch's interfaces."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "torch.Tag." in path.read_text()}
    assert found == {"ir/traits.py", "interop/fake.py"}
