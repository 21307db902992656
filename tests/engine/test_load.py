"""Loading a model by path or name: what comes back, and one sentence of advice where nothing can."""

import json
import shutil
from dataclasses import replace

import gguf
import httpx
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from batchinfer.engine.config import EngineConfig
from batchinfer.errors import ModelError
from batchinfer.models import hub, tokenizer
from batchinfer.models.fingerprint import fingerprint
from batchinfer.models.limits import longest_sequence
from batchinfer.models.load import load_model
from tests.engine.test_gguf import logits, tiny
from tests.gguf_writer import write_gguf
from tests.small_model import gguf_path
from tests.small_model import tokenizer as small_tokenizer


def load(model, **config):
    return load_model(EngineConfig(str(model), device="cpu", **config), "eager")


def words_tokenizer() -> PreTrainedTokenizerFast:
    words = ["[UNK]", "[EOS]", "[PAD]", *(f"w{i}" for i in range(94))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]", unk_token="[UNK]", pad_token="[PAD]")


def byte_tokens(writer: gguf.GGUFWriter) -> None:
    """The smallest GGUF tokenizer: the bytes, then special tokens, 97 in all."""
    letters = [chr(0x21 + i) for i in range(92)]
    tokens = [*letters, "ab", "Ġ", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 94 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(95)
    writer.add_chat_template("{{ messages[0].content }}")


@pytest.fixture
def folder(tmp_path):
    """A small Llama as transformers saves it, weights in several files."""
    path = tmp_path / "tiny-llama"
    model = tiny("llama")
    model.generation_config.eos_token_id = [1, 60]
    model.config.eos_token_id = 50
    model.save_pretrained(path, max_shard_size="50KB")
    words_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def small_gguf(tmp_path):
    path = tmp_path / "small.gguf"
    write_gguf(path, tiny("llama"), "llama", tokenizer=byte_tokens)
    return path


def edit_config(folder, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_real_model_with_all_that_the_engine_asks(tmp_path):
    loaded = load(gguf_path(), cache_dir=str(tmp_path))
    assert loaded.hf_config.num_hidden_layers == 30
    assert loaded.max_model_len == 8192
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.tokenizer.convert_ids_to_tokens(sorted(loaded.eos_token_ids)) == ["<|endoftext|>", "<|im_end|>"]
    assert len(loaded.revision) == 32
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    for text in ("The year 2024, naïve 🦜", "<|im_start|>user\nhi<|im_end|>"):
        assert loaded.tokenizer.encode(text) == small_tokenizer().encode(text)
    assert loaded.tokenizer.chat_template == small_tokenizer().chat_template


def test_a_safetensors_folder(folder):
    """Sharded weights come back as saved; end tokens are the union of config, generation config and tokenizer."""
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = load(folder)
    assert torch.equal(logits(loaded.model), logits(tiny("llama")))
    assert loaded.eos_token_ids == {50, 1, 60}
    assert loaded.max_model_len == 256
    assert loaded.name == "tiny-llama"
    assert loaded.tokenizer.encode("w1 w3") == [4, 6]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_tied_embeddings_with_and_without_a_head_in_the_file(tmp_path, is_tied, has_head):
    """Tied: a head in the file is ignored or not there. Untied: it is needed, and its absence is an error."""
    from safetensors.torch import save_file

    model = tiny("llama", tie_word_embeddings=is_tied)
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    if not has_head:
        del state["lm_head.weight"]
    model.config.save_pretrained(tmp_path)
    words_tokenizer().save_pretrained(tmp_path)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    if is_tied or has_head:
        assert torch.equal(logits(load(tmp_path).model), logits(model))
    else:
        with pytest.raises(ModelError, match=r"lacks 1 weights, such as lm_head\.weight"):
            load(tmp_path)


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_both_spellings_of_a_scaled_rotation(folder, key):
    """Older configs say ``type`` in ``rope_scaling``; Llama 3's scaling with a factor of 4, not only the usual 8."""
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps(config | {"rope_theta": 10_000.0, "rope_scaling": {**scaling, key: "llama3"}}))
    rope = {**scaling, "rope_type": "llama3", "rope_theta": 10_000.0}
    assert torch.equal(logits(load(folder).model), logits(tiny("llama", rope_parameters=rope)))


def test_dtype(folder):
    """``auto`` is float32 on a CPU, whatever the config says."""
    edit_config(folder, dtype="bfloat16")
    assert load(folder).dtype == torch.float32
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16


def test_revision_is_that_of_the_content(folder, tmp_path):
    """A copy elsewhere has the same revision; another weight or config has another."""
    first = load(folder).revision
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert load(copy).revision == first
    edit_config(copy, rms_norm_eps=0.1)
    assert load(copy).revision != first


def test_a_large_file_is_sampled_over_its_whole_length(tmp_path, monkeypatch):
    """Beyond the size that is read whole, size and samples decide; both ends and the middle are among them."""
    from batchinfer.models import fingerprint as module

    monkeypatch.setattr(module, "WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 10)
    path = tmp_path / "x.gguf"
    content = bytearray(255 * 20 + 10)
    path.write_bytes(content)
    names = {fingerprint([path])}
    for at in (0, 20 * 100 + 5, len(content) - 1):
        changed = bytearray(content)
        changed[at] = 1
        path.write_bytes(changed)
        names.add(fingerprint([path]))
    path.write_bytes(content + b"\0")
    names.add(fingerprint([path]))
    assert len(names) == 5


def test_a_folder_with_one_gguf_file_is_that_file(small_gguf, tmp_path):
    loaded = load(small_gguf.parent, cache_dir=str(tmp_path / "cache"))
    assert loaded.name == "tiny"
    assert loaded.eos_token_ids == {95, 96}, "older files name one end token of several"


def test_a_gguf_tokenizer_is_converted_once(small_gguf, tmp_path, monkeypatch):
    """The second load reads the kept one, which encodes the same; a moved file finds it too."""
    cache = tmp_path / "cache"
    first = load(small_gguf, cache_dir=str(cache))
    monkeypatch.setattr(tokenizer, "_convert", None)
    moved = small_gguf.rename(tmp_path / "moved.gguf")
    second = load(moved, cache_dir=str(cache))
    for text in ("ab a1 b22 !?", "<|im_start|>a<|im_end|>"):
        assert first.tokenizer.encode(text) == second.tokenizer.encode(text)
    assert second.tokenizer.chat_template == "{{ messages[0].content }}"
    assert second.eos_token_ids == first.eos_token_ids
    assert [path.name for path in (cache / "tokenizers").iterdir()] == [
        path.name for path in (cache / "tokenizers").iterdir() if not path.name.startswith(".")
    ], "no draft is left behind"


def test_a_damaged_kept_tokenizer_is_converted_again(small_gguf, tmp_path):
    cache = tmp_path / "cache"
    expected = load(small_gguf, cache_dir=str(cache)).tokenizer.encode("ab ab")
    (kept,) = (cache / "tokenizers").iterdir()
    (kept / "tokenizer.json").write_text("{ half a fi")
    assert load(small_gguf, cache_dir=str(cache)).tokenizer.encode("ab ab") == expected
    assert json.loads((kept / "tokenizer.json").read_text())


def test_an_unwritable_cache_costs_time_only(small_gguf, tmp_path):
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    assert load(small_gguf, cache_dir=str(blocked / "cache")).tokenizer.encode("ab")


def test_digits_are_split_where_the_file_says_so(small_gguf, tmp_path):
    """llama.cpp's ``smollm`` rule: each digit is a word of its own, so a blank never joins one."""
    pre = load(small_gguf, cache_dir=str(tmp_path / "c")).tokenizer.backend_tokenizer.pre_tokenizer
    assert [word for word, _ in pre.pre_tokenize_str("ab 123")] == ["ab", "Ġ", "1", "2", "3"]


def test_truncation_of_a_tokenizer_is_switched_off(folder):
    """Some models carry their training's truncation: a long prompt must not be cut in silence."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    backend.save(str(folder / "tokenizer.json"))
    assert load(folder).tokenizer.backend_tokenizer.encode("w1 " * 30).ids == [4] * 30


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: [path.unlink() for path in f.glob("*.safetensors")], "has no .safetensors weights"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "has no tokenizer that can be read"),
        (lambda f: edit_config(f, model_type="of-tomorrow"), "cannot be loaded: .*of-tomorrow"),
        (lambda f: edit_config(f, num_hidden_layers=4), r"lacks \d+ weights, such as model\.layers\.3"),
        (lambda f: edit_config(f, intermediate_size=64), "cannot be loaded"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be loaded"),
        (lambda f: next(f.glob("*1-of*.safetensors")).write_bytes(b"short"), "cannot be loaded"),
    ],
    ids=["config", "weights", "tokenizer", "type", "layers", "shapes", "json", "shard"],
)
def test_a_spoilt_folder_is_a_model_error_in_one_line(folder, spoil, words):
    spoil(folder)
    with pytest.raises(ModelError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_not_read(folder):
    """Not even when they are harmless: the advice is to convert them."""
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, which may run code.*convert it"):
        load(folder)


def test_code_of_a_model_is_never_run(folder, tmp_path):
    """A config that names its own classes is refused, and the file it names is not executed."""
    mark = tmp_path / "was-run"
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w')\nclass OwnConfig: pass\nclass OwnModel: pass\n")
    edit_config(
        folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    )
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model": "/no/such/model"}, "no model at /no/such/model: give a .gguf file"),
        ({"model": __file__}, "is not a .gguf file"),
        ({"device": "cuda:7"}, "device cuda:7 is not there: 0 GPUs"),
        ({"device": "toaster"}, "device 'toaster' is none that is known"),
        ({"max_model_len": 257}, "max_model_len 257 is more than the 256 tokens"),
    ],
)
def test_settings_that_cannot_be(folder, config, words):
    with pytest.raises(ModelError, match=words):
        load_model(replace(EngineConfig(str(folder), device="cpu"), **config), "eager")


def test_a_shorter_context_may_be_asked_for(folder):
    assert load(folder, max_model_len=100).max_model_len == 100


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_rotation_that_depends_on_the_batch_ends_at_the_trained_length(kind):
    """Beyond it, one long row would turn the keys of all others: the same row must give the same answer in any batch."""
    from types import SimpleNamespace

    config = SimpleNamespace(
        max_position_embeddings=128, rope_parameters={"rope_type": kind, "original_max_position_embeddings": 32}
    )
    assert longest_sequence(config, None, "phi") == 32
    assert longest_sequence(config, 20, "phi") == 20
    with pytest.raises(ModelError, match=f"33 is more than the 32 tokens that phi can read .*{kind}"):
        longest_sequence(config, 33, "phi")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("owner/name@v1.0", True),
        ("owner/name@refs/pr/1", True),
        ("gpt2", False),
        ("./models/tiny", False),
        ("/models/tiny", False),
        ("a/b/c", False),
        ("owner/name; rm -rf", False),
        ("https://huggingface.co/a/b", False),
    ],
)
def test_the_form_of_a_hub_id(name, expected):
    assert hub.is_hub_id(name) is expected


def test_a_hub_model_is_fetched_without_code_and_pickles(tmp_path):
    calls = []

    def fetch(repo, **options):
        calls.append((repo, options["revision"], options["cache_dir"], options["allow_patterns"]))
        return str(tmp_path / "snapshots" / "abc123")

    assert hub.download("owner/name@v2", "/cache", fetch=fetch).name == "abc123"
    ((repo, revision, cache, patterns),) = calls
    assert (repo, revision, cache) == ("owner/name", "v2", "/cache")
    assert not {"*.py", "*.bin", "*.pt"} & set(patterns)
    assert {"*.json", "*.safetensors"} <= set(patterns)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("x"), "the hub cannot be reached: give a model file or folder"),
        (OSError("no route"), "the hub cannot be reached"),
        (
            RepositoryNotFoundError("x", response=httpx.Response(404, request=httpx.Request("GET", "http://hub"))),
            "no such model on the hub",
        ),
    ],
)
def test_a_hub_model_that_cannot_be_had(error, words):
    def fetch(_repo, **_options):
        raise error

    with pytest.raises(ModelError, match=words):
        hub.download("owner/name", None, fetch=fetch)


def test_a_fetched_model_has_the_commit_as_revision(folder, tmp_path, monkeypatch):
    snapshot = shutil.copytree(folder, tmp_path / "snapshots" / "0123abcd")
    monkeypatch.setattr("batchinfer.models.load.download", lambda _name, _cache: snapshot)
    loaded = load("owner/tiny")
    assert (loaded.revision, loaded.name) == ("0123abcd", "tiny")
