"""Batch extraction with LangChain: sentences become validated Pydantic objects, all in one batch of the engine.

    python examples/extraction.py [model]

The grammar of the class's JSON schema decides which tokens are possible, so every answer is an object of the class;
whether it is a true one is up to the model. The instruction and its examples are computed once for all sentences, and
each forward pass writes one token of every answer.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from pydantic import BaseModel, Field

from foreword import Engine
from langchain_foreword import ChatForeword


class Building(BaseModel):
    """What a sentence says about a building."""

    name: str = Field(max_length=40)
    city: str = Field(max_length=40)
    year: int = Field(ge=0, le=2100)


INSTRUCTION = "You read a sentence about a building and write down its name, its city and the year as JSON."

# A small model learns more from examples than from an instruction.
EXAMPLES = [
    HumanMessage("The Colosseum in Rome, opened in the year 80, held 50,000 spectators."),
    AIMessage('{"name": "Colosseum", "city": "Rome", "year": 80}'),
    HumanMessage("Since 1931 the Empire State Building has been one of the sights of New York."),
    AIMessage('{"name": "Empire State Building", "city": "New York", "year": 1931}'),
    HumanMessage("London's Tower Bridge was opened in 1894."),
    AIMessage('{"name": "Tower Bridge", "city": "London", "year": 1894}'),
]

SENTENCES = [
    "The Eiffel Tower in Paris was built for the World's Fair of 1889.",
    "In 1998 the Petronas Towers in Kuala Lumpur became the tallest buildings of the world.",
    "In 1973 Queen Elizabeth II opened the Sydney Opera House in Sydney.",
    "The Golden Gate Bridge has stood at the entrance of the bay of San Francisco since 1937.",
    "The Atomium in Brussels, built in 1958, shows nine atoms of iron.",
    "The CN Tower in Toronto is 553 metres high and was completed in 1976.",
    "Seattle built the Space Needle for an exhibition in 1962.",
    "The Brandenburg Gate in Berlin was finished in 1791.",
]


def main(model: str = "smollm2-135m") -> None:
    # The default model has 135 M parameters and makes mistakes; a larger one, given by name, makes fewer.
    llm = ChatForeword(model=model, temperature=0, max_tokens=64)
    prompt = ChatPromptTemplate.from_messages([("system", INSTRUCTION), *EXAMPLES, ("human", "{sentence}")])
    chain = prompt | llm.with_structured_output(Building, include_raw=True)  # the raw messages carry the usage
    inputs = [{"sentence": sentence} for sentence in SENTENCES]
    engine = llm.get_engine()

    together = measured(engine, "one batch", lambda: chain.batch(inputs))
    engine.reset_prefix_cache()  # so that both ways begin with nothing computed
    one_by_one = measured(engine, "one by one", lambda: [chain.invoke(each) for each in inputs])
    print(f"the same objects: {[each['parsed'] for each in together] == [each['parsed'] for each in one_by_one]}\n")

    print(f"{'name':24}{'city':16}{'year':>6}{'prompt tokens':>16}{'reused':>9}")
    for found in together:
        building, usage = found["parsed"], found["raw"].usage_metadata
        reused = usage["input_token_details"]["cache_read"]
        print(f"{building.name:24}{building.city:16}{building.year:6}{usage['input_tokens']:16}{reused:9}")


def measured(engine: Engine, name: str, run: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of `run`; prints how many passes through the model it took."""
    before, start = engine.stats(), time.monotonic()
    results = run()
    after, seconds = engine.stats(), time.monotonic() - start
    reused, passes = after.tokens_reused - before.tokens_reused, after.steps - before.steps
    print(f"{name:11} {reused:5} prompt tokens reused, {passes:4} forward passes, {seconds:4.1f} s")
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
