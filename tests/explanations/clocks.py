"""A clock or a date in the prompt, and numbers that only look like one."""

from __future__ import annotations

from explanations.pair import RULES, SYSTEM, SYSTEM_OWNER, TURNS, Owner, Pair, assistant, system, user

ASK = user("Is the workshop open?")


def in_system(name: str, cached: str, asked: str, cause: str | None = "clock") -> Pair:
    """A system prompt that differs in one place."""
    return Pair(name=name, cached=[system(cached), ASK], asked=[system(asked), ASK], piece=SYSTEM_OWNER, cause=cause)


def around(before: str, after: str) -> str:
    return f"{before} {RULES} {after}".strip()


FIRST_LINE = "Current time: {}\n\n" + RULES
LAST: Owner = ("message", 1, "user")

PAIRS = [
    in_system(
        "time with seconds in the first line",
        FIRST_LINE.format("2026-11-30 12:05:33"),
        FIRST_LINE.format("2026-11-30 12:‸47:01"),
    ),
    in_system(
        "ISO 8601 with zone, seconds alone differ",
        FIRST_LINE.format("2026-11-30T12:05:33Z"),
        FIRST_LINE.format("2026-11-30T12:05:‸41Z"),
    ),
    in_system(
        "RFC 2822, another day",
        FIRST_LINE.format("Mon, 30 Nov 2026 09:12:44 +0000"),
        FIRST_LINE.format("‸Tue, 01 Dec 2026 09:12:44 +0000"),
    ),
    in_system(
        "weekday and date at the end of the system prompt",
        around("", "Today is Monday, November 30, 2026."),
        around("", "Today is ‸Tuesday, December 1, 2026."),
    ),
    in_system(
        "one digit more in the day",
        around("", "It is November 3, 2026."),
        around("", "It is November 3‸0, 2026."),
    ),
    in_system(
        "the same day as two locales write it",
        FIRST_LINE.format("11/30/2026"),
        FIRST_LINE.format("‸30.11.2026"),
    ),
    in_system(
        "American and British order",
        around("Date: 11/12/2026.", ""),
        around("Date: 1‸2/11/2026.", ""),
    ),
    in_system("German", around("Heute ist der 30. November 2026.", ""), around("Heute ist der ‸1. Dezember 2026.", "")),
    in_system(
        "French", around("", "Nous sommes le lundi 30 novembre."), around("", "Nous sommes le ‸mardi 1 décembre.")
    ),
    in_system("Spanish", around("Hoy es 30 de noviembre de 2026.", ""), around("Hoy es ‸1 de diciembre de 2026.", "")),
    in_system("Chinese or Japanese", around("2026年11月30日", ""), around("2026年1‸2月1日", "")),
    in_system(
        "twelve-hour clock, an hour with one digit and one with two",
        around("The local time is 9:58 AM.", ""),
        around("The local time is ‸10:03 AM.", ""),
    ),
    in_system("seconds since 1970", around("Request time 1796040333.", ""), around("Request time 179604‸1021.", "")),
    in_system(
        "milliseconds since 1970",
        FIRST_LINE.format("1796040333123"),
        FIRST_LINE.format("17960403331‸87"),
    ),
    in_system(
        "age of the last message",
        around("", "The last message came 3 minutes ago."),
        around("", "The last message came ‸12 minutes ago."),
    ),
    in_system("uptime", around("Host: shop-1, up 13:04:22.", ""), around("Host: shop-1, up 13:‸10:02.", "")),
    Pair(
        name="a page that an agent reads, with the time in the user's message",
        cached=[SYSTEM, user(f"Step 4.\nCurrent date and time: 2026-02-09 17:11\nPage:\n{RULES}\nWhat do you click?")],
        asked=[SYSTEM, user(f"Step 4.\nCurrent date and time: 2026-02-09 17:1‸2\nPage:\n{RULES}\nWhat do you click?")],
        piece=LAST,
        cause="clock",
    ),
    Pair(
        name="the time in the first line of a text prompt",
        cached=f"[2026-11-30 08:15] {RULES}\nQ: Do you sell bells?\nA:",
        asked=f"[2026-11-30 08:‸20] {RULES}\nQ: Do you sell bells?\nA:",
        piece=("text", None, None),
        cause="clock",
    ),
    Pair(
        name="time stamps of earlier turns are made anew",
        cached=[SYSTEM, user("(sent 12:05) " + TURNS[0]["content"]), *TURNS[1:]],
        asked=[SYSTEM, user("(sent 12:‸47) " + TURNS[0]["content"]), *TURNS[1:], assistant("Yes."), user("Why?")],
        piece=LAST,
        cause="clock",
    ),
    # no clocks
    Pair(
        name="a question about another day",
        cached=[SYSTEM, user("Are you open on 2026-11-30?")],
        asked=[SYSTEM, user("Are you open on 2026-1‸2-01?")],
        piece=LAST,
        cause=None,
    ),
    in_system(
        "a number of sentences", around("Use at most 3 sentences.", ""), around("Use at most ‸5 sentences.", ""), None
    ),
    in_system("a version", around("Manual version 2.10.26.", ""), around("Manual version 2.1‸1.26.", ""), None),
    in_system(
        "two prompts that begin with a date and share nothing else",
        "2026-11-30. The mechanics meet in the workshop and talk about gears, brakes and everything that broke.",
        "2026-1‸2-01. Write a poem about mountains in the style of a sailor who has never seen one in his life.",
        None,
    ),
]
