"""Ids, addresses and names: what stands for one request, user or session."""

from __future__ import annotations

import re

from foreword.text.causes.align import UNSPACED, similarity, slot, words_of
from foreword.text.passages import Span

_REACH = 96
_IDS = (
    "ids?|uid|guid|uuid|pid|account|acct|tenant|session|request|req|ticket|thread|trace|span|nonce|seed|correlation"
    "|konto"
)
_COUNTED = (
    "number|num|no|nr|user|customer|client|kunde|case|order|run|key|token|job|build|invoice|conversation|chat|message"
    "|port"
)
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+",  # an e-mail address
        r"(?i)(?<![0-9a-z])[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}(?![0-9a-z])",
        r"(?i)(?<![0-9a-z])(?=[0-9a-f]*\d)[0-9a-f]{8,}(?:[-:][0-9a-f]{2,})*(?![0-9a-z])",  # a digest, a trace
        r"(?<!\w)[0-9A-HJKMNP-TV-Z]{26}(?!\w)",  # a ULID
        r"(?<![\w-])[A-Za-z][A-Za-z]{1,15}(?:[_-][A-Za-z]+)*[_-](?=[\w-]*\d)[A-Za-z0-9][\w-]{2,}(?!\w)",  # req_8f3a
        r"(?<!\w)(?=[\w+/-]*\d)(?=[\w+/-]*[a-z])(?=[\w+/-]*[A-Z])[\w+/-]{10,}={0,2}(?!\w)",  # base64 and the like
        r"(?<![\w.])\d{6,}(?![\w])(?!\.\d)",
        r"(?<![\w.])(?:[A-Z]{2}\d\d[ -])?\d{3,4}(?:[ -]\d{2,4}){2,}(?!\w)",  # an account or a card, in groups
        r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]\d)",  # an address in a network
        r"\+\d{1,3}(?:[ \-/()]{0,2}\d{2,}){2,}",  # a telephone
        # a number behind its label; what can be counted, too, needs more than a number: "order 3 bells"
        rf"(?i)(?<![a-z])(?:{_IDS})(?![a-z])(?:\sis)?\W{{0,4}}(?=[\w-]*\d)[\w-]+(?!\w)",
        rf"(?i)(?<![a-z])(?:{_COUNTED})(?![a-z])"
        r"(?:\W{0,3}[:=#\"']\W{0,2}|\W{0,2}(?=[\w-]{3}))(?=[\w-]*\d)[\w-]+(?!\w)",
        r"#(?=[\w-]*\d)[\w-]+(?!\w)",
    )
)
_VERBS = frozenset(("is", "has", "was", "works", "lives", "wants", "asks", "uses", "prefers", "likes", "and"))
_WHO = re.compile(
    r"(?:user|name|customer|client|account|tenant|org|organi[sz]ation|company|owner|login|host|player|author|employee"
    r"|team|project|branch|repo(?:sitory)?|workspace|region|city|locale|cwd|path|directory|device)"
    r"(?:[ _]?name)?[\"']?\s*(?:[:=]|\bis\b)\s*[\"'`]?$",
    re.IGNORECASE,
)
_UNBROKEN = re.compile(rf"""[^\s"'`=:()\[\]{{}},;<>{UNSPACED}]*$""")
_COMMON = re.compile(r"\b(?:an?|k?eine?[nmrs]?|une?|una|uma?|een)\s+$", re.IGNORECASE)  # before a noun, not a name
_SLOT_WORDS, _SLOT_CHARACTERS = 8, 60  # words here are also the signs in a path or an address
_NEARLY_ALL = 0.8


def identifier(expected: str, actual: str, at: int) -> tuple[Span, Span] | None:
    """The ids that cover the first difference ``at`` in both texts; None if it lies in none."""
    for pattern in _PATTERNS:
        first, second = _covering(pattern, expected, at), _covering(pattern, actual, at)
        if first and second and max(first[1], second[1]) > at:
            return first, second
    return None


def name(expected: str, actual: str, at: int) -> tuple[Span, Span] | None:
    """A short slot that holds a name or a value: a few words behind which nearly everything is equal.

    A word that is edited is no slot: names begin with a capital inside a sentence, or hold digits, or stand behind a
    label that tells whose they are.
    """
    found = slot(expected, actual, at)
    if found is None:
        return None
    first, second = found
    for text, (start, end) in ((expected, first), (actual, second)):
        if not 0 < len(words_of(text, start, end)) <= _SLOT_WORDS or end - start > _SLOT_CHARACTERS:
            return None
        if not _is_name(text, start, end):
            return None
    rest_expected, rest_actual = expected[first[1] :], actual[second[1] :]
    if rest_expected != rest_actual:
        value, other = expected[slice(*first)], actual[slice(*second)]
        if similarity(rest_expected.replace(value, other), rest_actual) < _NEARLY_ALL:
            return None
    return found


def _covering(pattern: re.Pattern[str], text: str, at: int) -> Span | None:
    begin = max(at - _REACH, text.rfind("\n", 0, at) + 1)
    end = text.find("\n", at, at + _REACH)
    for match in pattern.finditer(text, begin, end if end >= 0 else at + _REACH):
        if match.start() <= at <= match.end():
            return match.span()
    return None


def _is_name(text: str, start: int, end: int) -> bool:
    line = max(start - _REACH, text.rfind("\n", 0, start) + 1)
    start -= len(_UNBROKEN.search(text[line:start])[0])  # type: ignore[index]  # it matches nothing at worst
    value, before = text[start:end], text[line:start]
    if _WHO.search(before) or value.startswith(("/", "~/")):
        return True
    if not any(char.isupper() or (char.isalpha() and not char.islower()) for char in value):
        return False
    if value[0].islower() or _COMMON.search(before):
        return False
    if before.rstrip(" \"'`*").endswith((".", "!", "?")) or not before.strip(" \"'`*#-"):  # begins a sentence
        following = words_of(text, end, end + 24)
        return bool(following) and (following[0][2] in _VERBS or text[end : end + 2] in ("'s", "\u2019s", ", "))
    return True
