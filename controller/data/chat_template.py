"""Renders chat messages with a model's Jinja template to the text that the model sees, as transformers does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2

from controller.data.row_values import check_text
from controller.data.template_process import Template
from splitppo.config import ConfigError
from splitppo.config_error import config_errors

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages
Tools = Sequence[Mapping[str, Any]]  # JSON schemas
_RENDERED_AT_A_TIME = 32


def as_messages(prompt: Prompt) -> Messages:
    """Converts a prompt into a list of chat messages; a plain string becomes one message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja template that turns chat messages into the text that a model sees.

    Attributes:
        template: None for a base model without a template.
        variables: variables of the template besides the messages, e.g. the named special tokens.
        source: the text of the template.
    """

    template: Template | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def applies_to(self, prompt: Prompt) -> bool:
        """Returns True if the chat template formats this prompt: then it adds all special tokens itself."""
        return self.template is not None and not isinstance(prompt, str)

    @property
    def takes_tools(self) -> bool:
        """Is True if the template writes the schemas of tools into a prompt."""
        tool = {"name": "tool", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}
        messages = as_messages("?")
        tools = [{"type": "function", "function": tool}]
        try:
            return self.template is not None and self.render(messages, tools) != self.render(messages)
        except ValueError:
            return False

    def render(self, prompt: Prompt, tools: Tools = (), *, add_generation_prompt: bool = True) -> str:
        """Renders a prompt to the text that the model sees: the messages in the template, with the generation prompt.

        A plain string is returned unchanged. Without a template the text is the contents of the messages, one per line.

        Args:
            prompt: chat messages, or text.
            tools: JSON schemas of the tools that the model may call; a text, or a model without a template, has none.
            add_generation_prompt: whether the text ends where the assistant's turn begins.

        Raises:
            ValueError: there are no messages, a message has no role or content, the template refuses the messages, or
                writes a text that cannot be encoded.
        """
        [text] = self.render_all([(prompt, tools)], add_generation_prompt=add_generation_prompt)
        if isinstance(text, ValueError):
            raise text
        return text

    def render_all(
        self, prompts: Sequence[tuple[Prompt, Tools]], *, add_generation_prompt: bool = True
    ) -> list[str | ValueError]:
        """Renders prompts, each with its tools, as `render` does; in the place of a text is the error if there is none.

        The list ends with the first error.
        """
        texts: list[str | ValueError] = []
        for start in range(0, len(prompts), _RENDERED_AT_A_TIME):
            texts += self._render_some(prompts[start : start + _RENDERED_AT_A_TIME], add_generation_prompt)
            if isinstance(texts[-1], ValueError):
                break
        return texts

    def _render_some(
        self, prompts: Sequence[tuple[Prompt, Tools]], add_generation_prompt: bool
    ) -> Iterator[str | ValueError]:
        """Yields the text of each prompt, in order, up to the first error, which is yielded in the place of a text.

        Only prompts before the first one without valid messages are rendered, all in one call of the template.
        """
        inputs = []  # of the template: the variables of messages; or a text, which needs no template
        first_wrong: list[ValueError] = []
        for prompt, tools in prompts:
            try:
                inputs.append(self._plain(prompt, tools, add_generation_prompt))
            except ValueError as error:
                first_wrong = [error]
                break
        variables = [value for value in inputs if not isinstance(value, str)]
        assert self.template is not None or not variables
        rendered = iter(self.template.render_all(variables) if self.template is not None and variables else ())
        for value in inputs:
            text = value if isinstance(value, str) else _checked(next(rendered))
            yield text
            if isinstance(text, ValueError):
                return
        yield from first_wrong

    def _plain(self, prompt: Prompt, tools: Tools, add_generation_prompt: bool) -> str | dict[str, Any]:
        """Returns the text of a prompt that no template renders, else the variables of the template."""
        if isinstance(prompt, str):
            return prompt
        _check_messages(prompt)
        if self.template is None:
            return "\n".join(_plain_content(message) for message in prompt)
        given = {"messages": prompt, "tools": list(tools) or None, "add_generation_prompt": add_generation_prompt}
        return {"documents": None, **given, **self.variables}


def _checked(rendered: str | jinja2.TemplateError) -> str | ValueError:
    """Returns what a template has written, or what is wrong with it."""
    if isinstance(rendered, jinja2.TemplateError):
        return ValueError(f"the chat template refuses the messages: {rendered}")
    try:
        return check_text(rendered)
    except ValueError as error:
        return ValueError(f"the chat template writes a text that has no tokens: {error}")


def load_chat_template(
    folder: Path,
    tokenizer_config: Mapping[str, Any],
    override: Path | None,
    variables: Mapping[str, Any],
    *,
    section: str = "data",
) -> ChatTemplate:
    """Loads a chat template from the user's file, else the model's chat_template.jinja, else tokenizer_config.json.

    Args:
        folder: the folder of the model.
        tokenizer_config: the content of its tokenizer_config.json.
        override: the file of the user; None for the model's own template.
        variables: as in `ChatTemplate`.
        section: the section of the key chat_template, for errors.

    Raises:
        ConfigError: the file does not exist, no template is named "default", or the template is not valid Jinja.
    """
    if override is not None and not override.is_file():
        raise ConfigError(f"{section}.chat_template: no such file {override}")
    file = override or folder / "chat_template.jinja"
    text = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    if isinstance(text, list):
        named = {entry["name"]: str(entry["template"]) for entry in text}
        if "default" not in named:
            raise ConfigError(
                f"{folder}: tokenizer_config.json has the chat templates {', '.join(named)}, but no default one;"
                f" set {section}.chat_template to a file"
            )
        text = named["default"]
    return ChatTemplate(None if text is None else _compile(text, override or folder), variables, text or "")


def detect_tool_format(source: str) -> Literal["hermes", "qwen3_coder", "llama3_json"] | None:
    """Finds out from the text of a chat template how the model writes calls of tools; None: in no way known here."""
    if "<function=" in source:
        return "qwen3_coder"
    if "<tool_call>" in source and "<arg_key>" not in source:  # GLM's calls have arg_key
        return "hermes"
    return "llama3_json" if '"name": function name, "parameters"' in source else None


def _compile(template: str, source: Path) -> Template:
    with config_errors(jinja2.TemplateError, before=f"{source}: the chat template is not valid Jinja: "):
        return Template(template)


def _check_messages(messages: Messages) -> None:
    """Raises ValueError if there are no messages, or if one has no role, or neither content nor calls of tools."""
    if not messages:
        raise ValueError("expected at least one message, got none")
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") is None or not _says_something(message):
            raise ValueError(f"expected messages with 'role' and 'content' (or 'tool_calls'), got {message!r}")


def _says_something(message: Mapping[str, Any]) -> bool:
    return message.get("content") is not None or bool(message.get("tool_calls"))


def _plain_content(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        raise ValueError(f"the model has no chat template, so a message's content must be text, got {content!r}")
    return content
