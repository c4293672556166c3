"""Retrieved passages in another order, or other passages."""

from __future__ import annotations

from explanations.pair import RULES, SYSTEM, TURNS, Owner, Pair, assistant, system, user

OIL = "Chain oil comes in two kinds. The dry one is for summer, the wet one stays on the chain in rain and snow."
BRAKES = "Brake pads wear out after two thousand kilometres, sooner in the hills. Replace both sides at once."
TYRES = "Tyres want three to five bars. The number on the side wall is the highest pressure, not the best one."
LAMPS = "A hub dynamo needs no battery. Its lamp shines for some minutes after the bicycle has stopped."
USER: Owner = ("document", 1, "user")


def llama_index(*texts: str, question: str = "What is wet oil for?") -> str:
    """As LlamaIndex fills its template for answers."""
    nodes = "\n\n".join(
        f"page_label: {len(text) % 7}\nfile_path: manual-{text[:2].lower()}.pdf\n\n{text}" for text in texts
    )
    rule = "-" * 21
    head, tail = "Context information is below.", f"Given the context, answer.\nQuery: {question}\nAnswer: "
    return "\n".join((head, rule, nodes, rule, tail))


def langchain(*texts: str, question: str = "What is wet oil for?") -> str:
    """As LangChain stuffs documents into a prompt."""
    return "Answer from the context alone.\n\nContext:\n" + "\n\n".join(texts) + f"\n\nQuestion: {question}"


def numbered(*texts: str, question: str = "What is wet oil for?") -> str:
    return "\n\n".join(f"Document {at}: {text}" for at, text in enumerate(texts, 1)) + f"\n\n{question}"


def tagged(*texts: str, question: str = "What is wet oil for?") -> str:
    blocks = "\n".join(f'<document index="{at}">\n{text}\n</document>' for at, text in enumerate(texts, 1))
    return f"<documents>\n{blocks}\n</documents>\n\n{question}"


def asked(name: str, cached: str, now: str, cause: str | None, share: float | None = None, piece: Owner = USER) -> Pair:
    return Pair(
        name=name, cached=[SYSTEM, user(cached)], asked=[SYSTEM, user(now)], piece=piece, cause=cause, share=share
    )


def mark(text: str, at: int = 0) -> str:
    return f"{text[:at]}‸{text[at:]}"


PAIRS = [
    asked(
        "LlamaIndex, ranked otherwise",
        llama_index(OIL, BRAKES, TYRES),
        llama_index(TYRES, OIL, BRAKES).replace("page_label: ", "page_label: ‸", 1),
        "document_order",
        1.0,
    ),
    asked("LangChain, ranked otherwise", langchain(OIL, BRAKES), langchain(mark(BRAKES), OIL), "document_order", 1.0),
    asked(
        "ranked otherwise and another question",
        langchain(OIL, BRAKES, TYRES),
        langchain(mark(TYRES), BRAKES, OIL, question="How much air?"),
        "document_order",
        1.0,
    ),
    asked("numbered, ranked otherwise", numbered(OIL, BRAKES), numbered(mark(BRAKES), OIL), "document_order", 1.0),
    asked(
        "tagged, ranked otherwise", tagged(OIL, TYRES, LAMPS), tagged(OIL, mark(LAMPS), TYRES), "document_order", 1.0
    ),
    asked(
        "swapped, and one is new",
        langchain(OIL, BRAKES, TYRES),
        langchain(mark(LAMPS), TYRES, OIL),
        "document_order",
        (len(TYRES) + len(OIL)) / (len(LAMPS) + len(TYRES) + len(OIL)),
    ),
    Pair(
        name="several text parts, swapped",
        cached=[SYSTEM, user([{"type": "text", "text": each} for each in (OIL, BRAKES, "What is wet oil for?")])],
        asked=[SYSTEM, user([{"type": "text", "text": each} for each in ("‸" + BRAKES, OIL, "What is wet oil for?")])],
        piece=USER,
        cause="document_order",
        share=1.0,
    ),
    Pair(
        name="context in the system prompt, ranked otherwise",
        cached=[system(f"{RULES}\n\n<context>\n{OIL}\n\n{BRAKES}\n</context>"), TURNS[0]],
        asked=[system(f"{RULES}\n\n<context>\n‸{BRAKES}\n\n{OIL}\n</context>"), TURNS[0]],
        piece=("document", 0, "system"),
        cause="document_order",
        share=1.0,
    ),
    Pair(
        name="a text prompt with numbered sources, ranked otherwise",
        cached=f"Answer from these sources.\n\n[1] {OIL}\n[2] {BRAKES}\n\nQuestion: What is wet oil for?\nAnswer:",
        asked=f"Answer from these sources.\n\n[1] ‸{BRAKES}\n[2] {OIL}\n\nQuestion: What is wet oil for?\nAnswer:",
        piece=("text", None, None),
        cause="document_order",
        share=1.0,
    ),
    Pair(
        name="examples in the system prompt, swapped",
        cached=[system(f"{RULES}\n\nExample 1:\nQ: Bell?\nA: Page 4.\n\nExample 2:\nQ: Lamp?\nA: Page 9.\n"), TURNS[0]],
        asked=[system(f"{RULES}\n\nExample 1:\nQ: ‸Lamp?\nA: Page 9.\n\nExample 2:\nQ: Bell?\nA: Page 4.\n"), TURNS[0]],
        piece=("system", 0, "system"),
        cause="document_order",
        share=1.0,
    ),
    # other passages
    asked("one passage replaced", langchain(OIL, BRAKES, TYRES), langchain(OIL, mark(LAMPS), TYRES), None),
    asked(
        "one passage replaced, with file names",
        llama_index(OIL, BRAKES),
        llama_index(OIL, LAMPS).replace("page_label: 3", "page_label: ‸3"),
        None,
    ),
    asked("one passage more in front", numbered(OIL, BRAKES), numbered(mark(TYRES), OIL, BRAKES), None),
    asked("all passages replaced", tagged(OIL, BRAKES), tagged(mark(TYRES), LAMPS), None),
    asked(
        "the same passages, another question",
        langchain(OIL, BRAKES),
        langchain(OIL, BRAKES, question="‸How long do pads last?"),
        None,
        piece=("message", 1, "user"),
    ),
    asked(
        "a passage with the time of its retrieval",
        tagged(f"retrieved 2026-11-30 12:05\n{OIL}", BRAKES),
        tagged(f"retrieved 2026-11-30 12:‸47\n{OIL}", BRAKES),
        "clock",
    ),
    Pair(
        name="examples in the system prompt, another one",
        cached=[system(f"{RULES}\n\nExample 1:\nQ: Bell?\nA: Page 4.\n\nExample 2:\nQ: Lamp?\nA: Page 9.\n"), TURNS[0]],
        asked=[system(f"{RULES}\n\nExample 1:\nQ: Bell?\nA: Page 4.\n\nExample 2:\nQ: ‸tyre?\nA: Page 2.\n"), TURNS[0]],
        piece=("system", 0, "system"),
        cause=None,
    ),
    Pair(
        name="the context of an earlier question is ranked otherwise",
        cached=[SYSTEM, user(langchain(OIL, BRAKES)), TURNS[1], TURNS[2]],
        asked=[SYSTEM, user(langchain(mark(BRAKES), OIL)), TURNS[1], TURNS[2], assistant("Yes."), user("Why?")],
        piece=USER,
        cause="document_order",
        share=1.0,
    ),
]
