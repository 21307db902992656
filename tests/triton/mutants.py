"""Hand-made mistakes, one a line of the kernels, that the tests must notice."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

PACKAGE = "batchinfer_kernels"
DEPENDENTS = {
    "quantize": ("rms_norm", "act_and_mul", "kv_write", "rope_and_kv_write"),
    "kv_write": ("rope_and_kv_write",),
    "gemm": ("int8_gemm", "fp8_gemm", "grouped_gemm", "lora", "lm_head"),
    "grouped_gemm": ("moe", "lora"),
    "sampler": ("logprobs",),
    "merge_states": ("paged_attention",),
    "attention_plan": ("paged_attention",),
}
"""Modules that import from a module, and so must be loaded again with it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old`` in a module's source becomes ``new``."""

    module: str
    mistake: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.module}: {self.mistake}"


def load(mutant: Mutant, folder: Path) -> dict[str, ModuleType]:
    """The mutated module and, loaded against it, those that use it; the real ones stay where they are."""
    real = {name: sys.modules[f"{PACKAGE}.{name}"] for name in (mutant.module, *DEPENDENTS.get(mutant.module, ()))}
    loaded: dict[str, ModuleType] = {}
    try:
        for name, module in real.items():
            source = _source(module)
            if name == mutant.module:
                assert source.count(mutant.old) == 1, f"{mutant}: its text occurs {source.count(mutant.old)} times"
                source = source.replace(mutant.old, mutant.new)
            path = folder / f"{name}.py"
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", path)
            loaded[name] = sys.modules[f"{PACKAGE}.{name}"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[name])
    finally:
        for name, module in real.items():
            sys.modules[f"{PACKAGE}.{name}"] = module
    return loaded


def _source(module: ModuleType) -> str:
    with open(module.__file__) as file:  # noqa: PTH123 -- a module's file is text
        return file.read()


MUTANTS = [
    Mutant("quantize", "rounds towards zero", "* inverse + 12582912.0) - 12582912.0", "* inverse)"),
    Mutant("quantize", "divides by 128", "tl.div_rn(peak, 127.0)", "tl.div_rn(peak, 128.0)"),
    Mutant("quantize", "signed peak", "    magnitude = tl.abs(x)\n", "    magnitude = x\n"),
    Mutant("quantize", "ignores NaN", '    return tl.where(peak < float("inf"), scale, float("nan"))', "    return scale"),
    Mutant("quantize", "divides by zero", "is_plain = (peak >= 1e-30) & ", "is_plain = "),
    Mutant("quantize", "forgets the smoothing", "        x *= tl.load(smoothing_ptr", "        _ = tl.load(smoothing_ptr"),
    Mutant("quantize", "forgets a fold of the parity", "    parity = parity ^ (parity >> 4)\n", ""),
    Mutant("quantize", "one bfloat16 part", "    y = tl.dot(middle, across, acc=y)\n", ""),
    Mutant("quantize", "two parts of the second product", "        y = tl.dot(down, low)\n", "        y = tl.dot(down, low) * 0.0\n"),
    Mutant("quantize", "blocks mixed with their neighbours", "r[:, None] // DEPTH == r[None, :] // DEPTH",
           "r[:, None] // DEPTH >= r[None, :] // DEPTH"),
    Mutant("quantize", "rows of a block not rotated", "    if ROTATION > COLUMNS:\n", "    if ROTATION > 9 * COLUMNS:\n"),
    Mutant("quantize", "the first group's factors", "tl.load(group_ptr + row).to(tl.int64) * n", "tl.load(group_ptr + row).to(tl.int64) * 0"),
    Mutant("quantize", "rows not gathered", "x_ptr + source.to(tl.int64) * x_stride", "x_ptr + row.to(tl.int64) * x_stride"),
    Mutant("quantize", "rotation not scaled", "    return y * (1.0 / tl.sqrt(ROTATION * 1.0))", "    return y"),
    Mutant("quantize", "unmasked tail", "        tl.store(target, quantized(x, peak), mask=inside)",
           "        tl.store(target, quantized(x, peak))"),
    Mutant("rms_norm", "mean over the padded row", "tile_sum(x * x) / n", "tile_sum(x * x) / (ROWS * COLUMNS)"),
    Mutant("rms_norm", "forgets epsilon", " / n + eps)", " / n)"),
    Mutant("rms_norm", "forgets Gemma's one", ".to(tl.float32) + weight_offset", ".to(tl.float32)"),
    Mutant("rms_norm", "norms what was not stored", "        x = kept.to(tl.float32)", "        x += 0.0"),
    Mutant("rms_norm", "does not keep the residual", "        tl.store(residual_at, kept, mask=inside)", "        pass"),
    Mutant("rms_norm", "reads rows without their stride", "x_ptr + row.to(tl.int64) * x_stride", "x_ptr + row.to(tl.int64) * n"),
    Mutant("rms_norm", "unmasked tail", "tl.load(weight_ptr + at, mask=inside, other=0.0)", "tl.load(weight_ptr + at)"),
    Mutant("act_and_mul", "the gate twice", "tl.load(row_ptr + n + at", "tl.load(row_ptr + at"),
    Mutant("act_and_mul", "the wrong activation", " if IS_GELU else -gate", " if not IS_GELU else -gate"),
    Mutant("act_and_mul", "gelu without the cube", "0.044715 * gate * gate * gate", "0.044715 * gate * gate"),
    Mutant("act_and_mul", "peak of the last chunk", "peak = tl.maximum(peak, peak_of(smooth", "peak = peak_of((smooth"),
    Mutant("act_and_mul", "one chunk only", "    at = tl.program_id(1) * (ROWS * COLUMNS) + ", "    at = "),
    Mutant("rope_and_kv_write", "turns backwards", "a * cos - b * sin, b * cos + a * sin, rest",
           "a * cos + b * sin, b * cos - a * sin, rest"),
    Mutant("rope_and_kv_write", "norms only the rotated part", " + tl.sum(rest * rest, axis=1)", ""),
    Mutant("rope_and_kv_write", "position off by one", "    cos_ptr += position * HALF", "    cos_ptr += (position + 1) * HALF"),
    Mutant("kv_write", "block and offset confused", "slot // BLOCK_SIZE, slot % BLOCK_SIZE",
           "slot % BLOCK_SIZE, slot // BLOCK_SIZE"),
    Mutant("kv_write", "padding is written", "(head < NUM_KV_HEADS) & (slot >= 0)", "(head < NUM_KV_HEADS) & (slot >= -1)"),
    Mutant("rope_and_kv_write", "drops what is not rotated", "tl.store(head_ptr + rest_at, rest.to(kind), mask=is_head & (rest_at < HEAD_DIM))",
           "pass"),
    Mutant("rope_and_kv_write", "scale of half a head", "tl.max(tl.where(tl.abs(b) < limit, tl.abs(b), limit), axis=1))", "0.0)"),
    Mutant("kv_write", "scales of heads mixed up", "(block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset",
           "(block * NUM_KV_HEADS + NUM_KV_HEADS - 1 - head) * BLOCK_SIZE + offset"),
    Mutant("rope_and_kv_write", "keys normed as queries", "rope.q_norm, rope.k_norm,", "rope.q_norm, rope.q_norm,"),
    Mutant("paged_attention", "sees the next token", "n[None, :] <= position[:, None]", "n[None, :] <= position[:, None] + 1"),
    Mutant("paged_attention", "does not see itself", "n[None, :] <= position[:, None]", "n[None, :] < position[:, None]"),
    Mutant("paged_attention", "window off by one", "n[None, :] > position[:, None] - WINDOW", "n[None, :] >= position[:, None] - WINDOW"),
    Mutant("paged_attention", "wrong GQA map", "head = kv_head * GROUP + row % GROUP", "head = row % GROUP * NUM_KV_HEADS + kv_head"),
    Mutant("paged_attention", "wrong query of a row", "    query = row // GROUP\n", "    query = row % num_queries\n"),
    Mutant("paged_attention", "reads stale values", "live = (n[:, None] < kv_end) & (d[None, :] < HEAD_DIM)",
           "live = (n[:, None] < kv_end + BLOCK_N) & (d[None, :] < HEAD_DIM)"),
    Mutant("paged_attention", "forgets to shrink the sum", "total = total * kept + tl.sum", "total = total + tl.sum"),
    Mutant("paged_attention", "forgets to shrink the result", "acc=acc * kept[:, None], input", "acc=acc, input"),
    Mutant("paged_attention", "NaN where nothing is seen", 'safe = tl.where(higher == float("-inf"), 0.0, higher)', "safe = higher"),
    Mutant("paged_attention", "key scale forgotten", "            scores *= tl.load(key_scale_ptr", "            _ = tl.load(key_scale_ptr"),
    Mutant("paged_attention", "value scale forgotten", "            weights *= tl.load(value_scale_ptr", "            _ = tl.load(value_scale_ptr"),
    Mutant("paged_attention", "cap forgotten", "    if SOFTCAP > 0.0:", "    if SOFTCAP < 0.0:"),
    Mutant("paged_attention", "first block of the table only", "table_ptr + start // BLOCK_SIZE", "table_ptr + start // (BLOCK_SIZE * 64)"),
    Mutant("paged_attention", "always the block's first keys", "offset = start % BLOCK_SIZE + ", "offset = start % BLOCK_N + "),
    Mutant("paged_attention", "sink in the wrong base", "mask=is_row, other=0.0) * 1.4426950408889634", "mask=is_row, other=0.0)"),
    Mutant("paged_attention", "base two in the states", "total, 1.0))) * 0.6931471805599453", "total, 1.0)))"),
    Mutant("paged_attention", "partial results go to the output", "mask=inside & (partial < 0)[:, None]", "mask=inside"),
    Mutant("merge_states", "last state only", "acc = acc * kept[:, None] + partial", "acc = partial"),
    Mutant("merge_states", "sink forgotten", "total * kept + tl.exp(sink - higher)", "total * kept"),
    Mutant("merge_states", "NaN of empty states", 'safe = tl.where(higher == float("-inf"), 0.0, higher)', "safe = higher"),
    Mutant("merge_states", "padding is written", "mask=inside & (token >= 0)", "mask=inside"),
    Mutant("merge_states", "stride forgotten", "first + state * stride", "first + state"),
    Mutant("attention_plan", "a window starts too late", "span.context - span.num_queries - sliding_window + 1)",
           "span.context - sliding_window + 65)"),
    Mutant("attention_plan", "a chunk's tile ends early", "        end = start + at + count\n", "        end = start + at + 1\n"),
    Mutant("attention_plan", "the last split is whole", "min((number + 1) * split, span.context)", "(number + 1) * split"),
    Mutant("attention_plan", "the group reads one split too few", "range(max((shared[index] for index in members), default=0))",
           "range(max((shared[index] for index in members), default=0) - 1)"),
    Mutant("attention_plan", "partials of a row overlap", "            num_partials += count\n", "            num_partials += count - 1\n"),
    Mutant("gemm", "scale of the row forgotten", "out *= tl.load(a_scale_ptr + rows, mask=is_row, other=0.0)[:, None]", "pass"),
    Mutant("gemm", "scales exchanged", "tl.load(w_scale_ptr + columns, mask=is_column, other=0.0)[None, :]",
           "tl.load(w_scale_ptr + columns // 2, mask=is_column, other=0.0)[None, :]"),
    Mutant("gemm", "bias forgotten", "        out += tl.load(bias_ptr + columns", "        _ = tl.load(bias_ptr + columns"),
    Mutant("gemm", "residual of another row", "    at = rows[:, None].to(tl.int64) * n + columns[None, :]\n    if residual_ptr",
           "    at = (m - 1 - rows[:, None]).to(tl.int64) * n + columns[None, :]\n    if residual_ptr"),
    Mutant("gemm", "depth not masked", "        if not EVEN_K:\n", "        if not EVEN_K and BLOCK_M > 256:\n"),
    Mutant("gemm", "rows not masked", "(a_rows < m)[:, None]", "(a_rows < m + BLOCK_M)[:, None]"),
    Mutant("gemm", "shares overlap", "    end = tl.minimum(begin + depth, k)\n", "    end = k\n"),
    Mutant("gemm", "a share is lost", "for share in tl.static_range(SPLIT_K)", "for share in tl.static_range(SPLIT_K - 1)"),
    Mutant("gemm", "tiles visited twice", "first + within % height", "first + within % GROUP_M"),
    Mutant("gemm", "int8 summed in float32", "tl.int32 if IS_EXACT else tl.float32)\n    for start in range(begin, end, BLOCK_K):\n        a_inside",
           "tl.float32)\n    for start in range(begin, end, BLOCK_K):\n        a_inside"),
    Mutant("gemm", "the last part of a tile is lost", "for program in range(first + 1, last + 1)", "for program in range(first + 1, last)"),
    Mutant("gemm", "both parts of a program in one place", "2 * tl.program_id(0) + (first == 0).to(tl.int32)", "2 * tl.program_id(0) + 1"),
    Mutant("gemm", "steps of the tile's beginning twice", "tl.maximum(begin - tile * depth, 0)", "begin * 0"),
    Mutant("gemm", "a tile ended by who has its last steps", "if last - first == depth", "if last == depth"),
    Mutant("gemm", "the first channel's output scale", "out_scale_ptr + columns * OUT_SCALES", "out_scale_ptr + columns * 0"),
    Mutant("gemm", "INT8 results cut off", "+ 12582912.0) - 12582912.0", ")"),
    Mutant("gemm", "INT8 results wrap", "tl.minimum(tl.maximum(x, -127.0), 127.0) + 12582912.0", "x + 12582912.0"),
    Mutant("gemm", "quantised before the residual", "    at = rows[:, None].to(tl.int64) * n + columns[None, :]\n    if residual_ptr",
           "    at = rows[:, None].to(tl.int64) * n + columns[None, :]\n    if out_scale_ptr is None and residual_ptr"),
    Mutant("int4_gemm", "halves exchanged", "tl.join((pairs & 15) - 8, (pairs >> 4) - 8)", "tl.join((pairs >> 4) - 8, (pairs & 15) - 8)"),
    Mutant("int4_gemm", "no zero point", "(pairs >> 4) - 8)", "(pairs >> 4))"),
    Mutant("int4_gemm", "the first group's scales", "group * n + columns", "columns"),
    Mutant("int4_gemm", "half of the depth", "for group in range(k // GROUP)", "for group in range((k // GROUP + 1) // 2)"),
    Mutant("int4_gemm", "columns beyond the edge", "is_row, is_column = rows < m, columns < n", "is_row, is_column = rows < m, columns < n + BLOCK_N"),
    Mutant("grouped_gemm", "the next expert's weights", "at = expert.to(tl.int64) * n", "at = (expert + 1).to(tl.int64) * n"),
    Mutant("grouped_gemm", "a partial tile is lost", "(ends - begins + BLOCK_M - 1) // BLOCK_M", "(ends - begins) // BLOCK_M"),
    Mutant("grouped_gemm", "empty experts count", "(after <= tile)", "(after < tile)"),
    Mutant("grouped_gemm", "rows of the next expert", "rows < end, columns < n", "rows < end + 1, columns < n"),
    Mutant("grouped_gemm", "every tile is its expert's first", " + within * BLOCK_M", " + 0 * within"),
    Mutant("grouped_gemm", "pairs taken for tokens", "pair // GATHER if GATHER > 0", "pair if GATHER > 0"),
    Mutant("grouped_gemm", "rows not gathered", "source = pair // GATHER if GATHER > 0 else rows", "source = rows"),
    Mutant("grouped_gemm", "not scattered", "(pair if SCATTER else rows)", "(rows if SCATTER else rows)"),
    Mutant("grouped_gemm", "scales of the output rows", "a_scale_ptr + source", "a_scale_ptr + pair"),
    Mutant("grouped_gemm", "the first expert's channel scales", "w_scale_ptr + at, ", "w_scale_ptr + columns, "),
    Mutant("grouped_gemm", "bias forgotten", "out += tl.load(bias_ptr + at", "_ = tl.load(bias_ptr + at"),
    Mutant("grouped_gemm", "too few programs", "tiles_m = num_pairs // c.block_m + min(num_experts, num_pairs)",
           "tiles_m = triton.cdiv(num_pairs, c.block_m)"),
    Mutant("grouped_gemm", "answers not weighed", ".to(tl.float32) * weight\n", ".to(tl.float32) + 0.0 * weight\n"),
    Mutant("grouped_gemm", "the first answer only", "(token * TOP_K + choice) * n", "token * TOP_K * n"),
    Mutant("grouped_gemm", "residual forgotten", "acc += tl.load(residual_ptr", "_ = tl.load(residual_ptr"),
    Mutant("routing", "ties in any order", "stable=True).indices", "stable=True).indices.flip(1)"),
    Mutant("routing", "weighed with the selection's bias", "score.gather(1", "ranked.gather(1"),
    Mutant("routing", "not renormalised", "    if renormalize:", "    if not renormalize:"),
    Mutant("routing", "offsets off by one", "searchsorted(by_expert, edges)", "searchsorted(by_expert, edges, right=True)"),
    Mutant("embedding", "ids of another rank", "is_here = (row >= 0) & ", "is_here = "),
    Mutant("embedding", "not scaled", ".to(tl.float32) * scale", ".to(tl.float32)"),
    Mutant("lora", "the next adapter's A", "tl.load(downs_ptr + adapter)", "tl.load(downs_ptr + (adapter + 1) % NUM_ADAPTERS)"),
    Mutant("lora", "the first adapter's B", "tl.load(ups_ptr + adapter)", "tl.load(ups_ptr)"),
    Mutant("lora", "rows not gathered", "x_at = x_ptr + rows[:, None] * x_stride", "x_at = x_ptr + places.to(tl.int64)[:, None] * x_stride"),
    Mutant("lora", "added to other rows", "out_at = out_ptr + rows[:, None]", "out_at = out_ptr + places.to(tl.int64)[:, None]"),
    Mutant("lora", "a share of the depth is lost", "for split in tl.static_range(SPLITS)", "for split in tl.static_range((SPLITS + 1) // 2)"),
    Mutant("lora", "shares overlap", "tl.minimum(begin + share, k), BLOCK_K", "k, BLOCK_K"),
    Mutant("lora", "the first ranks only", "for start in range(0, rank, BLOCK_R)", "for start in range(0, BLOCK_R, BLOCK_R)"),
    Mutant("lora", "ranks of the next row", "inside = is_row[:, None] & (ranks < rank)[None, :]", "inside = is_row[:, None] & (ranks < rank + 16)[None, :]"),
    Mutant("lora", "scale of the row forgotten", "y *= tl.load(x_scale_ptr", "_ = tl.load(x_scale_ptr"),
    Mutant("lora", "what was there is lost", "other=0.0).to(tl.float32) + acc", "other=0.0).to(tl.float32) * 0.0 + acc"),
    Mutant("lm_head", "words beyond the vocabulary", 'tl.where(is_word[None, :], scores, float("-inf"))', "scores"),
    Mutant("lm_head", "id within its tile", "tl.store(id_ptr + at, tl.program_id(0) * BLOCK_N + index", "tl.store(id_ptr + at, index"),
    Mutant("lm_head", "the best again and again", "numbers = tl.where(is_taken, float", "numbers = tl.where(is_taken & (BLOCK_K < 0), float"),
    Mutant("lm_head", "NaN is the best", '<= float("inf"), scores, float("-inf"))', '<= float("inf"), scores, float("inf"))'),
    Mutant("lm_head", "forgets NaN", "is_good = is_finite & (has_nan == 0)", "is_good = is_finite"),
    Mutant("lm_head", "logits of other rows", "logits_ptr + place[:, None] * n", "logits_ptr + (1 - place[:, None]) * n"),
    Mutant("lm_head", "scales of the rows forgotten", "scores *= tl.load(x_scale_ptr", "_ = tl.load(x_scale_ptr"),
    Mutant("lm_head", "bias forgotten", "scores += tl.load(bias_ptr", "_ = tl.load(bias_ptr"),
    Mutant("lm_head", "mass of the best tile", "total * tl.exp(best - ", "total * tl.exp(0.0 * "),
    Mutant("sampler", "top-k one too many", "top_k.to(tl.float64), peak", "top_k.to(tl.float64) + 1, peak"),
    Mutant("sampler", "top-p of all tokens, not of the top k", "goal = _total_weight(row_ptr, n, peak, temperature, floor, ", "goal = _total_weight(row_ptr, n, peak, temperature, floor * 0 - 2147483648, "),
    Mutant("sampler", "temperature forgotten", "tl.div_rn(relative, temperature)", "relative"),
    Mutant("sampler", "min-p forgotten", "tl.maximum(least, whole + ", "tl.maximum(least, 0 * whole + "),
    Mutant("sampler", "negative floats in reverse", "return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)", "return bits.to(tl.int64)"),
    Mutant("sampler", "number not of the position", "tl.philox(seed, position, ", "tl.philox(seed, position * 0, "),
    Mutant("sampler", "words of the number exchanged", "high, low, _, _ =", "low, high, _, _ ="),
    Mutant("sampler", "draws within every stretch", "        passed += share\n", "        passed += 0 * share\n"),
    Mutant("sampler", "share of the stretch before", "cumulative = before + ", "cumulative = passed * 0 + "),
    Mutant("sampler", "id within its stretch", "    return found + tl.sum(", "    return tl.sum("),
    Mutant("sampler", "the token before", "(cumulative <= target)", "(cumulative < target - (target >> 4))"),
    Mutant("sampler", "log-probability without the mass", "chosen - peak - tl.log(mass)", "chosen - peak"),
    Mutant("sampler", "excludes ties", "(_ordered(relative) >= floor)", "(_ordered(relative) > floor)"),
    Mutant("sampler", "top-p excludes ties", "(weight >= least)", "(weight > least)"),
    Mutant("sampler", "the last of the best", "place = tl.where(best > peak,", "place = tl.where(best >= peak,"),
    Mutant("sampler", "infinities pass", '(broken == 0) & (tl.abs(peak) < float("inf"))', "(broken == 0)"),
    Mutant("logprobs", "equals in reverse", "(at > last_id)", "(at < last_id)"),
    Mutant("logprobs", "the same one again", "(x < last) | ", "(x <= last) | "),
    Mutant("logprobs", "id within its stretch", "start + index, best_id)", "index, best_id)"),
    Mutant("logprobs", "another row's token", "        row = tl.load(rows_ptr + i)\n", "        row = i + 0 * tl.load(rows_ptr + i)\n"),
    Mutant("logprobs", "relative to the largest", "peak + tl.log(mass)", "peak"),
    Mutant("logit_changes", "repetition makes negative logits likelier", "tl.where(x < 0.0, x * repetition", "tl.where(x < 0.0, tl.div_rn(x, repetition)"),
    Mutant("logit_changes", "presence of prompt tokens", "tl.where(count > 0.0, presence", "tl.where(count >= 0.0, presence"),
    Mutant("logit_changes", "frequency counted once", "frequency * count", "frequency"),
    Mutant("logit_changes", "the first stretch of entries only", "    for start in range(tl.load(starts_ptr + i), end, BLOCK):\n        at = start + tl.arange(0, BLOCK)\n        place = row_ptr + tl.load(ids_ptr + at, mask=at < end, other=0)\n        x =",
           "    for start in range(tl.load(starts_ptr + i), end, 4 * BLOCK):\n        at = start + tl.arange(0, BLOCK)\n        place = row_ptr + tl.load(ids_ptr + at, mask=at < end, other=0)\n        x ="),
    Mutant("logit_changes", "bits in reverse", "(word >> (at % 32))", "(word >> (31 - at % 32))"),
    Mutant("logit_changes", "the mask of the logits' row", "mask_ptr + i.to(tl.int64)", "mask_ptr + tl.load(rows_ptr + i).to(tl.int64)"),
    Mutant("logit_changes", "bias of the next entry", "bias_ptr + at,", "bias_ptr + at - 1,"),
]  # fmt: skip
