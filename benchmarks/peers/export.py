"""Write the model as the folder of safetensors that peers and their converters read.

    python -m benchmarks.peers.export model.gguf FOLDER

The weights are those that our engine runs in bfloat16, to the bit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Load and save."""
    from batchinfer.engine.config import EngineConfig
    from batchinfer.models.load import load_model

    source, folder = sys.argv[1], Path(sys.argv[2])
    loaded = load_model(EngineConfig(source, dtype="bfloat16"), "sdpa")
    loaded.model.config.dtype = "bfloat16"
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    _add_older_names(folder / "config.json")


def _add_older_names(path: Path) -> None:
    """Peers bring transformers of other ages; before 5 these two had other names, and defaults that are wrong here."""
    config = json.loads(path.read_text())
    config |= {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
