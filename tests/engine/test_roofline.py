"""Predicted speeds against numbers worked out by hand, and laws that no device can break."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.engine.devices import DEVICES, UNITS, Device, find_device
from batchinfer.engine.model_shape import ModelShape
from batchinfer.engine.roofline import (
    Phase,
    Precision,
    Workload,
    activation_bytes_per_token,
    batch_size,
    kv_bytes_per_token,
    predict,
    restore_seconds,
    weight_bytes,
)
from batchinfer.errors import InvalidSpecError, ModelError
from benchmarks.roofline import restores, speeds

# A layer: query 8x8, key and value 8x4, output 8x8 = 192 weights; MLP 3 x 8 x 16 = 384. Two layers: 1,152. Head 8 x 32 = 256.
# KV: 2 layers x (key + value) x 1 head x 4 = 16 values a token, 32 bytes. Attention: 4 x 2 x 2 x 4 = 64 operations a pair.
SHAPE = ModelShape(2, 8, 2, 1, 4, 16, 32)
SLOW = Device("slow", 1e3, 1e6, 1e3, None, 4e3, None, 1e2, 10, "invented")
LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def approx(*, compute, memory, link=0.0):
    return Phase(pytest.approx(compute), pytest.approx(memory), pytest.approx(link))


def test_sizes_by_hand():
    assert (SHAPE.attention_weights, SHAPE.expert_weights, SHAPE.layer_weights) == (192, 384, 1152)
    assert (SHAPE.head_weights, SHAPE.kv_values_per_token, SHAPE.attention_operations) == (256, 16, 64)
    # 12 x 8 + 6 x 8 + 4 x 4 + 6 x 16 = 256 values of two bytes in two layers
    assert activation_bytes_per_token(SHAPE) == 1024
    # layers 2,304, head 512, embedding 512
    assert weight_bytes(SHAPE, Precision()) == 3328
    assert weight_bytes(replace(SHAPE, is_tied=True), Precision()) == 2816
    # 1,152 + 256 + an embedding of 512 that an INT8 head cannot share
    assert weight_bytes(replace(SHAPE, is_tied=True), Precision("int8", "int8", head="int8")) == 1920
    assert kv_bytes_per_token(SHAPE, "bf16") == 32
    # 16 bytes, and 2 layers x (key + value) x 1 head scales of 4
    assert kv_bytes_per_token(SHAPE, "int8") == 32


@pytest.mark.parametrize(
    ("fields", "published", "norms"),
    [
        # parameters as the models' cards state them; norms: two a layer and one, of the hidden size
        (LLAMA_8B, 8_030_261_248, 65 * 4096),
        (
            {**LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
            46_702_792_704, 65 * 4096,
        ),
        (
            {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
             "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
            134_515_008, 61 * 576,
        ),
    ],
    ids=["Llama-3.1-8B", "Mixtral-8x7B", "SmolLM2-135M"],
)  # fmt: skip
def test_weights_are_those_of_published_models(fields, published, norms):
    shape = ModelShape.from_config(fields)
    vocabulary = shape.head_weights * (1 if shape.is_tied else 2)
    assert shape.layer_weights + vocabulary + norms == published


def test_experts_are_read_as_tokens_choose_them():
    shape = replace(SHAPE, num_experts=4, experts_per_token=2)
    # attention 192 and a router of 8 x 4 = 32 a layer
    assert shape.layer_weights == 2 * (224 + 4 * 384)
    assert shape.layer_weights_per_token == 2 * (224 + 2 * 384)
    assert shape.layer_weights_read(1) == pytest.approx(2 * (224 + 2 * 384))
    # two tokens miss an expert with 1/4: three of four are read
    assert shape.layer_weights_read(2) == pytest.approx(2 * (224 + 3 * 384))


def test_a_config_of_a_multimodal_model_and_one_that_lacks_a_size():
    assert ModelShape.from_config({"text_config": LLAMA_8B}).num_layers == 32
    with pytest.raises(ModelError, match="no num_hidden_layers"):
        ModelShape.from_config({"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9})


def test_two_rows_by_hand():
    """Two rows of 3 + 3 tokens, at 1,000 operations and 1,000 bytes a second."""
    found = predict(SLOW, SHAPE, Precision(), Workload(2, 3, 3))
    assert found.batch == 2
    # prefill: 6 tokens, each row's see 1, 2, 3: 12 pairs; two rows sampled.
    # operations 2 x 6 x 1,152 = 13,824; head 2 x 2 x 256 = 1,024; attention 12 x 64 = 768
    # bytes: layers 2,304; head 512 and logits written and read 2 x 2 x 32 x 4 = 512; KV (6 read + 6 written) x 32 = 384;
    # activations 6 x 1,024 = 6,144
    assert found.prefill == approx(compute=15.616, memory=9.856)
    # decode: 4 tokens in 2 steps, at 4 and 5 tokens of context: 18 pairs.
    # operations 9,216 + 2,048 + 1,152; bytes 2 x 2,304 + (2 x 512 + 1,024) + (18 + 4) x 32 + 4 x 1,024
    assert found.decode == approx(compute=12.416, memory=11.456)
    sequential, overlap = found.output_tokens_per_second
    assert sequential == pytest.approx(6 / (15.616 + 9.856 + 12.416 + 11.456))
    assert overlap == pytest.approx(6 / (15.616 + 12.416))


def test_a_shared_prefix_by_hand():
    """The same rows behind two more tokens that both share."""
    found = predict(SLOW, SHAPE, Precision(), Workload(2, 5, 3, shared=2))
    # prefill: 8 tokens; pairs 1 + 2 and twice 3 + 4 + 5 = 27; 6 own and 2 shared tokens read, 8 written
    assert found.prefill == approx(compute=18.432 + 1.024 + 1.728, memory=2.304 + 1.024 + 0.512 + 8.192)
    # decode: pairs 4 x 6.5 = 26; read 4 x 4.5 own, and 2 shared tokens in each of 2 steps
    assert found.decode == approx(compute=9.216 + 2.048 + 1.664, memory=4.608 + 2.048 + 26 * 0.032 + 4.096)
    alone = predict(SLOW, SHAPE, Precision(), Workload(2, 5, 3, shared=2, reads_shared_once=False))
    # each row reads the prefix by itself: 2 tokens more at prefill, 2 in each step
    assert alone.prefill.memory - found.prefill.memory == pytest.approx(2 * 0.032)
    assert alone.decode.memory - found.decode.memory == pytest.approx(4 * 0.032)
    assert alone.total.compute == pytest.approx(found.total.compute)


def test_int8_by_hand():
    """A unit four times as fast, weights of one byte; attention stays in bfloat16."""
    found = predict(SLOW, SHAPE, Precision("int8", "int8", head="int8"), Workload(2, 3, 3))
    # (13,824 + 1,024) / 4,000 + 768 / 1,000; layers 1,152, head 256 + logits 512
    assert found.prefill == approx(compute=3.712 + 0.768, memory=1.152 + 0.768 + 0.384 + 6.144)
    weights_only = predict(SLOW, SHAPE, Precision("int8"), Workload(2, 3, 3))
    # the products run in bfloat16
    assert weights_only.prefill == approx(compute=15.616, memory=1.152 + 1.024 + 0.384 + 6.144)


def test_two_devices_by_hand():
    """Half of the work each; the only KV head is on both; two all-reduces a layer and the logits cross the link."""
    found = predict(replace(SLOW, num_devices=2), SHAPE, Precision(), Workload(2, 3, 3))
    # a ring of two moves as many bytes as there are: 2 layers x 2 x 6 tokens x 8 x 2 = 384; half of the logits, 128
    assert found.prefill == approx(compute=15.616 / 2, memory=(9.856 + 0.384) / 2, link=(384 + 128) / 100)
    without = predict(replace(SLOW, num_devices=2, link=None), SHAPE, Precision(), Workload(2, 3, 3))
    assert without.prefill.link == pytest.approx((384 + 128) / 10)


def test_the_batch_is_what_memory_holds():
    # 900,000 - 3,328 bytes hold 28,021 tokens of 32; a row holds 100 and half of 40
    assert batch_size(SLOW, SHAPE, Precision(), Workload(10_000, 100, 40)) == pytest.approx(28_021 / 120)
    # 80 of the 100 are held once
    shared = Workload(10_000, 100, 40, shared=80, max_num_seqs=10_000)
    assert batch_size(SLOW, SHAPE, Precision(), shared) == pytest.approx((28_021 - 80) / 40)
    assert batch_size(SLOW, SHAPE, Precision(), replace(shared, max_num_seqs=64)) == 64
    # 100 groups of 100 rows: each row brings a hundredth of 80 tokens
    assert batch_size(SLOW, SHAPE, Precision(), replace(shared, num_groups=100)) == pytest.approx(28_021 / 40.8)


def test_what_does_not_fit_is_a_sentence():
    with pytest.raises(InvalidSpecError, match=r"rtx4090 has 22 GB .* more devices"):
        predict(
            DEVICES["rtx4090"], replace(ModelShape.from_config(LLAMA_8B), num_layers=80), Precision(), Workload(1, 9, 9)
        )
    with pytest.raises(InvalidSpecError, match="no int4 matrix unit; it has bf16, fp8, int8"):
        DEVICES["h200"].peak("int4")


def test_restoring_a_prefix_by_hand():
    # 4 tokens of 32 bytes over a bus of 10 bytes a second; pairs 1 + 2 + 3 + 4 = 10
    fetch, compute = restore_seconds(SLOW, SHAPE, Precision(), 4)
    assert fetch == pytest.approx(12.8)
    # 2 x 4 x 1,152 + 10 x 64 operations are more than the bytes: 2,304 + head 512 + 4 x 32 + 4 x 1,024
    assert compute == pytest.approx(9.856)


def test_the_page_says_what_is_predicted():
    page = (Path(__file__).resolve().parents[2] / "docs" / "performance.md").read_text()
    for line in (*speeds(), *restores()):
        assert line in page, f"docs/performance.md lacks {line}: run python -m benchmarks.roofline"


def test_llama_8b_on_an_h200_reads_its_weights_in_a_known_time():
    """One row: a step reads 16.06 GB less the embedding (1.05 GB), at 4.8 TB/s: 3.13 ms, and little else."""
    found = predict(DEVICES["h200"], ModelShape.from_config(LLAMA_8B), Precision(), Workload(1, 1, 1001))
    assert found.decode.memory / 1000 == pytest.approx(15.01e9 / 4.8e12, rel=0.01)
    assert found.decode.memory > 50 * found.decode.compute


def test_names_of_devices():
    assert set(DEVICES) == {"a100", "h100", "h200", "l40s", "rtx4090", "rtx5090", "b200", "mi300x"}
    assert (find_device("RTX 4090"), find_device("H200").num_devices) == (DEVICES["rtx4090"], 1)
    assert (find_device("rtx4090x2").num_devices, find_device("mi300x").num_devices) == (2, 1)
    assert find_device("mi300xx8").num_devices == 8
    assert find_device("cpu") is find_device("cuda:0") is find_device("h200x0") is None


def test_the_table_obeys_the_hardware():
    for device in DEVICES.values():
        assert device.source
        peaks = [getattr(device, unit) for unit in UNITS]
        # narrower units are twice as fast or more; FP8 is no faster than INT8
        assert device.int8 == pytest.approx(2 * device.bf16, rel=0.02) or device.int8 > 2 * device.bf16
        assert all(peak is None or peak >= device.bf16 for peak in peaks)
        assert device.pcie < device.bandwidth
        # operations a byte at which a product turns from memory to compute
        assert 100 < device.bf16 / device.bandwidth < 450


numbers = st.floats(1, 5000)
workloads = st.builds(
    lambda rows, own, shared, output: Workload(rows, own + shared, output, shared),
    st.integers(1, 5000), numbers, numbers, numbers,
)  # fmt: skip
precisions = st.sampled_from([Precision(), Precision("int8", "int8", "int8", "int8"), Precision("int8")])
devices = st.sampled_from(list(DEVICES.values()))
shapes = st.sampled_from([
    ModelShape.from_config(LLAMA_8B), replace(ModelShape.from_config(LLAMA_8B), num_experts=8, experts_per_token=2, num_layers=4),
])  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    devices, shapes, precisions, workloads, st.floats(1, 10), st.sampled_from(["bandwidth", "bf16", "int8", "memory"])
)
def test_a_better_device_is_never_slower(device, shape, precision, work, factor, field):
    before = predict(device, shape, precision, work)
    after = predict(replace(device, **{field: getattr(device, field) * factor}), shape, precision, work)
    assert after.total.sequential <= before.total.sequential * (1 + 1e-9)
    assert after.total.overlap <= before.total.overlap * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(devices, shapes, precisions, workloads)
def test_laws_of_the_bounds(device, shape, precision, work):
    found = predict(device, shape, precision, work)
    assert found.total.overlap <= found.total.sequential <= 3 * found.total.overlap
    assert 1 <= found.batch <= work.num_rows
    apart = predict(device, shape, precision, replace(work, reads_shared_once=False))
    assert apart.total.sequential >= found.total.sequential * (1 - 1e-9)
    longer = predict(device, shape, precision, replace(work, output=work.output + 1))
    assert longer.total.sequential > found.total.sequential
    none_shared = predict(device, shape, precision, replace(work, shared=0.0))
    if work.num_rows > 1:
        assert none_shared.prefill.compute >= found.prefill.compute * (1 - 1e-9)
