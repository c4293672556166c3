"""White space that changed, and what only begins with it."""

from __future__ import annotations

import json

from explanations.pair import RULES, SYSTEM, SYSTEM_OWNER, TURNS, Pair, assistant, system, user
from explanations.tools import HOURS, STOCK

STATE = {"cart": ["bell", "lamp"], "paid": False, "customer": {"name": "Ada", "since": 2019}}
LINES = RULES.replace(". ", ".\n")

PAIRS = [
    Pair(
        name="CRLF",
        cached=[system(LINES), TURNS[0]],
        asked=[system(LINES.replace("\n", "‸\r\n", 1)), TURNS[0]],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="CRLF on every line",
        cached=[system(LINES), TURNS[0]],
        asked=[system("‸\r\n".join([LINES.split("\n")[0], "\r\n".join(LINES.split("\n")[1:])])), TURNS[0]],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="a newline at the end of the system prompt",
        cached=[system(RULES), TURNS[0]],
        asked=[system(RULES + "‸\n"), TURNS[0]],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="a newline less",
        cached=[system(RULES + "\n\n"), TURNS[0]],
        asked=[system(RULES + "\n"), TURNS[0]],
        at="<|im_end|>\n<|im_start|>user",
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="a space at the end of a line",
        cached=[system(LINES), TURNS[0]],
        asked=[system(LINES.replace(".\n", ".‸ \n", 1)), TURNS[0]],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="two spaces between words",
        cached=[SYSTEM, user("Do you sell bells and lamps?")],
        asked=[SYSTEM, user("Do you sell ‸ bells and lamps?")],
        piece=("message", 1, "user"),
        cause="whitespace",
    ),
    Pair(
        name="a prompt in a triple-quoted string, indented",
        cached=[system(LINES), TURNS[0]],
        asked=[
            system("\n".join([LINES.split("\n")[0], "‸    " + LINES.split("\n")[1], LINES.split("\n")[2]])),
            TURNS[0],
        ],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="JSON indented",
        cached=[system(f"{RULES}\nState: {json.dumps(STATE)}"), TURNS[0]],
        asked=[system(f"{RULES}\nState: {json.dumps(STATE, indent=2)}".replace("{\n", "{‸\n", 1)), TURNS[0]],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="JSON without spaces",
        cached=[system(f"{RULES}\nState: {json.dumps(STATE)}"), TURNS[0]],
        asked=[system(f"{RULES}\nState: " + json.dumps(STATE, separators=(",", ":")).replace(':["', ':‸["')), TURNS[0]],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="JSON indented and with its keys sorted",
        cached=[system(f"{RULES}\nState: {json.dumps(STATE)}"), TURNS[0]],
        asked=[
            system(f"{RULES}\nState: {json.dumps(STATE, indent=2, sort_keys=True)}".replace("{\n", "{‸\n", 1)),
            TURNS[0],
        ],
        piece=SYSTEM_OWNER,
        cause="json_key_order",
    ),
    Pair(
        name="an answer without the newline the model began with",
        cached=[SYSTEM, TURNS[0], assistant("\n" + str(TURNS[1]["content"])), TURNS[2]],
        asked=[SYSTEM, TURNS[0], assistant("‸" + str(TURNS[1]["content"])), *TURNS[2:]],
        piece=("message", 2, "assistant"),
        cause="whitespace",
    ),
    Pair(
        name="a narrow space in the time of day",
        cached=[system(f"It is 3:07 PM. {RULES}"), TURNS[0]],
        asked=[system(f"It is 3:07‸\u202fPM. {RULES}"), TURNS[0]],
        piece=SYSTEM_OWNER,
        cause="whitespace",
    ),
    Pair(
        name="a byte order mark at the head of a text",
        cached=f"{RULES}\nQ: Do you sell bells?\nA:",
        asked=f"‸\ufeff{RULES}\nQ: Do you sell bells?\nA:",
        piece=("text", None, None),
        cause="whitespace",
    ),
    Pair(
        name="a tool's description with another indentation",
        cached=[SYSTEM, TURNS[0]],
        asked=[SYSTEM, TURNS[0]],
        cached_tools=[STOCK | {"function": STOCK["function"] | {"description": "Left in stock, by number."}}, HOURS],
        tools=[STOCK | {"function": STOCK["function"] | {"description": "Left ‸ in stock, by number."}}, HOURS],
        piece=("tools", 0, None),
        cause="whitespace",
    ),
    # more than white space
    Pair(
        name="a word more",
        cached=[SYSTEM, user("Do you sell bells?")],
        asked=[SYSTEM, user("Do you sell loud bells?")],
        at="loud bells?",
        piece=("message", 1, "user"),
        cause=None,
    ),
]
