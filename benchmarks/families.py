"""Every family of the installed transformers that can be built tiny: two steps of SGD beside eager PyTorch, as a table.

    python benchmarks/families.py [-o benchmarks/results/families.md] [NAME ...]
    python benchmarks/families.py --mesh dp=2,tp=2 llama mixtral

A family is built from its own config with small sizes. It counts as buildable where eager PyTorch trains it on the
batch that its kind takes. Mixtures of experts run on ep=2 as well. One process per family, forked from one that has
imported everything; a family that takes more CPU time than a limit is listed as late.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import resource
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.place.styles import expert_parameters

SECONDS = 240  # of CPU time for one family: a busy machine makes none late
# Of losses, and of parameters relative to the largest magnitude: two steps, sums in another order. A model whose masks
# turn on a last digit is judged in float64 (bit: eager PyTorch itself moves by 1.2 where weights move by 1e-7).
TOLERANCE, EXACT = 1e-4, 1e-9
MOST_PARAMETERS = 30_000_000  # what is larger, the sizes below did not reach
BATCH, SEQ, VOCABULARY, WIDTH = 4, 16, 96, 32

# Sizes by the names of config fields, for those that a config has.
_NAMES = {
    WIDTH: "hidden_size d_model n_embd embed_dim dim emb_dim encoder_hidden_size decoder_hidden_size embedding_size",
    2: (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers mamba_expand "
        "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_experts_per_tok n_group "
        "num_experts_per_token moe_topk moe_k moe_top_k moe_num_active_experts"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_kv_heads "
        "num_key_value_heads encoder_num_attention_heads decoder_num_attention_heads num_experts num_local_experts "
        "n_routed_experts moe_num_experts"
    ),
    8: (
        "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim attention_head_dim sliding_window "
        "lora_rank_tokenshift"
    ),
    16: "kv_lora_rank q_lora_rank",
    48: (
        "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner dim_feedforward moe_intermediate_size "
        "shared_expert_intermediate_size intermediate_size_mlp ffn_hidden_size shared_intermediate_size "
        "expert_ffn_hidden_size"
    ),
    64: "max_position_embeddings n_positions n_ctx max_source_positions max_target_positions max_seq_len",
    VOCABULARY: "vocab_size decoder_vocab_size type_vocab_size vocab_size_per_layer_input",
    1: "topk_group first_k_dense_replace",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES |= {"image_size": 32, "use_cache": False}


@dataclass(frozen=True, slots=True)
class Task:
    """What a family is built for: the table that lists it, the class that builds it, and batches that it may take."""

    mapping: str
    auto_class: str
    batches: tuple[Callable[[Any], dict[str, Tensor]], ...]


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _text(config: Any) -> dict[str, Tensor]:
    ids = torch.randint(5, VOCABULARY - 5, (BATCH, SEQ), generator=_random(1))
    return {"input_ids": ids, "labels": ids}


def _classified_text(config: Any) -> dict[str, Tensor]:
    return {**_text(config), "labels": torch.arange(BATCH) % 2}


def _images(config: Any) -> dict[str, Tensor]:
    size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
    pixels = torch.randn(BATCH, getattr(config, "num_channels", 3), size, size, generator=_random(1))
    return {"pixel_values": pixels, "labels": torch.arange(BATCH)}


def _sound(config: Any) -> dict[str, Tensor]:
    return {"input_values": torch.randn(BATCH, 2000, generator=_random(1)), "labels": torch.arange(BATCH) % 2}


def _features(config: Any) -> dict[str, Tensor]:
    bins, frames = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 32)
    data = torch.randn(BATCH, bins, frames, generator=_random(1))
    return {"input_features": data, "labels": _text(config)["input_ids"]}


def _spectra(config: Any) -> dict[str, Tensor]:
    frames = torch.randn(
        BATCH, getattr(config, "max_length", 64), getattr(config, "num_mel_bins", 80), generator=_random(1)
    )
    return {"input_values": frames, "labels": torch.arange(BATCH) % 2}


TASKS = (
    Task("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "AutoModelForCausalLM", (_text,)),
    Task("MODEL_FOR_MASKED_LM_MAPPING_NAMES", "AutoModelForMaskedLM", (_text,)),
    Task("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "AutoModelForSeq2SeqLM", (_text,)),
    Task("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForImageClassification", (_images,)),
    Task("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "AutoModelForAudioClassification", (_sound, _spectra)),
    Task("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "AutoModelForSpeechSeq2Seq", (_features,)),
    Task("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", "AutoModelForSequenceClassification", (_classified_text,)),
)


def families() -> dict[str, Task]:
    """Model type -> the first task that lists it."""
    listed: dict[str, Task] = {}
    for task in TASKS:
        for name in getattr(modeling_auto, task.mapping):
            listed.setdefault(name, task)
    return listed


def tiny_configs(name: str) -> Iterator[Any]:
    """Configs of a family with small sizes, the plainest first: lists per layer are cut to two, or left as they are."""
    plain = transformers.AutoConfig.for_model(name)
    fields, aliases = plain.to_dict(), dict(type(plain).attribute_map)
    known = {aliases.get(field, field): size for field, size in SIZES.items() if aliases.get(field, field) in fields}
    alike = {f: s for f, s in known.items() if isinstance(fields[f], int) or f == "num_key_value_heads"}
    listed = any(isinstance(fields[f], list) for f in known)  # a width per stage: those stay as they are
    sizes = {f: s for f, s in alike.items() if not listed or s not in (WIDTH, 4)}
    few = {f: s for f, s in alike.items() if s in (2, VOCABULARY)}
    tokens = {f: v % VOCABULARY for f, v in fields.items() if f.endswith("_token_id") and isinstance(v, int)}
    layers = fields.get("layer_types") or fields.get("layers_block_type")
    short = {}
    if isinstance(layers, list) and layers:
        kinds = list(dict.fromkeys(layers))[:2]
        short = {"layer_types" if fields.get("layer_types") else "layers_block_type": (kinds * 2)[:2]}
    quiet = {
        f: 0.0
        for f, v in fields.items()
        if ("drop" in f or ("mask_" in f and f.endswith("prob"))) and isinstance(v, float)
    }
    rest = {**tokens, **quiet, "num_labels": 10}
    for settings in (
        {**sizes, **rest, **short},
        {**sizes, **rest},
        {**few, **rest, **short},
        {**few, **tokens},
        {"num_labels": 10},
    ):
        try:
            config = transformers.AutoConfig.for_model(name, **settings)
        except Exception:
            continue
        for token in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, token, None) is None:
                setattr(config, token, 0)
        yield config


def build(name: str, task: Task) -> tuple[nn.Module, dict[str, Tensor]] | str:
    """The model and a batch that eager PyTorch trains it on, or why there is none."""
    why = "no config with these sizes"
    for config in tiny_configs(name):
        for batch in task.batches:
            torch.manual_seed(0)
            try:
                with torch.device("meta"):
                    size = sum(
                        p.numel() for p in getattr(transformers, task.auto_class).from_config(config).parameters()
                    )
                if size > MOST_PARAMETERS:
                    why = f"{size / 1e6:.0f} M parameters"
                    continue
                model = getattr(transformers, task.auto_class).from_config(config).float().eval()
                data = batch(config)
                loss = model(**data).loss
                loss.backward()
                model.zero_grad()
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if loss.isfinite():
                torch.manual_seed(0)  # anew: some keep what they computed, which cannot be copied
                return getattr(transformers, task.auto_class).from_config(config).float().eval(), data
            why = "the loss is not finite"
    return why


def _loss(out: Any, _: Any) -> Tensor:
    return out.loss


def train_eagerly(model: nn.Module, data: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def compare(model: nn.Module, data: dict[str, Tensor], mesh: str, plan: str | None) -> tuple[str, str]:
    """(verdict, detail): pass, wrong, error (one of ours that says what is the matter) or crash (any other)."""
    try:
        worst = difference(model, data, mesh, plan)
        if worst <= TOLERANCE:
            return "pass", f"{worst:.1e}"
        double = {name: x.double() if x.is_floating_point() else x for name, x in data.items()}
        exact = difference(copy.deepcopy(model).double(), double, mesh, plan)
    except MeshweaveError as error:
        return "error", " ".join(str(error).split())[:160]
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return "crash", f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"[:160]
    return ("pass" if exact <= EXACT else "wrong"), f"{exact:.1e} in float64, {worst:.1e} in float32"


def difference(model: nn.Module, data: dict[str, Tensor], mesh: str, plan: str | None) -> float:
    """The worst difference from eager PyTorch of losses (relative) and parameters (of a tensor's largest magnitude)."""
    expected, wanted = train_eagerly(model, data)
    own = copy.deepcopy(model)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    step = mw.compile(own, loss=_loss, example=data, optimizer=optimizer, mesh=mesh, plan=plan)
    losses, trained = [float(step(data)) for _ in range(2)], step.parameters()
    worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected, strict=True))
    for name, want in wanted.items():
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-3)
        worst = max(worst, float((trained[name] - want).abs().max()) / scale if want.numel() else 0.0)
    return worst


def judge(name: str, task: Task, mesh: str, results: Any) -> None:
    """Put (mesh, verdict, detail) for each mesh of a family."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    try:
        built = build(name, task)
    except Exception as error:  # a default config that its own family refuses
        built = f"{type(error).__name__}: {error}"
    if isinstance(built, str):
        results.put(("", "not built", " ".join(built.split())[:160]))
        return
    model, data = built
    results.put((mesh, *compare(model, data, mesh, None)))
    if expert_parameters(model):
        results.put(("ep=2", *compare(model, data, "ep=2", "ep:ep")))


def judged(name: str, task: Task, mesh: str) -> list[tuple[str, str, str]]:
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=judge, args=(name, task, mesh, results))
    process.start()
    process.join()
    late = process.exitcode == -signal.SIGXCPU
    rows = []
    while not results.empty():
        rows.append(results.get())
    if process.exitcode:
        text = f"more than {SECONDS} s of CPU time" if late else f"the process ended with {process.exitcode}"
        rows.append((mesh, "late" if late else "crash", text))
    return rows


def table(rows: list[tuple[str, str, str, str]]) -> str:
    counts = Counter(verdict for _, _, verdict, _ in rows if verdict != "not built")
    total = sum(counts.values())
    left = len(families().keys() - {name for name, _, _, _ in rows})
    lines = [
        "# Families of transformers " + transformers.__version__,
        "",
        "`python benchmarks/families.py`: two steps of SGD beside eager PyTorch, float32, tiny, evaluation mode.",
        f"The worst error of losses and parameters stands beside a pass: at most {TOLERANCE:g}; {EXACT:g} in float64.",
        "",
        f"**{counts['pass']} of {total} pass ({counts['pass'] / max(total, 1):.1%}), {counts['error']} end in a clear "
        f"error, {counts['crash']} in another, {counts['late']} took too long, {counts['wrong']} are wrong.** "
        f"Not built tiny: {len({n for n, _, v, _ in rows if v == 'not built'})} types. Not run: {left} types.",
        "",
        "| family | mesh | verdict | detail |",
        "|---|---|---|---|",
    ]
    order = ("wrong", "crash", "error", "late", "pass", "not built")
    for name, mesh, verdict, detail in sorted(rows, key=lambda row: (order.index(row[2]), row[0], row[1])):
        lines.append(f"| {name} | {mesh} | {verdict} | {detail.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--mesh", default="dp=2,tp=2")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = []
    for name, task in families().items():
        if given.names and name not in given.names:
            continue
        for mesh, verdict, detail in judged(name, task, given.mesh):
            rows.append((name, mesh, verdict, detail))
            print(f"{name:28} {mesh:10} {verdict:9} {detail}", flush=True)
        if given.output:
            given.output.write_text(table(rows))
    return 1 if any(verdict in ("wrong", "crash", "late") for _, _, verdict, _ in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
