"""Frozen parameters that forward changes: the average of a student's weights that teaches it (MoCo, BYOL, DINO)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training import assert_equals_eager, batches, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import CaptureError

Write = Callable[[nn.Parameter, nn.Parameter], Any]


def assign(teacher: nn.Parameter, student: nn.Parameter) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1


WRITES: dict[str, Write] = {
    "lerp_": lambda teacher, student: teacher.lerp_(student, 0.1),
    "mul_ and add_": lambda teacher, student: teacher.mul_(0.9).add_(student, alpha=0.1),
    "copy_": lambda teacher, student: teacher.copy_(teacher * 0.9 + student * 0.1),
    "data in place": lambda teacher, student: teacher.data.lerp_(student.data, 0.1),
    "data assigned": assign,
}


class Teaches(nn.Module):
    """A student and the average of its weights, whose output is part of the loss."""

    def __init__(self, write: Write, after: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.write, self.after = write, after

    @torch.no_grad()
    def average(self) -> None:
        for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            self.write(teacher, student)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.after:
            self.average()
        with torch.no_grad():
            target = self.teacher(x)
        out = self.student(x)
        if self.training and self.after:
            self.average()
        self.distance = F.mse_loss(out, target)
        return out + 0.1 * target


MESHES = ("", "fsdp=2", "dp=2,tp=2", "pp=2")
# Of a write that captures as another one does, a single mesh is quick.
ALIKE = ("mul_ and add_", "copy_", "data in place")
ALL = [
    pytest.param(write, mesh, marks=pytest.mark.slow if write in ALIKE and mesh != "fsdp=2" else ())
    for write in WRITES
    for mesh in MESHES
]


@pytest.mark.parametrize(("write", "mesh"), ALL)
def test_a_teacher_is_averaged_as_in_eager(write: str, mesh: str) -> None:
    plan = mw.Plan.on({"student": [0], "teacher": [1]}) if mesh == "pp=2" else None
    data = [*batches(3, (4, 4), (4, 4)), *batches(1, (2, 4), (2, 4))]
    assert_equals_eager(Teaches(WRITES[write]), data, mesh, plan=plan)


def test_a_teacher_that_is_averaged_last() -> None:
    assert_equals_eager(Teaches(WRITES["lerp_"], after=True), batches(3, (4, 4), (4, 4)), "fsdp=2")


def test_evaluation_leaves_the_teacher_alone_and_a_checkpoint_holds_it(tmp_path: Path) -> None:
    data = batches(3, (4, 4), (4, 4))

    def compiled() -> tuple[Teaches, mw.TrainStep]:
        model = Teaches(WRITES["lerp_"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, mw.compile(model, loss=mse, example=data[0], optimizer=optimizer, mesh="fsdp=2")

    model, step = compiled()
    step(data[0])
    before = step.parameters()["teacher.0.weight"].clone()
    step.evaluate(data[1])
    step.forward_only(data[1])
    assert torch.equal(step.parameters()["teacher.0.weight"], before)
    assert torch.equal(model.teacher[0].weight, before)
    step.save(tmp_path / "c")
    expected = [float(step(batch)) for batch in data[1:]]
    _, other = compiled()
    other.load(tmp_path / "c")
    assert [float(other(batch)) for batch in data[1:]] == pytest.approx(expected)
    with torch.no_grad():
        model.teacher[0].weight.zero_()
    step(data[0])
    assert model.teacher[0].weight.abs().max() < 0.2 * before.abs().max()


class Scales(nn.Linear):
    """A trained parameter that forward scales."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return super().forward(x)


def test_microbatches_and_memory_that_is_shared_are_errors() -> None:
    data = batches(1, (4, 4), (4, 4))
    for model in (Teaches(WRITES["lerp_"]), Scales(4, 4)):
        assert_equals_eager(copy.deepcopy(model), data)
        with pytest.raises(CaptureError, match="accumulate=1, with which"):
            assert_equals_eager(model, data, accumulate=2)

    def share(teacher: nn.Parameter, student: nn.Parameter) -> None:
        teacher.data = student.data

    with pytest.raises(CaptureError, match="replaces its parameter"):
        assert_equals_eager(Teaches(share), data)
