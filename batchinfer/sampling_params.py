"""How one row is sampled. Field names are those of vLLM and the OpenAI API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from batchinfer.chat_params import ChatParams, arguments_schema
from batchinfer.guided import GUIDES, MAX_CHOICES, MAX_GUIDE_LENGTH, Guide, schema_text, single_schema

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 1024
MAX_LOGPROBS = 100
"""Most alternatives a token: each is a struct in the result, for every token of the row."""
MAX_SAMPLES = 128
MAX_BEAMS = 64
MAX_TOKENS = 2**31 - 1
"""Far above any context; keeps sums of estimates within 64 bits."""


class SamplingParams(ChatParams):
    """Parameters of one row; immutable and validated (pydantic's ``ValidationError`` names the field at fault).

    ``temperature`` 0 is greedy and the default: a batch job should give the same data set twice. ``seed`` None means
    that a seed is derived from the job's seed and the row, so that an unseeded row is reproducible too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, description="most tokens to generate; clamped to the context")
    ] = 256
    min_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, description="tokens before EOS or a stop string may end the row")
    ] = 0
    temperature: Annotated[float, Field(ge=0, le=100, description="0 is greedy")] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1, description="nucleus mass; 1 is off")] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS, description="candidates kept; 0 or -1 is off")] = 0
    min_p: Annotated[float, Field(ge=0, le=1, description="least share of the best token's probability")] = 0.0
    typical_p: Annotated[float, Field(gt=0, le=1, description="locally typical mass; 1 is off")] = 1.0
    repetition_penalty: Annotated[
        float, Field(gt=0, le=10, description="divides the logits of tokens in the prompt or the answer; 1 is off")
    ] = 1.0
    presence_penalty: Annotated[
        float, Field(ge=-2, le=2, description="taken off the logits of tokens in the answer, once a token")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Field(ge=-2, le=2, description="taken off the logits of tokens in the answer, once an occurrence")
    ] = 0.0
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(description="added to a token id's logit")
    ] = {}  # noqa: RUF012 -- pydantic copies it
    bad_words: Annotated[tuple[str, ...], Field(description="words that the answer never completes")] = ()
    allowed_token_ids: Annotated[tuple[int, ...], Field(description="the only token ids there are; none is all")] = ()
    seed: Annotated[int | None, Field(ge=0, lt=2**63, description="seed of this row's random numbers")] = None
    stop: Annotated[tuple[str, ...], Field(description="strings that end the row; cut from the output")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(description="token ids that end the row")] = ()
    ignore_eos: Annotated[bool, Field(description="go on past the end-of-sequence token")] = False
    include_stop_str_in_output: Annotated[bool, Field(description="keep the stop string that ended the row")] = False
    skip_special_tokens: Annotated[bool, Field(description="leave special tokens out of the output's text")] = True
    echo: Annotated[bool, Field(description="begin the output with the prompt's text")] = False
    continue_final_message: Annotated[
        bool, Field(description="go on with the last message, the assistant's, instead of answering it")
    ] = False
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_LOGPROBS, description="log-probabilities of the answer's tokens and of so many others"),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_LOGPROBS, description="log-probabilities of the prompt's tokens and of so many others"),
    ] = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES, description="samples of each row")] = 1
    best_of: Annotated[
        int | None, Field(ge=1, le=MAX_SAMPLES, description="samples of which the likeliest n are kept")
    ] = None
    beam_width: Annotated[int, Field(ge=1, le=MAX_BEAMS, description="beams of a beam search; 1 is off")] = 1
    length_penalty: Annotated[
        float, Field(ge=-10, le=10, description="power of a beam's length that its score is divided by")
    ] = 1.0
    json_schema: Annotated[
        str | None, Field(description="JSON schema that the answer follows; may be OpenAI's response_format, too")
    ] = None
    guided_regex: Annotated[
        str | None,
        Field(min_length=1, max_length=MAX_GUIDE_LENGTH, description="expression that all of the answer matches"),
    ] = None
    guided_choice: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...], Field(description="texts of which the answer is one")
    ] = ()
    guided_grammar: Annotated[
        str | None, Field(min_length=1, max_length=MAX_GUIDE_LENGTH, description="Lark or GBNF grammar of the answer")
    ] = None
    retry_truncated: Annotated[
        bool, Field(description="give JSON that max_tokens cuts off as many tokens again, once")
    ] = False
    adapter: Annotated[
        str | None, Field(max_length=1024, description="folder of a LoRA adapter; an empty text is the model alone")
    ] = None

    @field_validator("adapter")
    @classmethod
    def _no_adapter_may_be_empty(cls, value: str | None) -> str | None:
        return value or None

    @model_validator(mode="before")
    @classmethod
    def _one_name_for_a_schema(cls, data: object) -> object:
        """``response_format`` is another name of ``json_schema``."""
        return single_schema(data)

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_is_json(cls, value: object) -> object:
        return schema_text(value)

    @model_validator(mode="before")
    @classmethod
    def _one_string_or_nothing(cls, data: object) -> object:
        """``stop`` and ``bad_words`` may be one string; null in place of a list or a table is an empty one."""
        if not isinstance(data, dict):
            return data
        changed: dict[str, Any] = {}
        for name in ("stop", "bad_words"):
            if isinstance(data.get(name), str):
                changed[name] = (data[name],)
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "guided_choice", "logit_bias"):
            if name in data and data[name] is None:
                changed[name] = {} if name == "logit_bias" else ()
        return {**data, **changed}

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_may_be_json_or_pairs(cls, value: object) -> object:
        """A table, its JSON text, or pairs of token id and bias (what Arrow makes of a map)."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise ValueError('logit_bias is not a JSON object such as {"50256": -100}') from None
        if isinstance(value, list | tuple) and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in value):
            return dict(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}")
        if any(not s or len(s) > MAX_STOP_LENGTH for s in self.stop):
            raise ValueError(f"a stop string must have 1 to {MAX_STOP_LENGTH} characters")
        if len(self.bad_words) > MAX_BAD_WORDS or any(not word.strip() for word in self.bad_words):
            raise ValueError(f"bad_words must be at most {MAX_BAD_WORDS} words, none of them empty")
        self._check_guides()
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) is below n ({self.n})")
        if self.beam_width > 1:
            self._check_beams()
        elif self.num_sequences > 1 and self.is_greedy:
            raise ValueError(
                f"{self.num_sequences} samples at temperature 0 are {self.num_sequences} times the same: "
                "raise temperature, or ask for one"
            )
        return self

    def _check_guides(self) -> None:
        given = [name for name in GUIDES if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: an answer follows one of them")
        if self.forces_call:
            self._check_forced_call(given)
        num_characters = sum(map(len, self.guided_choice))
        if len(self.guided_choice) > MAX_CHOICES or num_characters > MAX_GUIDE_LENGTH:
            raise ValueError(
                f"guided_choice takes at most {MAX_CHOICES} texts of {MAX_GUIDE_LENGTH} characters together"
            )

    def _check_forced_call(self, guides: list[str]) -> None:
        if guides:
            name = guides[0] + " (response_format)" * (guides[0] == "json_schema")
            raise ValueError(
                f"tool_choice {self.tool_choice} and {name} exclude each other: "
                "an answer is a tool call or follows a form of its own"
            )
        num_characters = sum(len(guide.text) for guide in self.argument_guides.values())
        if num_characters > MAX_GUIDE_LENGTH:
            raise ValueError(
                f"the tools' parameters have {num_characters} characters; at most {MAX_GUIDE_LENGTH} are read"
            )

    def _check_beams(self) -> None:
        """A search has no draws, and its scores are those of the model's own log-probabilities."""
        if self.n > self.beam_width:
            raise ValueError(f"n ({self.n}) is above beam_width ({self.beam_width}): a search keeps no more answers")
        defaults = type(self).model_fields
        excluded = ("temperature", "best_of", "min_tokens", "stop", "logprobs", "reasoning", "max_reasoning_tokens", "repetition_penalty", "presence_penalty",
                    "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", *GUIDES)  # fmt: skip
        given = [name for name in excluded if getattr(self, name) != defaults[name].default]
        given += ["tool_choice"] * self.forces_call
        if given:
            raise ValueError(f"beam search (beam_width {self.beam_width}) goes without {' and '.join(given)}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def guide(self) -> Guide | None:
        """What the answer must look like; None where it is free."""
        for name in GUIDES:
            if value := getattr(self, name):
                return Guide(name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        return None

    @property
    def argument_guides(self) -> dict[str, Guide]:
        """What the arguments of the tools look like of which the answer must call one, by the tools' names."""
        return {
            tool["function"]["name"]: Guide("json_schema", schema_text(arguments_schema(tool)) or "{}")
            for tool in self.callable_tools
        }

    def tools_fault(self) -> str | None:
        """Of the tools that the answer must call, one whose parameters no arguments can follow, and why; None if all can."""
        faults = ((name, guide.fault()) for name, guide in self.argument_guides.items())
        return next((f"tools: the parameters of {name}: {fault}" for name, fault in faults if fault is not None), None)

    @property
    def forbids_calls(self) -> bool:
        """Whether there are tools that the answer must not call; a search, which takes no rules, only does not hear of them."""
        return bool(self.tools) and self.tool_choice == "none" and self.beam_width == 1

    @property
    def num_sequences(self) -> int:
        """Answers that are drawn for the row."""
        return 1 if self.beam_width > 1 else self.best_of or self.n

    @property
    def has_samples(self) -> bool:
        """Whether there are several answers, or there were to choose from."""
        return self.n > 1 or self.num_sequences > 1

    @property
    def has_scores(self) -> bool:
        """Whether the log-probability of each generated token is wanted."""
        return self.logprobs is not None or self.num_sequences > self.n or self.beam_width > 1

    @property
    def has_penalty(self) -> bool:
        """Whether what stands in the prompt or the answer already changes the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the likeliest token is looked for; ``min_tokens`` does so for a while."""
        return (
            self.has_penalty
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or bool(self.bad_words)
            or bool(self.allowed_token_ids)
            or self.guide is not None
            or self.forces_call
            or self.forbids_calls
        )

    @property
    def needs_logits(self) -> bool:
        """Whether the row's next token depends on more of the logits than which of them is the largest.

        False for a plainly greedy row: there the index of the largest logit is all that sampling needs.
        """
        return not self.is_greedy or self.changes_logits or self.has_scores
