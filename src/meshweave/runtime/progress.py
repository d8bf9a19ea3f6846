"""The progress of a step: which part may run next."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.errors import StepError


@dataclass(slots=True)
class Progress:
    """A step is (forward, backward) once per microbatch, then update. `num_done` microbatches have run backward."""

    num_micros: int
    num_done: int = 0
    is_forward: bool = False  # a microbatch has run forward but not backward

    @property
    def due(self) -> str:
        """The next part."""
        if self.is_forward:
            return "backward"
        return "forward" if self.num_done < self.num_micros else "update"

    def check(self, part: str) -> None:
        """Raise StepError unless `part` is next."""
        if part != self.due:
            raise StepError(
                f"{part} is out of order in this step",
                got=self._so_far(),
                expected=f"{self.due}()",
                hint="a step is forward and backward"
                + (" for each microbatch" * (self.num_micros > 1))
                + ", then update",
            )

    def check_idle(self, what: str) -> None:
        """Raise StepError in the middle of a step."""
        if self.is_forward or self.num_done:
            raise StepError(
                f"{what} is not possible in the middle of a step", got=self._so_far(), expected=f"{self.due}() first"
            )

    def advance(self, part: str) -> None:
        self.is_forward = part == "forward"
        self.num_done = {"forward": self.num_done, "backward": self.num_done + 1, "update": 0}[part]

    def reset(self) -> None:
        """Forget the step."""
        self.num_done, self.is_forward = 0, False

    def _so_far(self) -> str:
        at = f" of microbatch {self.num_done + self.is_forward} of {self.num_micros}" if self.num_micros > 1 else ""
        last = "forward" if self.is_forward else "backward" if self.num_done else ""
        return f"after {last}{at}" if last else "a step that has not begun"
