"""The tests themselves: each hand-made mistake in a kernel must make one of that kernel's tests fail."""

import functools
import types

import pytest
import torch

from tests.triton import test_attention, test_gemm, test_heads, test_lora, test_moe, test_rope, test_rows, test_sampler
from tests.triton.mutants import MUTANTS, PACKAGE, Mutant, load

F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8
bound = functools.partial

QUANTIZED = [
    bound(test_rows.test_rotation_is_orthogonal_and_hadamard, 32),
    bound(test_rows.test_rotation_keeps_float32s_precision, 64),
    bound(test_rows.test_rotation_keeps_float32s_precision, 512),
    test_rows.test_quantisation_rounds_half_to_even_and_reaches_127,
    bound(test_rows.test_zero_tiny_and_broken_rows, 0),
    test_rows.test_rows_are_gathered_and_smoothed_by_their_groups,
    test_rows.test_rms_norm_quantize,
]
KILLERS = {
    "quantize": QUANTIZED,
    "rms_norm": [
        bound(test_rows.test_rms_norm_is_torchs, F32, 576),
        bound(test_rows.test_rms_norm_adds_to_the_residual_and_norms_what_was_stored, BF16),
        test_rows.test_rms_norm_reads_rows_of_a_wider_matrix,
        test_rows.test_rms_norm_of_tiny_numbers_is_held_down_by_epsilon,
    ],
    "act_and_mul": [
        bound(test_rows.test_act_and_mul, F32, "silu", 4112),
        bound(test_rows.test_act_and_mul, F32, "gelu_tanh", 176),
        bound(test_rows.test_act_and_mul_quantize_sees_the_whole_of_a_long_row, 0),
    ],
    "kv_write": [
        bound(test_rope.test_padding_writes_nothing_and_others_keep_their_neighbours, True),
        bound(test_rope.test_kv_write_writes_what_it_is_given, True, F32),
        bound(test_rope.test_kv_write_writes_what_it_is_given, False, BF16),
    ],
    "rope_and_kv_write": [
        bound(test_rope.test_padding_writes_nothing_and_others_keep_their_neighbours, False),
        test_rope.test_rope_and_kv_write,
    ],
    "paged_attention": [
        bound(test_attention.test_contexts_around_the_edges_of_pages_and_splits, 65),
        bound(test_attention.test_a_window_is_exact_to_the_token, 16),
        bound(test_attention.test_sinks_however_strong, 1.5),
        test_attention.test_caps_pages_and_scales_at_once,
    ],
    "merge_states": [
        bound(test_attention.test_sinks_however_strong, 1.5),
        test_attention.test_merge_states,
        test_attention.test_padding_items_do_nothing,
    ],
    "attention_plan": [
        bound(test_attention.test_contexts_around_the_edges_of_pages_and_splits, 65),
        bound(test_attention.test_a_window_is_exact_to_the_token, 16),
        test_attention.test_several_groups_chunks_and_loners_in_one_launch,
    ],
    "gemm": [
        test_gemm.test_shares_of_three_tiles_by_hand,
        test_gemm.test_int8_results_round_to_even_and_have_no_nan,
        test_gemm.test_a_row_of_zeros_is_the_bias_and_a_broken_row_is_nan,
        test_gemm.test_w8a8,
        test_gemm.test_a_sum_at_the_end_of_int32_is_exact,
    ],
    "grouped_gemm": [
        bound(test_moe.test_combine_experts, F32, 3, 2064),
        test_moe.test_experts_without_rows_and_one_with_all_but_one,
        test_moe.test_grouped_gemm,
    ],
    "routing": [
        bound(test_moe.test_routing_is_what_sorting_by_hand_gives, "sigmoid", True),
        test_moe.test_equal_scores_go_to_the_lowest_experts,
    ],
    "int4_gemm": [test_gemm.test_int4],
    "embedding": [
        bound(test_heads.test_embedding_gathers_and_scales, F32, 16),
        test_heads.test_ranks_with_a_part_of_the_vocabulary_add_up,
    ],
    "lora": [
        test_lora.test_adapters_of_several_ranks_tiles_and_shares_of_the_depth,
        bound(test_lora.check, [0, None, 1], (16, 48), 144, 40, I8, F32, 5),
    ],
    "lm_head": [
        test_heads.test_the_lowest_of_equal_tokens_wins_even_across_tiles,
        bound(test_heads.test_a_broken_row_has_no_token_and_its_neighbours_do, float("nan")),
        test_heads.test_the_largest_among_equals_nan_and_nothing,
        bound(test_heads.test_lm_head_reduce, torch.int8, torch.int8),
        test_heads.test_lm_head_argmax,
    ],
    "sampler": [
        bound(test_sampler.test_greedy_takes_the_first_of_the_best_and_its_log_probability, F32, None),
        bound(test_sampler.test_a_broken_row_has_no_token_and_its_neighbours_do, float("inf"), 1.0),
        bound(test_sampler.test_the_draw_is_the_cpu_samplers_and_what_is_computed_by_hand, 2.0, None),
        bound(test_sampler.test_ties_with_the_last_one_kept_are_kept, None),
    ],
    "logprobs": [
        bound(test_sampler.test_the_largest_logprobs_among_equals_across_stretches, None),
        test_sampler.test_token_logprobs,
    ],
    "logit_changes": [bound(test_sampler.test_changes_by_hand, None), test_sampler.test_change_logits],
}


def survives(mutant: Mutant, folder, monkeypatch) -> bool:
    """Whether every test passes with the mutated modules in the place of the real ones."""
    loaded = load(mutant, folder)
    names = {f"{PACKAGE}.{name}": module for name, module in loaded.items()}
    for tests in (test_attention, test_gemm, test_heads, test_lora, test_moe, test_rope, test_rows, test_sampler):
        for name, value in list(vars(tests).items()):
            if isinstance(value, types.ModuleType) and value.__name__ in names:
                monkeypatch.setattr(tests, name, names[value.__name__])
            elif isinstance(value, (type, types.FunctionType)) and value.__module__ in names:
                monkeypatch.setattr(tests, name, getattr(names[value.__module__], name))
    for name in {"sampler", "logprobs", "logit_changes"} & loaded.keys():  # several stretches a row
        monkeypatch.setattr(loaded[name], "BLOCK", 32)
    for killer in KILLERS[mutant.module]:
        try:
            killer()
        except Exception:  # noqa: BLE001 -- a wrong result, a refusal of the interpreter: all of them notice
            return False
    return True


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_is_noticed(mutant, tmp_path, monkeypatch):
    assert not survives(mutant, tmp_path, monkeypatch), f"no test notices: {mutant}"


@pytest.mark.parametrize("module", KILLERS)
def test_without_a_mistake_the_same_tests_pass(module, tmp_path, monkeypatch):
    """Else a mutant would be killed by how it is loaded."""
    assert survives(Mutant(module, "none", "from __future__ import annotations", "from __future__ import annotations"),
                    tmp_path, monkeypatch)  # fmt: skip
