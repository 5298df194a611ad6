r"""Decides if an answer in LaTeX writes a value, or a calculation that is still to be done.

`\frac{20}{2}` is a way of writing 10; `3+7`, `\binom{5}{2}` and `x+1=11` restate a problem. This is decided before
anything is computed: by the answer's tokens, and by its sums, products, fractions and powers.
"""

import re
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

import sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, extract_boxed_content, normalize_latex
from math_verify import LatexExtractionConfig, parse
from sympy import Add, Float, I, MatAdd, MatMul, Mul, Pow, Rational, S, Symbol, UnevaluatedExpr, expand_mul

from rewards.scorers.math_writing import UNIT, UNIT_WORD

_NORMALISATION = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="none")
_LATEX = LatexExtractionConfig(normalization_config=_NORMALISATION)
_MAX_POWER_BITS = 100_000  # a power of numbers with more is not computed

# Units behind a value: "\text{ cm}^2", " square units" or "cm".
UNIT_POWER = r"(?:(?<=[a-zA-Z.]\})\^\{?\d\}?)?"
UNIT_AS_TEXT = rf"(?<=[^\s=,])\s*\\(?:text|mbox|mathrm)\s*\{{\s*+{UNIT}\s*\}}{UNIT_POWER}\s*$"
_LONG_WORD = rf"(?=[^\W\d_]{{2}}){UNIT_WORD}"
_UNIT = re.compile(
    rf"{UNIT_AS_TEXT}|(?<=[\d}}])(?:\s+{_LONG_WORD}(?:(?:-|\s+(?:(?:and|to)\s+)?){_LONG_WORD})*+|\s+[mgshLl]|(?:[ckm]m|kg|ft|mph))\s*$"
)
_EXPONENT = re.compile(r"(?<=\d)[eE]([+-]?\d+)\b")
_MIXED_NUMBER = re.compile(r"(?<![\d.^})\]_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_INTEGER = re.compile(r"(?<![\d._])\d+(?![\d.])")

_TOKEN = re.compile(
    r"\\(?:begin|end)\{\w*\}|\\mathbb\s*\{?R\}?(?:\s*\\(?:setminus|backslash)(?=\s*\\\{))?|\\[a-zA-Z]+|\\.|\S",
    re.DOTALL,
)
# The tokens that any value may have.
_WRITING = re.compile(
    r"[0-9.,;:+\-*/^(){}\[\]&%π√∞×·−°]|\\[ ,;:\\{}%]|\\mathbb.+|\\(?:begin|end)\{[pbB]?matrix\}"
    r"|\\(?:frac|sqrt|pi|cdot|times|pm|infty|cup|emptyset|varnothing|circ|degree|text|mbox|math(?:rm|bf)|textbf|quad"
    r"|[bB]igg?[lr]?|displaystyle|left|right)",
    re.DOTALL,
)
_RELATION = re.compile(r"[<>≤≥]|\\(?:[lg](?:t|e|eq|eqslant)|in|neq?)")
_SET = re.compile(r"\s*[(\[]|.*\\(?:cup|infty)", re.DOTALL)
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]")
_NAME = re.compile(r"(?:^|(?<=,))\s*\\?[a-zA-Z]+(?:_\{?\w\}?)?\s*=")


def plain_latex(text: str) -> str:
    """Rewrites an answer without units, in the LaTeX that math-verify's parser reads."""
    text = re.sub(r"(?<!\\)\\[ ,;:]|~", " ", re.sub(r"\\!|\\?\$", "", text)).rstrip(". ")
    text = re.sub(r"√\s*(\d+)", r"√{\1}", text).replace("√", r"\sqrt ").replace("∞", r"\infty ")
    return str(normalize_latex(_EXPONENT.sub(r"\\times 10^{\1}", _UNIT.sub("", text)), _NORMALISATION))


def parsed(latex: str, limit_s: int | None) -> list[Any]:
    """Parses LaTeX into sympy expressions, almost unevaluated; returns [] if a part of the text cannot be parsed."""
    boxed = f"\\boxed{{{latex}}}"
    is_whole = extract_boxed_content(boxed) == latex.strip()  # no brace of its own ends the box
    return list(parse(boxed, [_LATEX], "no_fallback", "first_match", limit_s)) if is_whole else []


def leaves_work(answer: str, truth: str, limit_s: int | None) -> bool:
    """Returns True if a LaTeX answer is a calculation that is still to be done, rather than a value as the truth is.

    A set or a relation is also accepted if the truth is one; so are kinds of operations that the truth contains.
    """
    if not _is_written_like(answer, truth):
        return True
    left = _operations_left(answer, limit_s)
    return bool(left) and not left <= _operations_left(truth, limit_s)


def is_name(left_side: str) -> bool:
    """Returns True if `left_side` names the value in an equation, as "x", "f(x)" or "(p,q)"; not "2x" or "x^2+y^2"."""
    if left_side.count("{") != left_side.count("}"):  # the equals sign is part of an index, as in "\sum_{i=1}^5"
        return False
    without_arguments = re.sub(r"(?<=[a-zA-Z}])\([^()]*\)", "", left_side.replace("^{-1}", ""))
    starts_as_name = re.fullmatch(r"\s*[(a-zA-Z\\][^-+*/^]*", without_arguments)
    is_plain = starts_as_name and re.search(r"[a-zA-Z]", without_arguments)
    return bool(is_plain) and not re.search(r"\\(?:frac|sqrt|cdot|times)", without_arguments)


def _value(text: str) -> str:
    """Returns the right-hand side of an equation: "5" for "x = 5", and "3, 4" for "x = 3, x = 4"."""
    left, equals, right = text.partition("=")
    return _NAME.sub("", right if equals and is_name(left) else text)


def _is_written_like(answer: str, truth: str) -> bool:
    """Returns True if every LaTeX token of an answer is one that values are written with, or occurs in the truth."""
    value = _value(truth)
    in_truth = set(_TOKEN.findall((truth if _LETTER.search(value) else value).lower()))
    tokens = _TOKEN.findall(_value(answer))
    others = {token for token in tokens if not (_WRITING.fullmatch(token) or token.lower() in in_truth)}
    if ":" in tokens and not in_truth & {":", "/", r"\frac"}:
        others.add(":")  # a ratio may be a fraction, but "30:2" for 15 is a division
    relations = set(filter(_RELATION.fullmatch, others))
    if relations and (_SET.match(value) or any(map(_RELATION.fullmatch, in_truth))):
        others -= relations
        letters = set(filter(str.isalpha, others))
        if len(letters) == 1 and not any(map(str.isalpha, in_truth)):  # "x < 3" for an interval
            others -= letters
    return not others


def _operations_left(latex: str, limit_s: int | None) -> set[str]:
    """Returns the kinds of operations that a LaTeX answer leaves undone; "unknown" if it cannot be parsed."""
    latex = _MIXED_NUMBER.sub(_improper_fraction, latex)
    # With a point, integers stay apart: "2(5)" would be read as a mixed number and "\frac{20}{2}" reduced.
    expressions = parsed(_INTEGER.sub(r"\g<0>.0", latex), limit_s)
    left: set[str] = set() if expressions else {"unknown"}
    try:
        for expression in expressions:
            _walk(expression, left)
    except Exception:  # noqa: BLE001 - sympy raises many kinds if parts do not fit together
        left.add("unknown")
    return left


def _improper_fraction(match: re.Match[str]) -> str:
    whole, over, under = map(int, match.groups())
    return rf"\frac{{{whole * under + over}}}{{{under}}}" if over < under else match[0]


def _walk(node: Any, left: set[str]) -> Any:
    """Evaluates a node of a sympy expression, and adds to `left` the kinds of operations that are left undone in it."""
    if isinstance(node, Float):
        return Rational(str(node))
    if isinstance(node, Symbol):
        return I if node.name == "i" else node
    if isinstance(node, sympy.MatrixBase):
        return node.applyfunc(partial(_walk, left=left))
    if isinstance(node, Mul | MatMul):
        return _walk_product(node, left)
    values = [_walk(part, left) for part in node.args]
    if isinstance(node, UnevaluatedExpr):
        return values[0]
    if isinstance(node, Pow) and _is_huge(*values):
        left.add("power")
        return Symbol("huge")
    # Products of sums would be multiplied out, so like terms are looked for only while nothing else is left.
    if isinstance(node, MatAdd) or (isinstance(node, Add) and not left and _have_like_terms(node.args, values)):
        left.add("sum")
    if isinstance(node, Pow) and values[0].is_number and values[0].is_Add and values[1].is_Integer and values[1] > 1:
        left.add("power")
    return node.func(*values) if values and isinstance(node, sympy.Expr) else node


def _is_huge(base: Any, exponent: Any) -> bool:
    are_numbers = base.is_Rational and exponent.is_Rational
    return bool(are_numbers and abs(exponent) * (base.p * base.q).bit_length() > _MAX_POWER_BITS)


def _have_like_terms(parts: Any, values: list[Any]) -> bool:
    terms = [term for part, value in zip(parts, values, strict=True) for term in _terms(part, value)]
    return len(set(terms)) < len(terms)


def _terms(part: Any, value: Any) -> set[Any]:
    r"""Returns the terms of a summand without rational factors, to find like terms: \sqrt3 for "2\sqrt3", 1 for "5"."""
    if value.is_number:
        value = expand_mul(value)
    elif isinstance(part, Mul) and not (part.args[0] is S.NegativeOne and len(part.args) == 2):
        return {value.as_content_primitive()[1].as_coeff_Mul()[1]}  # "3(x-2)" is one term
    return {term.as_coeff_Mul()[1] for term in Add.make_args(value)}


def _factors(product: Any) -> Iterator[Any]:
    """Yields the factors of a product and of the products in it, without signs."""
    for part in product.args:
        if isinstance(part, Mul):
            yield from _factors(part)
        elif part is not S.NegativeOne:  # a sign; a number that is written is a Float here
            yield part


def _walk_product(product: Any, left: set[str]) -> Any:
    """Evaluates a product or fraction, and adds to `left` "product" or "fraction" if that is left undone in it.

    The factors are evaluated first, which may leave other operations undone. A product of matrices is not multiplied
    out: it is returned as it is.
    """
    over, under, scale = _sorted_factors(product, left)
    if isinstance(product, MatMul):
        if sum(isinstance(value, sympy.MatrixBase) for value in over) > 1:
            left.add("product")
        return product
    if _is_unfinished_product(over):
        left.add("product")
    if _is_unfinished_fraction(over, under):
        left.add("fraction")
    return Mul(*over, *scale, *(1 / value for value in under))


def _sorted_factors(product: Any, left: set[str]) -> tuple[list[Any], list[Any], list[Any]]:
    """Evaluates the factors of a product; returns those over the fraction line, those under it, and the scale.

    The scale is the first factor that is a power of ten, or the hundredth of a percentage: one of them may stand beside
    a number, as in "3 x 10^5" and "20%", and is no multiplication to be done. There is one or none.
    """
    over: list[Any] = []
    under: list[Any] = []
    scale: list[Any] = []
    for part in _factors(product):
        if isinstance(part, Pow) and part.exp is S.NegativeOne:
            under.append(_walk(part.base, left))
        elif not scale and (isinstance(part, UnevaluatedExpr) or (isinstance(part, Pow) and part.base == 10.0)):
            scale.append(_walk(part, left))
        else:
            over.append(_walk(part, left))
    return over, under, scale


def _is_unfinished_product(factors: list[Any]) -> bool:
    r"""Returns True if evaluated factors can still be multiplied.

    several rational numbers                   2 \cdot 5
    roots whose product has another factor     \sqrt2 \cdot \sqrt6, which is 2\sqrt3
    several sums of numbers                    (1+\sqrt2)(3-\sqrt2)
    a letter twice                             x \cdot x^2
    """
    rational = [value for value in factors if value.is_Rational]
    irrational = [value for value in factors if value.is_number and not value.is_Rational]
    letters = [base for value in factors if (base := value.as_base_exp()[0]).is_Symbol]
    num_sums = sum(value.is_Add for value in irrational)
    own_factor = prod(value.as_coeff_Mul()[0] for value in irrational)
    gains_factor = Mul(*irrational).as_coeff_Mul()[0] != own_factor
    return len(rational) > 1 or gains_factor or num_sums > 1 or len(set(letters)) < len(letters)


def _is_unfinished_fraction(over: list[Any], under: list[Any]) -> bool:
    r"""Returns True if a fraction of evaluated factors can still be divided; \frac{20}{2} is a way of writing 10.

    two or more rational divisors                                        1/2/3
    a rational divisor, and a rational factor that is no integer         \frac{1.5}{2}
    a divisor that is a sum with the imaginary unit                      \frac{1}{1+i}
    """
    rational = [value for value in over if value.is_Rational]
    divisors = [value for value in under if value.is_Rational]
    is_of_integers = len(divisors) < 2 and all(value.is_Integer for value in rational + divisors)
    has_complex_divisor = any(value.is_number and value.is_Add and value.has(I) for value in under)
    return (bool(divisors) and not is_of_integers) or has_complex_divisor
