"""GSM8K: pairs of response and truth, each decided by hand, with the reason."""

from __future__ import annotations

import pytest

from rewards.scorers.gsm8k import compute_flexible_score, compute_score

# response, ground truth, score, why
STRICT = [
    ("48/2 = 24\n48+24 = <<48+24=72>>72\n#### 72", "72", 1, "as the data set writes it"),
    ("#### 72", "72", 1, "nothing but the answer"),
    ("#### 72\n", "72", 1, "a line break behind it"),
    ("#### 72 apples", "72", 1, "a unit behind it"),
    ("#### 72%", "72", 1, "percent is a unit"),
    ("#### 72, which is right", "72", 1, "a comma ends the number"),
    ("#### 72!", "72", 1, "an exclamation mark is no factorial here"),
    ("#### 72-year-old", "72", 1, "a hyphen before a letter is no minus"),
    ("#### 72 (6 dozen)", "72", 1, "a remark in parentheses"),
    ("### 72\n#### 72", "72", 1, "one marker is right"),
    ("##### 72", "72", 1, "the marker is in it"),
    ("#### 1,200", "1200", 1, "thousands"),
    ("#### 1200", "1,200", 1, "thousands in the truth"),
    ("#### 1,234,567", "1234567", 1, "millions"),
    ("#### $1,200", "1200", 1, "dollars"),
    ("#### 18", "$18", 1, "dollars in the truth"),
    ("#### -5", "-5", 1, "negative"),
    ("#### −5", "-5", 1, "a typographic minus"),
    ("#### -$5", "-5", 1, "a debt"),
    ("#### $-5", "-5", 1, "a debt, the other way round"),
    ("#### 0", "0", 1, "zero"),
    ("#### 0.5", "0.5", 1, "a decimal"),
    ("#### .5", ".5", 1, "a decimal without its zero, in both"),
    ("#### 1 no, #### 72", "72", 1, "the last marker counts"),
    ("#### 72\n#### so that is it", "72", 1, "a marker without a number is no answer"),
    ("wrong 5\n" * 100 + "#### 72", "72", 1, "long, and the end is right"),
    ("#### 1/2", "1/2", 1, "a fraction, if that is the truth"),
    ("#### 72", 72, 1, "the truth as a number"),
    ("#### 73", "72", 0, "wrong"),
    ("#### 5", "-5", 0, "the sign is lost"),
    ("#### -5", "5", 0, "a sign too many"),
    ("#### −5", "5", 0, "a typographic sign too many"),
    ("#### 72", "1,072", 0, "half of the truth"),
    ("#### 1,072", "72", 0, "more than the truth"),
    ("#### 7.2", "72", 0, "the point counts"),
    ("#### 72.5", "72", 0, "more precise, and another number"),
    ("#### 1.200", "1200", 0, "a point is no comma"),
    ("#### 72 no, #### 1", "72", 0, "the last marker counts, also when it is wrong"),
    ("#### 1/2", "1", 0, "a fraction is not its numerator"),
    ("#### 144/2", "72", 0, "not worked out"),
    ("#### 5 1/2", "5", 0, "a mixed number is not its integer"),
    ("#### 72 + 3", "72", 0, "a sum is not its first term"),
    ("#### 72 x 2", "72", 0, "a product is not its first factor"),
    ("#### 3 + 4 = 7", "3", 0, "nor an equation what it begins with"),
    ("#### 3 + 4 = 7", "7", 0, "the answer alone is wanted behind the marker"),
    ("#### 10-12", "10", 0, "a range"),
    ("#### 7:30", "7", 0, "a time"),
    ("#### 5 million", "5", 0, "a word goes on with the number"),
    ("#### 5k", "5", 0, "the same"),
    ("#### 5, 6, 7", "5", 0, "a list of guesses"),
    ("#### 5, 6, 7", "7", 0, "a list of guesses, whichever is right"),
    ("#### 5; 6", "5", 0, "two guesses"),
    ("#### 5 or 6", "5", 0, "two guesses"),
    ("#### 5 to 6", "5", 0, "a range in words"),
    ("#### 1e3", "1", 0, "an exponent"),
    ("#### 2^5", "2", 0, "a power"),
    ("#### 72.0", "72", 0, "strings are compared, as verl does: integers are wanted"),
    ("#### 72.00", "72", 0, "the same"),
    ("#### 72.", "72", 0, "the same: the number alone is wanted"),
    ("#### 072", "72", 0, "the same"),
    ("#### .5", "0.5", 0, "the same"),
    ("the answer is 72", "72", 0, "no marker"),
    ("72", "72", 0, "no marker"),
    ("### 72", "72", 0, "a marker too short"),
    ("####72", "72", 0, "no space"),
    ("####  72", "72", 0, "two spaces"),
    ("####\n72", "72", 0, "a line break"),
    ("#### **72**", "72", 0, "bold"),
    ("#### \\boxed{72}", "72", 0, "another data set's marker"),
    ("#### x = 72", "72", 0, "a name before it"),
    ("#### about 72", "72", 0, "a word before it"),
    ("#### seventy-two", "72", 0, "in words"),
    ("#### €72", "72", 0, "another currency"),
    ("#### --72", "72", 0, "two signs"),
    ("#### $$72", "72", 0, "two dollar signs"),
    ("#### -", "72", 0, "no digit"),
    ("#### ,", "72", 0, "no digit"),
    ("#### ...", "72", 0, "no digit"),
    ("#### ", "72", 0, "nothing"),
    ("", "72", 0, "nothing at all"),
    ("#### 72" + " padding" * 50, "72", 0, "more than 300 characters from the end"),
    ("#### 72 #### 73 #### 74", "73", 0, "three guesses: the last one counts"),
]

FLEXIBLE = [
    ("so it costs $1,200.", "1200", 1, "the end of a sentence is no part of the number"),
    ("1200 dollars", "1200", 1, "a unit"),
    ("#### 1,200", "1200", 1, "a marker does no harm"),
    ("**1200**", "1200", 1, "bold"),
    ("\\boxed{1200}", "1200", 1, "boxed"),
    ("600 * 2 = 1200", "1200", 1, "the right-hand side"),
    ("it is -7", "-7", 1, "negative"),
    ("it is −7", "-7", 1, "a typographic minus"),
    ("1200 on day 2", "1200", 0, "the last number is another"),
    ("1200.50", "1200", 0, "the point counts"),
    ("1200 million", "1200", 0, "a word goes on with the number"),
    ("1/1200", "1200", 0, "a fraction is not its denominator"),
    ("it is −7", "7", 0, "the sign counts"),
    ("none", "1200", 0, "no number"),
    ("", "1200", 0, "nothing at all"),
]


@pytest.mark.parametrize(("response", "truth", "score", "why"), STRICT)
def test_strict_scores_are_those_decided_by_hand(response: str, truth: object, score: float, why: str) -> None:
    assert compute_score("openai/gsm8k", response, truth) == score, why


@pytest.mark.parametrize(("response", "truth", "score", "why"), FLEXIBLE)
def test_flexible_scores_are_those_decided_by_hand(response: str, truth: str, score: float, why: str) -> None:
    assert compute_flexible_score("gsm8k_flexible", response, truth) == score, why
