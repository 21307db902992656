"""Write examples/prompts.parquet: 64 varied prompts, two of them bad on purpose.

A row uses its ``messages`` where they are not null, else its ``prompt``. Run: python examples/make_prompts.py
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ASSISTANT = "You are a helpful assistant. Answer in one short sentence."
REVIEWER = "You label customer reviews. Answer with one word: positive, negative or mixed."
TUTOR = "You are a patient tutor who explains with everyday examples."

QUESTIONS = [
    "What is the capital of France?",
    "What is the largest planet in our solar system?",
    "How many days are there in a leap year?",
    "Who wrote the play Romeo and Juliet?",
    "What is the chemical symbol for gold?",
    "Which ocean lies between Africa and Australia?",
    "What do bees make from nectar?",
    "What is the boiling point of water at sea level in Celsius?",
    "Which language is spoken in Brazil?",
    "What is the square root of 81?",
    "Name the three primary colours.",
    "What gas do plants take in from the air?",
    "Which planet is known as the red planet?",
    "What is the opposite of 'ancient'?",
    "Who painted the Mona Lisa?",
    "What is the currency of Japan?",
]
REVIEWS = [
    "The tent kept us dry through two nights of rain. Great buy.",
    "Arrived broken, and the seller never answered my three messages.",
    "Lovely sound, but the battery is flat after two hours.",
    "My daughter has not put this book down since her birthday.",
    "The shoes fell apart within a month. I want my money back.",
    "Good coffee, slow service, fair price.",
    "Exactly as described and delivered a day early!",
    "The app crashes every time I open the map.",
]
LESSONS = [
    "Explain gravity to a six-year-old.",
    "Explain what a database index does.",
    "Explain why the sky is blue.",
    "Explain compound interest.",
    "Explain how vaccines work.",
    "Explain what recursion is.",
    "Explain the difference between weather and climate.",
    "Explain why bread rises.",
]
CONTINUATIONS = [
    "Once upon a time, in a village at the foot of a mountain,",
    "The three most important things to pack for a hike are",
    "Dear neighbours, I am writing to invite you all to",
    "To make a simple tomato sauce, first",
    "The history of the bicycle begins in",
    "In 1969, two astronauts walked on the Moon. When they returned,",
    "A good night's sleep matters because",
    "def fibonacci(n: int) -> int:\n",
    "The old lighthouse had not been lit for years, until",
    "Here is a haiku about autumn rain:\n",
    "The main difference between a frog and a toad is",
    "Ingredients for pancakes: flour, eggs,",
]
TASKS = [
    "Translate to French: Good morning, my friends.",
    "Translate to Spanish: Where is the train station?",
    "Translate to German: I would like a cup of coffee, please.",
    "Write a polite email that declines an invitation to a wedding.",
    "Write a title for a blog post about growing tomatoes on a balcony.",
    "List five fruits that are red.",
    "Summarise in one sentence: The meeting moved from Tuesday to Thursday because the room was taken, and the agenda stays the same.",
    "Correct the grammar: She don't likes apples.",
    "Write a Python one-liner that reverses a string.",
    "Give three synonyms for 'happy'.",
    "What should I check before I buy a used car?",
    "Write a two-line poem about the sea.",
]
CONVERSATIONS = [
    [("user", "My name is Amina."), ("assistant", "Nice to meet you, Amina!"), ("user", "What is my name?")],
    [("user", "Give me a number between 1 and 10."), ("assistant", "7"), ("user", "Double it.")],
    [("user", "I am planning a trip to Rome."), ("assistant", "Wonderful! When do you travel?"), ("user", "In May. What should I pack?")],
    [("user", "What is a noun?"), ("assistant", "A word that names a person, place or thing."), ("user", "Give two examples.")],
    [("user", "¿Hablas español?"), ("assistant", "Sí, un poco."), ("user", "¿Cuál es la capital de España?")],
    [("user", "Is 17 a prime number? 🤔"), ("assistant", "Yes."), ("user", "And 21?")],
]  # fmt: skip


def chat(system: str, user: str) -> list[dict[str, str]]:
    """A conversation of one system and one user message."""
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def over_long() -> str:
    """A server log of some 30,000 tokens: more than the small model's context of 8,192."""
    lines = (
        f"2026-03-{day:02d} {hour:02d}:00 host-{day * hour % 7} served {day * 977 + hour} requests"
        for day in range(1, 29)
        for hour in range(24)
    )
    return "Summarise this log:\n" + "\n".join(lines)  # fmt: skip


def rows() -> list[dict[str, object]]:
    """All rows in order, with the bad ones in between, as they come in real files."""
    found: list[dict[str, object]] = []
    found += [{"topic": "question", "prompt": None, "messages": chat(ASSISTANT, text)} for text in QUESTIONS]
    found += [{"topic": "review", "prompt": None, "messages": chat(REVIEWER, text)} for text in REVIEWS]
    found.append({"topic": "over-long", "prompt": over_long(), "messages": None})
    found += [{"topic": "lesson", "prompt": None, "messages": chat(TUTOR, text)} for text in LESSONS]
    found += [{"topic": "continuation", "prompt": text, "messages": None} for text in CONTINUATIONS]
    found.append({"topic": "empty", "prompt": "", "messages": None})
    found += [{"topic": "task", "prompt": None, "messages": [{"role": "user", "content": text}]} for text in TASKS]
    found += [
        {"topic": "conversation", "prompt": None, "messages": [{"role": r, "content": c} for r, c in turns]}
        for turns in CONVERSATIONS
    ]
    return [{"id": f"row-{i:03d}", **row} for i, row in enumerate(found)]


def main() -> None:
    """Write the file beside this script."""
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema(
        [("id", pa.string()), ("topic", pa.string()), ("prompt", pa.string()), ("messages", pa.list_(message))]
    )
    path = Path(__file__).with_name("prompts.parquet")
    pq.write_table(pa.Table.from_pylist(rows(), schema=schema), path, compression="zstd")
    print(f"{path}: {len(rows())} rows")


if __name__ == "__main__":
    main()
