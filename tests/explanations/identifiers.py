"""Ids, addresses and names in the prompt, and words that are none."""

from __future__ import annotations

from explanations.clocks import around, in_system
from explanations.pair import RULES, SYSTEM, TURNS, Pair, system, user

PAIRS = [
    in_system(
        "request id in the first line",
        f"request_id: req_8f3ac1\n{RULES}",
        f"request_id: req_‸19bd07\n{RULES}",
        "identifier",
    ),
    in_system(
        "UUID of a session",
        around("Session 6fa459ea-ee8a-4ca4-894e-db77e160355e.", ""),
        around("Session ‸16fd2706-8baf-433b-82eb-8c7fada847da.", ""),
        "identifier",
    ),
    in_system(
        "digest of the build",
        around("", "Build 9fceb02d0ae598e95dc970b74767f19372d61af8."),
        around("", "Build 9fceb02d0ae598e95dc970b74767f19372d61a‸1c."),
        "identifier",
    ),
    in_system(
        "ULID",
        around("Trace 01HX3V8K2M5T7W9Y4N6P8R0S1Q.", ""),
        around("Trace 01HX3V8K‸9A5T7W9Y4N6P8R0S1Q.", ""),
        "identifier",
    ),
    in_system(
        "e-mail",
        around("You write to ada@example.org.", ""),
        around("You write to ‸bob.k@example.com.", ""),
        "identifier",
    ),
    in_system(
        "account number", around("Account 4871 2290 0315.", ""), around("Account 4871 ‸3010 7722.", ""), "identifier"
    ),
    in_system(
        "customer number", around("The customer id is 48213.", ""), around("The customer id is ‸90.", ""), "identifier"
    ),
    in_system("cache-busting nonce", around("nonce=x9Kd83LmQz2", ""), around("nonce=‸Tr41pWq8Zb0", ""), "identifier"),
    in_system("a user's name", around("You are helping Alice.", ""), around("You are helping ‸Bob.", ""), "identifier"),
    in_system(
        "a user's name that comes again",
        f"You are helping Alice Miller. {RULES} Address Alice Miller by name.",
        f"You are helping ‸Bob. {RULES} Address Bob by name.",
        "identifier",
    ),
    in_system("a user's name without capitals", f"User: ada\n{RULES}", f"User: ‸grace\n{RULES}", "identifier"),
    in_system(
        "a working directory",
        f"Working directory: /home/ada/shop\n{RULES}",
        f"Working directory: /home/‸grace/till\n{RULES}",
        "identifier",
    ),
    Pair(
        name="a name in the head of a text prompt",
        cached=f"You are helping Alice.\n{RULES}\n\nQ: Do you sell bells?\nA:",
        asked=f"You are helping ‸Bob.\n{RULES}\n\nQ: Do you sell lamps?\nA:",
        piece=("text", None, None),
        cause="identifier",
    ),
    # none
    in_system(
        "a word of the system prompt was edited",
        RULES,
        RULES.replace("polite", "‸friendly"),
        None,
    ),
    in_system("a sentence was put in front", RULES, "‸Never speak of prices. " + RULES, None),
    in_system(
        "another system prompt",
        RULES,
        "You ‸write poems. Rhyme every second line and use the words that the user gives, in the order given.",
        None,
    ),
    in_system(
        "the language was switched",
        RULES,
        "‸Antworte den Kunden eines Fahrradladens auf Deutsch, freundlich und kurz, und nenne die Seite des Handbuchs.",
        None,
    ),
    Pair(
        name="a question about another order",
        cached=[SYSTEM, user("Where is order 48213377?")],
        asked=[SYSTEM, user("Where is order ‸90127745?")],
        piece=("message", 1, "user"),
        cause=None,
    ),
    Pair(
        name="a question about someone else",
        cached=[SYSTEM, user("Has Alice picked up her bicycle?")],
        asked=[SYSTEM, user("Has ‸Bob picked up his bicycle?")],
        piece=("message", 1, "user"),
        cause=None,
    ),
    Pair(
        name="another city in a short text prompt",
        cached="What is the capital of France? Answer in one word.",
        asked="What is the capital of ‸Germany? Answer in one word.",
        piece=("text", None, None),
        cause=None,
    ),
    Pair(
        name="a system prompt where there was none",
        cached=TURNS[:1],
        asked=[system(RULES.replace("You a", "You a‸", 1)), *TURNS[:1]],
        piece=("system", 0, "system"),
        cause=None,
    ),
]
