"""DTensor's own rules as an oracle: where it takes our operand layouts as they are, it must give our result layouts.

Three things may happen otherwise, and are counted: DTensor moves an operand first, it has no rule (or one that fails),
or a layout has no placement. None of them says that we are wrong: `test_rules` proves each of our rules by running it.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch
from tests.place.conformance import build_case, one_axis
from tests.place.oracle import AGREES, DISAGREES, NO_RULE, REDISTRIBUTES, ask, fake_devices
from tests.place.test_rules import SAMPLES

from meshweave.ir.layout import Layout
from meshweave.place.assign import Shard

pytestmark = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="DTensor of earlier versions has fewer rules"
)

# Ours and DTensor's answers that differ, each with the reason. Found with torch 2.13.
KNOWN_DIFFERENCES = {
    # The operands are replicated in both; we let an axis cut a dim that only the result has, DTensor repeats the work.
    "aten.expand.default": "shards what is new",
    "aten.embedding_dense_backward.default": "shards what is new",
    # An empty list of dims means all of them (the result has no dims); DTensor reads it as none of them.
    "aten.sum.dim_IntList": "no dims listed",
}

# What torch 2.13 reaches is 188 ops and 636 assignments.
NUM_OPS_AGREEING = 180
NUM_AGREEMENTS = 600


def _report(table: dict[str, Counter[str]]) -> str:
    columns = (AGREES, REDISTRIBUTES, NO_RULE, DISAGREES)
    lines = [f"{'op':48}" + "".join(f"{c:>14}" for c in columns)]
    lines += [f"{op:48}" + "".join(f"{counts[c]:14}" for c in columns) for op, counts in sorted(table.items())]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def answers() -> tuple[dict[str, Counter[str]], dict[str, list[str]]]:
    """Per op how often DTensor gave which verdict, and the texts of the disagreements."""
    table: dict[str, Counter[str]] = defaultdict(Counter)
    different: dict[str, list[str]] = defaultdict(list)
    with fake_devices(2) as devices:
        for item in SAMPLES:
            if not str(item.target).startswith("aten."):
                continue
            case = build_case(item)
            for option in one_axis(case, 2):
                role = option.role("a")
                if role is None or (isinstance(role, Shard) and role.unit > 1):
                    continue  # nothing to compare, or nothing that DTensor can say
                answer = ask(case, option, devices)
                table[str(item.target)][answer.verdict] += 1
                if answer.verdict == DISAGREES:
                    texts = " ".join(map(str, option.operands))
                    different[str(item.target)].append(f"{item} {texts}: {answer.ours}, DTensor {answer.theirs}")
    print(_report(table))
    return table, different


@pytest.mark.slow
def test_no_unexplained_disagreement(answers: tuple[dict[str, Counter[str]], dict[str, list[str]]]) -> None:
    _, different = answers
    assert set(different) == set(KNOWN_DIFFERENCES), different
    for op, reason in KNOWN_DIFFERENCES.items():
        wanted = "DTensor [Replicate()]" if reason == "shards what is new" else "([5, 3],[])"
        assert all(wanted in text for text in different[op]), different[op]


@pytest.mark.slow
def test_most_ops_are_really_compared(answers: tuple[dict[str, Counter[str]], dict[str, list[str]]]) -> None:
    table, _ = answers
    assert sum(bool(counts[AGREES]) for counts in table.values()) >= NUM_OPS_AGREEING
    assert sum(counts[AGREES] for counts in table.values()) >= NUM_AGREEMENTS


def test_known_differences_are_of_layouts_that_hold() -> None:
    """The sum over an empty list of dims has no dims, so that it cannot be sharded as DTensor says."""
    case = next(build_case(s) for s in SAMPLES if str(s) == "aten.sum.dim_IntList([5, 3],[])")
    assert case.expected[0].shape == ()
    assert {str(o.results[0]) for o in one_axis(case, 2)} == {"[]", "[] partial(sum: a)"}
    assert isinstance(next(one_axis(case, 2)).results[0], Layout)
