"""Words of a shell script: quotes, variables, `${X:-default}`, arrays, arithmetic. Nothing is ever run."""

import fnmatch
import importlib.util
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath

from tree_sitter import Node

from splitppo.config import ConfigError


@dataclass(frozen=True)
class Unknown:
    """A text that only a command could give, and none is run: what is known before it, and why the rest is not."""

    before: str
    why: str
    is_unset: bool = False


Text = str | Unknown


@dataclass(frozen=True)
class Word:
    """One argument, and the line of the script in which it is written; 0: it came from outside."""

    text: Text
    line: int


# Of a variable; a list is an array.
Value = Text | list[Word]

_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}
_DEFAULT_SIGNS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
_EXPANSIONS = ("simple_expansion", "expansion")
_IMPORT = re.compile(r"^\s*import\s+([A-Za-z_]\w*)\s*;?\s*$")
_ESCAPE, _ESCAPE_IN_STRING = re.compile(r"\\(.)", re.DOTALL), re.compile(r'\\([\\"$`\n])')


def line_of(node: Node) -> int:
    """The line in which it begins, from 1."""
    return node.start_point.row + 1


def source_of(node: Node) -> str:
    """Its text in the script."""
    return (node.text or b"").decode(errors="replace")


def joined(texts: Sequence[Text], separator: str = "") -> Text:
    """One text; unknown from the first one on that is."""
    known: list[str] = []
    for text in texts:
        if isinstance(text, Unknown):
            before = separator.join([*known, text.before])
            return Unknown(before, text.why, is_unset=text.is_unset and not before)
        known.append(text)
    return separator.join(known)


def _blanks(node: Node) -> str:
    """Those before an expansion inside of quotes, which the parser counts as part of it."""
    text = source_of(node)
    return text[: len(text) - len(text.lstrip())]


class Words:
    """Evaluates words with the variables of a script.

    Attributes:
        variables: what the script and, before it, the environment have set.
        arguments: `$@`, which only functions have: what is given behind the script's name comes last in any case.
        from_environment: names of what was read of it.
    """

    def __init__(self, name: str, environment: Mapping[str, str], now: datetime) -> None:
        self.variables: dict[str, Value] = {**environment}
        self.arguments: list[Word] = []
        self.from_environment: list[str] = []
        self._name, self._now = name, now
        self._inherited = {*environment}
        self._unset_is_empty = False

    def fields(self, node: Node) -> list[Word]:
        """The arguments that a word becomes: unquoted values are split at blanks, `"${X[@]}"` is one for each entry."""
        entries = self._entries(node)
        if entries is not None:
            return entries
        text = self.text(node)
        if node.type in _EXPANSIONS:
            is_nothing = isinstance(text, Unknown) and text.is_unset
            parts: list[Text] = [] if is_nothing else [*text.split()] if isinstance(text, str) else [text]
            return [Word(part, line_of(node)) for part in parts]
        if node.type == "concatenation":
            parts = [self.text(child) for child in node.children if child.type in _EXPANSIONS]
            if any(isinstance(part, str) and re.search(r"\s", part) for part in parts):
                raise self.error(node, f"{source_of(node)} has blanks in it and would fall apart: quote it")
        return [Word(text, line_of(node))]

    def text(self, node: Node) -> Text:
        """The text of a word, or of a part of one."""
        match node.type:
            case "raw_string":
                return source_of(node)[1:-1]
            case "string":
                return joined([*self._in_quotes(node)])
            case "concatenation" | "command_name" | "variable_assignment":
                return joined([self.text(child) for child in node.children])
            case "simple_expansion":
                return joined([_blanks(node), self._variable(source_of(node).lstrip()[1:], node)])
            case "expansion":
                return joined([_blanks(node), self._expansion(node)])
            case "command_substitution":
                return self._substitution(node)
            case "arithmetic_expansion":
                return self._arithmetic(node.named_children[0])
            case "ansi_c_string" | "translated_string" | "process_substitution":
                raise self.error(node, f"{source_of(node)} is not understood here")
            case _:
                return _ESCAPE.sub(lambda found: "" if found[1] == "\n" else found[1], source_of(node))

    def tested(self, node: Node) -> Text:
        """The text of a word in a test, where what is not set is empty, as a shell has it everywhere."""
        self._unset_is_empty = True
        try:
            return self.text(node)
        finally:
            self._unset_is_empty = False

    def assign(self, node: Node) -> None:
        """`X=...`, `X+=...`, `X=(...)`."""
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None or name.type != "variable_name":
            raise self.error(node, f"{source_of(node)} is not understood here")
        new: Value = "" if value is None else self._array(value) if value.type == "array" else self.text(value)
        key = source_of(name)
        if any(child.type == "+=" for child in node.children):
            old = self.variables.get(key, [] if isinstance(new, list) else "")
            if isinstance(new, list):
                new = [*(old if isinstance(old, list) else [Word(old, line_of(node))]), *new]
            else:
                new = joined([self._variable(key, node), new])
        self.variables[key] = new
        self._inherited.discard(key)

    def error(self, node: Node, what: str) -> ConfigError:
        """What cannot be understood, and where."""
        return ConfigError(f"{self._name}, line {line_of(node)}: {what}")

    def unknown(self, node: Node) -> Unknown:
        """What a command would have said."""
        command = " ".join(source_of(node).split())
        short = command if len(command) <= 60 else command[:57] + "..."
        return Unknown("", f"{short} in line {line_of(node)} would have to be run")

    def _array(self, node: Node) -> list[Word]:
        return [word for child in node.named_children if child.type != "comment" for word in self.fields(child)]

    def _in_quotes(self, node: Node) -> Iterator[Text]:
        """The parts of "...", and the blanks between them, which have no node."""
        text, end = node.text or b"", 1
        for child in node.children[1:-1]:
            begin = child.start_byte - node.start_byte
            yield text[end:begin].decode()
            if child.type == "string_content":
                yield _ESCAPE_IN_STRING.sub(lambda found: "" if found[1] == "\n" else found[1], source_of(child))
            else:
                yield self.text(child)
            end = child.end_byte - node.start_byte
        yield text[end:-1].decode()

    def _entries(self, node: Node) -> list[Word] | None:
        """Those of `"$@"` and `"${X[@]}"`, quoted or not; None for another word."""
        inner = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
        if node.type == "string" and source_of(node) != f'"{source_of(inner)}"':
            return None
        if re.fullmatch(r"\$[@*]|\$\{[@*](:\d+)?\}", source_of(inner)):
            return [*self.arguments]
        if inner.type == "expansion" and inner.named_children and inner.named_children[0].type == "subscript":
            name, index = inner.named_children[0].named_children
            if source_of(index) in ("@", "*"):
                value = self.variables.get(source_of(name), [])
                return [*value] if isinstance(value, list) else [Word(value, line_of(node))]
        return None

    def _variable(self, name: str, node: Node) -> Text:
        value = self.variables.get(name)
        if name in self._inherited and name not in self.from_environment:
            self.from_environment.append(name)
        if name in ("@", "*"):
            return joined([word.text for word in self.arguments], " ")
        if name == "#":
            return str(len(self.arguments))
        if name == "0":
            return self._name
        if value is None:
            if name.isdigit() or self._unset_is_empty:
                return ""
            return Unknown("", f"{name} in line {line_of(node)} is set nowhere", is_unset=True)
        return (value[0].text if value else "") if isinstance(value, list) else value

    def _expansion(self, node: Node) -> Text:
        """`${X}`, `${X[0]}`, `${#X}`, `${X:-default}` and its like, `${X%pattern}`, `${X/pattern/new}`, `${X,,}`."""
        children = node.children[1:-1]
        if children and children[0].type == "#":
            value = self.variables.get(source_of(children[1]), "")
            return value if isinstance(value, Unknown) else str(len(value))
        if not children or children[0].type not in ("variable_name", "subscript", "special_variable_name"):
            raise self.error(node, f"{source_of(node)} is not understood here")
        name, rest = children[0], children[1:]
        if name.type == "subscript":
            return self._subscript(name)
        if not rest:
            return self._variable(source_of(name), node)
        if rest[0].type in _DEFAULT_SIGNS:
            return self._or_default(node, source_of(name), rest[0].type, rest[1:])
        return self._edited(node, self._variable(source_of(name), node), rest[0].type, rest[1:])

    def _or_default(self, node: Node, key: str, sign: str, words: Sequence[Node]) -> Text:
        """`:-`, `:=`, `:?`, `:+`; without the colon an empty value is a value."""
        value = self._variable(key, node)
        has_value = key in self.variables and (value != "" or not sign.startswith(":"))
        other = joined([self.text(word) for word in words])
        if sign.endswith("+"):
            return other if has_value else ""
        if has_value:
            return value
        if sign.endswith("?"):
            return Unknown("", f"{key} in line {line_of(node)} must be set")
        if sign.endswith("="):
            self.variables[key] = other
        return other

    def _edited(self, node: Node, value: Text, sign: str, words: Sequence[Node]) -> Text:
        """`%`, `#`, `/`, `,,` and `^^`."""
        pattern, *new = [self.text(word) for word in words if word.is_named] or [""]
        both = joined([value, pattern, *new])
        if isinstance(both, Unknown):
            return both
        match sign:
            case ",,":
                return str(value).lower()
            case "^^":
                return str(value).upper()
            case "%" | "%%" | "#" | "##":
                return _without(str(value), str(pattern), sign)
            case "/" | "//":
                return str(value).replace(str(pattern), str(joined(new)), -1 if sign == "//" else 1)
        raise self.error(node, f"{source_of(node)} is not understood here")

    def _subscript(self, node: Node) -> Text:
        name, index = node.named_children
        value = self.variables.get(source_of(name))
        if source_of(name) == "BASH_SOURCE":
            return self._name
        if isinstance(value, list) and str(self.text(index)) in [str(place) for place in range(len(value))]:
            return value[int(str(self.text(index)))].text
        if isinstance(value, list) and source_of(index) in ("@", "*"):
            return joined([word.text for word in value], " ")
        raise self.error(node, f"{source_of(node)} is not understood here")

    def _arithmetic(self, node: Node) -> Text:
        match node.type:
            case "binary_expression":
                left, sign, right = node.children
                values = [self._arithmetic(left), self._arithmetic(right)]
                if isinstance(both := joined(values, " "), Unknown):
                    return both
                if sign.type not in _ARITHMETIC or (sign.type in "/%" and int(str(values[1])) == 0):
                    raise self.error(node, f"{source_of(node)} is not understood here")
                return str(_ARITHMETIC[sign.type](int(str(values[0])), int(str(values[1]))))
            case "parenthesized_expression":
                return self._arithmetic(node.named_children[0])
            case "variable_name" | "word":
                value = self._variable(source_of(node), node)
            case _:
                value = self.text(node)
        if isinstance(value, str) and not re.fullmatch(r"-?\d+", value):
            raise self.error(node, f"{source_of(node)} is {value!r}; expected a whole number")
        return value

    def _substitution(self, node: Node) -> Text:
        """What `$(...)` would print: of commands that only say what is known anyway; of others it stays unknown."""
        printed = [self._printed(child) for child in node.named_children]
        lines = [line for line in printed if line is not None and line is not _FAILED]
        return self.unknown(node) if None in printed else joined(lines, "\n")

    def _printed(self, node: Node) -> Text | None:
        """The output of a command that succeeds; "" of one that fails silently; None: unknown."""
        if node.type == "redirected_statement":
            return self._printed(node.named_children[0])
        if node.type == "list":
            left, sign, right = node.children
            before = self._printed(left)
            if before is None:
                return None
            if (sign.type == "&&") == (before is not _FAILED):
                return self._printed(right)
            return before
        if node.type != "command":
            return None
        words = [word for child in node.named_children for word in self.fields(child)]
        if any(isinstance(word.text, Unknown) for word in words):
            return None
        return self._of_command([str(word.text) for word in words])

    def _of_command(self, words: Sequence[str]) -> Text | None:
        match words:
            case ["echo", *rest]:
                return " ".join(rest)
            case ["dirname", path]:
                return str(PurePosixPath(path).parent)
            case ["basename", path]:
                return PurePosixPath(path).name
            case ["pwd"]:
                return str(Path.cwd())
            case ["date", form] if form.startswith("+"):
                return self._now.strftime(form[1:])
            case ["python" | "python3", "-c", code] if found := _IMPORT.match(code):
                return "" if importlib.util.find_spec(found[1]) else _FAILED
        return None


# The output of a command that fails: an own object, as a command may succeed and print nothing.
_FAILED = Unknown("", "the command fails")


def _without(value: str, pattern: str, sign: str) -> str:
    """`value` less the shortest (`%`, `#`) or longest (`%%`, `##`) end or beginning that the pattern matches."""
    at_end = sign.startswith("%")
    cuts = range(len(value) + 1)
    found = [cut for cut in cuts if fnmatch.fnmatchcase(value[cut:] if at_end else value[:cut], pattern)]
    if not found:
        return value
    cut = (max if at_end == (len(sign) == 1) else min)(found)
    return value[:cut] if at_end else value[cut:]
