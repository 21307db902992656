"""A job whose answers are JSON that follows a schema, from the command to the values.

python examples/json_answers.py examples/prompts.parquet MODEL.gguf answers.parquet
"""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"type": "string", "maxLength": 30},
        "language": {"enum": ["English", "German", "other"]},
        "difficulty": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["topic", "language", "difficulty"],
    "additionalProperties": False,
}


def main(prompts: str, model: str, output: str) -> None:
    """Run the job, then read its answers."""
    schema = Path(output).with_suffix(".schema.json")
    schema.write_text(json.dumps(SCHEMA, indent=2))
    command = ["batchinfer", "run", prompts, "--model", model, "--output", output, "--limit", "6"]
    command += ["--system", "Describe the user's request as JSON.", "--json-schema", str(schema)]
    subprocess.run([*command, "--max-tokens", "64", "--retry-truncated"], check=True)  # noqa: S603 -- built above
    results = pq.read_table(output, columns=["row_index", "parsed", "error"]).to_pylist()
    answers = [{"row_index": row["row_index"], **json.loads(row["parsed"])} for row in results if row["parsed"]]
    print(json.dumps(answers, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:4])
