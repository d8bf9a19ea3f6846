"""Models by name have their published sizes; folders and repositories are read from their config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshweave.cli.hugging_face import from_configuration
from meshweave.cli.named_models import named_models
from meshweave.cli.sources import load_source
from meshweave.errors import MeshweaveError

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 96,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("name", named_models())
def test_a_named_model_has_its_published_number_of_parameters(name: str) -> None:
    model, _ = from_configuration(name, 1, 8, 0, "meta")
    parameters = list(model.parameters())
    assert sum(p.numel() for p in parameters) == named_models()[name].parameters
    assert {p.device.type for p in parameters} == {"meta"}


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("llama3-8b", {"input_ids": (2, 8192), "labels": (2, 8192)}),
        ("gpt2-xl", {"input_ids": (2, 1024), "labels": (2, 1024)}),
        ("deepseek-v3", {"input_ids": (2, 8192), "labels": (2, 8192)}),  # of 163,840
        ("vit-l", {"pixel_values": (2, 3, 224, 224), "labels": (2,)}),
    ],
)
def test_its_batches_have_its_context(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    source = load_source(name, seq=None, device="meta")
    assert {key: tuple(value.shape) for key, value in source.batch.items()} == shapes


def test_fields_of_a_named_model_can_be_changed() -> None:
    source = load_source("llama3-8b?num_hidden_layers=2&hidden_size=256&head_dim=8", device="meta")
    config = source.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_key_value_heads) == (2, 256, 8)
    assert config.vocab_size == 128_256


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_folder_with_a_configuration_is_a_model(folder: Path, prefix: str) -> None:
    source = load_source(f"{prefix}{folder}?num_hidden_layers=1", seq=None)
    config = source.model.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (1, 32, 48)
    assert source.batch["input_ids"].shape == (2, 96)


@pytest.mark.parametrize("contents", ["{}", "{", '{"model_type": "nothing"}'])
def test_a_folder_without_a_configuration_says_so(tmp_path: Path, contents: str) -> None:
    (tmp_path / "config.json").write_text(contents)
    with pytest.raises(MeshweaveError, match=r"no configuration of .*[\s\S]*expected: a folder with a config\.json"):
        load_source(str(tmp_path))


@pytest.mark.parametrize(
    ("repository", "name"), [("Qwen/Qwen3-8B", "a name: qwen3-8b$"), ("someone/Mixtral-8x7", "a name: mixtral-8x7b")]
)
def test_a_repository_that_cannot_be_reached_names_the_model(
    repository: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co'\nmore")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(
        MeshweaveError, match=rf"no configuration of '{repository}'[\s\S]*couldn't connect[\s\S]*{name}"
    ):
        load_source(f"hf:{repository}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama3-8", r"got: llama3-8\n.*expected: llama3-8b,"),
        ("Mixtral-8x7b", r"expected: mixtral-8x7b,"),
        ("hf:llama3-8b", r"hint: write llama3-8b without hf:"),
        ("hf:lama", r"no model of type 'lama'[\s\S]*expected: llama,"),
        ("llama3-8b?num_hiden_layers=2", r"no field 'num_hiden_layers'[\s\S]*expected: num_hidden_layers,"),
    ],
)
def test_unknown_names_have_near_matches(text: str, message: str) -> None:
    with pytest.raises(MeshweaveError, match=message):
        load_source(text, device="meta")


def test_sequences_longer_than_the_context_say_how_to_set_it() -> None:
    with pytest.raises(MeshweaveError, match=r"hint: .*gpt2\?max_position_embeddings=2048") as caught:
        load_source("gpt2", seq=2048, device="meta")
    text = caught.value.hint.rpartition(" ")[2]
    assert load_source(text, seq=2048, device="meta").batch["input_ids"].shape == (2, 2048)


def test_the_documentation_lists_all_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert [name for name in named_models() if f"`{name}`" not in page] == []
