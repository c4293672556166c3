"""What happens to your prompt: eight ways to lose the cache without noticing, each explained by the engine itself.

    python examples/prompt_cache.py [model]

Every case runs a prompt, then asks about one that a program would take for the same. No model runs for an
explanation. At the end a beginning is warmed, pinned and marked with a cache point, and a report adds up what happened.
"""

import sys
from typing import Any

from foreword import CacheExplanation, Engine, RequestOutput

RULES = (
    "You answer customers of a bicycle shop. Be polite and brief, name the page of the manual that you quote, and never "
    "promise a date of delivery. If you do not know, say so and offer to ask a mechanic."
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

# what it is, the prompt that ran, the one that comes next, and options of both
CASES: list[tuple[str, Any, Any, dict[str, Any], dict[str, Any]]] = [
    (
        "a clock in the system prompt",
        chat(f"It is 12:05 on November 30, 2026. {RULES}"),
        chat(f"It is 12:47 on November 30, 2026. {RULES}"),
        {},
        {},
    ),
    (
        "a request id before the rules",
        chat(f"Request 7f9c24e8-3b12-4c5a-9d01-5e2f8a7b6c3d.\n{RULES}"),
        chat(f"Request 1b4e28ba-2fa1-4d2b-883f-0016d3cca427.\n{RULES}"),
        {},
        {},
    ),
    (
        "tools in another order",  # canonical_tools=True, the default, sorts them: then nothing is lost
        chat(RULES),
        chat(RULES),
        {"tools": TOOLS, "canonical_tools": False},
        {"tools": TOOLS[::-1], "canonical_tools": False},
    ),
    (
        "documents in another order",
        chat("Use these passages:\n\n" + "\n\n".join(DOCUMENTS) + f"\n\n{RULES}"),
        chat("Use these passages:\n\n" + "\n\n".join(DOCUMENTS[i] for i in (0, 2, 1, 3)) + f"\n\n{RULES}"),
        {},
        {},
    ),
    ("white space", chat(f"Rules of the shop:\n{RULES}"), chat(f"Rules of the shop:\n\n{RULES}"), {}, {}),
    (
        "an edited turn",
        chat(RULES, *TURNS),
        chat(RULES, TURNS[0], ("assistant", TURNS[1][1].replace("in rain and snow", "in snow")), *TURNS[2:]),
        {},
        {},
    ),
    ("the oldest turns dropped", chat(f"Speak English. {RULES}", *TURNS), chat(f"Speak English. {RULES}", *TURNS[2:]), {}, {}),
    ("another salt", chat(f"Tenants apart. {RULES}"), chat(f"Tenants apart. {RULES}"), {"cache_salt": "a"}, {"cache_salt": "b"}),
]


def main(model: str = "smollm2-135m") -> None:
    with Engine(model, kv_cache_memory="256MiB") as engine:
        rows = []
        for name, before, after, options, changed in CASES:
            engine.chat(before, max_tokens=1, **options)
            rows.append(show(name, engine.explain(after, **changed)))
        rows.append(show("its own answer in other tokens", respelled(engine)))
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
    """An answer whose tokens are not those that a tokenizer would choose for its text."""
    asked = chat(f"Copy. {RULES}", ("user", "Say it."))
    spelled = [token for letter in "lubricant for chains" for token in engine.encode(letter)]
    output = engine.chat(asked, temperature=0, max_tokens=len(spelled), structured={"regex": "lubricant for chains"}, logit_bias={})
    prompt = output.prompt_token_ids
    engine.generate(prompt + spelled, max_tokens=1)
    return engine.explain(prompt + engine.encode("lubricant for chains") + engine.encode(" and tyres"))


def show(name: str, found: CacheExplanation) -> str:
    print(f"\n{name}\n{found}")
    return f"| {name} | {found.piece} | {found.position} | `{found.cause}` | {found.lost_tokens} of {found.prompt_tokens} |"


def reuse(output: RequestOutput) -> None:
    print(f"   {output.usage.cached_tokens} of {output.usage.prompt_tokens} prompt tokens reused")


if __name__ == "__main__":
    main(*sys.argv[1:])
