"""Earlier turns that were dropped or changed, and conversations that merely go on."""

from __future__ import annotations

from explanations.documents import BRAKES, OIL, langchain
from explanations.pair import RULES, SYSTEM, TURNS, Pair, assistant, system, user

FIRST, ANSWER, SECOND, ANSWER_2, THIRD = TURNS
LATER = [assistant("Yes, with a rag."), user("Which rag?")]
THOUGHT = "<think>\nThey ride in winter, so the dry oil is out.\n</think>\n\n"
SHOTS = [user("Bell?"), assistant("Page 4, bells and horns."), user("Lamp?"), assistant("Page 9, dynamos and lamps.")]


def marked(message: dict[str, str], at: int = 0) -> dict[str, str]:
    content = message["content"]
    return message | {"content": f"{content[:at]}‸{content[at:]}"}


USER_1 = ("message", 1, "user")

PAIRS = [
    Pair(
        name="a window over the turns drops the oldest",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, marked(SECOND), ANSWER_2, THIRD, *LATER],
        piece=USER_1,
        cause="history_truncated",
    ),
    Pair(
        name="trimmed to a number of tokens, down to the last turns",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, marked(THIRD), *LATER],
        piece=USER_1,
        cause="history_truncated",
    ),
    Pair(
        name="the window drops the system prompt too",
        cached=[SYSTEM, *TURNS],
        asked=[SECOND, ANSWER_2, THIRD, *LATER],
        at="re a helpful AI",
        piece=("system", None, "system"),
        cause="history_truncated",
    ),
    Pair(
        name="a window without a system prompt",
        cached=TURNS,
        asked=[marked(SECOND), ANSWER_2, THIRD, *LATER],
        piece=("message", 0, "user"),
        cause="history_truncated",
    ),
    Pair(
        name="turns with time stamps, the oldest dropped",
        cached=[SYSTEM, user("12:05 " + FIRST["content"]), ANSWER, user("12:47 " + SECOND["content"])],
        asked=[SYSTEM, user("12:‸47 " + SECOND["content"]), ANSWER_2, user("12:51 Thanks.")],
        piece=USER_1,
        cause="history_truncated",
    ),
    Pair(
        name="the oldest turns became a summary",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, user("‸So far: wet oil was recommended for winter."), ANSWER_2, THIRD, *LATER],
        piece=USER_1,
        cause="history_changed",
    ),
    Pair(
        name="the oldest turns became a summary in the system prompt",
        cached=[SYSTEM, *TURNS],
        asked=[system(RULES + "‸\n\nSo far: wet oil was recommended."), SECOND, ANSWER_2, THIRD, *LATER],
        piece=("system", 0, "system"),
        cause="history_changed",
    ),
    Pair(
        name="an earlier question was edited",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, user(FIRST["content"].replace("winter", "‸summer")), *TURNS[1:], *LATER],
        piece=USER_1,
        cause="history_changed",
    ),
    Pair(
        name="an earlier answer was edited",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, FIRST, assistant("A wet ‸oil."), *TURNS[2:]],
        piece=("message", 2, "assistant"),
        cause="history_changed",
    ),
    Pair(
        name="a turn in the middle was taken out",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, FIRST, ANSWER, marked(THIRD), *LATER],
        piece=("message", 3, "user"),
        cause="history_changed",
    ),
    Pair(
        name="the context of an earlier question is gone",
        cached=[SYSTEM, user(langchain(OIL, BRAKES, question=FIRST["content"]))],
        asked=[SYSTEM, marked(FIRST), ANSWER, user(langchain(BRAKES, question=SECOND["content"]))],
        piece=USER_1,
        cause="history_changed",
    ),
    Pair(
        name="an earlier question has the context of the new one",
        cached=[SYSTEM, user(langchain(OIL, question=FIRST["content"])), ANSWER, SECOND],
        asked=[SYSTEM, user(langchain("‸" + BRAKES, question=FIRST["content"])), ANSWER, SECOND, *LATER],
        piece=("document", 1, "user"),
        cause="history_changed",
    ),
    Pair(
        name="an answer without its thought",
        cached=[SYSTEM, FIRST, assistant(THOUGHT + ANSWER["content"]), SECOND],
        asked=[SYSTEM, FIRST, marked(ANSWER), SECOND, *LATER],
        piece=("message", 2, "assistant"),
        cause="history_changed",
    ),
    Pair(
        name="an example before the question was replaced",
        cached=[SYSTEM, *SHOTS, FIRST],
        asked=[SYSTEM, user("‸Tyre?"), assistant("Page 2, tubes and tyres."), *SHOTS[2:], FIRST],
        piece=USER_1,
        cause="history_changed",
    ),
    Pair(
        name="examples before another question were swapped",
        cached=[SYSTEM, *SHOTS, FIRST],
        asked=[SYSTEM, user("‸Lamp?"), SHOTS[3], *SHOTS[:2], SECOND],
        piece=USER_1,
        cause="history_changed",
    ),
    Pair(
        name="a late note of the system was put into the history",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, FIRST, ANSWER, system("The customer rides in winter."), *TURNS[2:]],
        at="system\nThe customer",
        piece=("message", 3, "system"),
        cause="history_changed",
    ),
    # no change of the history
    Pair(
        name="a new question",
        cached=[SYSTEM, FIRST],
        asked=[SYSTEM, user("‸Do you sell bells?")],
        piece=USER_1,
        cause=None,
    ),
    Pair(
        name="another last question in a long conversation",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, *TURNS[:4], user("‸Can you do that for me?")],
        piece=("message", 5, "user"),
        cause=None,
    ),
    Pair(
        name="the conversation goes on",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, *TURNS, assistant("‸Yes, with a rag."), user("Which rag?")],
        piece=("message", 6, "assistant"),
        cause=None,
    ),
    Pair(
        name="another conversation with the same system prompt",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, user("‸Do you sell bells?"), assistant("We do, from page 4 on."), user("Loud ones?")],
        piece=USER_1,
        cause=None,
    ),
    Pair(
        name="another conversation behind the same examples",
        cached=[SYSTEM, *SHOTS, FIRST, ANSWER, SECOND],
        asked=[SYSTEM, *SHOTS, user("‸Do you sell tents?"), assistant("We do not."), user("Who does?")],
        piece=("message", 5, "user"),
        cause=None,
    ),
    Pair(name="the same prompt again", cached=[SYSTEM, *TURNS], asked=[SYSTEM, *TURNS], piece=None, cause=None, at=""),
    Pair(
        name="the beginning of what is cached",
        cached=[SYSTEM, *TURNS],
        asked=[SYSTEM, *TURNS[:3]],
        piece=None,
        cause=None,
        at="",
    ),
    Pair(
        name="a longer text",
        cached="One, two, three",
        asked="One, two, three‸, four",
        piece=("text", None, None),
        cause=None,
    ),
]
