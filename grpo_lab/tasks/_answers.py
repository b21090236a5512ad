r"""Numeric answers: find the one a text gives, compare it exactly (Fraction, never eval or float), grade it 0 or 1.

`strict` takes a declared answer only: the number right behind `####` or inside `\boxed{`, on that line. Markup,
currency and brackets may stand between; a marker with anything else behind it (a heading, an expression 3+4, a list
1,2, a range, a ratio) declares nothing. The last declaration counts. `flexible` falls back to the text's last number.
Commas group thousands (1,234; anything else is a list); 1e3, 1/2, 1 1/2 and \frac{1}{2} are numbers; what follows is a
unit, the percent sign too: 50% is 50. Digits are ASCII. A number nobody can mean (1/0, over 1,000 characters or an
exponent beyond 1,000) is unparsable. Every pattern is possessive or anchored: time is linear in the text.
"""

import re
from fractions import Fraction
from typing import Literal

from grpo_lab.errors import ConfigError
from grpo_lab.types import Grade

Protocol = Literal["strict", "flexible"]

_MAX_CHARS = 1000
_MAX_EXPONENT = 1000

_CURRENCY = r"(?:\\?[$€£¥])?+"
_UNSIGNED = r"(?:[0-9]++(?:\.[0-9]++)?+|(?<![\w.])\.[0-9]++)"
_MAGNITUDE = (
    r"(?:(?P<whole>[0-9]++)[ ](?=[0-9]++/[0-9]))?+"
    rf"(?P<number>{_UNSIGNED})(?:[eE](?P<exponent>[+-]?+[0-9]++))?+(?:[ ]?/[ ]?(?P<denominator>{_UNSIGNED}))?+"
)
# Behind a word, digit or closing bracket, + and - are operators or hyphens, not signs.
_NUMBER = re.compile(rf"(?P<spelling>(?P<sign>(?<![^\W_])(?<![)\]}}])[+-])?+{_CURRENCY}{_MAGNITUDE})")

_MARKUP = r"(?:[^\S\n]|[*_`~$€£¥(\[{<:\"']|\\[(\[,;:! $]|\\(?:text|textbf|mathbf|mathrm|mathit|bf)\b)*+"
_GOES_ON = r"(?:\.[0-9]|[ ]*+(?:[+*/^=:,_\u00d7\u00f7-]|\\(?:times|div|cdot)\b)[ ]*+[-({$.]*+[0-9]|\\(?:sqrt|pi)\b)"
_LEADING = rf"{_MARKUP}(?P<spelling>(?P<sign>[+-])?+[ ]*+{_CURRENCY}[ ]*+{_MAGNITUDE})(?!{_GOES_ON})"
_DECLARED = re.compile(rf"(?:####|\\boxed[ ]?\{{){_LEADING}")
_WHOLE = re.compile(rf"{_LEADING}\W*+")

_MINUS_SIGNS = str.maketrans(dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"))
_LATEX_COMMA = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!])(?=[0-9]{3})")
_THOUSANDS = re.compile(r"(?<![0-9])(?<![0-9][.,])[1-9][0-9]{0,2}(?:,[0-9]{3})++(?!,?[0-9])")
_FRACTION = re.compile(
    r"(?P<before>[0-9]?)\\[dtc]?frac(?:\{[ ]*+(?P<top>[+-]?[0-9.]++)[ ]*+\}[ ]*+\{[ ]*+(?P<bottom>[0-9.]++)[ ]*+\}"
    r"|(?P<short_top>[0-9])(?P<short_bottom>[0-9]))"
)


def grade_number(truth: str, text: str, truncated: bool, protocol: Protocol) -> Grade:
    """Reward 1 if the text's answer equals `truth`, else 0.

    A truncated completion never declared its end: it is "truncated" and r = 0 whatever it contains.
    """
    if truncated:
        return Grade(0.0, "truncated")
    found = _find(_normalise(text), protocol)
    value = _value(found) if found else None
    if found is None or value is None:
        return Grade(0.0, "unparsable")
    correct = value == parse_number(truth)
    return Grade(float(correct), "correct" if correct else "wrong", found["spelling"].strip())


def parse_number(text: str) -> Fraction | None:
    """The number a whole text is, markup and signs like $ and % aside; None if it holds words or a second number."""
    match = _WHOLE.fullmatch(_normalise(text.strip()))
    return _value(match) if match else None


def require_number(answer: str, where: str) -> None:
    """Refuse a ground truth that is no number. ConfigError names `where` it stands."""
    if parse_number(answer) is None:
        raise ConfigError(
            f"{where}: the answer {answer[:80]!r} is not a number, which numeric grading needs; correct the row"
        )


def _find(text: str, protocol: Protocol) -> re.Match[str] | None:
    found = _last(_DECLARED, text)
    return _last(_NUMBER, text) if found is None and protocol == "flexible" else found


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text):  # noqa: B007
        pass
    return match


def _normalise(text: str) -> str:
    """One minus sign, thousands without commas, LaTeX fractions of plain numbers as a/b."""
    text = _LATEX_COMMA.sub(",", text.translate(_MINUS_SIGNS))
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return _FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match[str]) -> str:
    top, bottom = match["top"] or match["short_top"], match["bottom"] or match["short_bottom"]
    return f"{match['before']} {top}/{bottom}" if match["before"] else f"{top}/{bottom}"


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match["spelling"]) > _MAX_CHARS:  # also keeps below Python's limit on digits of an int
        return None
    exponent = int(match["exponent"] or 0)
    denominator = Fraction(match["denominator"] or 1)
    if abs(exponent) > _MAX_EXPONENT or denominator == 0:
        return None
    magnitude = int(match["whole"] or 0) + Fraction(match["number"]) * Fraction(10) ** exponent / denominator
    return -magnitude if match["sign"] == "-" else magnitude
