"""MODEL strings: files with a factory, and Hugging Face types with random weights."""

import textwrap

import pytest
import torch

from meshweave.capture.batch import call_model
from meshweave.cli.hugging_face import text_windows
from meshweave.cli.sources import load_source
from meshweave.errors import MeshweaveError

GOOD = """
import torch
from torch import nn

def factory(batch=4):
    make = lambda index: {"x": torch.full((batch, 3), float(index))}
    return nn.Linear(3, 2), make, lambda out, batch: out.mean()

def other():
    return nn.Linear(3, 2), (torch.ones(4, 3),), lambda out, batch: out.mean()

def wrong():
    return nn.Linear(3, 2)

def failing():
    x = 1
    return x / 0
"""


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(GOOD)
    return path


def test_a_factory_gives_a_different_batch_per_index(model_file):
    source = load_source(f"{model_file}:factory", batch=6)
    assert source.batch["x"].shape == (6, 3)
    assert source.make_batch(2)["x"].unique().tolist() == [2.0]
    assert (source.tokens_per_batch, source.unit) == (6, "samples")


def test_a_factory_may_return_one_batch_for_all(model_file):
    source = load_source(f"{model_file}:other")
    assert torch.equal(source.make_batch(7)[0], torch.ones(4, 3))


def test_the_seed_decides_the_parameters(model_file):
    weights = [load_source(f"{model_file}:factory", seed=s).model.weight for s in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_float64_is_of_parameters_and_data(model_file):
    source = load_source(f"{model_file}:factory", dtype=torch.float64)
    assert source.model.weight.dtype == source.make_batch(1)["x"].dtype == torch.float64


@pytest.mark.parametrize(
    ("ending", "options", "message"),
    [
        (":factry", {}, r"no function 'factry'[\s\S]*expected: factory"),
        (":wrong", {}, r"did not return a model[\s\S]*got: Linear"),
        (":failing", {}, r"failing\(\) failed[\s\S]*my_model\.py:17[\s\S]*ZeroDivisionError"),
        (":other", {"batch": 8}, r"chooses its own batch size[\s\S]*def other\(batch: int = 8\)"),
    ],
)
def test_bad_factories(model_file, ending, options, message):
    with pytest.raises(MeshweaveError, match=message):
        load_source(f"{model_file}{ending}", **options)


def test_a_missing_file_names_its_neighbours(model_file):
    with pytest.raises(MeshweaveError, match=r"no such file[\s\S]*my_model\.py"):
        load_source(f"{model_file.parent}/mymodel.py:factory")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import missing_module_xyz\n", r"cannot be imported[\s\S]*bad\.py:1[\s\S]*missing_module_xyz"),
        ("x = 1\ndef f(:\n", r"cannot be imported[\s\S]*bad\.py:2[\s\S]*SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_names_the_line(tmp_path, text, message):
    path = tmp_path / "bad.py"
    path.write_text(textwrap.dedent(text))
    with pytest.raises(MeshweaveError, match=message):
        load_source(f"{path}:factory")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf:llama", "LlamaForCausalLM"),
        ("hf:gpt2", "GPT2LMHeadModel"),
        ("hf:bert", "BertForMaskedLM"),
        ("hf:vit", "ViTForImageClassification"),
        ("hf:qwen2", "Qwen2ForCausalLM"),
        ("hf:qwen3", "Qwen3ForCausalLM"),
        ("hf:roberta", "RobertaForMaskedLM"),
        ("hf:t5", "T5ForConditionalGeneration"),
        ("hf:bart", "BartForConditionalGeneration"),
        ("hf:llama?task=SequenceClassification", "LlamaForSequenceClassification"),
    ],
)
def test_hugging_face_types_are_small_and_train(text, name):
    source = load_source(text, batch=2, seq=32)
    assert type(source.model).__name__ == name
    assert sum(p.numel() for p in source.model.parameters()) < 300_000
    assert source.model.training
    assert not getattr(source.model.config, "use_cache", False)
    value = source.loss(call_model(source.model, source.batch), source.batch)
    value.backward()
    assert torch.isfinite(value.detach())
    counts_samples = text == "hf:vit"
    assert source.unit == ("samples" if counts_samples else "tokens")
    assert source.tokens_per_batch == (2 if counts_samples else 64)


def test_special_tokens_lie_within_the_vocabulary():
    config = load_source("hf:gpt2?vocab_size=100").model.config
    assert config.bos_token_id == config.eos_token_id == 99
    assert load_source("hf:gpt2?vocab_size=100").batch["input_ids"].max() < 100


def test_the_query_sets_fields_by_either_name():
    config = load_source("hf:gpt2?hidden_size=48&n_head=3&num_hidden_layers=1&attn_pdrop=0.0").model.config
    assert (config.n_embd, config.n_head, config.n_layer, config.attn_pdrop) == (48, 3, 1, 0.0)


def test_key_value_heads_follow_the_heads_unless_given():
    assert load_source("hf:llama?num_attention_heads=8").model.config.num_key_value_heads == 8
    assert load_source("hf:llama?num_key_value_heads=2").model.config.num_key_value_heads == 2


def test_meta_allocates_nothing():
    source = load_source("hf:llama?hidden_size=4096&num_hidden_layers=32&num_attention_heads=32", device="meta")
    assert all(p.is_meta for p in source.model.parameters())
    assert source.batch["input_ids"].device.type == "cpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:llamma", r"of type 'llamma'[\s\S]*expected: llama"),
        ("hf:wav2vec2", r"of type 'wav2vec2'[\s\S]*a factory: file.py:factory"),
        ("hf:llama?task=Chat", r"no such task[\s\S]*CausalLM"),
        ("hf:llama?hidden_sze=64", r"LlamaConfig has no field 'hidden_sze'[\s\S]*expected: hidden_size"),
        ("hf:llama?hidden_size=65", r"LlamaConfig refuses these values[\s\S]*65"),
        ("hf:llama?hidden_size", r"not a query[\s\S]*field=value"),
        ("hf:gemma3", r"composed of several models[\s\S]*gemma3_text"),
        ("llama", r"neither a file nor the name of a model"),
    ],
)
def test_bad_models(text, message):
    with pytest.raises(MeshweaveError, match=message):
        load_source(text)


def test_text_is_text_and_windows_differ():
    a, b = text_windows(0, 4, 64), text_windows(1, 4, 64)
    assert a.shape == (4, 64)
    assert a.dtype == torch.int64
    assert torch.equal(a, text_windows(0, 4, 64))
    assert len({tuple(row.tolist()) for row in torch.cat([a, b])}) == 8
    assert not torch.equal(a, text_windows(0, 4, 64, seed=1))
    assert bytes(a[0].tolist()).decode().isprintable() or "\n" in bytes(a[0].tolist()).decode()


def test_masked_inputs_keep_their_labels():
    batch = load_source("hf:bert", batch=8, seq=64).batch
    hidden = batch["input_ids"] != batch["labels"]
    assert 0.10 < hidden.float().mean() < 0.20
    assert batch["input_ids"][hidden].unique().tolist() == [256]
