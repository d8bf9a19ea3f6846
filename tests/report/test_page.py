"""The page: the same bytes from the same step, safe whatever names say, and what it does in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.report.samples import moves_of, pipeline_sample, sample

from meshweave.cost.simulate.result import Simulation
from meshweave.errors import MeshweaveError
from meshweave.report.html import html_page
from meshweave.report.pipeline import pipeline_of

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell", "chromium-headless-shell")
BROWSER = os.environ.get("MESHWEAVE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), "")
HOSTILE = "</script><script>window.stolen=1</script><img src=x onerror=window.stolen=1>&amp;\u2028'\"`${1}"
Open = Callable[..., Any]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def starts(page: str) -> list[int]:
    """Start of every span in nanoseconds, as the page reads it."""
    at, found = 0, []
    for step in data_of(page)["spans"]["start"]:
        at += step
        found.append(at)
    return found


# the text of the page


def test_equal_steps_give_equal_bytes() -> None:
    made = [html_page(step := sample(roles=2), moves_of(step), measured=step, other=sample(layers=3)) for _ in range(2)]
    assert made[0] == made[1]


def test_the_page_holds_every_span_to_the_nanosecond() -> None:
    step = sample(roles=2, layers=2)
    page = html_page(step)
    data = data_of(page)
    assert starts(page) == [round(s.start * 1e9) for s in step.spans]
    columns, strings = data["spans"], data["strings"]
    assert [strings[i] for i in columns["op"]] == [s.op for s in step.spans]
    assert [i - n for i, back in enumerate(columns["needs"]) for n in back] == [n for s in step.spans for n in s.needs]
    exposed = [round(s.exposed_seconds * 1e9) for s in step.spans]
    assert columns["exposed"] == exposed
    assert sum(row[2] for row in data["reasons"]) == pytest.approx(sum(exposed), abs=len(exposed))
    assert len(strings) == len(set(strings))


def test_edges_of_the_graph_are_needs_too() -> None:
    step = sample(layers=1)
    page = data_of(html_page(replace(step, edges=((0, 9),))))
    assert 9 in page["spans"]["needs"][9]
    assert 0 not in step.spans[9].needs


def test_a_measured_step_follows_the_modelled_one_with_its_errors() -> None:
    step, real = sample(layers=2), sample(layers=2, source="measured", slow=1.25)
    data = data_of(html_page(step, measured=real))
    assert [(r["source"], r["first"], r["count"]) for r in data["runs"]] == [
        ("modelled", 0, len(step.spans)),
        ("measured", len(step.spans), len(real.spans)),
    ]
    errors = {row[0]: row for row in data["errors"]}
    assert errors["matmul"][3] / errors["matmul"][4] == pytest.approx(1 / 1.25, rel=1e-6)
    assert data["diff"] is None


def test_a_communication_knows_the_move_that_it_is_a_step_of() -> None:
    step = sample(layers=1)
    moves = moves_of(step)
    data = data_of(html_page(step, moves))
    index = next(i for i, s in enumerate(step.spans) if s.op == "reduce_scatter")
    source, target, _, steps, why, _ = data["moves"][data["spans"]["move"][index]]
    assert f"{source} -> {target}" == step.spans[index].layout.partition(": ")[2]
    assert steps == ["reduce_scatter(fsdp)"]
    assert why.endswith(" -> mm")
    assert all(m == -1 for m, s in zip(data["spans"]["move"], step.spans, strict=True) if s.kind == "compute")


def test_twenty_thousand_spans_take_less_than_four_megabytes() -> None:
    step = sample(layers=32, microbatches=12)
    assert len(step.spans) > 20_000
    assert len(html_page(step, moves_of(step)).encode()) < 4e6


def test_names_that_are_markup_stay_text() -> None:
    page = html_page(hostile())
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert HOSTILE in data_of(page)["strings"]


def test_the_page_loads_nothing() -> None:
    page = html_page(sample(layers=1))
    assert "default-src 'none'" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert not re.search(r"<!--[A-Z]+-->", page)


def hostile() -> Simulation:
    step = sample(layers=1, prefix=HOSTILE)
    named = tuple(replace(s, name=f"{s.name}{HOSTILE}", line=HOSTILE, layout=HOSTILE, op=s.op) for s in step.spans)
    return replace(step, spans=named, title=HOSTILE, verdict=HOSTILE, notes=(HOSTILE,))


# in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not BROWSER:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on the path, and MESHWEAVE_BROWSER is not set")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a report; at the end of the test nothing may have been logged, and nothing but the file been asked for."""
    contexts, problems, asked = [], [], []

    def open_(*args: Any, dark: bool = False, size: tuple[int, int] = (1600, 1000), **options: Any) -> Any:
        file = tmp_path / "report.html"
        file.write_text(html_page(*args, **options), encoding="utf-8")
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_function("window.meshweave !== undefined")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert problems == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in asked) == len(contexts)


def visible(page: Any) -> tuple[float, float]:
    begin, end = page.evaluate("meshweave.state.range")
    return begin, end


def most_exposed(step: Simulation) -> int:
    return max(step.spans, key=lambda s: (s.exposed_seconds, -s.index)).index


def middle_of(page: Any, index: int) -> tuple[float, float]:
    box = page.evaluate(f"meshweave.boxOf({index})")
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_it_says_the_totals_and_what_they_come_from(open_page: Open) -> None:
    step = sample(roles=2, verdict="does not fit: role 0 needs 90.0 GiB of 79.0 GiB")
    page = open_page(step, moves_of(step))
    top = page.inner_text("#top")
    for expected in (
        f"{step.seconds * 1e3:.1f} ms",
        f"{step.tokens_per_s_per_gpu:,.0f}",
        "41.2%",
        step.verdict,
        "h100 2026.1",
    ):
        assert expected in top
    assert f"{step.reserved_bytes / 2**30:.1f} GiB reserved" in top
    assert page.locator("#cards .card").count() == page.locator("#cards .card .label .tag").count() == 6
    assert set(page.locator("#cards .tag").all_inner_texts()) == {"modelled"}


@pytest.mark.slow
def test_wheel_keys_and_drag_change_what_is_visible(open_page: Open) -> None:
    step = sample()
    page = open_page(step)
    whole = visible(page)
    assert whole == (0, max(round(s.end * 1e9) for s in step.spans))
    x, y = middle_of(page, most_exposed(step))
    before = page.evaluate(f"meshweave.boxOf({most_exposed(step)})")["x"]
    page.mouse.move(x, y)
    page.mouse.wheel(0, -600)
    page.wait_for_function(f"meshweave.state.range[1] < {whole[1] * 0.6}")
    begin, end = visible(page)
    assert begin > 0
    zoomed = page.evaluate(f"meshweave.boxOf({most_exposed(step)})")
    assert abs(zoomed["x"] + zoomed["width"] / 2 - x) < 2, "the point under the pointer stays"
    assert before != zoomed["x"]
    page.mouse.down()
    page.mouse.move(x - 100, y, steps=3)
    page.mouse.up()
    dragged = visible(page)
    assert dragged[0] > begin
    assert dragged[1] - dragged[0] == pytest.approx(end - begin)
    page.keyboard.press("s")
    assert visible(page)[1] - visible(page)[0] > end - begin
    page.keyboard.press("a")
    page.keyboard.press("0")
    assert visible(page) == whole


def test_a_click_on_an_exposed_communication_says_why(open_page: Open) -> None:
    step = sample()
    index = most_exposed(step)
    page = open_page(step, moves_of(step))
    page.evaluate(f"meshweave.zoomTo({index})")
    page.mouse.move(*middle_of(page, index))
    tip = page.inner_text("#tooltip")
    page.mouse.down()
    page.mouse.up()
    assert page.evaluate("meshweave.state.selected") == index
    panel = page.inner_text("#details")
    span = step.spans[index]
    assert len(span.reasons) == 2
    for reason in span.reasons:
        assert reason.text in panel
    for expected in (span.module, span.line, span.layout, span.group, span.name, "all_gather(fsdp)"):
        assert expected in panel
    assert span.module in tip
    assert page.locator(".grid .row.selected").count() == 1
    blocker = next(r.blocker for r in span.reasons if r.blocker >= 0)
    page.click(f".why [data-span='{blocker}']")
    assert page.evaluate("meshweave.state.selected") == blocker
    begin, end = visible(page)
    assert begin <= step.spans[blocker].start * 1e9 <= end


def test_the_table_sorts_filters_and_selects(open_page: Open) -> None:
    step = sample()
    page = open_page(step)
    column = "meshweave.tableRows().map((row) => row.bytes)"
    page.click(".grid .head button:text-is('bytes')")
    down = page.evaluate(column)
    assert down == sorted(down, reverse=True)
    assert len(set(down)) > 3
    page.click(".grid .head button:has-text('bytes')")
    assert page.evaluate(column) == sorted(down)
    page.uncheck("#fold")
    rows = page.evaluate("meshweave.tableRows().map((row) => row.worst)")
    assert sorted(rows) == [s.index for s in step.spans if s.kind != "compute"]
    page.fill("#filter", "reduce_scatter layers.2 up_proj")
    rows = page.evaluate("meshweave.tableRows().map((row) => row.worst)")
    wanted = [s.index for s in step.spans if s.op == "reduce_scatter" and s.module == "model.layers.2.mlp.up_proj"]
    assert rows == wanted
    page.click(".grid .row")
    assert page.evaluate("meshweave.state.selected") == wanted[0]
    begin, end = visible(page)
    span = step.spans[wanted[0]]
    assert begin < span.start * 1e9 < span.end * 1e9 < end
    assert end - begin < 5 * span.seconds * 1e9
    page.fill("#filter", "no such words")
    assert "No communication has these words" in page.inner_text("#sheet")


@pytest.mark.slow
def test_the_tensors_at_the_peak_lead_to_what_makes_them(open_page: Open) -> None:
    step = sample(roles=2)
    page = open_page(step)
    page.click("#tabs [data-tab=memory]")
    page.select_option("#sheet select", index=1)
    held = next(h for h in step.roles[1].at_peak if h.kind == "activation")
    assert f"{step.roles[1].peak_bytes / 2**30:.1f} GiB" in page.inner_text("#sheet")
    page.click(f".grid .row:has-text('{held.name}')")
    selected = page.evaluate("meshweave.state.selected")
    assert held.name in step.spans[selected].names
    assert step.spans[selected].role == 1


def test_a_measured_step_and_another_plan_stand_beside_it(open_page: Open) -> None:
    step, real = sample(), sample(source="measured", slow=1.25)
    page = open_page(step, measured=real, other=sample(layers=5))
    table = page.inner_text("#sheet")
    assert "\u221220.0%" in table
    assert {"modelled", "measured"} == set(page.locator("#cards .tag").all_inner_texts())
    index = most_exposed(step)
    page.evaluate(f"meshweave.select({len(step.spans) + index})")
    assert "Modelled against measured" in page.inner_text("#details")
    page.click(f"#details [data-span='{index}']")
    assert page.evaluate("meshweave.state.selected") == index
    page.click("#tabs [data-tab=diff]")
    changes = page.inner_text("#sheet")
    assert "4 instead of 5" in changes
    assert "exposed all_gather" in changes


def test_hostile_names_are_shown_and_not_run(open_page: Open) -> None:
    step = hostile()
    page = open_page(step, moves_of(step), measured=step, other=sample(layers=1))
    for tab in ("communications", "graph", "memory", "errors", "diff"):
        page.click(f"#tabs [data-tab={tab}]")
        page.evaluate(f"meshweave.select({most_exposed(step)})")
    page.mouse.move(*middle_of(page, most_exposed(step)))
    assert HOSTILE.partition("\u2028")[0] in page.text_content("#details")
    assert page.evaluate("window.stolen") is None
    assert page.locator("img").count() == 0


@pytest.mark.slow
def test_twenty_thousand_spans_are_drawn_in_time(open_page: Open, record_property: Any) -> None:
    step = sample(layers=32, microbatches=12)
    page = open_page(step)
    assert page.evaluate("meshweave.numSpans") == len(step.spans) > 20_000
    frames = page.evaluate("meshweave.measureFrames(90)")
    assert len(frames) == 90
    assert min(frames) > 0
    record_property("median_frame_ms", median(frames))
    assert median(frames) < 50


@pytest.mark.slow
def test_a_step_of_which_little_is_known_is_shown_all_the_same(open_page: Open) -> None:
    full = sample()
    role = replace(full.roles[0], memory=(), at_peak=())
    step = replace(
        full, spans=(), roles=(role,), streams=(), tokens=0, mfu=None, mfu_dtype="", memory_bytes=None, notes=()
    )
    page = open_page(step, other=full)
    assert page.inner_text("#cards").count("not known") == 2
    for tab in ("communications", "graph", "memory", "diff"):
        page.click(f"#tabs [data-tab={tab}]")
    page.keyboard.press("e")
    page.keyboard.press("w")
    assert page.evaluate("meshweave.state.selected") == -1
    assert page.evaluate("meshweave.measureFrames(3).length") == 3


def test_a_step_without_roles_is_an_error() -> None:
    with pytest.raises(MeshweaveError, match="without roles"):
        html_page(replace(sample(), roles=(), spans=()))


def test_a_narrow_page_scrolls_down_only_and_everything_is_on_it(open_page: Open) -> None:
    step = sample()
    page = open_page(step, moves_of(step), size=(400, 800))
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    width = "(box => [box.left, box.right])(document.querySelector('{}').getBoundingClientRect())"
    for part in ("#cards", "#timeline", "#minimap", "#sheet", "#details"):
        left, right = page.evaluate(width.format(part))
        assert left >= 0, part
        assert 360 <= right <= 400, (part, left, right)
    box = page.evaluate(f"meshweave.zoomTo({most_exposed(step)}), meshweave.boxOf({most_exposed(step)})")
    assert 0 < box["x"] < box["x"] + box["width"] < 400
    assert box["width"] > 50


@pytest.mark.parametrize("width", [500, 1500])
def test_no_table_is_wider_than_its_place(open_page: Open, width: int) -> None:
    step = sample(layers=3)
    page = open_page(
        step, moves_of(step), measured=sample(layers=3, source="measured"), other=sample(), size=(width, 1000)
    )
    cut = "[...document.querySelectorAll('#sheet .grid')].filter(g => g.scrollWidth > g.clientWidth).length"
    for tab in page.locator("#tabs [data-tab]").all():
        tab.click()
        assert page.evaluate(cut) == 0, tab.inner_text()


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv", "dualpipev"])
def test_a_pipeline_is_drawn_with_the_reason_of_each_gap(open_page: Open, name: str) -> None:
    step, _ = pipeline_sample(name, 4, 8)
    picture = pipeline_of(step)
    assert picture is not None
    page = open_page(step)
    assert page.locator("#tabs [data-tab]").first.get_attribute("aria-selected") == "true"
    assert page.inner_text(".pipeline-text") == str(picture)
    at = max(range(len(picture.gaps)), key=lambda i: picture.gaps[i].seconds)
    for kind, number, expected in (
        ("gaps", at, [f"role {picture.gaps[at].role} waits", f"for {picture.gaps[at].text}"]),
        ("blocks", 0, ["forward of microbatch 0, stage 0", "role 0"]),
    ):
        box = page.evaluate(f"meshweave.pipelineBox('{kind}', {number})")
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tip = page.inner_text("#tooltip")
        for text in expected:
            assert text in tip
    page.mouse.down()
    page.mouse.up()
    assert page.evaluate("meshweave.state.selected") == picture.blocks[0].spans[0]
    rows = page.evaluate("meshweave.tableRows().length")
    assert rows == 0, "the table of communications is another"
    first = page.locator(".pipeline-view .grid .row").first
    assert picture.gaps[at].text in first.inner_text()
    first.click()
    begin, end = visible(page)
    assert begin <= picture.gaps[at].start * 1e9 < picture.gaps[at].end * 1e9 <= end + 1


def test_blocks_that_run_as_one_share_the_height(open_page: Open) -> None:
    step, _ = pipeline_sample("dualpipev", 2, 6)
    page = open_page(step)
    halves = page.evaluate("meshweave.pipelines[0].blocks.map((b) => b.half)")
    picture = pipeline_of(step)
    assert picture is not None
    pairs = {
        (b.role, b.start)
        for b in picture.blocks
        for c in picture.blocks
        if b is not c and b.role == c.role and b.start == c.start
    }
    assert halves.count(1) == halves.count(2) == len(pairs) > 0


def test_thousands_of_actions_are_drawn_quickly(open_page: Open) -> None:
    step, _ = pipeline_sample("zbv", 8, 64)
    page = open_page(step)
    assert page.evaluate("meshweave.pipelines[0].blocks.length") == 8 * 64 * 2 * 3
    assert median(page.evaluate("[...Array(9)].map(() => meshweave.measurePipeline())")) < 60


def test_modelled_and_measured_pipelines_stand_below_each_other(open_page: Open) -> None:
    step, _ = pipeline_sample("1f1b", 2, 4)
    page = open_page(step, measured=replace(step, source="measured"), size=(500, 1000))
    assert page.locator(".pipeline-text .tag").all_inner_texts() == ["modelled", "measured"]
    assert page.evaluate("document.documentElement.scrollWidth") == 500
    width = page.evaluate("document.querySelector('canvas.pipeline').getBoundingClientRect().width")
    assert 440 < width <= 500


def test_without_a_schedule_there_is_no_pipeline(open_page: Open) -> None:
    page = open_page(sample(roles=2))
    assert page.locator("[data-tab=pipeline]").count() == 0
