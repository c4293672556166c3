"""Dates, times and spans of time in a text, in the spellings of many places."""

# ruff: noqa: RUF001 - signs of other scripts are what this is about
from __future__ import annotations

import re
from datetime import date

from foreword.text.causes.align import UNSPACED
from foreword.text.passages import Span

# Full names are dates by themselves; short ones, and those that are words too, only beside a number.
_MONTHS = """
january february april june july august september october november december
januar jänner februar märz juni juli oktober dezember
janvier février avril juin juillet août septembre octobre novembre décembre
enero febrero marzo abril junio julio agosto septiembre octubre noviembre diciembre
gennaio febbraio aprile maggio giugno luglio settembre ottobre dicembre
janeiro fevereiro março maio junho julho setembro outubro novembro dezembro
januari februari maart augustus
stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października listopada grudnia
januari februari mars juni juli augusti marts april maj desember
января февраля марта апреля мая июня июля августа сентября октября ноября декабря
"""
_WEEKDAYS = """
monday tuesday wednesday thursday friday saturday sunday
montag dienstag mittwoch donnerstag freitag samstag sonnabend sonntag
lundi mardi mercredi jeudi vendredi samedi dimanche
lunes martes miércoles jueves viernes sábado domingo
lunedì martedì mercoledì giovedì venerdì sabato domenica
segunda-feira terça-feira quarta-feira quinta-feira sexta-feira
maandag dinsdag woensdag donderdag vrijdag zaterdag zondag
poniedziałek wtorek środa czwartek piątek sobota niedziela
måndag tisdag onsdag torsdag fredag lördag söndag mandag tirsdag lørdag søndag
понедельник вторник среда четверг пятница суббота воскресенье
星期一 星期二 星期三 星期四 星期五 星期六 星期日 星期天 月曜日 火曜日 水曜日 木曜日 金曜日 土曜日 日曜日
morning afternoon evening
"""
_SHORT_NAMES = """
may march mai mars mayo maj mei marzo marco marca maja lutego august mandag sobota среда мая
jan feb mar apr jun jul aug sep sept oct nov dec janv févr avr juil déc mär mrz okt dez ene abr ago dic gen mag giu lug
set ott fev out mrt sty lut kwi cze lip sie wrz paź lis gru янв фев мар апр июн июл авг сен окт ноя дек
mon tue tues wed thu thur thurs fri sat sun mo di mi do fr sa so lun mer jeu ven sam dim mié jue vie sáb dom
mar gio sab seg ter qua qui sex ma wo vr za zo man tir ons tor fre lör lør sön søn пн вт ср чт пт сб вс
"""
_SHORT = frozenset(_SHORT_NAMES.split())
_NAMES = frozenset((_MONTHS + _WEEKDAYS).split()) - _SHORT
_ANY_NAME, _ANY_SHORT = ("|".join(sorted(names, key=len, reverse=True)) for names in (_NAMES, _SHORT))

_LETTER = rf"[^\W{UNSPACED}]"
_TIME = r"\d{1,2}(?::|h)\d\d(?::\d\d(?:[.,]\d{1,9})?)?"
_ZONE = r"z|utc|gmt|cest|cet|e[sd]t|p[sd]t|c[sd]t|m[sd]t|bst|jst|uhr"
_TOKEN = rf"""(?:
    \d{{4}}-?\d\d-?\d\dt\d\d:?\d\d(?::?\d\d(?:[.,]\d+)?)?
    |{_TIME}
    |\d+[年月日時时分秒]
    |\d+(?:st|nd|rd|th|er|º|ª)?(?!{_LETTER})
    |(?:{_ANY_NAME})(?!{_LETTER})|(?:{_ANY_SHORT})(?!{_LETTER})\.?
    |(?:[ap]\.?m\b\.?|(?:{_ZONE})\b)
    |[+-]\d\d:?\d\d
    |[(（]?[月火水木金土日一二三四五六][)）]
)"""
_JOIN = (
    r"(?:,?\ (?:de|del|of|at|um|the|den|der|le|el|à|às|a\ las|kl|klo|o|г|в|om|den)\.?\ "
    r"|[ ,./\-\u202f\u00a0T|]{0,3})"
)
_EXPRESSION = re.compile(
    rf"(?<!{_LETTER})(?<![.\-$€£#]){_TOKEN}(?:{_JOIN}{_TOKEN})*(?!{_LETTER})", re.IGNORECASE | re.VERBOSE
)

_UNIT = (
    r"(?:ms|millis\w*|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|weeks?|months?|years?"
    r"|sekunden?|minuten?|stunden?|tage?n?|woche?n?|secondes?|heures?|jours?|segundos?|minutos?|horas?|días?|minuti|ore|giorni)"
)
_AMOUNT = (
    rf"(?:\d+(?:[.,:]\d+)*\ ?{_UNIT}\b(?:(?:,|\ and|\ und|\ et)?\ ?\d+(?:[.,:]\d+)*\ ?{_UNIT}?\b)*|\d+:\d\d(?::\d\d)?)"
)
_SPAN_OF_TIME = re.compile(
    rf"(?:an?\ {_UNIT}|just\ now|{_AMOUNT})\ ago\b|(?:\bvor|\bil\ y\ a|\bhace|\bhá)\ {_AMOUNT}|{_AMOUNT}\ fa\b"
    rf"|\b(?:up(?:time)?|elapsed|running|session\ age|age|laufzeit|since\ start|for)\b"
    rf"\W{{1,3}}(?:for\ |since\ )?{_AMOUNT}"
    rf"|{_AMOUNT}\ (?:elapsed|uptime)\b",
    re.IGNORECASE | re.VERBOSE,
)
_EPOCH = re.compile(r"(?<![\w.\-])1[4-9]\d{8}(?:\d{3}|\d{6}|\d{9}|\.\d{1,9})?(?![\w\-])")
_NEAR_S = 400 * 86_400  # two clocks of one program show times that lie no farther apart
_REACH = 64


def clock(expected: str, actual: str, at: int) -> tuple[Span, Span] | None:
    """The dates or times that cover the first difference ``at`` in both texts; None if it lies in none."""
    found = _epoch(expected, actual, at)
    for pattern in (_EXPRESSION, _SPAN_OF_TIME):
        if found is None:
            first, second = _covering(pattern, expected, at), _covering(pattern, actual, at)
            if (
                first
                and second
                and max(first[1], second[1]) > at
                and _same_era(expected[slice(*first)], actual[slice(*second)])
            ):
                found = first, second
    return found


def _covering(pattern: re.Pattern[str], text: str, at: int) -> Span | None:
    """The expression that covers ``at``, which may be its end."""
    begin = max(at - _REACH, text.rfind("\n", 0, at) + 1)
    end = text.find("\n", at, at + _REACH)
    for match in pattern.finditer(text, begin, end if end >= 0 else at + _REACH):
        if match.start() <= at <= match.end() and (pattern is _SPAN_OF_TIME or _is_time(match[0])):
            return match.span()
    return None


def _epoch(expected: str, actual: str, at: int) -> tuple[Span, Span] | None:
    begin = max(at - _REACH, 0)
    pair = [
        next((match for match in _EPOCH.finditer(text, begin, at + _REACH) if match.start() <= at < match.end()), None)
        for text in (expected, actual)
    ]
    first, second = pair
    if first is None or second is None or len(first[0]) != len(second[0]):
        return None
    near = abs(int(first[0][:10]) - int(second[0][:10])) <= _NEAR_S
    return (first.span(), second.span()) if near else None


def _same_era(first: str, second: str) -> bool:
    """Whether two bare numbers can be years of one program; everything else can."""
    return not (first.isdigit() and second.isdigit()) or abs(int(first) - int(second)) <= 5


def _is_time(text: str) -> bool:
    """Whether what looks like parts of a date or a time is one."""
    lower = text.lower()
    words = re.findall(r"[^\W\d]+(?:-feira)?", lower)
    numbers = re.findall(r"\d+", lower)
    if any(word in _NAMES for word in words) or any(char in lower for char in "年時时"):
        return True
    if numbers and any(word in _SHORT for word in words):
        return True
    if re.search(r"\d+月\d+日", lower) or re.search(r"\d ?[ap]\.?m\b", lower):
        return True
    if match := re.search(r"(?<!\d)(\d{1,2})[:h](\d\d)", lower):
        return int(match[1]) < 25 and int(match[2]) < 60
    if match := re.search(r"(?<!\d)(\d{4})-?(\d\d)-?(\d\d)(?=t|\b)", lower):
        return _is_date(match[1], match[2], match[3])
    if match := re.search(r"(?<!\d)(\d{1,4})([./-]) ?(\d{1,2})\2 ?(\d{4}|\d\d)(?!\d)", lower):
        first, second, last = match[1], match[3], match[4]
        if len(first) == 4:
            return _is_date(first, second, last)
        year = last if len(last) == 4 else f"20{last}"
        short = match[2] != "/" and len(match[0]) < 8  # 1.2.26 is as often a version
        return not short and (_is_date(year, second, first) or _is_date(year, first, second))
    if re.search(r"(?<!\d)\d{1,2}\.\d\d uhr", lower):
        return True
    year, month = r"(?:19|20)\d\d", r"(?:0?[1-9]|1[0-2])"
    return bool(re.fullmatch(rf"{year}(?:[-/.]{month})?|{month}[-/.]{year}", lower))


def _is_date(year: str, month: str, day: str) -> bool:
    try:
        return 1900 <= date(int(year), int(month), int(day)).year <= 2199
    except ValueError:
        return False
