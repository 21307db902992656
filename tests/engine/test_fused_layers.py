"""Each family's fused layers against its own unpatched model: eager attention, one sequence at a time."""

import copy

import pytest
import torch

from batchinfer.models.fused.families import FAMILIES
from tests.engine.small_decoder import logits_of, make_forward, small_model


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_layers_equal_the_unpatched_model(family):
    """Chunked prefill, a neighbour and decode steps give the logits of the model that transformers built."""
    reference = small_model(family)
    forward, attention = make_forward(copy.deepcopy(reference), torch.float32)
    assert forward.name == "fused"
    logits, sequences = logits_of(forward, attention)
    for ours, sequence in zip(logits, sequences, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([sequence])).logits[0]
        assert expected.std() > 0.1, "the model must say something"
        assert (ours - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "olmo2"])
def test_bfloat16_is_no_further_from_the_truth_than_transformers(family):
    """Both round; ours keeps the residual in float32, so it may only be nearer to the float32 model."""
    reference = small_model(family)
    forward, attention = make_forward(copy.deepcopy(reference), torch.bfloat16)
    logits, sequences = logits_of(forward, attention)
    rounded = copy.deepcopy(reference).to(torch.bfloat16)
    for ours, sequence in zip(logits, sequences, strict=True):
        with torch.inference_mode():
            truth = reference(torch.tensor([sequence])).logits[0]
            theirs = rounded(torch.tensor([sequence])).logits[0].float()
        assert (ours - truth).square().mean() < 1.2 * (theirs - truth).square().mean()


def test_other_families_run_in_transformers_modules():
    """A decoder of another shape, and one of ours with an activation that the kernels do not have."""
    for model in (small_model("starcoder2"), small_model("llama", hidden_act="relu")):
        assert make_forward(model, torch.float32)[0].name == "transformers"


def test_an_owned_model_gives_its_weights_away():
    """Nothing but the embeddings stays in the model, so that the weights are in memory once."""
    model = small_model("qwen2")
    kept, attention = make_forward(copy.deepcopy(model), torch.float32)
    taken, other = make_forward(model, torch.float32, owns_model=True)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(module.weight.numel() for module in linears) == 0
    for ours, expected in zip(logits_of(taken, other)[0], logits_of(kept, attention)[0], strict=True):
        assert torch.equal(ours, expected)
