"""What a launch script would pass to `verl.trainer.main_ppo`: evaluated, never run."""

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from controller.from_verl.shell_words import Unknown, Word, Words, joined, line_of, source_of
from splitppo.config import ConfigError

_ENTRY_POINT = re.compile(r"(^|[./])main_(ppo|dapo)\w*(\.py)?$")
_ENTRY_POINT_ANYWHERE = re.compile(r"\bmain_(ppo|dapo)")
_MAX_DEPTH = 20  # of functions that call each other
_COMPARISONS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


@dataclass(frozen=True)
class Launch:
    """The words that follow the entry point, and the variables of the environment that were read on the way."""

    words: list[Word]
    from_environment: Collection[str]


@dataclass(frozen=True)
class _Leave(Exception):
    """`exit`: where the script would end."""

    line: int


def read_script(file: Path, text: str, environment: Mapping[str, str], now: datetime) -> Launch:
    """The words that follow `-m verl.trainer.main_ppo` in a script that is given none itself.

    Raises:
        ConfigError: the script starts no such program, or two; it cannot be parsed, or which branch it takes depends on
            a command's output. The sentence names the line.
    """
    tree = Parser(Language(tree_sitter_bash.language())).parse(text.encode())
    run = _Run(Words(file.name, environment, now))
    if broken := _first_error(tree.root_node):
        raise run.words.error(broken, f"cannot be parsed as shell: {_excerpt(broken)}")
    ended = ""
    try:
        run.statements(tree.root_node)
    except _Leave as leave:
        ended = f" before it ends in line {leave.line}"
    if run.found is None:
        raise ConfigError(
            f"{file.name} starts no verl.trainer.main_ppo{ended}; expected python -m verl.trainer.main_ppo"
        )
    return Launch(run.found, run.words.from_environment)


def _first_error(node: Node) -> Node | None:
    if node.is_error or node.is_missing:
        return node
    return next((found for child in node.children if child.has_error and (found := _first_error(child))), None)


def _excerpt(node: Node) -> str:
    return next(iter(source_of(node).strip().splitlines()), "")[:60] or "something is missing"


def _not(status: bool | Unknown) -> bool | Unknown:
    return status if isinstance(status, Unknown) else not status


class _Run:
    """Goes through the statements in their order; commands other than the entry point are passed over."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.found: list[Word] | None = None
        self._found_line = self._depth = 0
        self._functions: dict[str, Node] = {}
        blocks = ("redirected_statement", "pipeline", "subshell", "compound_statement", "do_group")
        loops = ("while_statement", "c_style_for_statement")
        self._by_type: dict[str, Callable[[Node], bool | Unknown]] = {
            "variable_assignment": self._assignments,
            "variable_assignments": self._assignments,
            "declaration_command": self._assignments,
            "command": self._command,
            "list": self._list,
            "negated_command": lambda node: _not(self.statement(node.named_children[0])),
            "test_command": lambda node: self._test(node.named_children[0]),
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "function_definition": self._define,
            **dict.fromkeys(blocks, self.statements),
            **dict.fromkeys(loops, self._loop),
        }

    def statements(self, node: Node) -> bool | Unknown:
        """Of a block; the last one's status, as of every statement: whether it succeeds, or why nobody knows."""
        status: bool | Unknown = True
        for child in node.named_children:
            status = self.statement(child)
        return status

    def statement(self, node: Node) -> bool | Unknown:
        """One of them; what has no effect on words is passed over."""
        handler = self._by_type.get(node.type)
        return True if handler is None else handler(node)

    def _assignments(self, node: Node) -> bool:
        for one in [node] if node.type == "variable_assignment" else node.named_children:
            if one.type == "variable_assignment":
                self.words.assign(one)
        return True

    def _define(self, node: Node) -> bool:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self._functions[source_of(name)] = body
        return True

    def _loop(self, node: Node) -> bool:
        """`while` and its like: passed over where they are not entered, or have no effect."""
        if self._matters(node) and self.statement(node.named_children[0]) is not False:
            raise self.words.error(node, "a loop without a list of words is not understood here")
        return True

    def _command(self, node: Node) -> bool | Unknown:
        self._assignments_before(node)
        try:
            words = self._words_of(node)
        except ConfigError:
            if _ENTRY_POINT_ANYWHERE.search(source_of(node)):
                raise
            return self.words.unknown(node)
        texts = [word.text if isinstance(word.text, str) else "" for word in words]
        start = next((place for place, text in enumerate(texts) if _ENTRY_POINT.search(text)), None)
        if start is not None:
            self._find(node, words[start + 1 :])
            return True
        match texts:
            case ["exit", *_]:
                raise _Leave(line_of(node))
            case [name, *_] if name in self._functions:
                return self._call(self._functions[name], words[1:])
            case ["export", *_]:
                self._export(words[1:])
                return True
            case ["true" | ":" | "set" | "echo" | "cd" | "mkdir", *_]:
                return True
            case ["false"]:
                return False
        return self.words.unknown(node)

    def _assignments_before(self, node: Node) -> None:
        """`A=1 B=2` on a line of its own, which the parser takes to belong to the command of the next line."""
        text = node.text or b""
        for child, following in pairwise(node.children):
            between = text[child.end_byte - node.start_byte : following.start_byte - node.start_byte]
            if child.type == "variable_assignment" and b"\n" in between.replace(b"\\\n", b""):
                for one in node.children[: node.children.index(child) + 1]:
                    self.words.assign(one)

    def _export(self, words: Sequence[Word]) -> None:
        """`export A=1` that follows assignments on the line before, and is a command to the parser."""
        for word in words:
            text = word.text
            name, separator, value = (text if isinstance(text, str) else text.before).partition("=")
            if separator:
                self.words.variables[name] = value if isinstance(text, str) else Unknown(value, text.why)

    def _words_of(self, node: Node) -> list[Word]:
        """Nodes without a blank between them are one word."""
        parts: list[Word] = []
        end = -1
        for child in node.named_children:
            if child.type == "variable_assignment" or "redirect" in child.type:
                continue
            words = self.words.fields(child.named_children[0] if child.type == "command_name" else child)
            if parts and words and child.start_byte == end:
                first = parts.pop()
                words[0] = Word(joined([first.text, words[0].text]), first.line)
            parts += words
            end = child.end_byte
        return parts

    def _find(self, node: Node, words: Sequence[Word]) -> None:
        """The entry point, and what follows it."""
        if self.found is not None:
            raise self.words.error(node, f"a second run, after that of line {self._found_line}: keep one of them")
        self.found = [*words]
        self._found_line = line_of(node)

    def _call(self, body: Node, arguments: Sequence[Word]) -> bool | Unknown:
        if self._depth == _MAX_DEPTH:
            raise self.words.error(body, "a function that calls itself is not understood here")
        self._depth += 1
        before, self.words.arguments = self.words.arguments, [*arguments]
        for place, argument in enumerate(arguments, 1):
            self.words.variables[str(place)] = argument.text
        try:
            return self.statements(body)
        finally:
            self.words.arguments = before
            self._depth -= 1

    def _list(self, node: Node) -> bool | Unknown:
        left, sign, right = node.children
        status = self.statement(left)
        if isinstance(status, Unknown):
            # Outside of a condition a script goes on only where its commands succeed.
            if left.type in ("test_command", "list") and self._matters(right):
                raise self._undecided(node, status)
            return status if sign.type == "||" else self._both(status, right)
        if status == (sign.type == "&&"):
            return self.statement(right)
        return status

    def _both(self, status: Unknown, right: Node) -> bool | Unknown:
        return status if self.statement(right) is not False else False

    def _if(self, node: Node) -> bool:
        condition, *parts = node.named_children
        body = [part for part in parts if part.type not in ("elif_clause", "else_clause")]
        if self._holds(condition, node):
            for child in body:
                self.statement(child)
            return True
        for clause in parts[len(body) :]:
            if clause.type == "else_clause":
                self.statements(clause)
                return True
            if self._holds(clause.named_children[0], node):
                for child in clause.named_children[1:]:
                    self.statement(child)
                return True
        return True

    def _holds(self, condition: Node, whole: Node) -> bool:
        status = self.statement(condition)
        if isinstance(status, Unknown):
            if self._matters(whole):
                raise self._undecided(condition, status)
            return False
        return status

    def _case(self, node: Node) -> bool:
        value = self.words.tested(node.named_children[0])
        if isinstance(value, Unknown):
            if self._matters(node):
                raise self._undecided(node, value)
            return True
        for item in node.named_children[1:]:
            patterns = item.children_by_field_name("value")
            texts = [self.words.text(pattern) for pattern in patterns]
            if any(isinstance(text, str) and fnmatch.fnmatchcase(value, text) for text in texts):
                for child in item.named_children[len(patterns) :]:
                    self.statement(child)
                return True
        return True

    def _for(self, node: Node) -> bool:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None or not self._matters(body):
            return True
        for word in node.children_by_field_name("value"):
            for one in self.words.fields(word):
                self.words.variables[source_of(variable)] = one.text
                self.statement(body)
        return True

    def _matters(self, node: Node) -> bool:
        """Whether a statement that is passed over could change what is passed to the entry point."""
        if node.type in ("variable_assignment", "function_definition") or _ENTRY_POINT_ANYWHERE.search(source_of(node)):
            return True
        if node.type == "command_name" and (source_of(node) in self._functions or source_of(node) == "exit"):
            return True
        return any(self._matters(child) for child in node.named_children)

    def _undecided(self, node: Node, why: Unknown) -> ConfigError:
        return self.words.error(
            node, f"which branch is taken is not known, as {why.why}; set the variable in the environment"
        )

    def _test(self, node: Node) -> bool | Unknown:
        """`[ ... ]` and `[[ ... ]]`."""
        if node.type == "parenthesized_expression":
            return self._test(node.named_children[0])
        if node.type == "unary_expression":
            return self._unary(node)
        if node.type != "binary_expression":
            text = self.words.tested(node)
            return text if isinstance(text, Unknown) else bool(text)
        left, sign, right = node.children
        if sign.type in ("&&", "||"):
            first = self._test(left)
            return self._test(right) if first is (sign.type == "&&") else first
        texts = [self.words.tested(left), self.words.tested(right)]
        for text in texts:
            if isinstance(text, Unknown):
                return text
        return self._compare(node, str(texts[0]), source_of(sign), str(texts[1]))

    def _compare(self, node: Node, left: str, sign: str, right: str) -> bool:
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        if sign == "=~":
            try:
                return re.search(right, left) is not None
            except re.error as error:
                raise self.words.error(node, f"{right!r} is not understood here: {error}") from error
        order = _COMPARISONS.get(sign, sign)
        if order not in ("==", "!=", "<", "<=", ">", ">=") or not all(re.fullmatch(r"-?\d+", t) for t in (left, right)):
            raise self.words.error(node, f"{source_of(node)} is not understood here")
        a, b = int(left), int(right)
        return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[order]

    def _unary(self, node: Node) -> bool | Unknown:
        sign, operand = node.children[0], node.named_children[-1]
        if source_of(sign) == "!":
            return _not(self._test(operand))
        name = source_of(sign)
        if name == "-v":
            return source_of(operand) in self.words.variables
        text = self.words.tested(operand)
        if isinstance(text, Unknown):
            return text
        tests = {"-z": lambda: not text, "-n": lambda: bool(text)}
        files = {"-e": Path.exists, "-f": Path.is_file, "-d": Path.is_dir}
        if name in tests:
            return tests[name]()
        if name in files:
            return files[name](Path(text))
        raise self.words.error(node, f"{source_of(node)} is not understood here")
