"""Folders that look like a LoRA adapter's."""

import json

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def make_adapter(folder, weights=b"weights", **config):
    """One with a good configuration and any bytes as weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder
