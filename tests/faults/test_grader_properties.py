"""Properties of the numeric grader: every notation of a number is read as that number, and nothing around it matters."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.tasks._answers import Protocol, grade_number, parse_number

PROTOCOLS: tuple[Protocol, ...] = ("strict", "flexible")
properties = settings(derandomize=True, deadline=None, max_examples=300, database=None)

integers = st.one_of(st.integers(-20, 20), st.integers(-(10**12), 10**12))
decimals = st.builds(lambda n, places: Fraction(n, 10**places), integers, st.integers(0, 6))
rationals = st.builds(Fraction, integers, st.integers(1, 9999))
numbers = st.one_of(integers.map(Fraction), decimals, rationals)
words = st.text("abcdefgh ijklmno\t.!?", max_size=20)


def decimal(x: Fraction) -> str | None:
    """All digits of a number >= 0 whose expansion ends within 12 places."""
    scaled = x * 10**12
    if scaled.denominator != 1:
        return None
    whole, part = divmod(scaled.numerator, 10**12)
    digits = f"{part:012d}".rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)


def notations(x: Fraction) -> list[str]:
    """Every form the grader promises to read, of |x| and then with the sign."""
    size = abs(x)
    n, d = size.numerator, size.denominator
    found = [f"{n}/{d}", f"{3 * n} / {3 * d}", rf"\frac{{{n}}}{{{d}}}", rf"\dfrac{{{n}}}{{ {d} }}", f"{n:,}/{d}"]
    if n > d:
        found += [f"{n // d} {n % d}/{d}", rf"{n // d}\frac{{{n % d}}}{{{d}}}"]
    for power in (0, 3, -3):
        digits = decimal(size / Fraction(10) ** power)
        if digits is not None:
            found += [f"{digits}e{power}", f"{digits}E{power:+d}"]
    plain = decimal(size)
    if plain is not None:
        whole, point, part = plain.partition(".")
        tail = f"{point}{part}"
        grouped = f"{int(whole):,}"
        found += [plain, grouped + tail, grouped.replace(",", "{,}") + tail, grouped.replace(",", r"\,") + tail]
        found += [f"{plain}{'0' if point else '.00'}", f"{plain}%", f"{plain} dollars"]
        found += [tail] if point and whole == "0" else []
    signs = ["-", "\u2212", "\u2013"] if x < 0 else ["", "+"]
    return [sign + form for form in found for sign in signs]


def is_whole(notation: str) -> bool:
    """Whether it is a number and nothing else, as a ground truth must be."""
    return "dollars" not in notation


@given(numbers, st.data())
@properties
def test_every_notation_of_a_number_is_read_as_that_number(x: Fraction, data: st.DataObject) -> None:
    notation = data.draw(st.sampled_from(notations(x)))
    if is_whole(notation):
        assert parse_number(notation) == x
    text = data.draw(st.sampled_from(WRAPPERS)).format(notation)
    for protocol in PROTOCOLS:
        grade = grade_number(f"{x.numerator}/{x.denominator}", text, False, protocol)
        assert (grade.reward, grade.outcome) == (1.0, "correct"), text
    assert grade_number(f"{x.numerator}/{x.denominator}", f"it is {notation}", False, "flexible").reward == 1.0


WRAPPERS = [
    "#### {}",
    "####{}",
    r"\boxed{{{}}}",
    r"\boxed {{{}}}",
    "#### **{}**",
    r"#### $\boxed{{\text{{{}}}}}$",
    r"#### \({}\)",
]


@given(numbers, numbers, st.data())
@properties
def test_a_grade_depends_on_the_numbers_and_not_on_their_notation(
    x: Fraction, y: Fraction, data: st.DataObject
) -> None:
    y = data.draw(st.sampled_from([x, y, x + Fraction(1, 10**9), -x]))
    truth = data.draw(st.sampled_from([form for form in notations(x) if is_whole(form)]))
    answer = data.draw(st.sampled_from(notations(y)))
    for protocol in PROTOCOLS:
        assert grade_number(truth, f"#### {answer}", False, protocol).outcome == ("correct" if x == y else "wrong")


@given(
    numbers,
    st.data(),
    words,
    st.sampled_from(["", " ", "\t", "   ", "\u00a0"]),
    st.sampled_from(["", "$", r"\$", "€", "£"]),
)
@properties
def test_space_currency_markup_and_words_behind_do_not_matter(
    x: Fraction, data: st.DataObject, behind: str, space: str, currency: str
) -> None:
    form = data.draw(st.sampled_from(notations(abs(x))))
    sign = "-" if x < 0 else ""
    form = form.lstrip("+")
    ends = st.sampled_from(["", ".", "**", "$", "}", r"\)", ",", " ", "\n"])
    text = f"####{space}{sign}{currency}{form}{data.draw(ends)} {behind}"
    assert grade_number(f"{x.numerator}/{x.denominator}", text, False, "strict").outcome == "correct", text


MARKERS = [
    "####",
    r"\boxed{",
    r"\frac{",
    r"\text{",
    "{",
    "}",
    "$",
    "**",
    "\\",
    "1",
    "23",
    ",456",
    ".5",
    "/",
    "-",
    "e9",
    " ",
    "\n",
]
fragments = st.lists(st.sampled_from([*MARKERS, "\x00", "\u0663", "\ufffd", "x"]), max_size=40).map("".join)
garbage = st.one_of(fragments, st.text(max_size=60), st.binary(max_size=60).map(lambda b: b.decode(errors="replace")))


@given(numbers, garbage)
@properties
def test_what_stands_on_the_lines_before_a_declaration_does_not_matter(x: Fraction, before: str) -> None:
    text = f"{before}\n#### {x.numerator}/{x.denominator}"
    assert grade_number(f"{x.numerator}/{x.denominator}", text, False, "strict").outcome == "correct"


@given(garbage, garbage)
@properties
def test_garbage_has_a_grade_whatever_the_truth(text: str, truth: str) -> None:
    value = parse_number(truth)
    for protocol in PROTOCOLS:
        grade = grade_number(truth, text, False, protocol)
        assert grade.reward == float(grade.outcome == "correct")
        assert (grade.extracted is None) == (grade.outcome == "unparsable")
        assert grade == grade_number(truth, text, False, protocol)
        assert value is not None or grade.outcome != "correct"
        if grade.extracted is not None:  # what it found is a number by itself, and equal to the truth or not
            assert (parse_number(grade.extracted) == value) == (grade.outcome == "correct")
        assert grade_number(truth, text, True, protocol).outcome == "truncated"
