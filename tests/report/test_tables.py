"""Tables on terminals of any width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from tests.models import hugging_face

import meshweave as mw
from meshweave.report.tables import bytes_text, moves_table


@pytest.mark.slow_rows("200", "120")
@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_plan_loses_no_character_on_a_narrow_terminal(width: int) -> None:
    model, batch, loss = hugging_face("llama", batch=4, heads=4)
    rows = mw.compile(model, loss=loss, example=batch, mesh="fsdp=2,tp=2").explain()
    out = io.StringIO()
    Console(file=out, width=width).print(moves_table(rows, show_all=True))
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert max(map(len, lines)) <= width
    shown = [text for line in lines for text in re.findall(r"\d+(?:\.\d)? [KM]?i?B\b", line)]
    assert shown == [bytes_text(row.bytes_received) for row in rows]
