"""Rows of the batch that are chosen by numbers in it or by place: an error where each rank passes its own rows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.capture.step import CaptureOptions, capture
from meshweave.errors import PlanError
from meshweave.ir.graph import StepGraph
from meshweave.place.row_lookups import check_own_rows, row_lookups

ROWS = 12
Batch = dict[str, Tensor]
X = torch.zeros(ROWS, 5)
EDGES = torch.zeros(ROWS, 2, dtype=torch.int64)
LABELS = torch.zeros(ROWS, dtype=torch.int64)


class Small(nn.Module):
    def __init__(self, body: Callable[[Small, Batch], Tensor]) -> None:
        super().__init__()
        self.body, self.linear, self.table = body, nn.Linear(5, 5), nn.Embedding(10, 5)
        self.register_buffer("mesh", torch.tensor([0, 1, 2]))

    def forward(self, batch: Batch) -> Tensor:
        return self.body(self, batch)


def captured(body: Callable[[Any, Batch], Tensor], batch: Batch) -> StepGraph:
    def mean(out: Tensor, batch: Batch) -> Tensor:
        return out.mean()

    return capture(Small(body), mean, batch, None, CaptureOptions(), forward=lambda model, batch: model(batch))


def passed_messages(m: Any, b: Batch) -> Tensor:
    messages = m.linear(b["x"]).index_select(0, b["edges"][:, 0])
    return torch.zeros_like(b["x"]).index_add(0, b["edges"][:, 1], messages)


def segments(m: Any, b: Batch) -> Tensor:
    return torch.zeros(4, 5).index_add(0, b["segment"], m.linear(b["x"]))


def scores(m: Any, b: Batch) -> Tensor:
    x = m.linear(b["x"])
    return F.cross_entropy(x @ x.T, b["label"])


OF_ROWS: dict[str, tuple[Callable[[Any, Batch], Tensor], Batch, str]] = {
    "messages along edges": (passed_messages, {"x": X, "edges": EDGES}, "edges"),
    "edges + 1": (lambda m, b: m.linear(b["x"])[b["edges"][:, 0] + 1], {"x": X, "edges": EDGES}, "edges"),
    "a mesh in a buffer": (lambda m, b: m.linear(b["x"])[m.mesh], {"x": X}, "buffer mesh"),
    "flat positions": (
        lambda m, b: m.table(b["tokens"]).view(-1, 5)[b["at"]],
        {"tokens": torch.zeros(ROWS, 3, dtype=torch.int64), "at": LABELS},
        "at",
    ),
    "columns after a layer": (
        lambda m, b: m.linear(b["x"].transpose(0, 1))[:, b["at"]],
        {"x": X[:, None].repeat(1, 3, 1), "at": LABELS},
        "at",
    ),
    "which of the other rows is alike": (scores, {"x": X, "label": LABELS}, "label"),
}
NOT_OF_ROWS: dict[str, tuple[Callable[[Any, Batch], Tensor], Batch]] = {
    "classes": (lambda m, b: F.cross_entropy(m.linear(b["x"]), b["label"]), {"x": X, "label": LABELS}),
    "tokens": (lambda m, b: m.linear(m.table(b["tokens"])), {"tokens": LABELS}),
    "an element of each row": (
        lambda m, b: m.linear(b["x"])[torch.arange(ROWS), b["label"]],
        {"x": X, "label": LABELS},
    ),
    "along another dim": (lambda m, b: m.linear(b["x"]).gather(1, b["edges"]), {"x": X, "edges": EDGES}),
    "within samples": (
        lambda m, b: m.linear(b["x"]).gather(1, b["edges"][..., None].expand(-1, -1, 5)),
        {"x": X[:, None].repeat(1, 3, 1), "edges": EDGES},
    ),
    "parts of samples": (lambda m, b: m.linear(b["x"])[:, :2], {"x": X[:, None].repeat(1, 3, 1)}),
    "before a layer on columns": (
        lambda m, b: m.linear(b["x"].transpose(0, 1))[m.mesh],
        {"x": X[:, None].repeat(1, 3, 1)},
    ),
    "another order of rows": (lambda m, b: m.linear(b["x"])[torch.randperm(ROWS)], {"x": X}),
    "every second row": (lambda m, b: m.linear(b["x"])[::2] - m.linear(b["x"])[1::2], {"x": X}),
    "halves of two entries": (lambda m, b: m.linear(torch.cat([b["x"], b["z"]])).chunk(2)[0], {"x": X, "z": X}),
    "places in a row": (lambda m, b: m.linear(b["x"])[:, 1:].chunk(2, 1)[0], {"x": X}),
    "samples one by one": (lambda m, b: torch.stack([row.sum() for row in m.linear(b["x"])]), {"x": X}),
    "one hot": (lambda m, b: F.one_hot(b["label"], 5) * m.linear(b["x"]), {"x": X, "label": LABELS}),
}


@pytest.mark.parametrize("case", OF_ROWS)
def test_rows_that_are_chosen_by_numbers_are_an_error(case: str) -> None:
    body, batch, entry = OF_ROWS[case]
    with pytest.raises(PlanError, match=f"by '{entry}', with batch='local' on 2 ranks") as error:
        check_own_rows(captured(body, batch), 2)
    assert "test_row_lookups.py" in str(error.value)


@pytest.mark.parametrize("take", [lambda x: x[: ROWS // 2], lambda x: x.chunk(2)[1], lambda x: x.split([8, 4])[0]])
def test_parts_of_the_batch_are_an_error(take: Callable[[Tensor], Tensor]) -> None:
    """Chosen before rejected answers, on each rank: the first half of the global batch is that of the first rank."""
    with pytest.raises(PlanError, match="by the place of its rows") as error:
        check_own_rows(captured(lambda m, b: take(m.linear(b["x"])), {"x": X}), 2)
    assert "test_row_lookups.py" in str(error.value)


@pytest.mark.parametrize("case", NOT_OF_ROWS)
def test_numbers_of_anything_else_are_fine(case: str) -> None:
    assert row_lookups(captured(*NOT_OF_ROWS[case])) == []


def test_sums_in_a_shared_table_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "meshweave"):
        check_own_rows(captured(segments, {"x": X, "segment": LABELS}), 2)
    assert "rows are added up by 'segment', over the rows of all 2 ranks" in caplog.text


def test_padding_is_not_proposed_for_what_counts_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Padded edges are edges. A batch's entry of that name is not taken for the batch."""
    example = {"x": X, "edges": EDGES, "batch": torch.zeros(ROWS, 3)}
    model = Small(lambda m, b: passed_messages(m, b) * b["batch"].sum())
    step = mw.compile(
        model, loss=lambda out, batch: out.mean(), example=example, optimizer=torch.optim.SGD(model.parameters()),
        mesh="dp=2", forward=lambda model, batch: model(batch), run=mw.RunOptions(max_programs=2),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING, "meshweave"):
        for size in (8, 10, 14):
            step({"x": torch.zeros(size, 5), "edges": EDGES[: size - 2], "batch": torch.zeros(size, 3)})
    advice = [record.getMessage() for record in caplog.records if "at most 2 programs" in record.getMessage()]
    assert advice
    assert "x dim 0: 16" in advice[0]
    assert "batch [8, 3], is dropped" in advice[0]
    assert "edges dim" not in advice[0]
    assert "do not pad edges" in advice[0]
