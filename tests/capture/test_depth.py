"""Equal layers of a model, and the same model with fewer."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from meshweave.capture.depth import EqualLayers, find_equal_layers, shortened


class Block(nn.Module):
    def __init__(self, width: int = 4, number: int = 0, *, is_wide: bool = False) -> None:
        super().__init__()
        self.number, self.is_wide = number, is_wide
        self.act = partial(nn.functional.gelu, approximate="tanh")
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList(blocks), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def numbered(count: int, period: int = 1) -> list[Block]:
    """Blocks that know their number; every `period`-th is wide."""
    return [Block(number=i, is_wide=period > 1 and i % period == 0) for i in range(count)]


def test_layers_are_equal_but_for_their_number() -> None:
    assert find_equal_layers(Net(*numbered(6))) == EqualLayers("blocks", 0, 6)


def test_a_pattern_of_layers_has_a_period() -> None:
    assert find_equal_layers(Net(*numbered(8, 3))) == EqualLayers("blocks", 0, 6, 3)


def test_other_layers_at_both_ends_stay() -> None:
    wide = [Block(number=9, is_wide=True), nn.Linear(4, 4)]
    net = Net(wide[0], *[Block(number=7) for _ in range(4)], wide[1])
    layers = find_equal_layers(net)
    assert layers == EqualLayers("blocks", 1, 4)
    shorter = shortened(net, layers, 2).model
    assert [type(each) for each in shorter.blocks] == [Block, Block, Block, nn.Linear]
    assert shorter.blocks[0] is wide[0]
    assert shorter.blocks[3] is wide[1]


@pytest.mark.parametrize("change", ["width", "flag", "dtype", "frozen", "function", "module", "hook"])
def test_a_layer_that_differs_ends_the_run(change: str) -> None:
    blocks = numbered(5)
    if change == "width":
        blocks[2].up, blocks[2].down = nn.Linear(4, 6), nn.Linear(6, 4)
    elif change == "flag":
        blocks[2].is_wide = True
    elif change == "dtype":
        blocks[2].half()
    elif change == "frozen":
        blocks[2].up.weight.requires_grad = False
    elif change == "function":
        blocks[2].act = partial(nn.functional.gelu, approximate="none")
    elif change == "module":
        blocks[2].down = nn.Sequential(blocks[2].down)
    else:
        blocks[2].register_forward_hook(lambda *_: None)
    found = find_equal_layers(Net(*blocks))
    assert found is not None
    assert found.count == 2


def test_layers_that_share_a_parameter_are_not_cut() -> None:
    blocks = numbered(5)
    blocks[3].up = blocks[1].up
    assert find_equal_layers(Net(*blocks)) is None


def test_a_model_whose_forward_was_replaced_is_not_cut() -> None:
    net = Net(*numbered(5))
    net.forward = lambda x: x  # type: ignore[method-assign]
    assert find_equal_layers(net) is None


def test_a_shorter_model_shares_what_it_has() -> None:
    net = Net(*numbered(8))
    layers = find_equal_layers(net)
    assert layers is not None
    shorter = shortened(net, layers, 3)
    assert len(shorter.model.blocks) == 3
    assert len(net.blocks) == 8
    assert shorter.model.head is net.head
    x = torch.randn(2, 4)
    expected = net.head(net.blocks[7](net.blocks[1](net.blocks[0](net.first(x)))))
    assert torch.equal(shorter.model(x), expected)


def test_twins_and_names_of_a_shorter_model() -> None:
    net = Net(*numbered(8))
    layers = find_equal_layers(net)
    assert layers is not None
    shorter = shortened(net, layers, 3)
    own = dict(shorter.model.named_parameters())
    for name, parameter in net.named_parameters():
        assert own[shorter.twins[name]].shape == parameter.shape
        assert (name in shorter.names) == any(parameter is each for each in own.values())
    assert shorter.names["blocks.7.up.weight"] == "blocks.2.up.weight"
    assert shorter.twins["blocks.4.up.weight"] == "blocks.1.up.weight"
    assert {*shorter.names.values()} >= {*own}


def test_periods_stay_whole() -> None:
    net = Net(*numbered(12, 3))
    layers = find_equal_layers(net)
    assert layers == EqualLayers("blocks", 0, 12, 3)
    shorter = shortened(net, layers, 6)
    assert [block.is_wide for block in shorter.model.blocks] == [True, False, False] * 2
    assert [shorter.twins[f"blocks.{i}"] for i in range(12)] == [
        f"blocks.{i}" for i in (0, 1, 2, 0, 1, 2, 0, 1, 2, 3, 4, 5)
    ]


def test_a_model_that_is_a_list_itself() -> None:
    net = nn.Sequential(nn.Linear(4, 4), *[Block(number=i) for i in range(1, 7)])
    layers = find_equal_layers(net)
    assert layers == EqualLayers("", 1, 6)
    shorter = shortened(net, layers, 2)
    assert [type(each) for each in shorter.model] == [nn.Linear, Block, Block]
    assert shorter.twins["6.up.weight"] == "2.up.weight"
    assert shorter.omitted.place_of("2.up") == "-0.up"


def test_places_are_the_same_at_any_depth() -> None:
    net = Net(*numbered(8))
    layers = find_equal_layers(net)
    assert layers is not None
    low, high = shortened(net, layers, 2).omitted, shortened(net, layers, 4).omitted
    assert low.place_of("blocks.1.up") == high.place_of("blocks.3.up")
    assert low.place_of("blocks.0.up") == high.place_of("blocks.0.up") == "blocks.0.up"
    assert high.place_of("blocks.2.up") is None
    assert high.place_of("head") == "head"
