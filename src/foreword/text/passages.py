"""Retrieved passages inside a message, found by what programs write around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

Span = tuple[int, int]

_I, _M, _S = re.IGNORECASE, re.MULTILINE, re.DOTALL
_MANY = "documents|docs|passages|sources|chunks|excerpts|snippets|articles|references|results"
_THINGS = _MANY.replace("s|", "s?|") + "?"
_PASSAGE_TAG = re.compile(
    r"<(document|doc|passage|source|chunk|excerpt|snippet|article|search_result|result)\b[^<>]{0,200}>", _I
)
_CONTEXT_TAG = re.compile(rf"<(context|retrieved_context|{_MANY})\b[^<>]{{0,200}}>", _I)
_RULE = re.compile(r"^-{5,}[ \t]*\n", _M)
_ABOUT = re.compile(rf"\b(?:context|information|{_THINGS})\b", _I)
# "Context:", "Relevant documents:", and the context up to the question
_LABEL = re.compile(
    rf"^(?:[#*]+ ?)?(?:\w{{1,40}} ){{0,5}}(?:context|{_MANY})(?: [^\W\d]\w{{0,40}}){{0,5}}:\**[ \t]*(?:\n|(?=\S))",
    _I | _M,
)
# instructions that speak of the context that follows them, then the context up to the question
_FOLLOWING = re.compile(rf"\bfollowing\b[^\n]{{0,40}}?\b(?:context|{_THINGS})\b", _I)
_AFTER_INSTRUCTIONS = re.compile(r"\n-{5,}\n|\n[ \t]*\n")
_QUESTION = re.compile(
    r"^(?:[#*]+ ?)?(?:\w+[ -]){0,2}(?:question|query|answer|instructions?|task|request|frage|pregunta)\b[^\n:]{0,24}:"
    r"|^-{5,}",
    _I | _M,
)
_HEAD = re.compile(
    rf"^(?:(?P<numbered>(?:[#*]+ ?)?(?:{_THINGS}) ?[#\[(]?\d+\b)|(?P<bracket>\[\d+\]:? )"
    r"|(?P<field>source|file_path|file_name|page_label|title|url|content|document_id|doc_id): ?\S)",
    _I | _M,
)
_METADATA = re.compile(rf"(?:[#*]+ ?)?(?:(?:{_THINGS}) ?[#\[(]?\d+\W*|\[\d+\]:?|\w+: ?\S[^\n]*)$", _I)
_STRONG = ("numbered", "file_path", "file_name", "page_label")  # one is enough
_WORDS = (
    *("context", "information", "doc", "passage", "source", "chunk", "excerpt", "snippet", "article", "reference"),
    *("result", "[", "file_", "page_", "title:", "url:", "content:"),
)
_BLANK = re.compile(r"\n[ \t]*\n\s*")
_NUMBER = re.compile(rf"^((?:[#*]+ ?)?(?:{_THINGS})? ?[#\[(]?)\d+", _I)
_NUMBERED_TAG = re.compile(r"""(?<=[ <])(?:index|id|number|rank|n|score)=["']?[\d.]+["']?""", _I)


def passages(text: str, *, is_system: bool = False) -> list[Span]:
    """Where the passages of a message stand, in order; neither the instructions nor the question around them.

    Recognised are tagged blocks (``<document>``, ``<doc>``), what stands between ``<context>`` tags, between two rules
    under a line about the context, or behind ``Context:`` up to the question, and passages that begin with a number
    (``Document 1:``, ``[1]``) or with their metadata (``Source:``, ``file_path:``). What has no mark of its own is
    divided at blank lines.

    Args:
        is_system: the text is a system prompt, where numbers alone (``[1]``) may be rules just as well.
    """
    lower = text.lower()
    if not any(word in lower for word in _WORDS):  # most messages
        return []
    tagged = [block for block, _ in _blocks(text, _PASSAGE_TAG)]
    if tagged:
        return tagged
    for containers in (_tagged_contexts, _ruled_contexts, _labelled_contexts, _following_contexts):
        found = [span for start, end, closed in containers(text) for span in _inside(text, start, end, closed=closed)]
        if found:
            return found
    return [] if is_system and not _strong_head(text) else list(_headed(text, 0, len(text), closed=False))


def _blocks(text: str, tag: re.Pattern[str]) -> Iterator[tuple[Span, Span]]:
    """Blocks between an opening and a closing tag, and what is inside; in one pass, whatever is left open."""
    at, unclosed = 0, set[str]()
    for match in tag.finditer(text):
        name = match[1]
        if match.start() < at or name in unclosed:
            continue
        close = text.find(f"</{name}>", match.end())
        if close < 0:
            unclosed.add(name)
            continue
        at = close + len(name) + 3
        yield (match.start(), at), (match.end(), close)


def _tagged_contexts(text: str) -> Iterator[tuple[int, int, bool]]:
    return ((start, end, True) for _, (start, end) in _blocks(text, _CONTEXT_TAG))


def _ruled_contexts(text: str) -> Iterator[tuple[int, int, bool]]:
    """A line about the context, and the context between two rules."""
    rules = list(_RULE.finditer(text + "\n"))
    for rule, following in pairwise(rules):
        line = text[max(text.rfind("\n", 0, max(rule.start() - 1, 0)), rule.start() - 200, 0) : rule.start()]
        if _ABOUT.search(line):
            yield rule.end(), following.start(), True


def _labelled_contexts(text: str) -> Iterator[tuple[int, int, bool]]:
    if label := _LABEL.search(text):
        yield label.end(), len(text), False


def _following_contexts(text: str) -> Iterator[tuple[int, int, bool]]:
    if (said := _FOLLOWING.search(text)) and (after := _AFTER_INSTRUCTIONS.search(text, said.end())):
        yield after.end(), len(text), False


def passage_key(passage: str) -> str:
    """The passage without its number and with plain white space: equal for the same passage at another place."""
    head, bracket, rest = passage.partition(">") if passage.startswith("<") else ("", "", passage)
    head = _NUMBERED_TAG.sub("", head)
    return " ".join((head + bracket + _NUMBER.sub(r"\1", rest, count=1)).split())


def part_spans(parts: list[str]) -> list[Span]:
    """Where the passages stand in a content that was given as several text parts.

    Parts that end with ``?`` or ``:`` are the question and instructions; where none asks, the last part does.
    """
    kept = [not part.rstrip().endswith(("?", ":")) and bool(part.strip()) for part in parts]
    if not any(part.rstrip().endswith("?") for part in parts):
        kept[-1] = False
    spans, start = [], 0
    for part, keep in zip(parts, kept, strict=True):
        if keep:
            spans.append((start, start + len(part)))
        start += len(part)
    return spans if len(spans) > 1 else []


def _inside(text: str, start: int, end: int, *, closed: bool) -> list[Span]:
    """The passages in a container, which may be open at its end: then the question ends it."""
    if not closed and (question := _QUESTION.search(text, start, end)):
        end = question.start()
    elif not closed:  # the last paragraph asks
        borders = list(_BLANK.finditer(text, start, end))
        if borders and text[:end].rstrip().endswith("?"):
            end = borders[-1].start()
    return list(_headed(text, start, end, closed=True)) or list(_paragraphs(text, start, end))


def _strong_head(text: str) -> bool:
    return any(_kind(match) in _STRONG for match in _HEAD.finditer(text))


def _kind(match: re.Match[str]) -> str:
    return (match["field"] or match.lastgroup or "").lower()


def _headed(text: str, start: int, end: int, *, closed: bool) -> Iterator[Span]:
    """Passages that begin as the first one does; without a ``closed`` end the last is as long as the others."""
    heads = list(_HEAD.finditer(text, start, end))
    starts = [match.start() for match in heads if _kind(match) == _kind(heads[0])]
    if not starts or (len(starts) < 2 and not closed and _kind(heads[0]) not in _STRONG):
        return
    longest = 1
    for begin, stop in zip(starts, [*starts[1:], end], strict=True):
        if stop == end and not closed:
            stop = _end_of_last(text, begin, end, longest)
        body = text[begin:stop].rstrip()
        longest = max(longest, len(_BLANK.split(body)))
        yield begin, begin + len(body)


def _end_of_last(text: str, begin: int, end: int, paragraphs: int) -> int:
    if question := _QUESTION.search(text, begin + 1, end):
        return question.start()
    borders = [match.start() for match in _BLANK.finditer(text, begin, end)]
    if borders and all(_METADATA.match(line) for line in text[begin : borders[0]].split("\n")):
        paragraphs += paragraphs == 1  # nothing but metadata before the first blank line
    return borders[paragraphs - 1] if len(borders) >= paragraphs else end


def _paragraphs(text: str, start: int, end: int) -> Iterator[Span]:
    at = start
    for border in [*_BLANK.finditer(text, start, end), None]:
        stop = border.start() if border else end
        body = text[at:stop]
        if body.strip():
            begin = at + len(body) - len(body.lstrip())
            yield begin, begin + len(body.strip())
        at = border.end() if border else end
