r"""MATH: other spellings of its truths are right; answers that leave work, or say another thing, are wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain, islice, zip_longest

import pytest

from rewards.scorers.competition_math import compute_score
from tests.support.datasets import data_file

NUM_SPELLINGS = 300
MIN_SHARE = 0.98


def decimal(over: int, under: int) -> str | None:
    """A fraction as a decimal number, if it ends within six places."""
    scaled = over * 10**6
    return None if scaled % under else f"{over / under:.6f}".rstrip("0")


def mixed(over: int, under: int) -> str | None:
    return rf"{over // under}\frac{{{over % under}}}{{{under}}}" if over > under and over % under else None


def reversed_terms(text: str) -> str | None:
    r"""2x+3 for 3+2x."""
    terms = re.findall(r"[+-]?[^+-]+", text.replace(" ", ""))
    return "".join(term if term[0] in "+-" else f"+{term}" for term in reversed(terms)).removeprefix("+")


def comparison(left: str, low: str, high: str, right: str) -> str | None:
    """The inequality of an interval."""
    above = ">" if left == "(" else r"\ge "
    below, not_above = ("<" if bracket in "()" else r"\le " for bracket in (left, right))
    if "infty" in high:
        return None if "infty" in low else f"x{above}{low}"
    return f"x{not_above}{high}" if "infty" in low else f"{low}{below}x{not_above}{high}"


# A rule: truths of this form, and how else they may be written.
FRACTION = r"\\d?frac\{(\d+)\}\{(\d+)\}"
RULES: list[tuple[str, Callable[..., str | None]]] = [
    (FRACTION, lambda over, under: decimal(int(over), int(under))),
    (FRACTION, lambda over, under: f"{over}/{under}"),
    (FRACTION, lambda over, under: rf"\frac{{{3 * int(over)}}}{{{3 * int(under)}}}"),
    (FRACTION, lambda over, under: mixed(int(over), int(under))),
    (rf"-{FRACTION}", lambda over, under: rf"\frac{{-{over}}}{{{under}}}"),
    (r"(\d+)\.(\d+)", lambda whole, places: rf"\frac{{{int(whole + places)}}}{{{10 ** len(places)}}}"),
    (r"(\d{2,4})", lambda number: rf"\frac{{{2 * int(number)}}}{{2}}"),
    (r"(\d+)0000", lambda number: rf"{number}\times 10^4"),
    (r"(\d+)\\sqrt\{(\d+)\}", lambda factor, root: rf"\sqrt{{{int(factor) ** 2 * int(root)}}}"),
    (r"(\d+)\\sqrt\{(\d+)\}", lambda factor, root: rf"\frac{{{int(factor) * int(root)}}}{{\sqrt{{{root}}}}}"),
    (r"\\frac\{\\sqrt\{(\d+)\}\}\{(\d+)\}", lambda root, under: rf"\frac{{{root}}}{{{under}\sqrt{{{root}}}}}"),
    (r"\\frac\{\\sqrt\{(\d+)\}\}\{(\d+)\}", lambda root, under: rf"\sqrt{{\frac{{{root}}}{{{int(under) ** 2}}}}}"),
    (r"\\frac\{(\d+)\\sqrt\{(\d+)\}\}\{(\d+)\}", lambda a, root, b: rf"\frac{{{a}}}{{{b}}}\sqrt{{{root}}}"),
    (r"\\frac\{(\d*)\\pi\}\{(\d+)\}", lambda over, under: rf"\frac{{{over or 1}}}{{{under}}}\pi"),
    (r"(\d+)\\pi", lambda factor: rf"\pi\cdot {factor}"),
    (r"(-?\d\d?(?:, ?-?\d\d?)+)", lambda text: ",".join(reversed(text.split(",")))),
    (r"(-?\d\d?), ?(-?\d\d?)", lambda first, second: rf"x={second} \text{{ or }} x={first}"),
    (r"(\d+\+\d*\\sqrt\{\d+\}|\d+[+-]\d*i)", reversed_terms),
    (r"(-?\d*[a-z](?:\^\d)? ?[+-] ?[0-9a-z^+ -]*)", reversed_terms),
    (r"(\()([^,()]*\\infty), ?([^,()]*)(\]|\))", comparison),
    (r"(\(|\[)([-\d.]+), ?([-\d.]+)(\])", comparison),
    (r"(\(|\[)([^,()]*), ?([^,()]*\\infty)(\))", comparison),
    (r"(.*[)\]]) ?\\cup ?([(\[][^u]*)", lambda first, second: rf"{second}\cup {first}"),
    (r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", r"\begin{{bmatrix}}{}\end{{bmatrix}}".format),
    (r"\(([^,()]+), ?([^,()]+)\)", lambda x, y: rf"\left( {x} ,\, {y} \right)"),
    (r"\((\d+), ?(\d+)\)", lambda x, y: f"({x}.0, {2 * int(y)}/2)"),
    (r"[a-z] ?= ?(-?[\d.]+)", str),
    (r"([\d.]+)\\text\{ .*\}", r"{}\text{{ units}}".format),
    (r"(-?\d+)(?:\^\\circ|\\%)", str),
]


def spellings() -> list[tuple[str, str]]:
    """Other spellings of truths, each with its truth, taken in turn from the rules."""
    lines = data_file("math/train_answers_only.jsonl").read_text(encoding="utf-8").splitlines()
    truths = dict.fromkeys(json.loads(line)["answer"] for line in lines)
    by_rule = (((truth, re.fullmatch(form, truth), rule) for truth in truths) for form, rule in RULES)
    made = ([(rule(*match.groups()), truth) for truth, match, rule in rows if match] for rows in by_rule)
    in_turn = zip_longest(*([(other, truth) for other, truth in rows if other not in (None, truth)] for rows in made))
    return list(islice(filter(None, chain.from_iterable(in_turn)), NUM_SPELLINGS))


# math-verify makes the truth of each of these.
WRONG = [
    (r"2\cdot 5", "10"),
    (r"2 \times 5", "10"),
    ("2*5", "10"),
    ("20-10", "10"),
    (r"\frac12+\frac13", r"\frac56"),
    (r"\frac12\cdot\frac13", r"\frac16"),
    (r"3\cdot\frac12", r"\frac32"),
    (r"\frac{3+7}{2}", "5"),
    (r"\sqrt{9+16}", "5"),
    (r"\sqrt{16}+\sqrt{9}", "7"),
    (r"\sqrt{50}+\sqrt{18}", r"8\sqrt2"),
    (r"\sqrt2\cdot\sqrt8", "4"),
    (r"(3+\sqrt2)(3-\sqrt2)", "7"),
    (r"(1+\sqrt2)^2", r"3+2\sqrt2"),
    ("(1+2i)6-3i", "6+9i"),
    ("|{-3}|", "3"),
    (r"\lvert -3\rvert", "3"),
    (r"\cos\frac{\pi}{3}", r"\frac12"),
    (r"\log_2 8", "3"),
    (r"\log 100", "2"),
    (r"\ln e", "1"),
    (r"\lcm(4,6)", "12"),
    (r"\operatorname{lcm}(4,6)", "12"),
    (r"\max(3,5)", "5"),
    (r"\min(3,5)", "3"),
    (r"\lceil 4.5\rceil", "5"),
    (r"\lfloor 5.5\rfloor", "5"),
    (r"\prod_{k=1}^{4} k", "24"),
    (r"\lim_{x\to 0}\frac{\sin x}{x}", "1"),
    (r"\frac{d}{dx} x^2", "2x"),
    (r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2"),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", "-2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}3\\4\end{pmatrix}", r"\begin{pmatrix}4\\6\end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}\begin{pmatrix}1\\1\end{pmatrix}", r"\begin{pmatrix}3\\7\end{pmatrix}"),
    (r"\begin{pmatrix}1+3\\2+4\end{pmatrix}", r"\begin{pmatrix}4\\6\end{pmatrix}"),
    ("2x+3x", "5x"),
    ("(3x+2)-(x+5)", "2x-3"),
    (r"x\cdot x^2", "x^3"),
    (r"2x\cdot 3x", "6x^2"),
    ("5+x-x", "5"),
    ("5x/x", "5"),
    (r"5\text{ not}", "5"),
    (r"5\pm 3", "8,2"),
    ("5_{10}", "5"),
    ("101_2", "101"),
    ("12_{3}", "12"),
    (r"\sim 5", "5"),
    (r"\not 5", "5"),
    (r"7\mapsto 5", "5"),
    ("2(5)", "7"),
    ("(2)(5)", "7"),
    (r"2^3\cdot 3^2", "72"),
    ("2^{3+4}", "128"),
    (r"3\div 4\div 5", r"\frac{3}{20}"),
    (r"\frac{3}{4}\div\frac{5}{6}", r"\frac{9}{10}"),
    (r"\frac{\frac34}{\frac56}", r"\frac9{10}"),
    (r"0.5\cdot 20", "10"),
    ("1.5+3.5", "5"),
    (r"50\%\cdot 10", "5"),
    ("5-0", "5"),
    (r"5\cdot 1", "5"),
    (r"1\cdot 5", "5"),
    ("5+0", "5"),
    (r"2\cdot10^2\cdot10^3", "200000"),
    (r"{5\choose 2}", "10"),
    ("-5=5", "5"),
    ("x=6=5", "5"),
    (r"\frac{x}{x}5", "5"),
    (r"\Gamma(6)", "120"),
    (r"\sqrt{\binom{4}{2}+3}", "3"),
    (r"\frac{10!}{9!}", "10"),
    (r"\frac{6\cdot 5}{3}", "10"),
    (r"\left|3-8\right|", "5"),
    (r"3\cdot x+2\cdot x", "5x"),
    (r"\sum 5", "5"),
    ("100-90", "10"),
    (r"5 \text{ is wrong, } 7 \text{ is right}", "5"),
    ("5c", "5"),
    ("5t", "5"),
    ("5", "5t"),
    ("2 5", "7"),
    (r"\frac{4}{2}\frac{1}{2}", r"\frac52"),
    ("|x|", r"\sqrt{x^2}"),
    (r"-1 \cdot 5", "-5"),
]

# Each with a truth of the same value: signs, fonts, brackets, degrees, times, decimals and units, as people type them.
TYPED_OTHERWISE = [
    ("72°", "72"),
    ("72", "72°"),
    (r"72\degree", r"72^\circ"),
    (r"72^{\degree}", "72"),
    ("20°, 70°", "20,70"),
    (r"72^\circ\text{ clockwise}", r"72^\circ"),
    (r"\varnothing", r"\emptyset"),
    ("∅", r"\{\}"),
    (r"\bigl(3,4\bigr)", "(3,4)"),
    (r"\Bigg[\frac12,3\Bigg)", r"\left[\frac{1}{2},3\right)"),
    (r"\lbrace 2,1\rbrace", r"\{1,2\}"),
    (r"41 \text{ percent}", r"41\%"),
    ("41 percent", "41"),
    (r"41\%", r"41 \text{ percent}"),
    (r"33\frac13\%", r"33\frac{1}{3}\%"),
    ("6-1i", "6-i"),
    ("6.0 + 1.0i", "6+i"),
    ("-1i", "-i"),
    (r"0.\overline{6}", r"\frac23"),
    (r"\frac16", r"0.1\overline{6}"),
    (r"-3.\overline{3}", r"-\frac{10}{3}"),
    (r"0.\dot{1}4285\dot{7}", r"\frac17"),
    ("0.1666...", r"\frac{1}{6}"),
    (r"0.2727\ldots", r"\frac{3}{11}"),
    ("9:15 AM", r"9\!:\!15 \text{ a.m.}"),
    (r"\text{9:15 pm}", r"9:15\,\mathrm{p.m.}"),
    ("$9:15 PM$", r"9:15\text{ p.m.}"),
    (r"\bf 8", "8"),
    (r"{\bf 8}", "8"),
    (r"\boldsymbol{8}", "8"),
    (r"\displaystyle\frac12", "0.5"),
    ("½", r"\frac12"),
    ("-3¾", r"-\frac{15}{4}"),
    ("８", "8"),
    ("（１，－２）", "(1,-2)"),
    ("x²+1", "x^2+1"),
    ("10⁻³", r"\frac{1}{1000}"),
    ("3×10⁴", "30000"),
    ("−8", "-8"),
    ("2√3", r"2\sqrt3"),
    ("π/2", r"\frac{\pi}{2}"),
    ("x ≤ 3", r"x\le 3"),
    (r"8\text{ m/s}", "8"),
    (r"8 \text{ miles per hour}", "8"),
    (r"8\text{cm}^2", "8"),
    (r"8\text{ red marbles}", "8"),
    (r"8\text{ months}", "8"),
    (r"8\text{ four-legged animals}", "8"),
    (r"8\text{ one-hour lessons}", "8"),
    ("8 half-pints", "8"),
    ("8", r"8\text{ mixed doubles}"),
    (r"8\text{ uncooked eggs}", "8"),
    (r"8\text{ times per day}", "8"),
    (r"8\text{ times}", "8"),
    ("8 cups and saucers", "8"),
    (r"8\text{ inches to the mile}", "8"),
    ("3 noon", "3 p.m."),
    (r"2+\frac{3i}{4}", r"2+\frac34i"),
    ("0.5-2.25i", r"\frac12-\frac94i"),
    (r"3i\sqrt7", r"3\sqrt7i"),
    (r"\frac{5+2i}{3}", r"\frac53+\frac23i"),
    (r"\text{8 quarters}", "8"),
    (r"2^{-98}", r"\frac{1}{2^{98}}"),
    ("0.333333333333", r"\frac13"),
    (r"1.60\times 10^{-19}", r"1.6\times 10^{-19}"),
    (r"\frac{\sqrt{6}-\sqrt2}{4}", r"\frac{\sqrt2(\sqrt3-1)}{4}"),
]
# Each is near its truth, or begins with it.
NEARLY = [
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    (r"\frac{1}{18!}", r"\frac{1}{19!}"),
    (r"(\frac34)^{150}", r"(\frac34)^{151}"),
    (r"6.6\times10^{-34}", r"1.05\times10^{-34}"),
    ("e^{-400}", "e^{-401}"),
    ("1-2^{-300}", "1-2^{-301}"),
    (r"\sqrt2-2^{-300}", r"\sqrt2-2^{-301}"),
    (r"\frac{\pi}{2^{60}}", r"\frac{\pi}{2^{61}}"),
    ("10^{-20}", "0"),
    ("2^{-98}i", "2^{-99}i"),
    ("2^{-98}x", "2^{-99}x"),
    ("x+2^{-98}", "x+2^{-99}"),
    ("(2^{-98},1)", "(2^{-99},1)"),
    (r"\{2^{-98},1\}", r"\{2^{-99},1\}"),
    ("[2^{-98},1)", "[2^{-99},1)"),
    (r"\begin{pmatrix}2^{-98}\\1\end{pmatrix}", r"\begin{pmatrix}2^{-99}\\1\end{pmatrix}"),
    (r"x\le 2^{-98}", r"x\le 2^{-99}"),
    ("1.4142135623", r"\sqrt2"),
    (r"0.\overline{34}", r"\frac13"),
    ("0.33...", r"\frac13"),
    (r"0.\overline{3}", "0.3"),
    ("5%7", "5"),
    ("5%7", "57"),
    (r"30\div 2", "15"),
    ("30÷2", "15"),
    ("30:2", "15"),
    (r"5\text{ tenths}", "5"),
    ("5 tenths", "5"),
    (r"5\text{ twelfths}", "5"),
    (r"5\text{ lakh}", "5"),
    (r"5\text{ quadrillion}", "5"),
    (r"5\text{ gross}", "5"),
    (r"5\text{ doubled}", "5"),
    (r"5\text{ twice}", "5"),
    (r"5\text{ rounded up}", "5"),
    (r"5\text{ (wrong)}", "5"),
    (r"5\text{, or so}", "5"),
    (r"5\text{?}", "5"),
    (r"5\text{ cm or six}", "5"),
    (r"5\text{ cm is incorrect}", "5"),
    ("73°", "72"),
    ("½", "2"),
    ("2½", "1"),
    ("x²", "2x"),
    ("10⁻³", "103"),
    ("９", "8"),
    ("9:15 PM", "9:15 AM"),
    ("8 am", "8 p.m."),
    (r"8\text{ P.M.}", r"8\text{ a.m.}"),
    ("12 midnight", "12 noon"),
    ("101", "101_2"),
    ("734", "734_{8}"),
    (r"40^\circ15", "4015"),
    (r"40^\circ15", "55"),
    ("40°15", "4015"),
    ("8,8", "8"),
    ("8, 8.0", "8"),
    ("8,9,9", "8,9"),
    (r"\{8,9,9\}", r"\{8,9\}"),
    ("--8", "8"),
    ("-(-8)", "8"),
    ("0.77...", "0.77"),
    (r"8\text{ bln}", "8"),
    ("8 mln", "8"),
    (r"8\text{ sixfold}", "8"),
    (r"8\text{ sextuple}", "8"),
    (r"8\text{ inverted}", "8"),
    (r"8\text{ repeating}", "8"),
    (r"8\text{ octal}", "8"),
    (r"8\text{ is never}", "8"),
    ("8 impossible", "8"),
    (r"8\text{ cm possibly}", "8"),
    (r"8\text{ I believe}", "8"),
    (r"8\text{ times nine}", "8"),
    (r"8\text{ times y}", "8"),
    (r"8\text{ to nine}", "8"),
    (r"8\text{ cm and nine}", "8"),
    (r"8\text{ three-quarters}", "8"),
    (r"8\text{ twenty-one}", "8"),
    (r"8\text{ y}", "8"),
    (r"8\text{ K}", "8"),
    (r"\bf 6", "5"),
    (r"\bigl(1,2\bigr]", "(1,2)"),
    (r"\varnothing", "0"),
    ("6+1i", "6-i"),
    ("11i", "i"),
    (r"f\circ g", "fg"),
    (r"\text{5 or 6}", "5"),
]


@pytest.mark.extended
def test_other_spellings_of_a_truth_are_right() -> None:
    pairs = spellings()
    lost = [pair for pair in pairs if compute_score("lighteval/MATH", rf"\boxed{{{pair[0]}}}", pair[1]) != 1.0]
    assert len(pairs) == NUM_SPELLINGS
    assert len(lost) <= (1 - MIN_SHARE) * NUM_SPELLINGS, lost


def test_forms_that_leave_work_or_say_another_thing_are_wrong() -> None:
    assert [pair for pair in WRONG if compute_score("lighteval/MATH", rf"\boxed{{{pair[0]}}}", pair[1])] == []


def is_right(pair: tuple[str, str]) -> bool:
    answer, truth = pair
    return compute_score("lighteval/MATH", rf"\boxed{{{answer}}}", truth) == 1.0


def test_what_is_typed_otherwise_is_right() -> None:
    assert [pair for pair in TYPED_OTHERWISE if not is_right(pair)] == []


def test_what_is_nearly_the_truth_is_wrong() -> None:
    assert [pair for pair in NEARLY if is_right(pair)] == []
