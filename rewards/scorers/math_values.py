r"""Compares the values of two expressions of sympy: numbers exactly, anything else by math-verify.

math-verify compares numbers to a fixed number of decimal places, so that 2^{-98} would be 2^{-99}. And sympy can take
minutes for one line; how much work an expression is shows in its size, before anything is computed.
"""

from math import comb, inf, log2, prod
from typing import Any

import sympy
from math_verify import verify
from sympy import Expr, Float, I, Integer, MatrixBase, Mul, N, Pow, Rational, Symbol, UnevaluatedExpr
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.relational import Relational
from sympy.functions.combinatorial.factorials import CombinatorialFunction

_MAX_TERMS = 100  # when multiplied out; the largest ground truth of MATH has 11
_WEIGHT_OF_SOLVED = 4  # of a term or root in an equation, an inequality or a union, which sympy solves
_MAX_BITS = 4_000  # of the numbers, which are computed to twice as many
_MAX_RATIONAL_BITS = 100_000  # if all numbers are rational
_MAX_EXPONENT_BITS = 50  # larger exponents are not computed
_MAX_ROOTS = 12  # for more, sympy looks for simpler forms for seconds
_GUARD_DIGITS = 30
_ROUNDING = Rational(5, 10**12)  # relative, of a decimal with twelve significant digits
# Where expressions with letters are compared before sympy simplifies their difference.
_POINT = tuple(Rational(numerator, 1009) for numerator in (1433, 1931, 2477, 3163, 4021))
_POINT_DIGITS = 50
_POINT_LIMIT = Rational(1, 10**20)


def are_small(expressions: list[Any]) -> bool:
    """Returns True if expressions, almost unevaluated, are small enough to be compared in a fraction of a second."""
    sizes = [_size(expression) for expression in expressions]
    terms = sum(size[0] for size in sizes)
    bits = max(size[1] for size in sizes)
    nodes = [node for expression in expressions for node in sympy.preorder_traversal(expression)]
    roots = {node for node in nodes if isinstance(node, Pow) and not isinstance(node.exp, Integer)}
    is_solved = any(isinstance(node, Relational) for node in nodes)
    num_roots = sum(_WEIGHT_OF_SOLVED if is_solved and root.free_symbols else 1 for root in roots)
    is_rational = not roots and not any(isinstance(node, sympy.Function | sympy.NumberSymbol) for node in nodes)
    max_bits = _MAX_RATIONAL_BITS if is_rational else _MAX_BITS
    return terms <= _MAX_TERMS and num_roots < _MAX_ROOTS and bits <= max_bits


def is_same(truth: Any, answer: Any, limit_s: int | None) -> bool:
    """Returns True if two small expressions have the same value; False also if math-verify gives up."""
    exact_truth = exact(truth)
    exact_answer = exact(answer)
    if _num_repeated(answer) != _num_repeated(truth):
        return False
    digits = _digits(truth, answer)
    if isinstance(exact_truth, Expr) and isinstance(exact_answer, Expr) and not _has_percent(truth, answer):
        if exact_truth.is_number and exact_answer.is_number:
            rounded_from = None
            if truth.has(Float) is not answer.has(Float):
                rounded_from = exact_answer if truth.has(Float) else exact_truth
            return _is_same_number(exact_truth, exact_answer, digits, rounded_from)
        if _differ_somewhere(exact_truth, exact_answer):
            return False
    return bool(
        verify(
            exact_truth,
            exact_answer,
            float_rounding=digits,
            numeric_precision=digits,
            allow_set_relation_comp=True,  # an interval and the inequality that describes it are the same set
            timeout_seconds=limit_s,
        )
    )


def exact(node: Any) -> Any:
    """Returns an expression with fractions in place of decimals, and the imaginary unit in place of the letter i."""
    if isinstance(node, Symbol):
        return I if node.name == "i" else node
    if isinstance(node, Float):
        return Rational(str(node))
    if isinstance(node, MatrixBase):
        return node.applyfunc(exact)
    if not node.has(Float) and all(letter.name != "i" for letter in node.free_symbols):
        return node
    parts = getattr(node, "_unsorted_args", node.args)  # of a set of math-verify
    return node.func(*(exact(part) for part in parts))


def _num_repeated(node: Any) -> int:
    """Returns how many elements of a list or set, which math-verify takes for a set, are written more than once."""
    elements = [exact(element).doit() for element in getattr(node, "_unsorted_args", ())]
    return len(elements) - len(set(elements))


def _is_same_number(truth: Expr, answer: Expr, digits: int, rounded_from: Expr | None) -> bool:
    """Returns True if two numbers are equal: exactly if both are rational, else up to the precision of `digits`.

    Args:
        truth: the number of the data set.
        answer: the number of the response.
        digits: to how many significant digits irrational numbers are computed (`_digits`).
        rounded_from: the number that is written without a decimal point, if the other one has a decimal point, else
            None. Unless its decimals end (1/8), the other number may be its rounding, so closeness decides.
    """
    truth = truth.doit()
    answer = answer.doit()
    if truth == answer:
        return True
    if rounded_from is not None and not _is_decimal(rounded_from.doit()):
        return _is_near(truth, answer, _POINT_DIGITS, _ROUNDING)
    if truth.is_Rational and answer.is_Rational:
        return False
    return _is_near(truth, answer, digits, Rational(1, 10 ** (digits - _GUARD_DIGITS)))


def _is_near(truth: Expr, answer: Expr, digits: int, tolerance: Rational) -> bool:
    """Compares two numbers, computed to `digits`, within a relative tolerance; False if one is not finite."""
    first = N(truth, digits)
    second = N(answer, digits)
    if not (_is_finite(first) and _is_finite(second)):
        return False
    return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))


def _differ_somewhere(truth: Expr, answer: Expr) -> bool:
    """Returns True if two expressions with letters have different values at a point, so that they cannot be equal."""
    letters = sorted(truth.free_symbols | answer.free_symbols, key=str)
    if isinstance(truth, Symbol) or isinstance(answer, Symbol) or not 0 < len(letters) <= len(_POINT):
        return False  # math-verify takes a word for the product of its letters
    point = dict(zip(letters, _POINT, strict=False))
    first = N(truth.subs(point), _POINT_DIGITS)
    second = N(answer.subs(point), _POINT_DIGITS)
    if not (_is_finite(first) and _is_finite(second)):
        return False
    return bool(abs(first - second) > _POINT_LIMIT * max(abs(first), abs(second)))


def _is_finite(number: Expr) -> bool:
    """Returns True if sympy has computed a number, real or complex, and it is finite."""
    return all(part.is_finite and part.is_Number for part in number.as_real_imag())


def _has_percent(*expressions: Any) -> bool:
    return any(expression.has(UnevaluatedExpr) for expression in expressions)


def _is_decimal(number: Expr) -> bool:
    """Returns True if a number is a fraction whose decimals end."""
    return bool(number.is_Rational) and 10 ** number.q.bit_length() % number.q == 0


def _digits(*expressions: Any) -> int:
    """Returns a number of digits at which two different numbers of these sizes differ."""
    return 2 * _GUARD_DIGITS + int(0.7 * max(_size(expression)[1] for expression in expressions))


def _size(node: Any) -> tuple[float, float]:
    """Returns the number of terms of an expression that is multiplied out, and the bits of its largest number.

    Both are estimated by rules from the sizes of its parts, without computing it; infinite if there is no bound.
    """
    if isinstance(node, Float):
        node = Rational(str(node))
    if isinstance(node, Rational):
        return 1, (node.p * node.q).bit_length()
    if isinstance(node, ExprWithLimits | sympy.Derivative | sympy.Limit):
        return inf, inf
    parts = [_size(part) for part in (node.flat() if isinstance(node, MatrixBase) else getattr(node, "args", ()))]
    terms = [part[0] for part in parts]
    bits = [part[1] for part in parts]
    if not parts:
        return 1, 1
    if isinstance(node, Mul):
        return _product(terms), sum(bits)
    if isinstance(node, Pow | sympy.exp):
        exponent = _magnitude(node.exp, _size(node.exp)[1])
        base_terms, base_bits = (1, 2) if isinstance(node, sympy.exp) else parts[0]
        return _power(base_terms, exponent), max(1.0, exponent) * base_bits
    if isinstance(node, CombinatorialFunction):
        largest = max(_magnitude(part, size[1]) for part, size in zip(node.args, parts, strict=True))
        return _product(terms), largest * log2(largest + 2)
    weight = _WEIGHT_OF_SOLVED if isinstance(node, Relational | sympy.Union) else 1
    return weight * sum(terms), max(bits) + len(bits)


def _magnitude(node: Any, bits: float) -> float:
    """Returns the absolute value of a number, 1 for an expression with letters, or infinity for a large number.

    `bits` is the estimated size of the number (`_size`), which tells whether it may be computed at all.
    """
    if not getattr(node, "is_number", False):
        return 1
    value = N(node) if bits <= _MAX_EXPONENT_BITS else sympy.oo
    return float(abs(value)) if value.is_finite and value.is_number else inf


def _product(factors: list[float]) -> float:
    """Multiplies sizes, which may be infinite."""
    return prod(factors, start=1.0)


def _power(terms: float, exponent: float) -> float:
    """Returns how many terms a sum of t terms has when its power n is multiplied out: (n + t - 1) over n.

    Infinity for very many.
    """
    if terms == 1 or exponent <= 1:
        return terms
    return float(comb(int(exponent + terms) - 1, int(exponent))) if exponent + terms < 1000 else inf
