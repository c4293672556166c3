"""Tools in another order or changed, and JSON whose keys were moved."""

from __future__ import annotations

from typing import Any

from explanations.pair import RULES, SYSTEM, TURNS, Messages, Owner, Pair, assistant, result, system, tool, user

STOCK = tool("stock", "How many of an article are left.", article="its number")
PRICE = tool("price", "What an article costs.", article="its number", currency="EUR or USD")
HOURS = tool("hours", "When the shop is open.", day="of the week")
ASK = [SYSTEM, TURNS[0]]
WORDS: Owner = ("tools", None, None)


def owner(index: int) -> Owner:
    return ("tools", index, None)


def on(
    name: str, cached: Messages, asked: Messages, piece: Owner, cause: str | None, at: str | None = None
) -> list[Pair]:
    """The pair with a template that has a section for tools, and with one that has none."""
    return [
        Pair(
            name=f"{name} ({template})",
            cached=ASK,
            asked=ASK,
            cached_tools=cached,
            tools=asked,
            piece=piece,
            cause=cause,
            at=at,
            template=template,
        )
        for template in ("default", "qwen")
    ]


def turned(value: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(value.items()))


CALL = "call00001"
STOCK_LINE, PRICE_LINE = '{"name": "stock", "parameters": {}}', '{"name": "price", "parameters": {}}'
WHERE = '{"article": "B-17", "shelf": 4, "shop": "north"}'

PAIRS = [
    *on(
        "tools from a set, in another order",
        [STOCK, PRICE, HOURS],
        [HOURS, STOCK, PRICE],
        owner(0),
        "tool_order",
        "hours",
    ),
    *on("two tools swapped at the end", [STOCK, PRICE, HOURS], [STOCK, HOURS, PRICE], owner(1), "tool_order", "hours"),
    *on("a tool in front", [STOCK, PRICE], [HOURS, STOCK, PRICE], owner(0), None, "hours"),
    *on(
        "a description changed",
        [STOCK, PRICE],
        [STOCK, PRICE | {"function": PRICE["function"] | {"description": "What ‸it costs."}}],
        owner(1),
        None,
    ),
    *on(
        "a date in a description",
        [STOCK | {"function": STOCK["function"] | {"description": "Articles left on 2026-11-30, by number."}}, PRICE],
        [STOCK | {"function": STOCK["function"] | {"description": "Articles left on 2026-1‸2-01, by number."}}, PRICE],
        owner(0),
        "clock",
    ),
    *on(
        "keys of a definition in another order",
        [STOCK, PRICE],
        [STOCK, PRICE | {"function": turned(PRICE["function"])}],
        owner(1),
        "json_key_order",
        'parameters": {"type": "object", "properties": {"article": {"type": "string", "description": "its number"}, '
        '"curr',
    ),
    Pair(
        name="the last tool taken away",
        cached=ASK,
        asked=ASK,
        cached_tools=[STOCK, PRICE],
        tools=[STOCK],
        piece=WORDS,
        cause=None,
        at="</tools>\nTo call",
    ),
    Pair(
        name="tools in a text prompt, in another order",
        cached=f"Functions: [{STOCK_LINE}, {PRICE_LINE}]\nQ: How many?\nA:",
        asked=f"Functions: [{PRICE_LINE.replace('price', '‸price')}, {STOCK_LINE}]\nQ: How many?\nA:",
        piece=("text", None, None),
        cause="tool_order",
    ),
    Pair(
        name="tools as lines of the system prompt, in another order",
        cached=[system(f'{RULES}\n{{"name": "stock", "args": ["id"]}}\n{{"name": "price", "args": []}}\n'), TURNS[0]],
        asked=[system(f'{RULES}\n{{"name": "‸price", "args": []}}\n{{"name": "stock", "args": ["id"]}}\n'), TURNS[0]],
        piece=("system", 0, "system"),
        cause="tool_order",
    ),
    Pair(
        name="a tool in front, in a text prompt",
        cached=f"Functions: [{STOCK_LINE}, {PRICE_LINE}]\nQ: How many?\nA:",
        asked=f'Functions: [{{"name": "‸hours", "parameters": {{}}}}, {STOCK_LINE}, {PRICE_LINE}]\nQ: How many?\nA:',
        piece=("text", None, None),
        cause=None,
    ),
    Pair(
        name="arguments of a call come back with their keys sorted",
        cached=[*ASK, assistant("", (CALL, '{"shop": "north", "article": "B-17"}')), result("4"), user("Thanks.")],
        asked=[*ASK, assistant("", (CALL, '{"article": "B-17", "shop": "north"}')), result("4"), user("Thanks.")],
        piece=("message", 2, "assistant"),
        cause="json_key_order",
        at='article": "B-17", "shop": "north"}}\n</tool_call>',
    ),
    Pair(
        name="a result whose keys come in another order",
        cached=[*ASK, assistant("", (CALL, "{}")), result(WHERE)],
        asked=[*ASK, assistant("", (CALL, "{}")), result('{"‸shop": "north", "article": "B-17", "shelf": 4}')],
        piece=("message", 3, "tool"),
        cause="json_key_order",
        template="qwen",
    ),
    Pair(
        name="a result as Python prints it, keys in another order",
        cached=[*ASK, assistant("", (CALL, "{}")), result("{'article': 'B-17', 'left': None}")],
        asked=[*ASK, assistant("", (CALL, "{}")), result("{'‸left': None, 'article': 'B-17'}")],
        piece=("message", 3, "tool"),
        cause="json_key_order",
    ),
    Pair(
        name="JSON in the user's message, an inner object turned",
        cached=[SYSTEM, user(f'Order: {{"id": 7, "item": {WHERE}}}. Is it complete?')],
        asked=[
            SYSTEM,
            user('Order: {"id": 7, "item": {"‸shelf": 4, "article": "B-17", "shop": "north"}}. Is it complete?'),
        ],
        piece=("message", 1, "user"),
        cause="json_key_order",
    ),
    Pair(
        name="a result with another value",
        cached=[*ASK, assistant("", (CALL, "{}")), result(WHERE)],
        asked=[*ASK, assistant("", (CALL, "{}")), result(WHERE.replace("4", "‸7"))],
        piece=("message", 3, "tool"),
        cause=None,
    ),
]
