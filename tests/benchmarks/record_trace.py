"""Record a cache trace of agents and RAG on the default model, with a burst of prompts that never return.

    python -m tests.benchmarks.record_trace tests/unit/kv/agent_rag_scan.jsonl.gz

The parts are those of the examples: the agent's system prompt, tools and questions, and the retriever, passages and
prompt of the RAG chain. Several users talk to the agent, each in sessions whose prompts carry all that was said;
between their turns come questions over passages, popular ones more often. In the middle a batch job reads many texts
once, each with a few words behind it, while the users go on now and then. The model really answers: its words are in
the next turn.
"""

from __future__ import annotations

import argparse
import gzip
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foreword import Engine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

NAMES = ["Bill of Rights", "Gettysburg Address", "Zen of Python"]
ASKED = [
    "What is {a} times {b}?",
    "How much is {a} plus {b}?",
    "Who wrote the {name}?",
    "Where was the {name} written?",
    "When was the {name} written?",
]
RAG_QUESTIONS = [
    "In which amendment is the right to a speedy and public trial?",
    "What is said about the trial by jury?",
    "Which president delivered the Gettysburg Address?",
    "In which year was the Gettysburg Address delivered?",
    "What does the Second Amendment say about arms?",
    "What is better than implicit?",
    "When may soldiers be quartered in a house?",
    "What are the unreasonable searches?",
    "What is said about excessive bail?",
    "Which powers are reserved to the states?",
    "What should errors never do?",
    "What shall not perish from the earth?",
    "What is said of the freedom of speech?",
    "What does the nation owe to the dead?",
    "How many obvious ways should there be to do it?",
    "Who may be held to answer for a capital crime?",
]


class Agents:
    """Users of one agent: each call of ``turn`` is one user's next question, with its tool call."""

    def __init__(self, engine: Engine, rng: random.Random, users: int) -> None:
        import agent
        from langchain_core.utils.function_calling import convert_to_openai_tool

        self._engine, self._rng = engine, rng
        self._tools = [convert_to_openai_tool(tool) for tool in (agent.calculate, agent.look_up)]
        self._run = {tool.name: tool for tool in (agent.calculate, agent.look_up)}
        self._system = {"role": "system", "content": agent.SYSTEM}
        self._sessions: list[list[dict[str, Any]]] = [[self._system] for _ in range(users)]

    def turn(self) -> None:
        user = self._rng.randrange(len(self._sessions))
        if len(self._sessions[user]) > 1 + 4 * self._rng.randint(2, 5):
            self._sessions[user] = [self._system]
        messages = self._sessions[user]
        question = self._rng.choice(ASKED).format(
            a=self._rng.randint(2, 99), b=self._rng.randint(2, 2000), name=self._rng.choice(NAMES)
        )
        messages.append({"role": "user", "content": question})
        output = self._chat(messages, "any", 128)
        messages.append(output.message.as_dict())
        for call in output.message.tool_calls:
            result = self._run[call.name].invoke(call.parse())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        messages.append(self._chat(messages, "none", 24).message.as_dict())

    def _chat(self, messages: list[dict[str, Any]], choice: str, tokens: int) -> Any:
        options: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": tokens}
        return self._engine.chat(messages, tools=self._tools, temperature=0, **options)


def questions(engine: Engine, rng: random.Random) -> Iterator[None]:
    """Each step answers a question over retrieved passages; the first ones of the list come most often."""
    import rag_chain

    retriever = rag_chain.KeywordRetriever(passages=rag_chain.read_passages())
    weights = [1 / (1 + place) for place in range(len(RAG_QUESTIONS))]
    while True:
        [question] = rng.choices(RAG_QUESTIONS, weights)
        context = rag_chain.context(retriever.invoke(question))
        system = f"Answer in one short sentence, using only these passages.\n\n{context}"
        turns = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        engine.chat(turns, temperature=0, max_tokens=24)
        yield


def texts(rng: random.Random) -> Iterator[str]:
    """Pieces of this project's source, each once."""
    pieces = []
    for path in sorted((ROOT / "src" / "foreword").rglob("*.py")):
        source = path.read_text()
        pieces += [source[start : start + 1600] for start in range(0, len(source) - 1600, 1600)]
    rng.shuffle(pieces)
    yield from pieces


def run(engine: Engine, rounds: int, scanned: int) -> None:
    """``rounds`` turns of agents and of RAG, mixed; half way ``scanned`` texts that are read once."""
    rng = random.Random(7)
    agents, answered = Agents(engine, rng, users=6), questions(engine, rng)

    def serve() -> None:
        agents.turn() if rng.random() < 0.5 else next(answered)

    for number in range(rounds):
        serve()
        if number == rounds // 2:
            for text, _ in zip(texts(rng), range(scanned), strict=False):
                messages = [{"role": "user", "content": f"{text}\n\nName the topic of this text in three words."}]
                engine.chat(messages, temperature=0, max_tokens=6)
                if rng.random() < 0.1:
                    serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the compressed trace to write")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--scanned", type=int, default=60)
    parser.add_argument("--kv-cache-memory", default="192MiB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        with Engine("smollm2-135m", kv_cache_memory=options.kv_cache_memory, cache_trace=path) as engine:
            run(engine, options.rounds, options.scanned)
            stats = engine.stats()
        content = path.read_bytes()
        options.target.write_bytes(gzip.compress(content, 9, mtime=0))
    requests = content.count(b"\n") - 1
    print(f"{requests} requests, {len(content):,} bytes, compressed {options.target.stat().st_size:,}")
    print(f"{stats.tokens_reused / stats.prompt_tokens:.1%} of {stats.prompt_tokens:,} prompt tokens were reused")


if __name__ == "__main__":
    main()
