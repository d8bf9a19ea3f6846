"""What a batch may be: dicts, tuples, lists and dataclasses, and nests of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from tests.training import assert_equals_eager
from torch import Tensor, nn

import meshweave as mw
from meshweave.capture.batch import Batch
from meshweave.capture.model_checks import check_shapes
from meshweave.errors import CaptureError


@dataclass
class Rows:
    x: Tensor
    y: Tensor
    scale: float = 2.0


@dataclass(frozen=True, slots=True)
class Pair:
    rows: Rows
    more: dict[str, Any]
    derived: int = field(init=False, default=3)


def rows(at: float = 0.0, num: int = 4) -> Rows:
    return Rows(torch.arange(float(3 * num)).view(num, 3) / 12 + at, torch.ones(num, 2))


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Whole(ByName):
    def forward(self, batch: Rows) -> Tensor:
        return self.net(batch.x)


def loss(out: Tensor, batch: Rows) -> Tensor:
    assert type(batch) is Rows
    return batch.scale * (out - batch.y).square().mean()


@pytest.mark.parametrize(("kind", "mesh"), [(ByName, ""), (Whole, "dp=2")])
def test_a_dataclass_is_a_batch(kind: type[ByName], mesh: str) -> None:
    batches = [rows(), rows(0.5), rows(num=2)]  # the last one of an epoch
    eager, expected = kind(), []
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        value = loss(eager.net(batch.x), batch)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(
        model, loss=loss, example=batches[0], optimizer=optimizer, mesh=mesh, run=mw.RunOptions(backend="eager")
    )
    assert [float(step(batch)) for batch in batches] == pytest.approx(expected, rel=1e-5)
    assert float(step.evaluate(batches[0])) == pytest.approx(loss(eager.net(batches[0].x), batches[0]).item(), rel=1e-5)


def test_a_dataclass_with_another_number_has_another_program() -> None:
    model = ByName()
    step = mw.compile(model, loss=loss, example=rows(), mesh="", run=mw.RunOptions(backend="eager"))
    other = rows()
    other.scale = 3.0
    assert float(step(other)) == pytest.approx(loss(model.net(other.x), other).item(), rel=1e-5)


def test_dataclasses_are_taken_apart_and_put_together() -> None:
    plain = Rows("a", "b")  # type: ignore[arg-type]
    pair = Pair(rows(), {"list": [rows(1.0), plain], "ids": torch.tensor([1, 2])})
    batch = Batch.of([pair])
    assert batch.names == ("0.rows.x", "0.rows.y", "0.more.list.0.x", "0.more.list.0.y", "0.more.ids")
    (again,) = batch.rebuild([t + 1 for t in batch.tensors])
    assert type(again) is Pair
    assert again.derived == 3
    assert torch.equal(again.rows.x, pair.rows.x + 1)
    assert again.rows.scale == 2.0
    assert torch.equal(again.more["list"][0].y, torch.full((4, 2), 2.0))
    assert again.more["list"][1] is plain
    assert torch.equal(pair.rows.x, rows().x)  # the caller's is as it was


def test_what_holds_no_tensor_says_what_may() -> None:
    class Own:
        def __init__(self) -> None:
            self.x = torch.ones(2)

    for batch in (Own(), Rows(1, 2), Rows):  # type: ignore[arg-type]
        with pytest.raises(CaptureError, match="the batch contains no tensor") as error:
            Batch.of(batch)
        assert "dict, tuple, list or dataclass" in error.value.expected


# entries that are not tensors


def weighed(out: Tensor, batch: dict[str, Any]) -> Tensor:
    weight = batch["weight"].copy() if isinstance(batch["weight"], np.ndarray) else batch["weight"]
    return ((out - torch.as_tensor(batch["y"])).square() * torch.as_tensor(weight)).mean()


def with_entries(i: int, weight: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(i)
    y = torch.randn(4, 2, generator=draw)
    return {"x": torch.randn(4, 3, generator=draw), "y": y.numpy(), "weight": weight}


@pytest.mark.parametrize(
    ("weight", "num_programs"),
    [
        (lambda i: 3 + i, 2),
        (lambda i: 0.1 * i, 2),
        (lambda i: np.float32(i), 1),
        (lambda i: np.full((4, 1), i + 1.0, np.float32)[::-1], 1),
        (lambda i: 2, 1),
    ],
    ids=["int", "float", "numpy number", "numpy array", "the same int"],
)
def test_numbers_and_arrays_are_inputs_of_the_step(weight: Callable[[int], Any], num_programs: int) -> None:
    data = [with_entries(i, weight(i)) for i in range(4)]

    step = assert_equals_eager(ByName(), data, "dp=2", loss=weighed)
    assert len(step._compiled.variants.all) == num_programs


def test_a_number_that_decides_the_ops_has_a_program_for_each_value(caplog: pytest.LogCaptureFixture) -> None:
    def loss(out: Tensor, batch: dict[str, Any]) -> Tensor:
        return (out - torch.as_tensor(batch["y"])).square().mean() * (2.0 if batch["weight"] > 1 else 1.0)

    step = assert_equals_eager(ByName(), [with_entries(i, i) for i in range(4)], "dp=2", loss=loss)
    assert len(step._compiled.variants.all) == 2
    assert "for another value of the batch entry 'weight'" in caplog.text


def test_other_entries_are_named_when_they_compile(caplog: pytest.LogCaptureFixture) -> None:
    def loss(out: Tensor, batch: dict[str, Any]) -> Tensor:
        return (out - torch.as_tensor(batch["y"])).square().mean() * batch["weight"][0]

    assert_equals_eager(ByName(), [with_entries(i, [i]) for i in range(1, 3)], "dp=2", loss=loss)
    assert "for another value of the batch entry 'weight'" in caplog.text


def test_an_optional_argument_that_a_tuple_does_not_fill_is_named() -> None:
    class Optional(ByName):
        def forward(self, x: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            y = self.net(x)
            return y, None if targets is None else (y - targets).square().mean()

    data = (torch.ones(4, 3), torch.ones(4, 2))
    model = Optional()
    options: dict[str, Any] = {"loss": lambda out, batch: out[1], "example": data, "mesh": "dp=2"}
    with pytest.raises(CaptureError, match="its optional argument targets") as error:
        mw.compile(model, **options)
    assert "forward=lambda model, batch: model(*batch)" in error.value.hint
    step = mw.compile(model, **options, forward=lambda model, batch: model(*batch))
    assert float(step(data)) == pytest.approx(model(*data)[1].item(), rel=1e-5)


# what of a tensor counts beside its elements


class Asks(nn.Module):
    """A layer that does with x what `asked` says, too."""

    def __init__(self, asked: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.asked = nn.Linear(4, 4), asked

    def forward(self, x: Tensor) -> Tensor:
        answer = self.asked(x)
        return self.linear(x) * (2.0 if answer is True else 1.0)


def own() -> dict[str, Tensor]:
    return {"x": torch.ones(4, 4), "y": torch.zeros(4, 4)}


def test_whether_a_tensor_of_the_batch_requires_gradients_counts() -> None:
    data = [own(), own() | {"x": torch.ones(4, 4, requires_grad=True)}, own()]
    step = assert_equals_eager(Asks(lambda x: x.requires_grad), data)
    assert len(step._compiled.variants.all) == 2


def test_what_a_model_does_not_ask_may_be_otherwise() -> None:
    shared = torch.ones(4, 8, requires_grad=True)[:, ::2]
    assert_equals_eager(
        Asks(lambda x: x + 1), [own(), dict.fromkeys(("x", "y"), shared.detach()), own() | {"x": shared}]
    )


def test_a_batch_asks_for_gradients_of_itself() -> None:
    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]

    data = [{"x": torch.randn(4, 4, requires_grad=True), "y": torch.randn(4, 4)} for _ in range(2)]
    assert_equals_eager(Forces(), data, "dp=2")


class Scale:
    """An object in the batch, equal to another of the same name."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale)

    __hash__ = object.__hash__


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, by: Any) -> Tensor:
        return self.linear(x) * (by.value if isinstance(by, Scale) else by)


@pytest.mark.parametrize("pair", [(Scale(2.0), Scale(3.0)), (True, 2), (1, 1.5)], ids=["object", "number", "type"])
def test_another_object_in_the_batch_counts_if_it_makes_a_difference(pair: tuple[Any, Any]) -> None:
    step = assert_equals_eager(Scaled(), [own() | {"by": by} for by in (pair[0], copy(pair[0]), pair[1])])
    assert len(step._compiled.variants.all) == 2


def test_nested_tensors_are_an_error() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    with pytest.raises(CaptureError, match=r"nested or sparse\n  where: entry 'x'") as error:
        Batch.of({"y": torch.ones(2), "x": ragged})
    assert "to_padded_tensor" in str(error.value)


def test_a_plain_attribute_on_meta_is_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), torch.ones(4)

    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    with pytest.raises(CaptureError, match=r"the attribute '0.scale' is a tensor without values"):
        check_shapes(model)
