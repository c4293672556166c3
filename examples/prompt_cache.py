"""What happens to your prompt: ways to lose the cache without noticing, each explained by the engine itself.

    python examples/prompt_cache.py [model]

Every case runs a prompt, then asks about one that a program would take for the same. No model runs for an
explanation. At the end a beginning is warmed, pinned and marked with a cache point, and a report adds up what happened.
"""

import sys
from typing import Any

from foreword import CacheExplanation, Engine, RequestOutput

RULES = (
    "You answer customers of a bicycle shop. Be polite and brief, name the page of the manual that you quote, and "
    "never promise a date of delivery. If you do not know, say so and offer to ask a mechanic."
)
DOCUMENTS = [
    "Chains. A wet lubricant stays on the chain in rain and snow. Wipe it off after every ride in dry weather.",
    "Brakes. Pads are changed when less than a millimetre is left. Discs are cleaned with alcohol, never with oil.",
    "Tyres. The pressure is printed on the side. A heavier rider needs more, and so does a loaded bicycle.",
    "Lights. A dynamo needs no battery. The rear light goes on for four minutes after the bicycle has stopped.",
]
TURNS = [
    ("user", "Which oil should I use for a chain in winter?"),
    ("assistant", "A wet lubricant: it stays on the chain in rain and snow."),
    ("user", "And how often should I apply it?"),
    ("assistant", "After every ride in the rain, else every two hundred kilometres."),
    ("user", "Do I have to clean the chain before that?"),
]


def chat(system: str, *turns: tuple[str, str]) -> list[dict[str, Any]]:
    asked = turns or (("user", "Which oil do I need?"),)
    return [{"role": role, "content": content} for role, content in (("system", system), *asked)]


def tool(name: str, description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("search_manual", "Search the manual."), tool("look_up_order", "Look up an order by its number.")]

CUSTOMER = '{"name": "Ada", "bicycle": "touring", "since": 2019}'
REORDERED = '{"bicycle": "touring", "name": "Ada", "since": 2019}'


def as_given(tools: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tools": tools, "canonical_tools": False}  # by default tools are sorted, and their order loses nothing


def passages(*order: int) -> str:
    return "\n\n".join(["Use these passages:", *(DOCUMENTS[index] for index in order), RULES])


Case = tuple[str, Any, Any, dict[str, Any], dict[str, Any]]

# what changed, the prompt that ran, the one that comes next, and the options of each
CASES: list[Case] = [
    ("a clock", chat(f"It is 12:05 now. {RULES}"), chat(f"It is 12:47 now. {RULES}"), {}, {}),
    (
        "a request id",
        chat(f"Request 7f9c24e8-3b12-4c5a-9d01-5e2f8a7b6c3d.\n{RULES}"),
        chat(f"Request 1b4e28ba-2fa1-4d2b-883f-0016d3cca427.\n{RULES}"),
        {},
        {},
    ),
    ("the order of tools", chat(RULES), chat(RULES), as_given(TOOLS), as_given(TOOLS[::-1])),
    ("the order of JSON keys", chat(f"Customer: {CUSTOMER}\n{RULES}"), chat(f"Customer: {REORDERED}\n{RULES}"), {}, {}),
    ("the order of documents", chat(passages(0, 1, 2, 3)), chat(passages(0, 2, 1, 3)), {}, {}),
    ("white space", chat(f"Rules of the shop:\n{RULES}"), chat(f"Rules of the shop:\n\n{RULES}"), {}, {}),
    (
        "an earlier turn, edited",
        chat(RULES, *TURNS),
        chat(RULES, TURNS[0], ("assistant", TURNS[1][1].replace("in rain and snow", "in snow")), *TURNS[2:]),
        {},
        {},
    ),
    ("the oldest turns, dropped", chat(f"Be kind. {RULES}", *TURNS), chat(f"Be kind. {RULES}", *TURNS[2:]), {}, {}),
    ("the salt", chat(f"Tenants. {RULES}"), chat(f"Tenants. {RULES}"), {"cache_salt": "a"}, {"cache_salt": "b"}),
]


def main(model: str = "smollm2-135m") -> None:
    with Engine(model, kv_cache_memory="256MiB") as engine:
        rows = []
        for name, before, after, options, changed in CASES:
            engine.chat(before, max_tokens=1, **options)
            rows.append(show(name, engine.explain(after, **changed)))
        rows.append(show("the tokens of its own answer", respelled(engine)))
        print("\n| what changed | where | position | cause | lost tokens |\n| --- | --- | ---: | --- | ---: |")
        print("\n".join(rows))

        print("\nA beginning that stays, whatever else runs:")
        system = [{"role": "system", "content": f"Open daily. {RULES}"}]
        print("  ", engine.warm(system, pin=True, ttl="1h"))
        reuse(engine.chat(chat(f"Open daily. {RULES}"), max_tokens=1))
        print("   unpinned:", engine.unpin(system))
        point = {"type": "text", "text": f"Closed on Sundays. {RULES}", "cache_control": {"type": "ephemeral"}}
        engine.chat([{"role": "system", "content": [point]}, {"role": "user", "content": "When?"}], max_tokens=1)
        print("   blocks pinned by a cache point:", engine.stats().blocks_pinned)

        print("\nOne answer, three continuations:")
        answer = engine.chat(chat(f"Be inventive. {RULES}"), max_tokens=12, ignore_eos=True, seed=1)
        for branch in engine.fork(answer, 3, max_tokens=8, seed=2):
            reuse(branch)

        print(f"\n{engine.cache_report()}")


def respelled(engine: Engine) -> CacheExplanation:
    """An answer that stands in the cache letter by letter; as text it comes back in the tokenizer's own tokens.

    A model that samples spells like that now and then. Answers that go back as messages are put back in their tokens.
    """
    asked = chat(f"Be exact. {RULES}", ("user", "What do I need?"))
    answer = "lubricant for chains"
    prompt = engine.chat(asked, max_tokens=1).prompt_token_ids
    engine.generate(prompt + [token for letter in answer for token in engine.encode(letter)], max_tokens=1)
    return engine.explain([*asked, {"role": "assistant", "content": answer}, {"role": "user", "content": "And tyres?"}])


def show(name: str, found: CacheExplanation) -> str:
    print(f"\n{name}\n{found}")
    lost = f"{found.lost_tokens} of {found.prompt_tokens}"
    return f"| {name} | {found.piece} | {found.position} | `{found.cause}` | {lost} |"


def reuse(output: RequestOutput) -> None:
    print(f"   {output.usage.cached_tokens} of {output.usage.prompt_tokens} prompt tokens reused")


if __name__ == "__main__":
    main(*sys.argv[1:])
