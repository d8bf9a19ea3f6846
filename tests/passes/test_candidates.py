"""Which programs a list of passes tries, and which of them it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from torch import fx

from meshweave.cost.simulate.step import StepSeconds
from meshweave.errors import VerifyError
from meshweave.optimize.overlap.decide import NoOrderError
from meshweave.passes.base import Numerics, Pass, Stage
from meshweave.passes.candidates import run_passes
from meshweave.search import Budget

Times = dict[str, float]
SLOW = {"": 100.0, "a2": 80.0, "a4": 90.0, "a8": 50.0, "b": 70.0, "a2b": 60.0}


@dataclass(frozen=True)
class Words:
    """A program that is a text; its seconds are in a table."""

    text: str
    times: Times
    log: list[str]
    graphs: tuple[fx.Graph, ...]

    def each(self, rewrite: Any) -> Any:
        raise NotImplementedError

    def with_text(self, text: str) -> Words:
        return replace(self, text=text, graphs=(fx.Graph(),))

    def verify(self, before: Words) -> None:
        if "broken" in self.text:
            raise VerifyError("broken")

    def seconds(self, costs: Any) -> StepSeconds:
        total = self.times[self.text.removesuffix("!")]
        return StepSeconds(total, self.times.get("compute", 0.0), self.times.get("communication", 0.0))

    def agreed(self, choice: int) -> int:
        return choice


@dataclass(frozen=True)
class Note:
    text: str

    def left(self, reason: str) -> Note:
        return Note(f"{self.text}, left: {reason}")


@dataclass(frozen=True)
class Write(Pass[Words]):
    """Appends a text, in one of several alternatives; not to texts that end with `after`."""

    name: ClassVar[str] = "write"
    numerics: ClassVar[Numerics] = "reassociates"
    stage: ClassVar[Stage] = "written"
    texts: tuple[str, ...] = ("a2", "a4", "a8")
    not_after: str = "?"

    @property
    def is_compared(self) -> bool:
        return True

    @property
    def alternatives(self) -> tuple[Write, ...]:
        return tuple(replace(self, texts=(text,)) for text in self.texts)

    @property
    def label(self) -> str:
        return self.texts[0]

    def run(self, program: Words, costs: Any) -> tuple[Words, tuple[Note, ...]]:
        if program.text.endswith(self.not_after):
            return program, (Note("nothing to write"),)
        return program.with_text(program.text + self.texts[0]), (Note(self.texts[0]),)


@dataclass(frozen=True)
class WriteB(Write):
    name: ClassVar[str] = "write b"
    texts: tuple[str, ...] = ("b",)


@dataclass(frozen=True)
class End(Pass[Words]):
    """Ends the text, unless its time is infinite."""

    name: ClassVar[str] = "end"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "ordered"

    def run(self, program: Words, costs: Any) -> tuple[Words, tuple[Note, ...]]:
        program.log.append(program.text)
        if program.times[program.text] == math.inf:
            raise NoOrderError("no order is under the cap")
        return program.with_text(program.text + "!"), (Note("ended"),)


PASSES: tuple[Pass[Words], ...] = (Write(), WriteB(), End())


def run(times: Times, passes: Sequence[Pass[Words]] = PASSES, **how: Any) -> tuple[str, list[str], list[str], Any]:
    """The text taken, those that were ended, the names of the variants, and the reports."""
    log: list[str] = []
    candidate, variants = run_passes(Words("", times, log, (fx.Graph(),)), passes, None, **how)
    return candidate.program.text, log, [v.name for v in variants], candidate.reports


def test_alternatives_are_tried_until_they_are_no_faster_and_the_fastest_is_rewritten_further() -> None:
    text, log, names, reports = run(SLOW)
    assert log == ["", "a2", "a4", "a2b"]  # not a8, and nothing after what is slow
    assert text == "a2b!"
    assert names == ["as it is", "a2", "a4", "a2, b"]
    assert reports["write"] == (Note("a2"),)


def test_a_program_that_is_little_slower_is_rewritten_too() -> None:
    text, log, _, reports = run({"": 100.0, "a2": 101.0, "b": 70.0, "a2b": 90.0})
    assert log == ["", "a2", "b", "a2b"]
    assert text == "b!"
    (note,) = reports["write"]
    assert "left: the program is not faster with it" in note.text


def test_equal_programs_stay_as_they_are_and_a_rewrite_has_to_gain_enough() -> None:
    equal = dict.fromkeys(("", "a2", "b", "a2b"), 100.0)
    assert run(equal)[0] == "!"
    assert run({**equal, "b": 95.0}, least_gain=0.08)[0] == "!"
    assert run({**equal, "b": 90.0}, least_gain=0.08)[0] == "b!"


def test_under_a_cap_every_alternative_is_tried_until_a_program_fits() -> None:
    times = {"": math.inf, "a2": math.inf, "a4": 90.0, "a8": 95.0, "b": math.inf, "a4b": 80.0}
    text, log, names, _ = run(times)
    assert log == ["", "a2", "a4", "a8", "b", "a4b"]
    assert text == "a4b!"
    assert names == ["as it is", "a2", "a4", "a8", "b", "a4, b"]
    with pytest.raises(NoOrderError):
        run(dict.fromkeys(("", "a2", "a4", "a8", "b", "a8b", "a2b"), math.inf))


def test_a_pass_that_changes_nothing_adds_no_program_and_reports_so() -> None:
    text, log, names, reports = run({"": 10.0}, (Write(not_after=""), WriteB(not_after=""), End()))
    assert (text, log, names) == ("!", [""], [])
    assert reports["write"] == reports["write b"] == (Note("nothing to write"),)


def test_what_a_pass_breaks_is_an_error() -> None:
    with pytest.raises(VerifyError):
        run({"": 1.0}, (Write(texts=("broken",)), End()))


def test_programs_that_time_does_not_suffice_for_are_named() -> None:
    text, log, names, _ = run(SLOW, budget=Budget(-1.0))
    assert (text, log) == ("!", [""])
    assert names == ["as it is", "a2", "a4", "a8", "b"]


def test_processes_decide_together() -> None:
    """The clock of another process counts as well."""
    text, _, _, _ = run(SLOW, budget=Budget(1e9, lambda late: (late, 1)))
    assert text == "!"


def test_nothing_is_rewritten_where_compute_leaves_too_little_to_gain() -> None:
    """100 s, of which a rewrite has to save 10: with 91 s of compute, or 92 less the 2% that it may save, it cannot."""
    for compute, is_tried in ((91.0, True), (92.0, False)):
        text, log, names, _ = run({**SLOW, "compute": compute}, least_gain=0.1)
        assert (len(log) > 1) == is_tried
        assert text == ("a2b!" if is_tried else "!")
        assert len(names) == (4 if is_tried else 3)
    assert names == ["as it is", "a2", "b"]


def test_a_pass_that_saves_compute_is_tried_all_the_same() -> None:
    @dataclass(frozen=True)
    class Shorter(WriteB):
        saves_compute: ClassVar[bool] = True

    assert run({**SLOW, "compute": 99.0}, (Shorter(), End()), least_gain=0.1)[0] == "b!"


def test_a_pass_that_only_hides_communication_is_not_tried_where_that_takes_too_long() -> None:
    """Unless a pass before it may shorten communication."""

    @dataclass(frozen=True)
    class Hides(WriteB):
        saves_communication: ClassVar[bool] = False

    times = {**SLOW, "communication": 99.0}
    assert run(times, (Hides(), End()), least_gain=0.1)[0] == "!"
    assert run(times, (WriteB(), End()), least_gain=0.1)[0] == "b!"
    assert run(times, (Write(), Hides(), End()), least_gain=0.1)[0] == "a2b!"
