"""Random LoRA adapters as peft writes them, and the models that peft merges them into."""

import copy
import warnings

import torch

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_MODULES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def save_adapter(model, folder, *, seed=0, rank=6, alpha=9, rslora=False, modules=MODULES):
    """Write an adapter whose A and B are random; return peft's merged model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, use_rslora=rslora, target_modules=list(modules), init_lora_weights=False,
        lora_dropout=0.1, task_type="CAUSAL_LM",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's remarks on how a model was made
        adapted = get_peft_model(copy.deepcopy(model), config).eval()
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.2)
        adapted.save_pretrained(folder)
        return adapted.merge_and_unload()
