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
