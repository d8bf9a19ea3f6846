"""Tests that only `make test-all` runs although their file is quick: what each of them would find, others of the quick
tests find too. By reason; a name is a node id without `tests/` in front."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

LONG_TAIL: Mapping[str, tuple[str, ...]] = {
    "optimizers that go element by element: test_optimizers.py compares their ops, Adam, SGD and Lion run": (
        *(
            f"test_compile_optimizers.py::test_five_steps_equal_eager[{case}-1e-12]"
            for case in (
                "ASGD-fsdp=2,tp=2-dtype66",
                "Adadelta-fsdp=2,tp=2-dtype30",
                "Adagrad-fsdp=2,tp=2-dtype24",
                "NAdam-fsdp=2,tp=2-dtype42",
                "RAdam-fsdp=2,tp=2-dtype48",
                "RMSprop-fsdp=2,tp=2-dtype54",
                "Rprop-fsdp=2,tp=2-dtype60",
            )
        ),
        "test_compile_optimizers.py::test_a_switch_of_an_option_is_captured_anew[weight decay off]",
        "test_compile_optimizers.py::test_every_schedule_of_torch_made_after_compile[make_optimizer1]",
    ),
    "the same on a mesh runs in the quick tests": (
        *(
            f"runtime/test_bindings.py::test_a_script_sees_and_changes_the_weights_as_in_eager_pytorch[{habit}-]"
            for habit in (
                "average",
                "evaluate_the_average",
                "nothing",
                "keep_the_average",
                "write_in_place",
                "assign_data",
            )
        ),
        "test_variants.py::test_buckets_of_lengths_share_one_state[]",
        "test_variants.py::test_microbatches_are_an_argument_of_a_call[]",
        "test_variants.py::test_modes_of_modules_are_as_they_are_at_the_call[eval_mode-]",
        "test_variants.py::test_a_loop_with_a_short_last_batch_and_evaluation_is_eager_pytorchs[]",
        "runtime/test_phases.py::test_the_parts_are_the_whole_to_the_bit[-1]",
        "runtime/test_phases.py::test_the_parts_are_the_whole_to_the_bit[dp=2-1]",
        "runtime/test_phases.py::test_the_parts_are_the_whole_to_the_bit[dp=2-3]",
        "runtime/test_phases.py::test_the_parts_are_the_whole_to_the_bit[fsdp=2,tp=2-1]",
        "runtime/test_phases.py::test_the_parts_are_the_whole_to_the_bit[pp=2,dp=2-1]",
        "runtime/test_optimizer_state.py::test_a_checkpoint_of_either_is_resumed_by_the_other[adamw-]",
        "runtime/test_optimizer_state.py::test_a_checkpoint_of_either_is_resumed_by_the_other[sgd-fsdp=2,tp=2]",
        "runtime/test_optimizer_state.py::test_two_steps_of_one_optimizer_share_its_state[]",
    ),
    "another mesh or place of the same sums, of which the quick tests have one each": (
        "runtime/test_accumulation.py::test_it_equals_eager_pytorch[-whole-2]",
        "runtime/test_accumulation.py::test_it_equals_eager_pytorch[dp=2,fsdp=2-shards-2]",
        "runtime/test_accumulation.py::test_it_equals_eager_pytorch[dp=2-auto-2]",
        "runtime/test_accumulation.py::test_it_equals_eager_pytorch[fsdp=2-shards-2]",
        "runtime/test_accumulation.py::test_it_equals_eager_pytorch[fsdp=2-whole-2]",
        "runtime/test_accumulation.py::test_it_equals_eager_pytorch[pp=2,dp=2-whole-2]",
        "runtime/test_accumulation.py::test_gradients_are_reduced_once_whatever_the_number_of_microbatches[dp=2]",
        "runtime/test_accumulation.py::test_gradients_are_reduced_once_whatever_the_number_of_microbatches[fsdp=2]",
        "runtime/test_accumulation.py::test_a_tied_weight_is_counted_once_for_each_use[dp=2]",
    ),
    "a device that fails in another part of the step": (
        *(
            f"runtime/test_pipeline.py::test_a_device_that_fails_in_a_step_leaves_the_state_of_the_last_one[{case}]"
            for case in ("0-backward", "3-backward", "3-loss")
        ),
    ),
    "a second mesh of a property that one shows": (
        "runtime/test_pipeline.py::test_stages_alone_and_with_other_axes[pp=2,tp=2-adamw]",
        "runtime/test_session.py::test_a_hundred_steps_hold_no_more_than_five[options0]",
        "runtime/test_session.py::test_a_value_is_let_go_after_its_last_use[tp=2-1]",
        "runtime/test_session.py::test_fsdp_holds_its_share_and_at_most_two_gathered_layers[fsdp=4]",
        "sharding/test_place.py::test_schemes_add_up[dp=2,tp=2]",
        "sharding/test_place.py::test_schemes_add_up[fsdp=2,tp=2]",
        "sharding/test_random_pieces.py::test_each_device_draws_its_own_piece_of_every_mask[dp=4]",
        "sharding/test_search.py::test_no_other_choice_of_styles_is_cheaper[512-widths3]",
        "schedule/test_step.py::test_the_cap_holds_when_the_step_runs[0]",
        "report/test_tables.py::test_a_plan_loses_no_character_on_a_narrow_terminal[200]",
        "report/test_tables.py::test_a_plan_loses_no_character_on_a_narrow_terminal[120]",
    ),
    "orders of whole steps to the bit: test_carry.py runs the same with parameters carried over": (
        "test_compile_overlap.py::test_values_are_the_same_to_the_bit[dp]",
        "test_compile_overlap.py::test_values_are_the_same_to_the_bit[fsdp x tp, cast]",
    ),
    "a second sample of random graphs": (
        "buckets/test_overlap_aliases.py::test_a_sample_of_graphs_that_see_storages[1]",
        "schedule/test_overlap_fuzz.py::test_a_sample_of_random_graphs[1]",
        "problem/test_overlap_costs.py::test_more_memory_is_never_slower[5]",
    ),
    "a second model of the same ops": (
        "capture/test_recompute.py::test_the_bits_are_those_without_recomputation[gpt2-]",
        "simulate/test_against_runtime.py::"
        "test_every_value_has_the_shape_strides_and_storage_that_it_really_has[mlp alone]",
        "simulate/test_against_runtime.py::test_every_value_has_the_shape_strides_and_storage_that_it_really_has[vit]",
        "test_examples.py::test_a_script_trains_as_its_original[llama-dp=2]",
        "test_examples.py::test_a_script_trains_as_its_original[vit-dp=2]",
        "test_compile.py::test_one_layer_of_other_models_equals_eager[qwen2-tp=4]",
        "test_compile.py::test_other_optimizers[adam]",
    ),
    "the command line's doors to what is tested by itself": (
        "capture/test_recompute.py::test_the_command_line_takes_it",
        "capture/test_param_dtype.py::test_the_command_line_takes_it",
        "test_cli.py::test_ctrl_c_saves_the_last_completed_step",
        "test_cli.py::test_a_plan_file["
        r'plan.toml-plan = "dp:dp"\n"up.weight" = "[{tp}, {}]"\n"down" = "rowwise:tp"\n]',
    ),
    "a sequence cut over devices: the quick tests have each way to do attention, and one beside tensor parallelism": (
        "sharding/test_balance.py::test_gradients_are_exact[cp=2,tp=2-gather]",
        "sharding/test_balance.py::test_gradients_are_exact[cp=2,tp=2-heads]",
        "sharding/test_balance.py::test_gradients_are_exact[cp=4-gather]",
        "sharding/test_balance.py::test_gradients_are_exact[cp=4-heads]",
        "sharding/test_balance.py::test_gradients_are_exact[dp=2,cp=2-gather]",
        "sharding/test_balance.py::test_gradients_are_exact[dp=2,cp=2-heads]",
        "sharding/test_balance.py::test_gradients_are_exact[dp=2,cp=2-ring]",
        "sharding/test_balance.py::test_gradients_are_exact[fsdp=2,cp=2-gather]",
        "sharding/test_balance.py::test_gradients_are_exact[fsdp=2,cp=2-heads]",
        "sharding/test_balance.py::test_gradients_are_exact[fsdp=2,cp=2-ring]",
        "sharding/test_balance.py::test_llama_has_it_by_default[cp=2,tp=2-gather]",
        "sharding/test_balance.py::test_llama_has_it_by_default[cp=2-ring]",
        "sharding/test_balance.py::test_llama_has_it_by_default[cp=4-gather]",
        "sharding/test_balance.py::test_llama_has_it_by_default[cp=4-ring]",
        "sharding/test_balance.py::test_llama_has_it_by_default[fsdp=2,cp=2-gather]",
        "sharding/test_balance.py::test_llama_has_it_by_default[fsdp=2,cp=2-ring]",
        "sharding/test_balance.py::test_masks_go_by_positions[bool-gather]",
        "sharding/test_balance.py::test_masks_go_by_positions[documents-gather]",
        "sharding/test_balance.py::test_masks_go_by_positions[float-gather]",
        "sharding/test_balance.py::test_masks_go_by_positions[float-ring]",
        "sharding/test_balance.py::test_masks_go_by_positions[none-gather]",
        "sharding/test_sequences.py::test_gradients_are_exact[cp=2,tp=2-heads]",
        "sharding/test_sequences.py::test_gradients_are_exact[cp=2-gather]",
        "sharding/test_sequences.py::test_gradients_are_exact[dp=2,cp=2-gather]",
        "sharding/test_sequences.py::test_gradients_are_exact[dp=2,cp=2-heads]",
        "sharding/test_sequences.py::test_gradients_are_exact[fsdp=2,cp=2-gather]",
        "sharding/test_sequences.py::test_gradients_are_exact[fsdp=2,cp=2-heads]",
        "sharding/test_sequences.py::test_models_of_hugging_face[gpt2-cp=2,tp=2]",
        "sharding/test_sequences.py::test_models_of_hugging_face[llama-cp=2]",
        "sharding/test_sequences.py::test_models_of_hugging_face[llama-cp=4]",
        "sharding/test_sequences.py::test_models_of_hugging_face[llama-dp=2,cp=2]",
        "sharding/test_sequences.py::test_models_of_hugging_face[llama-fsdp=2,cp=2]",
        "sharding/test_sequences.py::test_models_of_hugging_face[qwen2-cp=2]",
        "fuzz/test_sequences.py::test_gradients_are_exact[3]",
        "fuzz/test_sequences.py::test_gradients_are_exact[4]",
        "fuzz/test_sequences.py::test_gradients_are_exact[5]",
    ),
    "more of a kind in jobs of several processes: each kind has one that is quick": (
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[compile first]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[eval, compiled]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[forward]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[layer]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[models]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[parameters]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[size]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[skip]",
        "runtime/test_calls.py::test_calls_that_ranks_do_not_share_are_named_on_every_rank[twice]",
        "runtime/test_bindings_cluster.py::test_scripts_for_fsdp2_see_and_change_the_weights[dp=2-2]",
        "runtime/test_bindings_cluster.py::test_scripts_for_fsdp2_see_and_change_the_weights[fsdp=2,tp=2-4]",
        "runtime/test_cluster.py::test_steps_over_several_axes_give_what_virtual_devices_give[4]",
        "runtime/test_cluster.py::test_a_rank_that_raises_is_named_on_every_rank[0]",
        "runtime/test_saves.py::test_a_script_of_two_processes_that_ends_finishes_it",
        "runtime/test_weight_files.py::test_a_process_has_its_pieces_alone_in_memory",
        "test_cli.py::test_ctrl_c_under_torchrun_saves_on_all_ranks_after_the_same_step",
        "calibrate/test_automatic.py::test_a_job_measures_once_and_again_where_what_is_kept_is_not_to_be_used",
        "test_variants_cluster.py::test_short_batches_and_evaluation_share_one_state[fsdp=2-all]",
        "test_default_passes.py::test_several_processes_take_what_is_simulated_faster[tp=2]",
        "torch_compile/test_gloo_rings.py::test_steps_with_rings_are_those_of_eager",
    ),
    "optimizers in float32: in float64 they are equal to 1e-12": (
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-ASGD]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-Adadelta]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-Adafactor]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-Adagrad]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-AdamW]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-Adamax]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-Lion]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-Muon]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-NAdam]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-RAdam]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-RMSprop]",
        "capture/test_optimizers.py::test_update_equals_torch[torch.float32-2e-06-Rprop]",
        "test_compile_optimizers.py::test_five_steps_equal_eager[Adafactor-fsdp=2,tp=2-dtype18-1e-12]",
        "test_compile_optimizers.py::test_five_steps_equal_eager[Adamax-fsdp=2,tp=2-dtype36-1e-12]",
    ),
    "orders and gathers of whole steps: their parts are tested by themselves": (
        "test_compile_overlap.py::test_values_are_the_same_to_the_bit[buffers]",
        "test_compile_overlap.py::test_values_are_the_same_to_the_bit[fsdp, clipped, on a CPU cluster]",
        "test_compile_overlap.py::test_values_are_the_same_to_the_bit[pp x fsdp]",
        "test_compile_overlap.py::test_run_and_check",
        "passes/test_pipeline.py::test_what_does_not_gain_is_left",
        "passes/test_pipeline.py::test_training_is_the_same[accumulated]",
        "gathers/test_carry.py::test_a_step_is_faster_with_it[1]",
        "gathers/test_carry.py::test_what_the_first_blocks_need_is_gathered_in_the_update",
        "gathers/test_carry.py::test_equal_inputs_give_equal_graphs",
        "gathers/test_carry.py::test_values_are_the_same_to_the_bit[fsdp x tp, cast]",
        "schedule/test_step.py::test_equal_inputs_give_equal_orders",
        "schedule/test_step.py::test_the_cap_holds_when_the_step_runs[2]",
        "runtime/test_accumulation.py::test_the_choice_follows_memory_and_says_so",
    ),
    "another mesh, dtype or family of what the quick tests have": (
        "expand/test_steps.py::test_every_step[all_gather-2x2x2-torch.bool-a fifth]",
        "expand/test_steps.py::test_every_step[all_gather-2x2x2-torch.int64-a fifth]",
        "expand/test_steps.py::test_every_step[all_reduce-2x2x2-torch.bool-a fifth]",
        "expand/test_steps.py::test_every_step[all_reduce-2x2x2-torch.int64-a fifth]",
        "expand/test_steps.py::test_every_step[all_to_all-2x2x2-torch.bool-a fifth]",
        "expand/test_steps.py::test_every_step[all_to_all-2x2x2-torch.int64-a fifth]",
        "expand/test_steps.py::test_every_step[permute-2x2x2-torch.bool-a fifth]",
        "expand/test_steps.py::test_every_step[permute-2x2x2-torch.int64-a fifth]",
        "expand/test_steps.py::test_every_step[reduce_scatter-2x2x2-torch.bool-a fifth]",
        "expand/test_steps.py::test_every_step[reduce_scatter-2x2x2-torch.int64-a fifth]",
        "expand/test_steps.py::test_every_step[slice-2x2x2-torch.bool-a fifth]",
        "expand/test_steps.py::test_every_step[slice-2x2x2-torch.int64-a fifth]",
        "expand/test_steps.py::test_every_step[to_partial-2x2x2-torch.bool-a fifth]",
        "expand/test_steps.py::test_every_step[to_partial-2x2x2-torch.int64-a fifth]",
        "runtime/test_weight_files.py::test_a_model_on_the_meta_device_begins_with_them[dp=2-False]",
        "runtime/test_weight_files.py::test_a_model_on_the_meta_device_begins_with_them[dp=2-True]",
        "runtime/test_weight_files.py::test_a_model_on_the_meta_device_begins_with_them[fsdp=2,tp=2-False]",
        "test_freezing.py::test_a_run_with_frozen_parameters_resumes_as_it_would_have_gone_on[1-False]",
        "test_freezing.py::test_a_run_with_frozen_parameters_resumes_as_it_would_have_gone_on[3-False]",
        "test_freezing.py::test_a_run_with_frozen_parameters_resumes_as_it_would_have_gone_on[3-True]",
        "test_freezing.py::test_a_run_with_frozen_parameters_resumes_as_it_would_have_gone_on[5-False]",
        "test_freezing.py::test_a_run_with_frozen_parameters_resumes_as_it_would_have_gone_on[5-True]",
        "test_freezing.py::test_a_run_with_frozen_parameters_resumes_as_it_would_have_gone_on[7-True]",
        "test_experts.py::test_a_family_trains_as_in_eager_pytorch[mixtral-dp=2]",
        "test_experts.py::test_experts_without_tokens_and_with_all_of_them[last]",
        "test_experts.py::test_every_consumer_sees_every_contribution[gpt_oss-ep=2]",
        "test_experts.py::test_gradients_and_updates_equal_one_device_and_eager_pytorch[qwen3_moe-dp=2,ep=2]",
        "test_examples.py::test_a_script_trains_as_its_original[resnet-dp=2]",
        "test_cli.py::test_check_of_layers_on_different_devices_proves_and_compares[pp=2,dp=2-adamw-2]",
        "test_several_optimizers.py::test_muon_and_adamw_train_as_in_eager_torch[dp=2]",
        "test_several_optimizers.py::test_muon_and_adamw_train_as_in_eager_torch[fsdp=2]",
        "check/test_completeness.py::test_every_rule_runs_as_its_local_call_must_be[4]",
        "check/test_completeness.py::test_every_rule_runs_as_its_local_call_must_be[5]",
        "check/test_completeness.py::test_every_rule_runs_as_its_local_call_must_be[6]",
        "check/test_completeness.py::test_every_rule_runs_as_its_local_call_must_be[7]",
    ),
}


def mark_long_tail(items: Iterable[pytest.Item], is_all: bool) -> None:
    """Mark them slow. Raises UsageError for a name that there is not, where all tests have been collected."""
    by_name = {item.nodeid.removeprefix("tests/"): item for item in items}
    for names in LONG_TAIL.values():
        for name in names:
            if name in by_name:
                by_name[name].add_marker(pytest.mark.slow)
            elif is_all:
                raise pytest.UsageError(f"tests/long_tail.py names a test that there is not: {name}")
