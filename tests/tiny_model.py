"""A random Llama of three small layers on disk, whose tokens are words: engines of it load in a fraction of a second."""

from pathlib import Path

from tests.engine.small_decoder import VOCAB, small_model

LONGEST = 512


def write_tiny_model(folder: Path) -> Path:
    """Config, weights and a tokenizer of ``w0`` to ``w95`` between blanks; 2 ends a sequence."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = small_model("llama", max_position_embeddings=LONGEST)
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder
