"""A pipeline of many equal layers follows from a short one."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave import study


@pytest.mark.parametrize(
    ("schedule", "mesh", "plan"),
    [("1f1b", "pp=4,dp=2", "zero1:dp+stages:pp"), ("interleaved", "pp=2,dp=2", "zero1:dp+stages:pp:2")],
)
def test_a_step_is_nearly_that_of_all_layers(schedule, mesh, plan, monkeypatch):
    monkeypatch.setattr(study, "_WORTH_OF_PIPELINE", 1)
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=12, hidden_size=2048, intermediate_size=5504, num_attention_heads=16,
        num_key_value_heads=16, vocab_size=16000, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.empty(2 * 8, 2048, dtype=torch.long, device="meta")
    questions = mw.Study(model, loss=lambda output, _: output.loss, optimizer=torch.optim.AdamW(model.parameters()))
    few, whole = (
        questions.simulate(
            {"input_ids": ids, "labels": ids},
            mesh=mesh,
            plan=plan,
            profile="h100",
            framework="megatron",
            accumulate=8,
            pipeline=schedule,
            precision=torch.bfloat16,
            every_layer=every_layer,
        )
        for every_layer in (False, True)
    )
    assert any("10 of 12 equal layers were built" in note for note in few.notes)
    assert few.seconds == pytest.approx(whole.seconds, rel=0.04)
    assert few.flops == pytest.approx(whole.flops, rel=1e-6)
    assert (few.tokens, few.mesh, few.num_devices, few.schedule) == (
        whole.tokens, whole.mesh, whole.num_devices, whole.schedule
    )  # fmt: skip
    for role, of_all in zip(few.roles, whole.roles, strict=True):
        assert role.devices == of_all.devices
        assert role.peak_bytes == pytest.approx(of_all.peak_bytes, rel=0.1)
        assert role.persistent_bytes == pytest.approx(of_all.persistent_bytes, rel=1e-6)


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
