"""Every row of the rule table, proven by running its op on pieces under every legal assignment."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from tests.place.conformance import Case, F, I, R, Sample, build_case, check, one_axis, roles_of, sample, two_axes
from tests.place.samples_dense import DENSE, UNEQUAL_HEADS
from tests.place.samples_linalg import LINALG, WHOLE
from tests.place.samples_pointwise import POINTWISE
from tests.place.samples_shape import SHAPE
from tests.place.samples_vision import VISION

from meshweave.ir.graph import op_name, tensor_inputs
from meshweave.ops.factors import rule_from_text, sums
from meshweave.ops.registry import POINTWISE as POINTWISE_ROW
from meshweave.ops.registry import TABLE, OpRecord, RuleFunction, row_for

aten = torch.ops.aten
SAMPLES = [*DENSE, *LINALG, *WHOLE, *SHAPE, *VISION, *POINTWISE]
NUM_PAIRS = 4  # assignments of two axes per sample in the default run; all of them with -m slow

NAMES = [f"{i}-{s}" for i, s in enumerate(SAMPLES)]

every_sample = pytest.mark.parametrize("index", range(len(SAMPLES)), ids=NAMES)


@cache
def _case(index: int) -> Case:
    return build_case(SAMPLES[index])


def _table() -> set[object]:
    """The rows of this package: tests of registration may have added others."""
    return {target for target in TABLE if str(target).startswith(("aten.", "meshweave."))}


def test_every_row_has_a_sample() -> None:
    refused = {aten.as_strided.default}  # see test_registry
    assert _table() - {s.target for s in SAMPLES} == refused


def test_the_fallback_row_is_sampled_widely() -> None:
    assert len({s.target for s in SAMPLES} - _table()) >= 50
    cases = [_case(i) for i, s in enumerate(SAMPLES) if s.target not in TABLE]
    assert all(row_for(case.node) is POINTWISE_ROW for case in cases)


@every_sample
def test_one_axis(index: int) -> None:
    case = _case(index)
    for option in [*one_axis(case, 2), *one_axis(case, 3)]:
        check(case, option)


@every_sample
def test_two_axes(index: int) -> None:
    case = _case(index)
    options = list(two_axes(case))
    for option in random.Random(0).sample(options, min(NUM_PAIRS, len(options))):
        check(case, option)


def test_attention_backward_of_unequal_head_sizes() -> None:
    _check_all(build_case(UNEQUAL_HEADS))


@pytest.mark.slow
@every_sample
@pytest.mark.parametrize("seed", range(2))
def test_two_axes_exhaustively(index: int, seed: int) -> None:
    case = build_case(SAMPLES[index], seed)
    for option in two_axes(case):
        check(case, option)


# what rules must allow: a rule that forbids everything would pass the tests above


def test_only_these_ops_are_never_sharded() -> None:
    """What looks at everything at once."""
    choices = {i: len(roles_of(_case(i))) - 1 for i in range(len(SAMPLES))}
    never = {op_name(s.target) for s in SAMPLES} - {op_name(s.target) for i, s in enumerate(SAMPLES) if choices[i]}
    whole = ["masked_scatter", "histc", "max", "min", "prod", "any", "all", "median", "nanmedian"]
    assert never == {f"aten.{name}" for name in whole} | {op_name(s.target) for s in WHOLE}
    assert sum(not n for n in choices.values()) < len(SAMPLES) // 10


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        # m, n and k as they are and in blocks of two; either operand may be partial
        (sample(aten.mm.default, F(5, 6), F(6, 3)), 8),
        # both factors of the merged dim's outer part, and four reductions that a view passes
        (sample(aten.view.default, F(5, 6), [5, 2, 3]), 7),
        # groups and batch; a member of a group is not outermost
        (sample(aten.convolution.default, F(2, 6, 4), F(12, 2, 3), None, [1], [1], [1], False, [0], 3), 5),
        # a sum over both dims can be cut anywhere
        (sample(aten.sum.dim_IntList, F(5, 3), []), 5),
        # a sort only beside its dim
        (sample(aten.sort.default, R(5, 4)), 2),
        # rows of the table and of the index, columns; a partial table
        (sample(aten.embedding.default, F(5, 3), I(2, 4, high=5)), 8),
    ],
    ids=lambda value: str(value),
)
def test_number_of_choices(item: Sample, expected: int) -> None:
    assert len(roles_of(build_case(item))) - 1 == expected


@pytest.mark.parametrize(
    ("text", "linear", "item"),
    [
        ("a b -> b a", (), sample(aten.abs.default, F(4, 4))),  # a swapped shard
        ("a b -> a", (), sample(aten.amax.default, F(5, 4), [1])),  # maxima that would be summed
        ("a b -> a b", (), sample(aten.cumsum.default, F(5, 4), 1)),  # a scan over a piece
        ("a b -> a b", (0,), sample(aten.relu.default, F(5, 4))),  # a partial value through a non-linear op
    ],
    ids=["swapped", "summed", "scanned", "not linear"],
)
def test_the_harness_catches_a_wrong_rule(
    text: str, linear: tuple[int, ...], item: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TABLE, item.target, OpRecord(_of_text(text, linear)))
    case = build_case(item)
    with pytest.raises(AssertionError):
        _check_all(case)


def _check_all(case: Case) -> None:
    for option in one_axis(case, 2):
        check(case, option)


def _of_text(text: str, linear: tuple[int, ...]) -> RuleFunction:
    return lambda node: rule_from_text(
        text, [n.meta["spec"] for n in tensor_inputs(node)], [node.meta["spec"]], sums(*({i} for i in linear))
    )
