"""Reading mathematical answers: where a reply gives its answer, and plain answers as exact numbers.

No algebra happens here; `math_judge` decides whether an answer is right. Every pattern is linear in the text, since
models write 100 kB of anything.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

MAX_PLAIN_CHARS = 400
"""Longer texts are not read as plain numbers."""

# ---------------------------------------------------------------- where the answer is

_THOUGHT_END, _THOUGHT_START = re.compile(r"(?i)</think>"), re.compile(r"(?i)<think>")
_BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s*(?P<bare>[-+]?\d[\d.,]*)|\\\\(?!boxed|fbox)|\\[{}]|[{}]"
)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*([^\n]*)")
_TAGS = re.compile(r"(?i)<(/?)answer>")
_ANNOUNCED = re.compile(r"(?i)answer[^\n$\\]{0,60}(\$\$?|\\[(\[])")
_CLOSERS = {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_LIST_GLUE = re.compile(
    r"(?:\s|\$|\*|(?P<separator>[,;&]|\b(?:and|or)\b|\\text\s*\{\s*(?:,\s*)?(?:and|or)\s*\})"
    r"|\\(?:qquad|quad|[()\[\],;: \\])|[A-Za-z](?:_\{?\w\}?)?\s*=)*"
)
_MAX_GLUE_CHARS = 60


@dataclass(frozen=True)
class _Found:
    start: int
    end: int
    text: str


def after_thinking(text: str) -> str | None:
    """Return what follows the last `</think>`, all of a text without thoughts, None when a thought never ends."""
    said = _THOUGHT_END.split(text)[-1]
    return None if _THOUGHT_START.search(said) else said


def final_answer(text: str, *, parts: int = 1) -> str | None:
    r"""Return the last answer that a text marks as such, stripped; None without one, or when the last box never closes.

    Marks are `\boxed{}`, `#### ...`, `<answer>` tags, and mathematics announced by the word answer. Boxes in a list
    (`\boxed{1} and \boxed{2}`) are one answer, `1, 2`.

    Args:
        parts: how many values the right answer has. With several, boxes may be parted by white space alone.

    >>> final_answer(r"\boxed{1} no, \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    boxes, is_open = _boxes(text)
    if is_open:
        return None
    marks = sorted([*_in_tags(text, boxes), *_after_hashes(text, boxes)], key=lambda found: found.start)
    if boxes and (not marks or boxes[-1].start > marks[-1].start):
        return ", ".join(_last_list(text, boxes, loose=parts > 1))
    if marks:
        return marks[-1].text
    lines = [line for line in map(str.strip, _HASHES.findall(text)) if line]
    return lines[-1] if lines else _announced(text)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` that is not empty; None without one, or when it never closes.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    boxes, is_open = _boxes(text)
    return boxes[-1].text if boxes and not is_open else None


def _boxes(text: str) -> tuple[list[_Found], bool]:
    """Return the innermost closed boxes that are not empty, in order, and whether one opens after them for good."""
    opened: list[tuple[int, int] | None] = []  # for each open brace: start and content of its box, if it is one's
    boxes: list[_Found] = []
    for token in _BRACES.finditer(text):
        if token["box"]:
            opened.append((token.start(), token.end()))
        elif token["bare"]:
            boxes.append(_Found(token.start(), token.end(), token["bare"].rstrip(".,")))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()) is not None:
            is_outer = boxes and boxes[-1].start > box[0]
            content = text[box[1] : token.start()].strip()
            if content and not is_outer:
                boxes.append(_Found(box[0], token.end(), content))
    last = boxes[-1].start if boxes else -1
    return boxes, any(box is not None and box[0] > last for box in opened)


def _last_list(text: str, boxes: list[_Found], *, loose: bool) -> list[str]:
    """Return the contents of the boxes at the end that form one list, each once."""
    chosen = [boxes[-1]]
    for before in reversed(boxes[:-1]):
        between = text[before.end : chosen[0].start]
        glue = _LIST_GLUE.fullmatch(between) if len(between) <= _MAX_GLUE_CHARS else None
        if glue is None or not (loose or glue["separator"]):
            break
        chosen.insert(0, before)
    return list(dict.fromkeys(found.text for found in chosen))


def _in_tags(text: str, boxes: list[_Found]) -> list[_Found]:
    """Return the last pair of answer tags, unless a box in it says more."""
    last, opened = None, None
    for tag in _TAGS.finditer(text):
        if not tag[1]:
            opened = tag.end()
        elif opened is not None:
            last, opened = (opened, tag.start()), None
    if last is None or any(last[0] <= box.start < last[1] for box in boxes) or not text[slice(*last)].strip():
        return []
    return [_Found(*last, text[slice(*last)].strip())]


def _after_hashes(text: str, boxes: list[_Found]) -> Iterator[_Found]:
    """Yield `#### answer` lines; `#### Step 2` is a heading of Markdown, unless it is all there is."""
    lines = list(_HASHES.finditer(text))
    for line in lines[-20:]:
        said = line[1].strip()
        is_last = line is lines[-1] and not text[line.end() :].strip() and re.search(r"[\d\\]", said)
        holds_box = any(line.start() <= box.start < line.end() for box in boxes[-2:])
        if said and not holds_box and (is_last or (len(said) < 100 and read_quantity(clean(said)) is not None)):
            yield _Found(line.start(), line.end(), said)


def _announced(text: str) -> str | None:
    """Return the mathematics after the last word "answer", as in `The answer is $x$`."""
    found = list(_ANNOUNCED.finditer(text))
    if not found:
        return None
    start = found[-1].end()
    end = text.find(_CLOSERS[found[-1][1]], start)
    return text[start:end].strip() or None if end >= 0 else None


# ---------------------------------------------------------------- one spelling

_SPELLED = {  # how we write it: what else is written for it, aside from wide forms of the same
    "-": "−–‐‑",
    "": "\u200b\ufeff",
    "'": "‘’′",
    '"': "“”″",
    "/": "÷∕⁄",
    r"\times ": "×",
    r"\cdot ": "·⋅",
    r"\le ": "≤",
    r"\ge ": "≥",
    r"\ne ": "≠",
    r"\approx ": "≈",
    r"\pm ": "±",
    r"\infty ": "∞",
    r"\pi ": "π",
    r"\cup ": "∪",
    r"\cap ": "∩",
    r"\in ": "∈",
    r"\emptyset ": "∅",
    r"^\circ ": "°",
    "^2": "²",
    "^3": "³",
}
_TRANSLATION = str.maketrans({char: spelling for spelling, chars in _SPELLED.items() for char in chars})
_COMPATIBLE = re.compile("[\u00a0\u2000-\u200a\u202f\u3000\ufe63\uff01-\uff5e¼-¾⅐-⅞]")


def _compatible(match: re.Match[str]) -> str:
    """Spell out a fraction in one character, or a wide space, digit or sign."""
    top, slash, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}" if slash else top


_SPELLINGS = [
    (re.compile(r"(?<!\\)\$(\d[\d.,]*)\$"), r"\1"),
    (re.compile(r"√\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))"), r"\\sqrt{\1\2}"),
    (re.compile(r"√"), r"\\sqrt"),
    (re.compile(r"(?<!\\)\\!|\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])|(?<!\\)~|\s+"), " "),
    (re.compile(r"(?<!\\)\{\s*,\s*\}"), ","),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\langle(?![A-Za-z])"), "("),
    (re.compile(r"\\rangle(?![A-Za-z])"), ")"),
    (re.compile(r"\^?\\degree(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}"), r"^\\circ "),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{ *\\\}"), r"\\emptyset "),
    (re.compile(r"(?<=\d) +i(?![A-Za-z])"), "i"),
    (re.compile(r" +"), " "),
]
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))
_TEXT_MACRO = re.compile(r"\\(?:f?boxed|text(?:rm|bf|it|sf|normal)?|math(?:rm|bf|it|sf)|mbox|bm|operatorname)\s*\{")
_OPENERS = {"(": ")", "[": "]", "{": "}"}


@lru_cache(maxsize=1024)
def clean(text: str) -> str:
    r"""Return an answer in plain LaTeX: one kind of space, minus and fraction, and nothing wrapped around the whole.

    >>> clean(r"$\left(\dfrac{1}{2},\;−3\right)$.")
    '(\\frac{1}{2}, -3)'
    """
    text = _COMPATIBLE.sub(_compatible, text).translate(_TRANSLATION)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    while (unwrapped := _unwrapped(text)) != text:
        text = unwrapped
    return text


def _unwrapped(text: str) -> str:
    text = text.strip()
    if text[-1:] in (".", ",", ";", ":") and text[-2:-1] != "\\":
        return text[:-1]
    for start, end in _WRAPPERS:
        inner = text[len(start) : -len(end)]
        if len(text) > len(start + end) and text.startswith(start) and text.endswith(end) and start not in inner:
            return inner
    if (macro := _TEXT_MACRO.match(text)) and closing(text, macro.end() - 1) == len(text) - 1:
        return text[macro.end() : -1]
    is_grouping = text[:1] == "{" or (text[:1] == "(" and "," not in text and ";" not in text)
    return text[1:-1] if is_grouping and len(text) > 2 and closing(text, 0) == len(text) - 1 else text


def closing(text: str, start: int) -> int | None:
    """Return where the bracket that opens at `start` closes; None when it does not. Escaped braces are pairs, too."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i
    return None


def words_of(text: str) -> str:
    """Return a clean text in lower case without macros, quotes and doubled spaces."""
    text = re.sub(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}|\\mbox\s*\{([^{}]*)\}", r" \1\2 ", text)
    return re.sub(r"\s+", " ", text.replace('"', "").replace("'", "")).strip(" .,;:!").lower()


# ---------------------------------------------------------------- plain numbers, with units


@dataclass(frozen=True)
class Unit:
    """A unit of measure that can be compared with others."""

    dimensions: tuple[tuple[str, int], ...]  # ("length", 2): an area
    factor: Fraction  # how many of the dimension's base unit it is


@dataclass(frozen=True)
class Quantity:
    """A plain number."""

    value: Fraction
    is_decimal: bool  # written with a decimal point, so possibly rounded
    is_percent: bool = False
    unit: Unit | None = None  # None: none, or one that is not known (apples)

    def equals(self, gold: "Quantity", tolerance: float) -> bool:
        """Compare with the right one. 50% is 50 and 0.5; a unit counts only where both have one.

        Args:
            tolerance: for decimals, relative to `gold` below 1; integers and fractions must be equal.
        """
        ours, theirs = self.value, gold.value
        if self.unit and gold.unit:
            if self.unit.dimensions != gold.unit.dimensions:
                return False
            ours, theirs = ours * self.unit.factor, theirs * gold.unit.factor
        pairs = [(ours, theirs)]
        if self.is_percent and not gold.is_percent:
            pairs.append((ours / 100, theirs))
        if gold.is_percent and not self.is_percent:
            pairs.append((ours, theirs / 100))
        margin = Fraction(str(tolerance)) * min(1, abs(theirs)) if self.is_decimal or gold.is_decimal else Fraction(0)
        return any(abs(left - right) <= margin for left, right in pairs)


_DIGITS = (
    r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|[1-9]\d{0,2}(?: \d{3})+(?![\d/])|[1-9]\d{0,2}(?:'\d{3})+(?!\d)"
    r"|[1-9]\d?(?:,\d{2})+,\d{3}(?!\d)|\d+)"
)
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_LEAD = re.compile(r"(?P<sign>[-+]?) *(?P<money>(?:US|CA?|AU?)?\$|[€£¥₹]|USD |EUR |Rs\.? )? *(?P<late_sign>[-+]?) *")
_FRACTION = re.compile(
    rf"\\frac *(?:\{{ *(-?) *({_DECIMAL}) *\}}|()(\d)) *(?:\{{ *(-?) *({_DECIMAL}) *\}}|()(\d))"
    rf"|()({_DECIMAL}) */ *()({_DECIMAL})"
)
_WHOLE = re.compile(r"(\d+)(?= *\\frac| +\d+ */) *")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar) *\{(\d+)\}")
_NUMBER = re.compile(
    rf"({_DECIMAL})(?:[eE]([-+]?\d{{1,3}})(?![\d.])"
    r"|(?: *(?:\\times|\\cdot|\*|x) *10 *\^ *(?:\{ *([-+]?\d{1,3}) *\}|(\d))))?"
)
_POWER_OF_TEN = re.compile(r"10 *\^ *(?:\{ *([-+]?\d{1,3}) *\}|(\d)(?!\d))")
# fmt: off
_NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]
# fmt: on
_MACRO_IN_TAIL = re.compile(r"\\(?:text(?:rm|bf|it)?|math(?:rm|bf|it)|mbox|operatorname|unit) *\{([^{}]*)\}")
_PERCENT = re.compile(r"%|(?:per ?cent|percentage|pct)(?: points?)?")
_TAIL_WORDS = re.compile(r"[A-Za-z][A-Za-z.'-]*(?:\^[23])?(?:(?: ?/ ?| )[A-Za-z][A-Za-z.'-]*(?:\^[23])?){0,4}")
_MULTIPLIERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_OPERATION = re.compile(
    r"(?i)\b(?:and|or|to|than|less|fewer|more|minus|plus|times|over|by|divided|squared|cubed|halves|half|thirds?|"
    r"quarters?|fifths|factorial|mod|remainder|if|not)\b"
)


def read_quantity(text: str) -> Quantity | None:
    r"""Read a clean text that is one plain number, maybe with a currency, a unit or a percent sign; else None.

    >>> read_quantity(r"-1\frac{1}{2} \text{ hours}").value
    Fraction(-3, 2)
    """
    if len(text) > MAX_PLAIN_CHARS:
        return None
    if text.lower() in _NUMBER_WORDS:
        return Quantity(Fraction(_NUMBER_WORDS.index(text.lower())), is_decimal=False)
    lead = _LEAD.match(text)
    assert lead is not None  # it matches nothing, too
    if (lead["sign"] and lead["late_sign"]) or (read := _read_number(text[lead.end() :])) is None:
        return None
    number, rest = read
    negative = "-" in (lead["sign"], lead["late_sign"])
    quantity = replace(number, value=-number.value if negative else number.value)
    tailed = _with_tail(quantity, rest)
    if tailed is None or not lead["money"]:
        return tailed
    return replace(tailed, unit=_currency(lead["money"].strip()))


def _read_number(text: str) -> tuple[Quantity, str] | None:
    """Read the number at the beginning of a text, without sign; what follows it is returned with it."""
    if whole := _WHOLE.match(text):
        fraction = _FRACTION.match(text, whole.end())
        value = _value_of(fraction) if fraction else None
        if fraction is None or value is None or not 0 <= value < 1:
            return None  # a product, or nonsense
        return Quantity(int(whole[1]) + value, is_decimal=False), text[fraction.end() :]
    if fraction := _FRACTION.match(text):
        value = _value_of(fraction)
        return None if value is None else (Quantity(value, is_decimal="." in fraction[0]), text[fraction.end() :])
    if repeating := _REPEATING.match(text):
        before, after, again = repeating.groups()
        nines = Fraction(int(again), 10 ** len(again) - 1) / 10 ** len(after)
        return Quantity(Fraction(f"{before or 0}.{after or 0}") + nines, is_decimal=False), text[repeating.end() :]
    if power := _POWER_OF_TEN.match(text):
        return Quantity(Fraction(10) ** int(power[1] or power[2]), is_decimal=False), text[power.end() :]
    if number := _NUMBER.match(text):
        exponent = int(number[2] or number[3] or number[4] or 0)
        return Quantity(_plain(number[1]) * Fraction(10) ** exponent, "." in number[1]), text[number.end() :]
    return None


def _value_of(fraction: re.Match[str]) -> Fraction | None:
    sign, numerator, other_sign, denominator = [group for group in fraction.groups() if group is not None]
    below = _plain(denominator)
    return None if below == 0 else _plain(numerator) / below * (1 if sign == other_sign else -1)


def _plain(digits: str) -> Fraction:
    return Fraction(re.sub(r"[, ']", "", digits))


def _with_tail(quantity: Quantity, tail: str) -> Quantity | None:
    """Return the quantity with what follows its digits; None when that is no unit (`x`, `\\pi`, `and 6`)."""
    in_macro = _MACRO_IN_TAIL.search(tail) is not None
    tail = re.sub(r"\^ *\{ *([23]) *\}", r"^\1", _MACRO_IN_TAIL.sub(r" \1 ", tail))
    is_glued = not tail.startswith(" ")
    tail = re.sub(r" *\^ *(?=[23])", "^", re.sub(r" +", " ", tail)).strip(" .")
    if not tail:
        return quantity
    if _PERCENT.fullmatch(tail):
        return replace(quantity, is_percent=True)
    if tail.startswith(r"^\circ"):
        scale = tail.removeprefix(r"^\circ").strip()
        return replace(quantity, unit=_UNITS["degree" + scale]) if "degree" + scale in _UNITS else None
    if base := re.fullmatch(r"_ *\{? *(\d+|ten|two|eight|sixteen) *\}?", tail):
        return replace(quantity, unit=Unit((("base " + base[1], 1),), Fraction(1)))
    if tail in ("¢", "$", "€", "£", "¥"):
        return replace(quantity, unit=_currency(tail))
    if not _TAIL_WORDS.fullmatch(tail):
        return None
    words = tail.split(" ")
    if words[0].lower() in _MULTIPLIERS:
        times = _MULTIPLIERS[words[0].lower()]
        return _with_tail(replace(quantity, value=quantity.value * times), " " + " ".join(words[1:]))
    if is_glued and not in_macro and tail in ("st", "nd", "rd", "th"):
        return quantity
    if (unit := read_unit(tail)) is not None:
        return replace(quantity, unit=unit)
    if _OPERATION.search(tail):
        return None
    is_variable = not in_macro and (is_glued or any(len(word) < 3 for word in words))
    return None if is_variable else quantity


def _currency(symbol: str) -> Unit:
    return _UNITS.get({"$": "dollar", "US$": "dollar"}.get(symbol, symbol)) or Unit(((symbol, 1),), Fraction(1))


def _table(**units: str) -> dict[str, Unit]:
    """Return units by all their names: `dimension="1 base bases, 60 minute minutes"`."""
    return {
        name: Unit(((dimension, 1),), Fraction(factor))
        for dimension, entries in units.items()
        for factor, *names in (entry.split() for entry in entries.split(","))
        for name in names
    }


_UNITS = _table(
    length="1/1000 mm millimeter millimetre,1/100 cm centimeter centimetre,1 m meter metre,1000 km kilometer kilometre,"
    "127/5000 in inch inches,381/1250 ft foot feet,1143/1250 yd yard,201168/125 mi mile",
    time="1 s sec second,60 min minute,3600 h hr hour,86400 day,604800 week",
    months="1 month,12 yr year",
    mass="1/1000 mg milligram,1 g gram,1000 kg kilogram",
    volume="1/1000 ml mL milliliter millilitre,1 l L liter litre",
    money="1 dollar USD usd,1/100 cent ¢",
    angle="1 degree deg",
    radians="1 radian rad",
    celsius="1 degreeC Celsius",
    fahrenheit="1 degreeF Fahrenheit",
)
_UNITS["mph"] = Unit((("length", 1), ("time", -1)), Fraction(201168, 125 * 3600))
_UNITS["kmh"] = _UNITS["kmph"] = Unit((("length", 1), ("time", -1)), Fraction(1000, 3600))


def read_unit(text: str) -> Unit | None:
    """Return a unit by its name (`cm^2`, `square feet`, `miles per hour`); None when it is not in the table."""
    dimensions: dict[str, int] = {}
    factor = Fraction(1)
    for place, side in enumerate(re.split(r" ?/ ?| per ", text)):
        parts = re.fullmatch(r"(?:(square|sq\.?|cubic|cu\.?) )?([A-Za-z¢]+)\.?(?:\^([23]))?( squared| cubed)?", side)
        known = parts and (_UNITS.get(parts[2]) or _UNITS.get(parts[2].lower().removesuffix("s")))
        if not parts or not known:
            return None
        is_square, is_cubic = (parts[1] or "")[:1] == "s", (parts[1] or "")[:1] == "c"
        power = 2 if is_square or parts[4] == " squared" else 3 if is_cubic or parts[4] else int(parts[3] or 1)
        power = power if place == 0 else -power
        factor *= known.factor**power
        for dimension, count in known.dimensions:
            dimensions[dimension] = dimensions.get(dimension, 0) + count * power
    return Unit(tuple(sorted(dimensions.items())), factor)


# ---------------------------------------------------------------- lists of plain numbers

_NAME = re.compile(r"(?:\\text *\{[^{}]*\}|[A-Za-z](?:_\{?\w+\}?)?(?: ?\([a-z]\))?) *= *")
_MEMBER = re.compile(r"[A-Za-z] *\\in(?![A-Za-z]) *")
_CONJUNCTION = re.compile(r",? *(?:\\text *\{ *,? *(?:and|or) *\}|\\lor|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])) *")


@dataclass(frozen=True)
class Parts:
    """A text taken apart at its outermost commas."""

    brackets: str  # "()", "[)", "{}", ...; "": none
    texts: tuple[str, ...]


def split_parts(text: str) -> Parts:
    r"""Split a clean text at its outermost separators: commas, semicolons, and, or. `1,234` stays one number.

    >>> split_parts(r"\{1, (2,3)\}")
    Parts(brackets='{}', texts=('1', '(2,3)'))
    """
    text = text[len(member[0]) :] if (member := _MEMBER.match(text)) else text
    opener, body = ("{", text[1:]) if text.startswith(r"\{") else (text[:1], text)
    brackets = ""
    if opener in _OPENERS and closing(body, 0) == len(body) - 1:
        inner = body[1:-1].removesuffix("\\")
        if len(texts := _split(inner, is_inside=True)) > 1 or opener == "{":
            return Parts("{}" if opener == "{" else opener + body[-1], texts)
    return Parts(brackets, _split(text, is_inside=False))


def _split(text: str, *, is_inside: bool) -> tuple[str, ...]:
    text = _CONJUNCTION.sub(", ", text)
    keeps_thousands = not is_inside or ", " in text or ";" in text
    texts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        is_separator = char == ";" or (char == "," and not (keeps_thousands and _is_thousands(text, i)))
        if depth == 0 and is_separator:
            texts.append(text[start:i])
            start = i + 1
    return tuple(part.strip() for part in [*texts, text[start:]])


def _is_thousands(text: str, comma: int) -> bool:
    return text[comma - 1 : comma].isdigit() and re.match(r"\d{3}(?!\d)", text[comma + 1 : comma + 5]) is not None


def name_of(text: str) -> str:
    """Return the name before an equals sign (`x` of `x = 5`), "" without one."""
    name = _NAME.match(text)
    return name[0].rstrip("= ") if name else ""


def without_name(text: str) -> str:
    """Return a text without the name before its equals sign."""
    return text[len(name[0]) :] if (name := _NAME.match(text)) else text
