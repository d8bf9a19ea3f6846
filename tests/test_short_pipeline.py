"""A pipeline of many equal layers follows from a short one."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave import study
from meshweave.short_pipeline import _short_mesh

SIZES = {
    "num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 16000, "use_cache": False,
}  # fmt: skip
EXPERTS = {
    "hidden_size": 1024, "moe_intermediate_size": 1024, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64,
    "vocab_size": 4000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "schedule", "mesh", "plan", "tolerance"),
    [
        ("megatron", "1f1b", "pp=4,dp=2", "zero1:dp+stages:pp", 0.04),
        pytest.param("megatron", "interleaved", "pp=2,dp=2", "zero1:dp+stages:pp:2", 0.04, marks=pytest.mark.slow),
        # with all layers megatron's gathers wait for their stage's first microbatch, here on links between nodes
        pytest.param(
            "deepspeed", "1f1b", "dp=2,pp=3,tp=2", "zero1:dp+hf_tp:tp+stages:pp", 0.04, marks=pytest.mark.slow
        ),
        pytest.param(
            "megatron", "1f1b", "pp=5,dp=2", "zero1:dp+stages:pp:layout=E|t*4|t*4|t*4|L", 0.04, marks=pytest.mark.slow
        ),
        pytest.param(
            "megatron", "1f1b", "pp=4,dp=2,ep=2", "zero1:dp+zero1:ep+ep:ep+stages:pp", 0.01, marks=pytest.mark.slow
        ),
        pytest.param(
            "megatron",
            "interleaved",
            "dp=2,pp=2,ep=2",
            "zero1:dp+zero1:ep+experts:ep+stages:pp:2",
            0.01,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_is_nearly_that_of_all_layers(framework, schedule, mesh, plan, tolerance, monkeypatch):
    monkeypatch.setattr(study, "_WORTH_OF_PIPELINE", 1)
    kind, sizes = ("qwen3_moe", {**SIZES, **EXPERTS}) if "ep=" in mesh else ("llama", SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    ids = torch.empty(4 * 8, 2048, dtype=torch.long, device="meta")
    questions = mw.Study(model, loss=lambda output, _: output.loss, optimizer=torch.optim.AdamW(model.parameters()))
    few, whole = (
        questions.simulate(
            {"input_ids": ids, "labels": ids},
            mesh=mesh,
            plan=plan,
            profile="h100",
            framework=framework,
            accumulate=8,
            pipeline=schedule,
            precision=torch.bfloat16,
            every_layer=every_layer,
        )
        for every_layer in (False, True)
    )
    assert any("10 of 12 equal layers were built" in note for note in few.notes)
    assert any("gradients of 8 microbatches are added up" in note for note in few.notes)
    assert few.seconds == pytest.approx(whole.seconds, rel=tolerance)
    assert few.flops == pytest.approx(whole.flops, rel=1e-6)
    assert (few.tokens, few.mesh, few.num_devices, few.schedule) == (
        whole.tokens, whole.mesh, whole.num_devices, whole.schedule
    )  # fmt: skip
    for role, of_all in zip(few.roles, whole.roles, strict=True):
        assert role.devices == of_all.devices
        assert role.persistent_bytes == pytest.approx(of_all.persistent_bytes, rel=1e-6)
        is_alone = "|L" in plan and role in (few.roles[0], few.roles[-1])  # its moment is that of stages with layers
        assert is_alone or role.peak_bytes == pytest.approx(of_all.peak_bytes, rel=0.1)


def test_the_short_pipeline_is_on_devices_of_the_whole():
    """Groups keep their links; indices that the whole lacks are behind its devices."""
    outermost, between = (_short_mesh(mw.Mesh.of(text), "pp") for text in ("pp=2,dp=2", "dp=2,pp=8,tp=2"))
    assert outermost == mw.Mesh.of("pp=4,dp=2")
    assert [between.at(pp=index).devices for index in range(4)] == [
        (0, 1, 16, 17), (2, 3, 18, 19), (4, 5, 20, 21), (6, 7, 22, 23)
    ]  # fmt: skip
    few = _short_mesh(mw.Mesh.of("dp=2,pp=2"), "pp")
    assert [few.at(pp=index).devices for index in range(4)] == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_another_batch_of_the_same_shape_is_the_same_question(monkeypatch):
    monkeypatch.setattr(study, "_WORTH_OF_PIPELINE", 1)
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=12, hidden_size=64, intermediate_size=128, num_attention_heads=4, use_cache=False
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    stages: list[str] = []
    optimizer = torch.optim.SGD(model.parameters())
    questions = mw.Study(model, loss=lambda output, _: output.loss, optimizer=optimizer, progress=stages.append)
    results = []
    for _ in range(2):
        ids = torch.empty(8, 16, dtype=torch.long, device="meta")
        results.append(
            questions.simulate(
                {"input_ids": ids, "labels": ids},
                mesh="pp=4",
                profile="h100",
                framework="megatron",
                accumulate=8,
                pipeline="1f1b",
            )
        )
    assert results[0].seconds == results[1].seconds
    assert "stages follow schedule 1f1b" in results[0].notes
    assert stages.count("capture") == 1


def test_gathers_beside_the_stages_are_exposed_only_where_a_rank_waits_for_them(monkeypatch):
    monkeypatch.setattr(study, "_WORTH_OF_PIPELINE", 1)
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=12, hidden_size=1024, intermediate_size=2816, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=4000, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.empty(2 * 32, 1024, dtype=torch.long, device="meta")
    questions = mw.Study(model, loss=lambda output, _: output.loss, optimizer=torch.optim.AdamW(model.parameters()))
    result = questions.simulate(
        {"input_ids": ids, "labels": ids},
        mesh="pp=4,dp=2",
        plan="zero1:dp+stages:pp",
        profile="h100",
        framework="megatron",
        accumulate=32,
        pipeline="1f1b",
        precision=torch.bfloat16,
    )
    for role in result.roles:
        assert role.compute_seconds + role.exposed_seconds + role.idle_seconds == pytest.approx(result.seconds)
    first, *between, last = (role.exposed_seconds for role in result.roles)
    assert 0 < max(between) < min(first, last)  # embedding first, head last: nothing hides their gather and reduction
