"""Texts with fields in braces: a field is a name, and a value is a text or a number."""

import math

import pytest

from splitppo.text_fields import field_names, field_text, filled


def test_fields_are_filled_and_doubled_braces_are_braces() -> None:
    template = "{a} and {b-c}, {{{a}}}\n"
    assert field_names(template) == ("a", "b-c")
    assert filled(template, {"a": "{b-c}", "b-c": "2"}) == "{b-c} and 2, {{b-c}}\n"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{a", "its braces do not match"),
        ("a}", "its braces do not match"),
        ("{}", "a field without a name"),
        ("{ }", "a field without a name"),
        ("{a.__class__}", "'a.__class__' is more than a name"),
        ("{a[0]}", "more than a name"),
        ("{a!r}", "more than a name"),
        ("{a:>9}", "more than a name"),
        ("{a:{b}}", "more than a name"),
    ],
)
def test_a_template_with_another_field_is_refused(template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        field_names(template)


def test_texts_and_numbers_are_values() -> None:
    values = ("", "x", 3, 0.5, -(10**300))
    assert [field_text(value) for value in values] == ["", "x", "3", "0.5", "-1" + 300 * "0"]


@pytest.mark.parametrize("value", [None, True, ["secret"], {"secret": 1}, b"secret", math.nan, math.inf, -(10**400)])
def test_another_value_is_refused_without_being_told(value: object) -> None:
    with pytest.raises(ValueError, match="expected a text or a number, got") as refusal:
        field_text(value)
    assert "secret" not in str(refusal.value)
