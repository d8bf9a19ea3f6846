"""The layout of a pipeline's stages in Megatron's text (`--pipeline-model-parallel-layout`): `Et*3|t*5|t*5|t*3L`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.errors import PlanError

_TOKENS = re.compile(r"\*[0-9]{1,6}|.", re.DOTALL)
_MOST = 100_000  # characters that a layout may have with its repeats written out
_HINT = "for example Et*3|t*5|t*5|t*3L, or E|(t*2|)*4L with parts of their own for embedding and head"


@dataclass(frozen=True, slots=True)
class StageLayout:
    """What each stage has, in the order of a microbatch: `E` what comes before the layers, a `t` for every layer, `L`
    what comes after them. Without `E` or `L` that is with the first or the last layers.

    `str()` is the shortest text without groups; `StageLayout.parse` reads it again.
    """

    stages: tuple[str, ...]  # with repeats written out: Ettt

    @staticmethod
    def parse(text: str) -> StageLayout:
        """Read a layout: `|` separates stages, `*n` repeats what stands before it, a part or a group in parentheses;
        blanks and commas mean nothing. Raises PlanError for other text, an empty stage, parts in another order than
        `E`, `t`, `L`, and `m`, Megatron's layers of multi-token prediction."""
        whole = _without_repeats(str(text))
        stages = tuple(whole.split("|"))
        if "m" in whole:
            raise _error(
                text,
                "m (multi-token prediction)",
                "E, t and L: such layers follow the model's list of layers, and belong to L",
            )
        if "" in stages:
            got = f"nothing in stage {stages.index('')} of {len(stages)}, counted from 0"
            raise _error(text, got, "E, t or L in every stage: a device without any work would be idle")
        if not re.fullmatch("E?t+L?", whole.replace("|", "")):
            raise _error(
                text, whole.replace("|", ""), "at most one E, in front, at least one t, at most one L, at the end"
            )
        return StageLayout(stages)

    @staticmethod
    def of_sizes(sizes: Sequence[int]) -> StageLayout:
        """Stages with so many layers each, embedding and head with the first and the last."""
        return StageLayout.parse("E" + "|".join("t" * size for size in sizes) + "L")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(stage.count("t") for stage in self.stages)

    def __str__(self) -> str:
        return re.sub("tt+", lambda match: f"t*{len(match.group())}", "|".join(self.stages))


def _without_repeats(text: str) -> str:
    """The layout with `*n` and groups written out."""
    open_groups, repeated = [""], ""  # what `*n` would repeat
    for token in _TOKENS.findall(re.sub(r"[\s,]", "", text)):
        if token == "(":
            open_groups.append("")
            repeated = ""
        elif token == ")" and len(open_groups) > 1:
            repeated = open_groups.pop()
            open_groups[-1] += repeated
        elif token in ("E", "t", "L", "m", "|"):
            repeated = token
            open_groups[-1] += token
        elif token[0] == "*" and repeated and int(token[1:] or 0):
            count = int(token[1:])
            if count * len(repeated) + sum(map(len, open_groups)) > _MOST:
                raise _error(text, f"more than {_MOST} parts", "a layer of the model for each t")
            open_groups[-1] += repeated * (count - 1)
            repeated = ""
        else:
            raise _error(text, f"'{token}'", "E, t, L, | and groups in parentheses, each with *n behind it or without")
    if len(open_groups) > 1:
        raise _error(text, "a parenthesis that is not closed", "a ) for each (")
    return open_groups[0]


def _error(text: str, got: str, expected: str) -> PlanError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return PlanError("invalid layout of stages", where=f"layout {shown!r}", got=got, expected=expected, hint=_HINT)
