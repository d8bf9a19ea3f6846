"""Parameters and buffers of a meta model, made module by module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshweave.errors import CaptureError
from meshweave.runtime.initialize import materialize

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
HF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", {**SMALL, "vocab_size": 128, "num_key_value_heads": 2}),
    "qwen2": (
        "AutoModelForCausalLM",
        {**SMALL, "vocab_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "gpt2": ("AutoModelForCausalLM", {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128, "n_positions": 64}),
    "bert": ("AutoModelForMaskedLM", {**SMALL, "vocab_size": 128, "max_position_embeddings": 64}),
    "vit": ("AutoModelForImageClassification", {**SMALL, "image_size": 32, "patch_size": 8}),
}


def hf_model(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    auto, options = HF[kind]
    return getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **options))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64, bias=False))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 32))


def transformer() -> nn.Module:
    return nn.Transformer(64, 4, 1, 1, 96, batch_first=True)


def recurrent() -> nn.Module:
    return nn.ModuleList([nn.Embedding(32, 64, padding_idx=0), nn.LSTM(64, 32)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind: (lambda kind=kind: hf_model(kind)) for kind in HF},
    **{f.__name__: f for f in (mlp, cnn, transformer, recurrent)},
}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("name", MODELS)
def test_made_as_if_built_on_cpu(name: str) -> None:
    torch.manual_seed(0)
    expected = tensors(MODELS[name]())
    model = on_meta(MODELS[name])
    assert all(t.is_meta for t in tensors(model).values())
    made = dict(materialize(model, seed=1))
    assert made.keys() == expected.keys()
    for key, tensor in made.items():
        reference = expected[key].detach()
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (reference.shape, reference.dtype, "cpu")
        assert not tensor.requires_grad
        if not reference.is_floating_point() or reference.unique().numel() <= 2 or "inv_freq" in key:
            assert torch.equal(tensor, reference), key
        else:
            # Of n samples the standard deviation has a relative error of about 1/sqrt(2n); 5 of these.
            assert float(tensor.std() / reference.std()) == pytest.approx(1, abs=5 / tensor.numel() ** 0.5), key
            assert float(tensor.mean() - reference.mean()) == pytest.approx(
                0, abs=8 * float(reference.std()) / tensor.numel() ** 0.5
            ), key


@pytest.mark.parametrize("name", MODELS)
def test_deterministic_and_independent_of_what_is_wanted(name: str) -> None:
    model = on_meta(MODELS[name])
    torch.manual_seed(123)
    state = torch.get_rng_state()
    whole = {key: digest(t) for key, t in materialize(model, seed=7)}
    assert torch.equal(state, torch.get_rng_state()), "the global generator moved"
    torch.manual_seed(456)
    for key in sorted(whole, reverse=True)[:8]:
        ((got, tensor),) = materialize(on_meta(MODELS[name]), seed=7, wanted=[key])
        assert (got, digest(tensor)) == (key, whole[key])
    assert dict(materialize(model, seed=7, wanted=())) == {}
    assert whole != {key: digest(t) for key, t in materialize(model, seed=8)}


def test_equal_modules_at_different_paths_differ() -> None:
    made = dict(materialize(on_meta(lambda: nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])), seed=0))
    assert not torch.equal(made["0.weight"], made["1.weight"])


@pytest.mark.parametrize("name", ["gpt2", "cnn"])
def test_the_model_is_not_changed(name: str) -> None:
    model = on_meta(MODELS[name])
    before = {key: (id(t), t.requires_grad) for key, t in tensors(model).items()}
    attributes = {path: dict(vars(m)) for path, m in model.named_modules()}
    list(materialize(model, seed=0))
    assert {key: (id(t), t.requires_grad) for key, t in tensors(model).items()} == before
    assert {path: vars(m).keys() for path, m in model.named_modules()} == {p: a.keys() for p, a in attributes.items()}
    assert all(t.is_meta for t in tensors(model).values())


def test_tied_weights_come_once_under_their_first_name() -> None:
    model = on_meta(MODELS["qwen2"])
    names = [name for name, _ in materialize(model, seed=0)]
    assert len(set(names)) == len(names)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_real_values_are_yielded_and_never_overwritten() -> None:
    model = MODELS["gpt2"]()
    expected = {key: t.detach().clone() for key, t in tensors(model).items()}
    model.transformer.h[0].mlp.c_proj.weight = nn.Parameter(torch.empty(256, 64, device="meta"))
    made = dict(materialize(model, seed=0))
    assert made.keys() == expected.keys()
    for key, tensor in made.items():
        assert torch.equal(tensor, expected[key]) == (key != "transformer.h.0.mlp.c_proj.weight"), key
    assert float(made["transformer.h.0.mlp.c_proj.weight"].std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    # A block that resets its children is run for each of them, yet a neighbour with a value keeps it.
    assert all(torch.equal(t, expected[key]) for key, t in tensors(model).items() if not t.is_meta)


def test_a_block_may_rescale_what_its_children_made() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(32, 32)
            self.gain = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.normal_(self.out.weight, std=1e-4)
            nn.init.constant_(self.gain, 2.0)

    made = dict(materialize(on_meta(Block), seed=0))
    assert float(made["out.weight"].std()) == pytest.approx(1e-4, rel=0.1)
    assert float(made["out.bias"].abs().max()) > 1e-3
    assert made["gain"].tolist() == [2.0, 2.0, 2.0]


def test_only_one_module_is_held_at_a_time() -> None:
    made: list[StorageWeakRef] = []
    held_when_made: list[int] = []

    class Tracked(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            if not self.weight.is_meta:
                held_when_made.append(sum(not storage.expired() for storage in made))
                made.extend(StorageWeakRef(p.untyped_storage()) for p in self.parameters())

    model = on_meta(lambda: nn.Sequential(*(Tracked(8, 8) for _ in range(6))))
    weights = 0
    for name, tensor in materialize(model, seed=0, wanted=[f"{i}.weight" for i in range(6)]):
        assert tensor.shape == (8, 8), name
        weights += 1
        del tensor
    assert weights == 6
    assert held_when_made == [0] * 6
    assert all(storage.expired() for storage in made)


class Table(nn.Module):
    """A buffer made in the constructor and nowhere else."""

    def __init__(self, table: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.register_buffer("table", table())


@pytest.mark.parametrize(
    "table",
    [lambda: torch.arange(4), lambda: torch.ones(3), lambda: torch.tensor([True]), lambda: torch.ones(2).cfloat()],
)
def test_a_buffer_that_nothing_initialises_is_an_error(table: Callable[[], torch.Tensor]) -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Table(table)))
    with pytest.raises(CaptureError) as caught:
        list(materialize(model, seed=0))
    assert str(caught.value) == (
        "nothing initialises '1.table', which lost its value on the meta device\n"
        "  where: module '1' (Table)\n"
        "  expected: a method reset_parameters() that sets every parameter and buffer that the module itself owns\n"
        "  hint: define reset_parameters in Table, or build this module on CPU"
    )
    assert dict(materialize(model, seed=0, wanted=["0.bias"])).keys() == {"0.bias"}


def test_a_buffer_built_on_cpu_in_a_meta_model_keeps_its_value() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Table(lambda: torch.arange(4, device="cpu"))))
    assert dict(materialize(model, seed=0))["1.table"].tolist() == [0, 1, 2, 3]


def test_a_parameter_set_in_part_is_an_error() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.empty(4, dtype=torch.bfloat16))

        def reset_parameters(self) -> None:
            self.w.data[:2] = 1.0

    with pytest.raises(CaptureError, match="nothing initialises 'w'"):
        list(materialize(on_meta(Half), seed=0))


def test_an_initialiser_that_reads_its_neighbours_is_an_error() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def reset_parameters(self) -> None:
            self.a.weight.data.copy_(self.b.weight.data)

    with pytest.raises(CaptureError, match=r"cannot be initialised alone\n  where: module 'a' \(Linear\)"):
        list(materialize(on_meta(Copies), seed=0))


def test_reduced_precision_is_initialised_in_its_own_dtype() -> None:
    made = dict(materialize(on_meta(lambda: mlp().to(torch.bfloat16)), seed=0))
    assert {t.dtype for t in made.values()} == {torch.bfloat16}
    assert float(made["0.weight"].float().std()) == pytest.approx(1 / (3 * 64) ** 0.5, rel=0.05)
