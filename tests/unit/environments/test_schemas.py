"""Schemas of functions are those of transformers' get_json_schema; what it refuses is refused with one sentence."""

from __future__ import annotations

import enum
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Literal, Optional, Union  # noqa: F401 - in the functions below

import pytest
from transformers.utils import get_json_schema

from environments.schemas import schema_of


class Color(enum.Enum):
    RED = "red"


TYPES = [
    "int",
    "float",
    "str",
    "bool",
    "list",
    "tuple",
    "dict",
    "Any",
    "None",
    "object",
    "Color",
    "list[int]",
    "list[list[str]]",
    "list[dict[str,Any]]",
    "list[Any]",
    "list[int|None]",
    "dict[str,int]",
    "dict[str,list[float]]",
    "dict[str,dict[str,bool]]",
    "dict[str,Any]",
    "tuple[int,str]",
    "tuple[int,list[str],dict[str,float]]",
    "Optional[int]",
    "int|None",
    "Optional[list[int]]",
    "Optional[dict[str,int]]",
    "Union[int,str]",
    "int|str|None",
    "list[int]|str",
    "Union[list[int],dict[str,int],None]",
    "list|tuple",
    "bool|int|float",
    'Union[Literal["a"],int]',
    'Literal["a"]',
    'Literal["a","b"]',
    'Literal[1,"a"]',
    "Literal[1,2.5]",
    "Literal[True,None]",
    'Optional[Literal["x","y"]]',
    'list[Literal["a","b"]]',
    "list[Optional[Union[int,str]]]",
]

WRONG_TYPES = ["tuple[int]", "tuple[int, ...]", "set[int]", "Callable[[int], int]", "type[int]", "Literal[b'a']"]


def made(source: str) -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(textwrap.dedent(source), dict(globals()), names)
    (function,) = names.values()
    return function  # type: ignore[no-any-return]


@pytest.mark.parametrize("type_", TYPES)
def test_a_type_has_the_schema_that_transformers_gives_it(type_: str) -> None:
    function = made(
        f'''
        def tool(one: {type_}, two: {type_} = None) -> {type_}:
            """Does it.

            Args:
                one: the first.
                two: the second.

            Returns:
                What it found.
            """
        '''
    )
    assert schema_of(function) == get_json_schema(function)


@pytest.mark.parametrize("type_", WRONG_TYPES)
@pytest.mark.parametrize("place", ["one: {}", "one: list[{}]", "one: {} | None"])
def test_a_type_without_a_schema_is_refused_as_transformers_refuses_it(type_: str, place: str) -> None:
    function = made(f'def tool({place.format(type_)}):\n    """Does it.\n\n    Args:\n        one: the first.\n    """')
    with pytest.raises(Exception):  # noqa: B017 - of any type of transformers'
        get_json_schema(function)
    with pytest.raises(ValueError, match=r"^argument 'one' has the type .*, for which there is no schema$"):
        schema_of(function)


def plain() -> None:
    """Takes nothing."""


def only_args(a: int) -> int:
    """Has a summary
    of two lines.

    And more below.

    Args:
        a: one,
            two and
            three.
    """
    return a


def sections(first_name: str, b: float = 0.5, *, c: bool = True) -> dict[str, Any]:
    """Has all sections: also Args in a word, and colons: many.

    Args:
        first_name: with a colon: here, and (parentheses).

        b: after an empty line
        c: last

    Returns:
        a dict
        of two lines: yes

    Raises:
        ValueError: never.
    """
    return {}


def choices(drink: str, number: int = 1) -> str:
    """Serves.

    Args:
        drink: what to drink (choices: ["tea", " coffee "])
        number: how many (CHOICES: [1, 2])
    """
    return drink


async def asynchronous(key: str) -> str:
    """Waits.

    Args:
        key: the word.
    """
    return key


def raises_only(key: str) -> None:
    """Looks.

    Args:
        key: the word.

    Raises:
        KeyError: there is none.
    """


def returns_without_type(key: str):
    """Looks.

    Args:
        key: the word.

    Returns:
        What is never told.
    """


def more_described(key: str) -> None:
    """Looks.

    Args:
        key: the word.
        other: not an argument.
    """


def returns_first() -> int:
    """Returns: nothing special."""
    return 1


class Owner:
    def method(self, key: str) -> str:
        """Looks.

        Args:
            key: the word.
        """
        return key


FUNCTIONS = [
    plain,
    only_args,
    sections,
    choices,
    asynchronous,
    raises_only,
    returns_without_type,
    more_described,
    returns_first,
    Owner.method,
    Owner().method,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_a_function_has_the_schema_that_transformers_gives_it(function: Callable[..., Any]) -> None:
    assert schema_of(function) == get_json_schema(function)


def no_docstring(key: str) -> None: ...


def no_type(key) -> None:  # type: ignore[no-untyped-def]
    """Looks.

    Args:
        key: the word.
    """


def no_description(key: str) -> None:
    """Looks."""


def wrong_choices(key: str) -> None:
    """Looks.

    Args:
        key: the word (choices: a, b)
    """


def unknown_type(key: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Looks.

    Args:
        key: the word.
    """


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (no_docstring, "it has no docstring; expected one that says what it does"),
        (no_type, "argument 'key' has no type; expected one, as in key: str"),
        (no_description, "argument 'key' has no description; expected a line under Args"),
        (wrong_choices, "argument 'key': expected choices as a JSON list, got a, b"),
        (unknown_type, "its types cannot be read: name 'Nowhere' is not defined"),
    ],
)
def test_what_transformers_refuses_is_refused_with_a_sentence(function: Callable[..., Any], expected: str) -> None:
    with pytest.raises(Exception):  # noqa: B017 - of any type of transformers'
        get_json_schema(function)
    with pytest.raises(ValueError) as raised:
        schema_of(function)
    assert str(raised.value) == expected


@pytest.mark.parametrize("parameters", ["*keys: str", "**keys: str", "keys: str, /"])
def test_arguments_that_have_no_name_are_refused(parameters: str) -> None:
    function = made(f'def tool({parameters}):\n    """Does it.\n\n    Args:\n        keys: words.\n    """')
    with pytest.raises(ValueError, match="argument 'keys' cannot be given by name; expected arguments with names only"):
        schema_of(function)


def test_a_schema_says_nothing_of_the_object_of_a_method() -> None:
    assert list(inspect.signature(Owner.method).parameters) == ["self", "key"]
    assert list(schema_of(Owner.method)["function"]["parameters"]["properties"]) == ["key"]
