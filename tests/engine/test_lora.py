"""LoRA adapters against peft: the merged model's logits, for some rows of a batch and no other."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from batchinfer.errors import RowFailure
from batchinfer.models.fused.adapted import AdapterGroup, AdapterSlots
from batchinfer.models.fused.families import FAMILIES
from batchinfer.models.fused.int8 import DEFAULT_SCHEME, w8a8
from batchinfer.models.fused.packed_linear import PackedLinear
from batchinfer.models.fused.parts import ModulePart
from batchinfer.models.fused.spec import Projection
from batchinfer.models.lora_store import LoraStore
from batchinfer.types import ErrorCode
from batchinfer_kernels.cpu import Accumulated, get_ops
from tests.engine.adapters import FUSED_MODULES, MODULES, save_adapter
from tests.engine.small_decoder import logits_of, make_forward, small_model

GIB = 1 << 30
ATTENTION_MODULES = MODULES[:4]


def modules_of(family):
    if family == "phi3":
        return FUSED_MODULES
    return ATTENTION_MODULES if family in ("mixtral", "qwen3_moe") else MODULES


@torch.inference_mode()
def truth(model, sequence):
    return model(torch.tensor([sequence])).logits[0]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_each_row_has_the_logits_of_its_own_merged_model(family, tmp_path):
    """Chunked prefill and decoding, two adapters beside each other, then one beside a plain row."""
    model = small_model(family)
    merged = [
        save_adapter(model, tmp_path / "a", seed=1, rank=6, modules=modules_of(family)),
        save_adapter(model, tmp_path / "b", seed=2, rank=17, alpha=4, rslora=True, modules=modules_of(family)[-2:]),
    ]
    forward, attention = make_forward(copy.deepcopy(model), torch.float32, owns_model=True)
    store = LoraStore(forward.adapters, GIB)
    a, b = store.open(str(tmp_path / "a")), store.open(str(tmp_path / "b"))
    logits, sequences = logits_of(forward, attention, store, (a, b))
    for ours, reference, sequence in zip(logits, merged, sequences, strict=True):
        expected = truth(reference, sequence)
        assert (expected - truth(model, sequence)).abs().max() > 0.05, "the adapter must say something"
        assert (ours - expected).abs().max() < 3e-4 * expected.abs().max()
    mixed, _ = logits_of(forward, attention, store, (None, a))
    plain, _ = logits_of(forward, attention)
    assert torch.equal(mixed[0], plain[0])
    expected = truth(merged[0], sequences[1])
    assert (mixed[1] - expected).abs().max() < 3e-4 * expected.abs().max()


@pytest.mark.parametrize(("dtype", "quantization"), [
    (torch.bfloat16, "none"), (torch.bfloat16, "int8"), (torch.bfloat16, "int8-weight-only"),
])  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_in_other_precisions_an_adapter_is_as_near_as_the_model_itself(family, dtype, quantization, tmp_path):
    """The error against peft's float32 model stays in the range of the plain model's; plain rows keep their bytes."""
    model = small_model(family, hidden_size=128, intermediate_size=256)
    merged = save_adapter(model, tmp_path / "a", rank=8, alpha=4)
    forward, attention = make_forward(copy.deepcopy(model), dtype, quantization=quantization)
    store = LoraStore(forward.adapters, GIB)
    a = store.open(str(tmp_path / "a"))
    mixed, sequences = logits_of(forward, attention, store, (a, None))
    plain, _ = logits_of(forward, attention)
    assert torch.equal(mixed[1], plain[1])
    plain_error = (plain[0] - truth(model, sequences[0])).square().mean() / truth(model, sequences[0]).var()
    error = (mixed[0] - truth(merged, sequences[0])).square().mean() / truth(merged, sequences[0]).var()
    without = (plain[0] - truth(merged, sequences[0])).square().mean() / truth(merged, sequences[0]).var()
    assert error < max(3 * plain_error, 0.02)
    assert error < without / 4


def adapted_linear(precision, ins, outs):
    """A merged projection of two modules, with room for adapters."""
    ops = get_ops()
    torch.manual_seed(ins * 7 + outs)
    modules = [torch.nn.Linear(ins, outs), torch.nn.Linear(ins, outs + 3, bias=False)]
    names = ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj")
    projection = Projection("layers.0.qkv", [ModulePart(module) for module in modules], 0.7, names)
    if precision == "int8":
        linear = w8a8(ops, projection, DEFAULT_SCHEME.without_data, None)
    else:
        linear = PackedLinear(ops, projection.weight(), projection.bias(), precision)
    slots = AdapterSlots()
    return slots, slots.wrap(ops, projection, linear)


def whole(product):
    return product.dequantize() if isinstance(product, Accumulated) else product


@settings(max_examples=40, deadline=None)
@given(
    precision=st.sampled_from([torch.float32, torch.bfloat16, "int8"]),
    ins=st.sampled_from([48, 64, 160, 576]),
    outs=st.sampled_from([16, 33, 128]),
    ranks=st.tuples(st.integers(1, 256), st.integers(1, 40)),
    num_rows=st.integers(4, 130),
    data=st.data(),
)
def test_a_row_has_the_same_bytes_alone_and_among_others(precision, ins, outs, ranks, num_rows, data):
    """Whichever rows stand beside it, and whichever adapters those use; plain rows are as without any adapter."""
    slots, linear = adapted_linear(precision, ins, outs)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    deltas = [
        {"layers.0.qkv": linear.delta(
            [(0, torch.randn(rank, ins, generator=generator), torch.randn(outs, rank, generator=generator)),
             (outs, torch.randn(rank, ins, generator=generator), torch.randn(outs + 3, rank, generator=generator))],
            0.5,
        )}
        for rank in ranks
    ]  # fmt: skip
    x = torch.randn(num_rows, ins, generator=generator)
    uses = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=num_rows, max_size=num_rows))
    groups = [
        AdapterGroup.of(deltas[which], [row for row, used in enumerate(uses) if used == which])
        for which in (0, 1)
        if which in uses
    ]
    plain = whole(linear(linear.convert(x)))
    slots.groups = groups
    together = whole(linear(linear.convert(x)))
    slots.groups = ()
    for row in data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=6)):
        if uses[row] is None:
            assert torch.equal(together[row], plain[row])
            continue
        slots.groups = [AdapterGroup.of(deltas[uses[row]], [0])]
        alone = whole(linear(linear.convert(x[row].expand(4, -1).contiguous())))
        slots.groups = ()
        assert torch.equal(together[row], alone[0])
        assert not torch.equal(together[row], plain[row])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model with room for adapters, and an adapter of it."""
    folder = tmp_path_factory.mktemp("adapter") / "good"
    model = small_model("llama")
    save_adapter(model, folder)
    forward, _ = make_forward(model, torch.float32)
    return SimpleNamespace(folder=folder, slots=forward.adapters, model=model)


@pytest.mark.parametrize(("changes", "said"), [
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "whole modules"),
    ({"bias": "all"}, "biases"),
    ({"lora_bias": True}, "a bias of its own"),
    ({"rank_pattern": {"q_proj": 2}}, "ranks by layer"),
    ({"r": 257}, "1 to 256"),
    ({"r": True}, "1 to 256"),
    ({"r": 5}, "made for another model"),
    ({"lora_alpha": "16"}, "lora_alpha"),
    ({"peft_type": "IA3"}, "only LORA"),
    ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_with_a_sentence(llama, tmp_path, changes, said):
    folder = tmp_path / "adapter"
    shutil.copytree(llama.folder, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(RowFailure, match=said) as failure:
        LoraStore(llama.slots, GIB).open(str(folder))
    assert failure.value.error.code is ErrorCode.INVALID_ADAPTER
    assert str(folder) in failure.value.error.message


def tensors_with(change):
    def damage(folder):
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return damage


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(("damage", "said"), [
    (lambda folder: (folder / "adapter_config.json").write_text("{"), "cannot be read"),
    (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "cannot be read"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 100), "cannot be read"),
    (tensors_with(lambda t: t.pop(f"{Q}B.weight")), "has no lora_B"),
    (tensors_with(lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(6, 64)})), "lm_head"),
    (tensors_with(lambda t: t.update({f"{Q}magnitude_vector": torch.ones(6)})), "magnitude_vector"),
    (tensors_with(lambda t: t.update({f"{Q}A.weight": torch.ones(6, 63)})), "made for another model"),
    (tensors_with(lambda t: t.update({f"{Q}A.weight": torch.ones(6, 64, dtype=torch.int8)})), "needs floats"),
    (tensors_with(dict.clear), "holds no tensors"),
])  # fmt: skip
def test_a_damaged_adapter_is_refused_with_a_sentence(llama, tmp_path, damage, said):
    folder = tmp_path / "adapter"
    shutil.copytree(llama.folder, folder)
    damage(folder)
    with pytest.raises(RowFailure, match=said) as failure:
        LoraStore(llama.slots, GIB).open(str(folder))
    assert failure.value.error.code is ErrorCode.INVALID_ADAPTER


def test_pickles_are_never_read(llama, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(llama.folder, folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(RowFailure, match="pickled"):
        LoraStore(llama.slots, GIB).open(str(folder))


def test_a_missing_adapter_is_named(llama, tmp_path):
    with pytest.raises(RowFailure, match="there is no adapter") as failure:
        LoraStore(llama.slots, GIB).open(str(tmp_path / "gone"))
    assert failure.value.error.code is ErrorCode.ADAPTER_NOT_FOUND


def test_weights_are_loaded_when_they_run_and_leave_by_age(llama, tmp_path):
    """A budget for two: the third takes the place of the one that was used longest ago; one that is used stays."""
    for name in "abc":
        shutil.copytree(llama.folder, tmp_path / name)
    size = LoraStore(llama.slots, GIB).open(str(llama.folder)).num_bytes
    store = LoraStore(llama.slots, 2 * size)
    a, b, c = (store.open(str(tmp_path / name)) for name in "abc")
    assert (store.num_loads, store.num_bytes) == (0, 0)
    for used, loads in ((a, 1), (b, 2), (a, 2), (c, 3), (a, 3), (b, 4)):
        store.groups({used: [0]})
        assert store.num_loads == loads
        assert store.num_bytes <= 2 * size
    groups = store.groups({a: [0], b: [1], c: [2]})  # all of a step's are there, however many
    assert len(groups) == store.num_loaded == 3
    store.groups({c: [0]})
    assert store.num_bytes <= 2 * size
    weights = sum(tensor.numel() for name, tensor in load_file(llama.folder / "adapter_model.safetensors").items())
    assert size >= 4 * weights, "the size counts every number"


def test_an_adapter_that_changes_is_another_one_and_a_removed_one_runs_on(llama, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(llama.folder, folder)
    store = LoraStore(llama.slots, GIB)
    first = store.open(str(folder))
    assert store.open(str(folder)) is first
    (folder / "adapter_model.safetensors").unlink()
    tensors = {name: tensor + 1 for name, tensor in load_file(llama.folder / "adapter_model.safetensors").items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    second = store.open(str(folder))
    assert second is not first
    assert second.fingerprint != first.fingerprint
    shutil.rmtree(folder)
    assert first.load().keys() == second.load().keys()
