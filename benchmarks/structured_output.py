"""Structured output, measured: two grammar libraries side by side, and what guided rows cost a batch.

    python -m benchmarks.structured_output libraries --model MODEL.gguf --suite JSON-Schema-Test-Suite/tests/draft2020-12
    python -m benchmarks.structured_output batch --model MODEL.gguf

``libraries`` needs xgrammar beside llguidance. Times of ``batch`` are CPU time of the process, all threads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer.engine.config import EngineConfig
from batchinfer.engine.engine import Engine
from batchinfer.guided import Guide
from batchinfer.sampling_params import SamplingParams
from batchinfer.types import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

REMOTE = ("refRemote", "vocabulary")
"""Files of the suite that need other documents."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        **{f"field_{i}": {"type": "string", "maxLength": 40} for i in range(20)},
        "kind": {"enum": [f"kind {i}" for i in range(200)]},
        "items": {"type": "array", "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "when": {"type": "string", "format": "date-time"},
                "score": {"type": "number", "minimum": 0, "maximum": 1},
            },
            "required": ["id", "when", "score"],
        }},
    },
    "required": ["kind", "items"],
}  # fmt: skip
ANSWERS = (
    ("2 fields", PERSON, {"name": "John Smith of Longnm", "age": 123}),
    ("22 fields", ORDER, {
        "field_1": "some words go here", "field_7": "more words", "kind": "kind 17",
        "items": [{"id": "ABC-1234", "when": "2026-01-02T03:04:05Z", "score": 0.25}] * 4,
    }),
    ("any object", {"type": "object"}, {"a": [1, 2, {"b": "text of some words here"}], "c": None}),
)  # fmt: skip


class LLGuidance:
    """As the engine uses it."""

    name = "llguidance"

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Iterable[int]) -> None:
        from llguidance import LLTokenizer

        self.vocabulary = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos))
        self.mask = bytearray((vocab_size + 31) // 32 * 4)

    def compile(self, schema: object) -> Any:
        """A schema ready for rows; raises if the library refuses it."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self.vocabulary, Guide("json_schema", json.dumps(schema)).grammar(), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def accepts(self, compiled: Any, text: str) -> bool:
        """Whether a text is a whole answer."""
        matcher, tokens = compiled.deep_copy(), self.vocabulary.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], bool]]:
        """What computes the mask of a new row, and what takes a token."""
        matcher = compiled.deep_copy()
        return matcher.compute_bitmask, matcher.consume_token


class XGrammar:
    """With the same separators and no strict mode, which would forbid more than a schema says."""

    name = "xgrammar"

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Iterable[int]) -> None:
        import xgrammar

        self.library = xgrammar
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(eos))
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.mask = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, schema: object) -> Any:
        """A schema ready for rows; raises if the library refuses it."""
        return self.compiler.compile_json_schema(
            json.dumps(schema), any_whitespace=False, separators=(", ", ": "), strict_mode=False
        )

    def accepts(self, compiled: Any, text: str) -> bool:
        """Whether a text is a whole answer."""
        matcher = self.library.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_terminated()

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], bool]]:
        """What computes the mask of a new row, and what takes a token."""
        matcher = self.library.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(self.mask, 0), matcher.accept_token


def suite(library: Any, folder: Path) -> None:
    """Schemas taken and refused; of those taken, instances judged as the suite does."""
    counts = dict.fromkeys(
        ("taken", "refused", "valid accepted", "valid refused", "invalid accepted", "invalid refused"), 0
    )
    seconds = []
    for file in sorted(folder.glob("*.json")):
        for group in [] if file.stem in REMOTE else json.loads(file.read_text()):
            started = time.perf_counter()
            try:
                compiled = library.compile(group["schema"])
            except Exception:  # noqa: BLE001 -- whatever it is, the schema is refused
                counts["refused"] += 1
                continue
            seconds.append(time.perf_counter() - started)
            counts["taken"] += 1
            for case in group["tests"]:
                verdict = library.accepts(compiled, json.dumps(case["data"], ensure_ascii=False))
                counts[f"{'valid' if case['valid'] else 'invalid'} {'accepted' if verdict else 'refused'}"] += 1
    seconds.sort()
    quantiles = " ".join(f"p{q} {1e3 * seconds[len(seconds) * q // 100]:.2f}" for q in (50, 95, 99))
    print(library.name, counts, "compile ms:", quantiles)


def masks(library: Any, tokenizer: Any) -> None:
    """Time of a mask, token after token, for a first and a second row of one schema."""
    for label, schema, answer in ANSWERS:
        started = time.perf_counter()
        compiled = library.compile(schema)
        compile_ms = 1e3 * (time.perf_counter() - started)
        for row in ("first", "second"):
            mask, accept = library.start(compiled)
            spent = []
            for token in tokenizer.encode(json.dumps(answer), add_special_tokens=False):
                started = time.perf_counter()
                mask()
                spent.append(1e6 * (time.perf_counter() - started))
                assert accept(token)
            spent.sort()
            print(
                f"{library.name}, {label}, {row} row: compiled in {compile_ms:.2f} ms; mask us: "
                f"mean {sum(spent) / len(spent):.1f}, p50 {spent[len(spent) // 2]:.1f}, max {spent[-1]:.0f}"
            )


def batch(model: str, num_rows: int, max_tokens: int) -> None:
    """CPU time a generated token of batches with and without guided rows, in turn, in one process."""
    plain = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    guided = SamplingParams(max_tokens=max_tokens, json_schema=json.dumps(ORDER), temperature=1.0)
    with Engine(model, max_num_seqs=num_rows, max_model_len=512, enable_prefix_caching=False) as engine:

        def run(label: str, share: float, other: SamplingParams) -> None:
            rows = [
                Request(
                    str(i), other.model_copy(update={"seed": i}) if i < share * num_rows else plain, f"Row {i}: tell"
                )
                for i in range(num_rows)
            ]
            before, started = engine.core.stats(), time.process_time()
            done = list(engine.generate(rows))
            cpu, after = time.process_time() - started, engine.core.stats()
            computed = sum(c.usage.prompt_tokens + c.usage.completion_tokens for c in done)
            print(
                f"{label}: {cpu:6.2f} s CPU, {1e3 * cpu / computed:.3f} ms a token, "
                f"{after.forced_tokens - before.forced_tokens} of {sum(c.usage.completion_tokens for c in done)} tokens "
                f"forced, sampling {(after.sample_ns - before.sample_ns) / 1e9:.3f} s, {after.steps - before.steps} steps",
                flush=True,
            )

        sampled = plain.model_copy(update={"temperature": 1.0})
        greedy = guided.model_copy(update={"temperature": 0.0})
        run("warm-up          ", 0.1, guided)
        for _ in range(3):
            run("all plain        ", 0.0, plain)
            run("10 % sampled     ", 0.1, sampled)
            run("10 % guided      ", 0.1, greedy)
            run("10 % both        ", 0.1, guided)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("libraries", "batch"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    if given.what == "batch":
        batch(given.model, given.rows, given.max_tokens)
        return
    from batchinfer.engine.attention import ATTENTION_NAME, register_attention
    from batchinfer.models.load import load_model

    register_attention()
    loaded = load_model(EngineConfig(model=given.model), ATTENTION_NAME)
    for kind in (LLGuidance, XGrammar):
        started = time.process_time()
        library = kind(loaded.tokenizer, loaded.hf_config.vocab_size, loaded.eos_token_ids)
        print(f"{library.name}: vocabulary read in {time.process_time() - started:.2f} s CPU")
        if given.suite:
            suite(library, given.suite)
        masks(library, loaded.tokenizer)


if __name__ == "__main__":
    main()
