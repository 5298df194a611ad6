r"""Rewrites the ways of typing an answer into one: signs of Unicode, fonts, degrees, times and repeating decimals.

The result is LaTeX with the same value, which both comparisons of rewards/scorers/math_equivalence.py read.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

# Signs that NFKC does not turn into LaTeX.
_SIGNS = str.maketrans(
    dict.fromkeys("−‐‑‒–—", "-")
    | dict.fromkeys("⁄∕", "/")
    | dict.fromkeys("·⋅∙", r"\cdot ")
    | dict.fromkeys("°º˚", r"^\circ ")
    | {"×": r"\times ", "÷": r"\div ", "±": r"\pm ", "∞": r"\infty ", "π": r"\pi ", "∅": r"\emptyset "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "ℝ": r"\mathbb{R}"}
)
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴-⁹⁺⁻ⁿ]++")
_SUBSCRIPT = re.compile("[₀-₉]++")

_DEGREES = r"\\(?:circ|degree|textdegree)(?![a-zA-Z])"
_FONTS = (
    r"bf|it|rm|sf|tt|bfseries|itshape|rmfamily|boldmath|displaystyle|textstyle|tiny|small|large|Large|LARGE|huge|Huge"
)
_OVERLINED = r"\\(?:overline|bar|dot)\s*"
_PERIOD = (
    rf"(?:{_OVERLINED}\{{(\d{{1,15}})\}}|{_OVERLINED}(\d)|\((\d{{1,15}})\)"
    r"|\\dot\{?(\d)\}?(\d{0,15})\\dot\{?(\d)\}?)"
)
_REPEATING_DECIMAL = re.compile(rf"(?<![\d.])(\d{{0,15}})\.(\d{{0,15}}){_PERIOD}(?!\s*[\^_\d(])")
_DOTS = r"(?:\.\.\.|\\[lc]?dots(?![a-zA-Z]))"
_DECIMAL_WITH_DOTS = re.compile(rf"(?<![\d.])(\d{{1,15}})\.(\d{{0,15}}?)(\d{{1,6}}?)\3(\3*+){_DOTS}(?!\s*[\^_\d])")
_TIME_OF_DAY = re.compile(
    r"(?<=\d)(?:\\[ ,;:!]|[~\s])*(?:\\(?:text|mbox|mathrm)\s*\{\s*)?"
    r"(?:([ap])\.?\s*m\b\.?|noon|(midnight))\s*\}?(?=\s*$)",
    re.IGNORECASE,
)


def rewritten(text: str) -> str:
    """Rewrites an answer in LaTeX, or in signs of Unicode, without changing its value.

    Bold and large type, sizes of brackets and degrees are left out; a repeating decimal becomes a fraction.
    """
    text = _plain_signs(text)
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    text = _REPEATING_DECIMAL.sub(_repeating_decimal, text)
    text = _DECIMAL_WITH_DOTS.sub(_decimal_with_dots, text)
    return _TIME_OF_DAY.sub(_half_of_day, text)


_REWRITES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^\s*(?:\$|\\\()+|(?:(?<!\\)\$|\\\))+\s*$", ""),
    (r"^\s*\\(?:text|mbox)\s*\{([^{}]*\d[^{}]*)\}\s*$", r"\1"),
    (rf"\{{\\(?:{_FONTS})(?![a-zA-Z])\s*([^{{}}]*)\}}", r"\1"),
    (rf"\\(?:{_FONTS})(?![a-zA-Z])\s*", ""),
    (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf|mathnormal)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?=\s*(?:\\[{}|lr]|[()\[\]|.]))\s*", ""),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
    (rf"\^\s*(?:\{{\s*{_DEGREES}\s*\}}|{_DEGREES})\s*+(?!\d)", ""),
    (rf"(?<=[\d}}])\s*(?:\{{\s*{_DEGREES}\s*\}}|{_DEGREES})(?!\s*[a-zA-Z\d(])", ""),
    (r"(?<=\S)\s*\\(?:text|mbox|mathrm)\s*\{\s*(?:percent|per cent|pct\.?)\s*\}", r"\\%"),
    (r"(?<=[\d}])\s*(?:percent|per cent|pct\b\.?)", r"\\%"),
    (r"(?<![\w.])1(?:\.0+)?\s*(?=i(?![a-zA-Z]))", ""),
)


def _plain_signs(text: str) -> str:
    """Writes signs of Unicode as LaTeX or ASCII: fractions, super- and subscripts, roots, minus signs."""
    if text.isascii():
        return text
    text = _VULGAR_FRACTION.sub(_vulgar_fraction, text)
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = _SUBSCRIPT.sub(lambda match: f"_{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
    return re.sub(r"√\s*(?:\(([^()]*)\)|(\d+))", lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)


def _half_of_day(match: re.Match[str]) -> str:
    half = match[1].lower() if match[1] else "a" if match[2] else "p"
    return rf"\text{{ {half}m}}"


def _vulgar_fraction(match: re.Match[str]) -> str:
    over, _, under = unicodedata.normalize("NFKC", match[0]).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{over}}}{{{under}}}"


def _repeating_decimal(match: re.Match[str]) -> str:
    whole, before, *periods = match.groups(default="")
    return _fraction(whole, before, "".join(periods)) if whole or before else match[0]


def _decimal_with_dots(match: re.Match[str]) -> str:
    whole, before, period, further = match.groups()
    return _fraction(whole, before, period) if further or len(period) > 1 else match[0]  # "0.33..." may be 0.334


def _fraction(whole: str, before: str, period: str) -> str:
    r"""Returns a repeating decimal as a fraction: \frac{1}{6} for the whole part 0, the places 1 and the period 6."""
    nines = 10 ** len(period) - 1
    value = Fraction(int(whole + before + period) - int(whole + before or "0"), 10 ** len(before) * nines)
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# Words that make another value of the number before them, or say something about it. Any other word is a unit.
SCALES = (
    r"hundreds?|thousands?|\w*illions?|dozens?|gross|lakhs?|lacs?|crores?|cr|myriads?|ml?n|bl?n|tr?l?n|mil|grand"
    r"|scores?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|\w+teen|\w+tie|hundred|thousand|\w+illion)ths?"
)
_CARDINALS = (
    r"zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|twenty|thirty|forty|fifty|sixty"
    r"|seventy|eighty|ninety|googol|half|halves|quarter|third|thirds"
)
_CHANGES = (
    r"once|twice|thrice|double|triple|treble|\w+tuples?|\w*fold|plus|minus|over|negative|positive|mod|modulo|in\s+base|base"
    r"|factorials?|reciprocals?|inverses?|conjugates?|power|itself|off|less|percents?|percentage|pct|pi|sqrt|inf|infinity"
    r"|infinite|roots?|logs?|ln|exp|recurring|repeating|repeats?|hex|hexadecimal|octal|binary|decimal"
    r"|(?:(?:dou|tre)bl|tripl|\w+tupl|halv|squar|cub|round|add|subtract|multipli|divid|increas|decreas|reduc|rais|lower|negat"
    r"|invert|flipp|revers|scal|truncat|remov|omitt|exclud|repeat|averag|rais|estimat|guess|assum|suppos|reject|refut"
    r"|cancell?|suspect|doubt|expect)ed"
    r"|times(?=\s+(?!(?:per|an?|each|every)\b)\w)"
)
_STATEMENTS = (
    r"or|nor|but|not|no|never|none|nothing|cannot|is|isn|isnt|are|was|be|through|versus|vs|either|neither|maybe|perhaps"
    r"|probabl[ey]|possibl[ey]|impossible|likely|unlikely|presumably|apparently|supposedly|hopefully|guess|guesses|think"
    r"|believe|assume|suppose|doubt|doubtful|unsure|uncertain|unclear|unknown|undefined|might|could|should|would"
    r"|wrong|incorrect|mistaken|false|invalid|untrue|nope|if|unless|except|instead|than|least|most|approximately|approx"
    r"|about|roughly|nearly|almost|around|circa"
)
# A number word that begins a compound is a part of a unit: "one-way tickets", but not "three-quarters".
_NUMBER_WORDS = rf"(?:{_CARDINALS})\b(?!-(?!quarters\b)[^\W\d_])"
_LETTER_NO_UNIT = r"[^\W\d_aAdgJhLlmNsVW]"  # those that are no unit, nor an article
UNIT_WORD = rf"(?!(?i:{SCALES}|{_CHANGES}|{_STATEMENTS}|and|to|{_NUMBER_WORDS})\b|{_LETTER_NO_UNIT}\b)[^\W\d_]++\.?"
# Units: "cm", "square units", "miles per hour", "m/s", "miles to the gallon".
UNIT = rf"{UNIT_WORD}(?:(?:\s*[-/]\s*|\s+(?:(?:and|to)\s+)?|\s*\\cdot\s*){UNIT_WORD})*+"
