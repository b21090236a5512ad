"""Numeric answers: what each protocol reads in each spelling, bounded time, and never an exception."""

import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.errors import ConfigError
from grpo_lab.tasks._answers import Protocol, grade_number, parse_number, require_number

NONE = None  # unparsable
PROTOCOLS: tuple[Protocol, ...] = ("strict", "flexible")

# (text, what strict reads, what flexible reads)
CASES = [
    # Without a declaration strict finds nothing and flexible takes the last number.
    ("$1,234.50", NONE, "1234.5"),
    ("18.", NONE, "18"),
    ("**18**", NONE, "18"),
    ("-3", NONE, "-3"),
    ("\u22123", NONE, "-3"),
    ("1/2", NONE, "1/2"),
    ("1 1/2", NONE, "3/2"),
    ("50%", NONE, "50"),
    ("1,234", NONE, "1234"),
    ("1,2", NONE, "2"),
    ("1,234,56", NONE, "56"),
    ("1,2345", NONE, "2345"),
    ("1e3", NONE, "1000"),
    ("2.5E-1", NONE, "0.25"),
    ("18 dollars", NONE, "18"),
    ("+18", NONE, "18"),
    ("0.50", NONE, "0.5"),
    (".5", NONE, "0.5"),
    ("it is...5", NONE, "5"),
    ("-$3", NONE, "-3"),
    ("$-3$", NONE, "-3"),
    ("5-3", NONE, "3"),
    ("(5)-3", NONE, "3"),
    ("pages 10-20", NONE, "20"),
    ("4 - 7 = -3.", NONE, "-3"),
    (r"-\frac{1}{2}", NONE, "-1/2"),
    (r"\frac12", NONE, "1/2"),
    ("first 3, then 4 apples", NONE, "4"),
    ("1/0", NONE, NONE),
    ("", NONE, NONE),
    ("no number at all", NONE, NONE),
    ("\u0661\u0668", NONE, NONE),  # Arabic-Indic 18: only ASCII digits are numbers
    ("1e999999999", NONE, NONE),
    ("7" * 1001, NONE, NONE),
    # Declared after ####.
    ("#### 18", "18", "18"),
    ("####18", "18", "18"),
    ("#### $1,234.50", "1234.5", "1234.5"),
    ("#### **18**", "18", "18"),
    ("#### <18>", "18", "18"),
    ("#### 18.", "18", "18"),
    ("#### 18 dollars", "18", "18"),
    ("#### +18", "18", "18"),
    ("#### -3", "-3", "-3"),
    ("#### \u2212 3", "-3", "-3"),
    ("#### 50%", "50", "50"),
    ("#### 1/2", "1/2", "1/2"),
    ("#### .5", "0.5", "0.5"),
    ("#### 1e3", "1000", "1000"),
    (r"#### \(18\)", "18", "18"),
    ("1 2\n#### 18\nWait, 5 of 6 is 30.", "18", "18"),
    ("#### 18 is it, with 5 of 6 left", "18", "18"),
    ("#### ", NONE, NONE),
    ("we have 7\n#### ", NONE, "7"),
    ("#### \n5 apples", NONE, "5"),
    ("#### The answer is 18", NONE, "18"),
    ("### 18", NONE, "18"),
    ("#### 1/0", NONE, NONE),  # declared, and no number: flexible does not look further
    ("4 #### 1/0", NONE, NONE),
    ("#### " + "7" * 1001, NONE, NONE),
    # More than one number declares nothing.
    ("#### 1,2", NONE, "2"),
    ("#### 1, 2, 3", NONE, "3"),
    ("#### 3 + 4 = 7", NONE, "7"),
    ("#### 10-20", NONE, "20"),
    ("#### 3:30", NONE, "30"),
    ("#### 1.2.3", NONE, "3"),
    ("#### 10^3", NONE, "3"),
    # Declared in a box.
    (r"\boxed{18}", "18", "18"),
    (r"so $\boxed{18}$ of 20", "18", "18"),
    (r"\boxed{\frac{1}{2}}", "1/2", "1/2"),
    (r"\boxed{-\dfrac{1}{2}}", "-1/2", "-1/2"),
    (r"\boxed{1\frac{1}{2}}", "3/2", "3/2"),
    (r"\boxed{\text{\mathbf{{18}}}}", "18", "18"),
    (r"\boxed{\$1{,}234.50}", "1234.5", "1234.5"),
    (r"\boxed{50\%}", "50", "50"),
    (r"\boxed{18\text{ dollars}}", "18", "18"),
    (r"#### \boxed{18}", "18", "18"),
    (r"\boxed{\boxed{18}}", "18", "18"),
    (r"\boxed{18", "18", "18"),
    (r"\boxed{}18", NONE, "18"),
    (r"\boxed{x = 18}", NONE, "18"),
    (r"\boxed{2\sqrt{3}}", NONE, "3"),
    # The last declaration counts; a marker with no number behind it is none.
    ("#### 17\n#### 18", "18", "18"),
    (r"#### 17 no: \boxed{18}", "18", "18"),
    ("#### 18\n#### Explanation: 7", "18", "18"),
    ("#### Step 1\nadd 2", NONE, "2"),
]


def _check(text: str, protocol: Protocol, expected: str | None) -> None:
    if expected is None:
        for truth in ("0", "1", "18"):
            grade = grade_number(truth, text, False, protocol)
            assert (grade.reward, grade.outcome, grade.extracted) == (0.0, "unparsable", None)
        return
    right, wrong = grade_number(expected, text, False, protocol), grade_number(f"{expected}1", text, False, protocol)
    assert (right.reward, right.outcome) == (1.0, "correct")
    assert (wrong.reward, wrong.outcome) == (0.0, "wrong")
    assert right.extracted == wrong.extracted != ""


@pytest.mark.parametrize(("text", "strict", "flexible"), CASES, ids=lambda value: repr(value)[:40])
def test_what_each_protocol_reads(text: str, strict: str | None, flexible: str | None) -> None:
    _check(text, "strict", strict)
    _check(text, "flexible", flexible)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_truncated_completion_earns_nothing_whatever_it_contains(protocol: Protocol) -> None:
    grade = grade_number("18", "#### 18", True, protocol)
    assert (grade.reward, grade.outcome, grade.extracted) == (0.0, "truncated", None)


def test_numbers_are_compared_exactly() -> None:
    assert grade_number("0.3", "#### 0.30000000000000001", False, "strict").outcome == "wrong"
    assert grade_number("1/3", "#### 0.3333333333333333", False, "strict").outcome == "wrong"
    assert grade_number("9007199254740993", "#### 9007199254740992", False, "strict").outcome == "wrong"
    assert grade_number("50%", "#### 0.5", False, "strict").outcome == "wrong"


def test_a_ground_truth_is_one_number_and_nothing_else() -> None:
    assert parse_number(" $1,080.00 ") == 1080
    assert parse_number("50%") == 50
    assert parse_number(r"$\frac{-1}{2}$") == Fraction(-1, 2)
    for text in ("", "18 dollars", "3 hours 20", "1,2", "1/0", "#### 18", "x"):
        assert parse_number(text) is None, text
    with pytest.raises(ConfigError, match=r"rows, line 3.*'three' is not a number"):
        require_number("three", "rows, line 3")


ADVERSARIAL = [
    "1" * 400_000,
    "#### " + "9" * 400_000,
    "1," * 200_000,
    "1,234" * 80_000,
    "1,234," * 66_000 + "5",
    "1 " * 200_000,
    "1/" * 200_000,
    "1e" * 200_000,
    "1." * 200_000,
    "-" * 400_000,
    "#" * 400_000,
    "#### " * 80_000,
    "####" + " " * 400_000 + "x",
    ("####" + "*" * 1000) * 400,
    r"\boxed{" * 57_000,
    r"\boxed{" + "{" * 400_000,
    r"\frac{" * 60_000,
    r"\frac{1" * 50_000,
    r"\frac{" + " " * 400_000,
    r"1\frac" * 60_000,
    r"1{,}" * 100_000,
    "#### 1" + " " * 400_000 + "x",
    "." * 400_000,
    "$" * 400_000,
]


@pytest.mark.parametrize("text", ADVERSARIAL, ids=lambda text: repr(text[:10]))
def test_time_is_bounded_on_adversarial_text(text: str) -> None:
    """400,000 characters: linear patterns need well under a second, quadratic ones minutes."""
    start = time.process_time()
    for protocol in PROTOCOLS:
        assert grade_number("18", text, False, protocol).reward == 0.0
    assert time.process_time() - start < 5


MARKERS = ["#### ", r"\boxed{", r"\frac{", r"\text{", "{", "}", "(", ")", "$", "**", "%", "=", "\\"]
DIGITS = ["1", "23", "0", ",", ",456", ".", "/", "-", "\u2212", "+", "e", "\u00b2", "\u0663"]
FRAGMENTS = st.sampled_from([*MARKERS, *DIGITS, " ", "\n", "a", "\x00", "\ud800"])


@given(st.one_of(st.text(), st.lists(FRAGMENTS, max_size=30).map("".join)))
@settings(max_examples=500, deadline=None)
def test_any_text_gets_a_grade_and_a_strict_reading_is_the_flexible_one(text: str) -> None:
    strict, flexible = (grade_number("23", text, False, protocol) for protocol in PROTOCOLS)
    for grade in (strict, flexible):
        assert grade.reward == float(grade.outcome == "correct")
        assert (grade.extracted is None) == (grade.outcome == "unparsable")
    if strict.outcome != "unparsable":
        assert flexible == strict


WRAPPERS = [
    "#### {}",
    "work 1 + 1 = 2\n#### {}\n",
    "#### ${}",
    "#### **{}**",
    r"\boxed{{{}}}",
    r"so $\boxed{{\text{{{}}}}}$.",
]
WRAPPERS += ["#### {} apples", r"\boxed{{{}\%}}", "#### {}."]


@given(st.decimals(-(10**9), 10**9, places=3), st.sampled_from(WRAPPERS), st.booleans())
@settings(deadline=None)
def test_a_formatted_number_is_correct_in_its_many_spellings(number: Decimal, wrapper: str, grouped: bool) -> None:
    value = Fraction(number)
    spelled = f"{number:,}" if grouped else f"{number}"
    spellings = [spelled, spelled + "0", spelled.replace("-", "\u2212"), f"{value.numerator}/{value.denominator}"]
    if value >= 0:
        spellings.append("+" + spelled)
    for spelling in spellings:
        text = wrapper.format(spelling)
        for protocol in PROTOCOLS:
            assert grade_number(str(number), text, False, protocol).outcome == "correct", text
            assert grade_number(str(number + 1), text, False, protocol).outcome == "wrong", text
        assert grade_number(str(number), f"I think {spelling}", False, "flexible").outcome == "correct", spelling
