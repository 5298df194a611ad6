r"""MATH: pairs of answer and truth, each decided by hand, with the reason; the response boxes the answer."""

from __future__ import annotations

import pytest

from rewards.competition_math import compute_score

# answer, ground truth, score, why
NUMBERS = [
    ("12", "12", 1, "the same"),
    ("-12", "12", 0, "the sign"),
    ("12", "-12", 0, "the sign"),
    ("12.", "12", 1, "the end of a sentence"),
    ("012", "12", 1, "a leading zero"),
    ("12.0", "12", 1, "a decimal zero"),
    ("12.01", "12", 0, "nearly"),
    ("12.0000001", "12", 0, "more nearly"),
    ("0.0000001", "0", 0, "small is not nothing"),
    ("1,000", "1000", 1, "thousands"),
    (r"900,\!000,\!000", "900000000", 1, "thousands, typeset"),
    ("10{,}000", "10000", 1, "thousands, typeset otherwise"),
    ("10 000", r"10,\!000", 1, "thousands by spaces"),
    ("1.000.000", "1,000,000", 0, "points are no commas"),
    ("111", r"111, \! 111, \! 111", 0, "a third of its digits"),
    ("1 2", "12", 0, "two numbers"),
    (r"1.5\times10^3", "1500", 1, "scientific notation"),
    ("2^{10}", "1024", 1, "a power"),
    ("10!", "3628800", 1, "a factorial"),
    (r"\binom{5}{2}", "10", 1, "a binomial coefficient"),
    (r"\log_2 8", "3", 1, "a logarithm"),
    (r"\lfloor 3.5\rfloor", "3", 1, "rounded down"),
    ("|-3|", "3", 1, "an absolute value"),
    (r"\text{four}", r"\mbox{four}", 1, "in words, typeset otherwise"),
    (r"\text{five}", r"\mbox{four}", 0, "another word"),
]
FRACTIONS = [
    (r"\dfrac{1}{2}", r"\frac12", 1, "typeset otherwise"),
    ("1/2", r"\frac{1}{2}", 1, "on one line"),
    ("0.5", r"\frac{1}{2}", 1, "as a decimal"),
    (".5", "0.5", 1, "without its zero"),
    (r"\frac{2}{4}", r"\frac{1}{2}", 1, "not in lowest terms"),
    (r"\frac{-1}{2}", r"-\frac{1}{2}", 1, "the sign above"),
    (r"\frac{1}{-2}", r"-\frac{1}{2}", 1, "the sign below"),
    (r"\frac{1}{2}", r"-\frac{1}{2}", 0, "the sign is lost"),
    (r"\frac{2}{1}", r"\frac{1}{2}", 0, "upside down"),
    ("1 1/2", r"\frac{3}{2}", 1, "a mixed number"),
    ("1 1/2", r"\frac{11}{2}", 0, "a mixed number, not eleven halves"),
    (r"3\frac{1}{2}", r"\frac{7}{2}", 1, "a mixed number, typeset"),
    (r"3\frac{1}{2}", r"\frac{3}{2}", 0, "a mixed number is no product"),
    ("0.3333", r"\frac{1}{3}", 0, "rounded"),
    ("0.333333", r"\frac{1}{3}", 0, "rounded later"),
    ("0.000067", "0.0000672", 0, "rounded, and small"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}", 1, "a rational denominator"),
    (r"\sqrt{8}", r"2\sqrt2", 1, "a root, simplified"),
    (r"\sqrt[3]{8}", "2", 1, "a cube root"),
    ("2.236", r"\sqrt5", 0, "a root, rounded"),
    ("3.14", r"\pi", 0, "pi is not 3.14"),
    ("3.141593", r"\pi", 0, "nor that"),
    (r"\frac{1}{2}\pi", r"\frac{\pi}{2}", 1, "pi beside the fraction"),
    ("3:6", "1:2", 1, "a ratio"),
    ("2:1", "1:2", 0, "the ratio the other way round"),
]
UNITS = [
    (r"10\text{ cm}", "10", 1, "a unit"),
    ("10", r"10\text{ cm}", 1, "a unit that is not said"),
    (r"15\text{ cm}^2", r"15\mbox{ cm}^2", 1, "a unit with an exponent"),
    (r"11\text{ cm}", r"10\text{ cm}", 0, "the number is another"),
    (r"10\text{ m}", r"10\text{ cm}", 1, "units are not compared, as in verl"),
    (r"\$18.90", "18.90", 1, "dollars"),
    (r"\$18.9", "18.90", 1, "dollars, and a zero less"),
    (r"90^\circ", "90", 1, "degrees"),
    (r"90\text{ degrees}", r"90^{\circ}", 1, "degrees in words"),
    (r"7\%", "7", 1, "percent were asked for"),
    ("7", r"7\%", 1, "percent are understood"),
    ("0.07", r"7\%", 1, "the same number"),
    ("0.07", "7", 0, "another number"),
    (r"0.5\%", r"\frac{1}{2}", 0, "half a percent is no half"),
    (r"4:51 \text{ p.m.}", r"4\!:\!51 \text{ p.m.}", 1, "a time"),
    (r"4:51 \text{ a.m.}", r"4\!:\!51 \text{ p.m.}", 0, "the other half of the day"),
    ("52_8", "52_{8}", 1, "a base, typeset otherwise"),
    ("52", "52_8", 1, "a base that the problem gives"),
    ("52_8", "52_9", 0, "another base"),
    (r"\text{ cm}", r"\%", 0, "units without a number"),
]
EXPRESSIONS = [
    ("x^2 + 2x + 1", "(x+1)^2", 1, "multiplied out"),
    ("x^2-1", "(x-1)^2", 0, "multiplied out wrongly"),
    ("3+2x", "2x+3", 1, "in another order"),
    ("x+1", "y+1", 0, "another variable"),
    ("yx", "xy", 1, "factors commute"),
    ("x", "X", 0, "another variable"),
    ("3+4i", "4i+3", 1, "complex"),
    ("3-4i", "3+4i", 0, "its conjugate"),
    (r"\sin^2 x+\cos^2 x", "1", 1, "an identity"),
    (r"\sqrt{x^2}", "x", 0, "x may be negative"),
    ("x=5", "5", 1, "a named value"),
    ("5", "x=5", 1, "a value whose name is known"),
    ("y=5", "x=5", 0, "another name"),
    ("f(x)=x^2", "x^2", 1, "a named function"),
    ("f^{-1}(x)=2x", "2x", 1, "an inverse function"),
    ("2x=10", "10", 0, "not solved"),
    (r"\sqrt{x}=5", "5", 0, "not solved"),
    ("x^2+y^2=25", "25", 0, "an equation is no number"),
    ("0", "x+y+z=0", 0, "a number is no equation"),
    ("2+3=5", "5", 1, "worked out"),
    ("2x-y+3=0", "y=2x+3", 1, "the same line"),
    ("2x+2y=4", "x+y=2", 1, "the same line, twice"),
    ("y=-2x+1", "y=-2x", 0, "a parallel"),
]
SETS = [
    ("3, 4", "4,3", 1, "solutions have no order"),
    ("3", "3,4", 0, "one of two solutions"),
    ("3,4,5", "3,4", 0, "one too many"),
    (r"\pm 3", "3,-3", 1, "both signs"),
    ("3", r"\pm 3", 0, "one of two signs"),
    (r"3 \text{ and } 4", "3,4", 1, "a list in words"),
    ("12", r"12\text{ and }13", 0, "half of a list in words"),
    ("7,-2,-5", r"7, -2, \text{ and } -5", 1, "a list with a comma before its and"),
    (r"\left( 3, 4 \right)", "(3,4)", 1, "a point"),
    ("(4,3)", "(3,4)", 0, "coordinates have an order"),
    ("4,3", "(3,4)", 0, "also without their parentheses"),
    ("(20100)", "(20,100)", 0, "a comma of a point is none of thousands"),
    (r"\{3,4\}", "(3,4)", 0, "a set is no point"),
    (r"\{5,4,7\}", r"\{4,5,7\}", 1, "a set has no order"),
    ("[3,4)", "[3,4)", 1, "an interval"),
    ("[3,4]", "[3,4)", 0, "closed"),
    (r"(-\infty,3]", r"x\le 3", 1, "the same set"),
    (r"x\le 3", r"(-\infty,3]", 1, "the same set"),
    (r"x<3", r"(-\infty,3]", 0, "without its end"),
    (r"[3,4]\cup[1,2]", r"[1,2]\cup[3,4]", 1, "a union"),
    (r"(1,2)\cup\{5\}", r"\{5\}\cup(1,2)", 1, "a union of an interval and a number"),
    (r"\emptyset", r"\{\}", 1, "the empty set"),
    (r"\begin{bmatrix}1\\2\end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1, "a vector, typeset otherwise"),
    (r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0, "its entries swapped"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}", 0, "its transpose"),
]
WORDS = [
    (r"\text{ Evelyn}", r"\text{Evelyn}", 1, "a name"),
    ("Evelyn", r"\text{Evelyn}", 1, "a name, not typeset as text"),
    ("even", r"\text{Even}", 1, "a capital letter"),
    (r"\text{Alice}", r"\text{Evelyn}", 0, "another name"),
    ("SILENT", "LISTEN", 0, "letters are no factors"),
    ("AFC", r"\text{ACF}", 0, "nor are these"),
    (r"\text{(C)}", "C", 1, "a choice"),
    ("B", r"\text{(C)}", 0, "another choice"),
]


@pytest.mark.parametrize(
    ("answer", "truth", "score", "why"), [*NUMBERS, *FRACTIONS, *UNITS, *EXPRESSIONS, *SETS, *WORDS]
)
def test_scores_are_those_decided_by_hand(answer: str, truth: str, score: float, why: str) -> None:
    assert compute_score("lighteval/MATH", rf"Hence it is $\boxed{{{answer}}}$.", truth) == score, why


@pytest.mark.parametrize(
    ("response", "score", "why"),
    [
        (r"$\boxed{\frac{1}{2}}$", 1, "boxed"),
        (r"\fbox{\frac{1}{2}}", 1, "the other box"),
        (r"$\boxed 0.5$", 1, "a box without braces"),
        (r"\boxed{1}, no: \boxed{0.5}", 1, "the last box counts"),
        (r"\boxed{0.5} or \boxed{1}", 0, "the last box counts, also when it is wrong"),
        (r"\boxed{0.5} and \boxed{1", 1, "a box that was cut off is none"),
        (r"\boxed{\boxed{0.5}}", 1, "boxed twice"),
        (r"\boxed{0.5}" + " and so on" * 1000, 1, "long afterwards"),
        ("0.5", 0, "no box"),
        ("The answer is $0.5$.", 0, "no box"),
        (r"\boxed{}", 0, "an empty box"),
        (r"\boxed{\text{ }}", 0, "a box with nothing in it"),
        (r"\boxed{0.5, 1, 2}", 0, "guesses"),
        ("", 0, "nothing at all"),
    ],
)
def test_the_last_box_is_what_counts(response: str, score: float, why: str) -> None:
    assert compute_score("lighteval/MATH", response, r"\frac{1}{2}") == score, why
