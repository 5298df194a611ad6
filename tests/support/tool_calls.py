"""Texts in which a model calls tools, in the three formats, some of them broken; tool_calls.json has vLLM's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")


def property_(type_: Any, **more: Any) -> dict[str, Any]:
    return {"type": type_, "description": "one", **more}


ARGUMENTS = {
    "text": property_("string"),
    "number": property_("integer"),
    "ratio": property_("number"),
    "flag": property_("boolean"),
    "items": property_("array", items={"type": "integer"}),
    "fields": property_("object"),
    "either": property_(["integer", "string"]),
    "complex": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}], "description": "one"},
    "kind": property_("string", enum=["a", "b"]),
}

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": ARGUMENTS if name == "f" else {}},
        },
    }
    for name in ("f", "g")
]


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def function(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


F = '{"name": "f", "arguments": {"text": "a"}}'
G = '{"name": "g", "arguments": {}}'

HERMES = [
    "",
    "No call at all.",
    hermes(F),
    hermes(G),
    hermes(F, G),
    hermes(F, F, F),
    "I look it up.\n" + hermes(F),
    "I look it up.\n" + hermes(F) + "\nand wait.",
    f"<tool_call>{F}</tool_call>",
    f"<tool_call>{F}",
    f"<tool_call>\n{F}\n",
    f"<tool_call>{F}<tool_call>{G}</tool_call>",
    hermes('{"arguments": {"text": "a"}, "name": "f"}'),
    hermes('{"name": "f", "arguments": {"text": "a"}, "id": 7}'),
    hermes('{"name": "f", "arguments": {"text": "caf\\u00e9 \\ud83d\\ude00 é"}}'),
    hermes('{"name": "f", "arguments": {"text": "line\\nline\\t\\"quoted\\""}}'),
    hermes('{"name": "f", "arguments": {"text": "a < b && c > d </tool> "}}'),
    hermes('{"name": "f", "arguments": {"number": 3, "ratio": -1.5e3, "flag": true, "text": null}}'),
    hermes('{"name": "f", "arguments": {"items": [1, [2, {"a": 3}]], "fields": {"a": {"b": {}}}}}'),
    hermes('{"name": "f", "arguments": {"text": "' + "x" * 5000 + '"}}'),
    hermes('  {"name" :"f","arguments":{ } }  '),
    hermes('{\n  "name": "f",\n  "arguments": {\n    "text": "a"\n  }\n}'),
    hermes('{"name": "unknown", "arguments": {"x": 1}}'),
    hermes('{"name": "", "arguments": {}}'),
    hermes('{"name": "f", "arguments": {"text": "a"}}}'),
    hermes('{"name": "f", "arguments": {"text": "a"}'),
    hermes('{"name": "f", "arguments": {"text": "a", }}'),
    hermes("{'name': 'f', 'arguments': {'text': 'a'}}"),
    hermes('{"name": "f", "arguments": {"text": True}}'),
    hermes('{name: "f", arguments: {}}'),
    hermes('{"name": "f"}'),
    hermes('{"arguments": {}}'),
    hermes('{"name": 3, "arguments": {}}'),
    hermes('{"name": "f", "arguments": "text"}'),
    hermes('{"name": "f", "arguments": [1]}'),
    hermes('{"name": "f", "arguments": null}'),
    hermes('{"name": "f", "parameters": {"text": "a"}}'),
    hermes('["f", {}]'),
    hermes('"f"'),
    hermes(""),
    hermes("f(text='a')"),
    hermes(F, '{"name": "f", "arguments": {'),
    hermes('{"name": "f", "arguments": {', F),
    '<tool_call>\n{"name": "f", "arguments": {"text": "cut off in the mid',
    "<tool_call>",
    "</tool_call>",
    F,
    f"```json\n{F}\n```",
    "<tool_call",
    hermes('{"name": "f", "arguments": {"text": "</tool_call>"}}'),
    hermes('{"name": "f", "arguments": {"text": "\x01"}}'),
    hermes('{"name": "f", "arguments": {"text": "\\ud800"}}'),
    hermes('{"name": "f", "arguments": {"text": "a", "text": "b"}}'),
    hermes('{"name": "f", "arguments": {"ratio": NaN}}'),
]

QWEN3_CODER = [
    "",
    "No call at all.",
    function("f", text="a"),
    function("g"),
    function("f", text="a") + "\n" + function("g"),
    "I look it up.\n" + function("f", text="a"),
    "I look it up.\n\n" + function("f", text="a") + "\nand wait.",
    function("f", text="two\nlines\n\nand more"),
    function("f", text="  spaces  "),
    function("f", text=""),
    function("f", text="5"),
    function("f", text="null"),
    function("f", text="true"),
    function("f", text='{"a": 1}'),
    function("f", text="a < b && c > d <b>bold</b>"),
    function("f", text="é 😀 \\n"),
    function("f", number="5"),
    function("f", number="-17"),
    function("f", number="five"),
    function("f", number="5.5"),
    function("f", number=""),
    function("f", number="__import__('os')"),
    function("f", ratio="1.5"),
    function("f", ratio="3"),
    function("f", ratio="-2e3"),
    function("f", ratio="NaN"),
    function("f", flag="true"),
    function("f", flag="false"),
    function("f", flag="True"),
    function("f", flag="1"),
    function("f", flag="yes"),
    function("f", items="[1, 2, 3]"),
    function("f", items="[1, 2"),
    function("f", items="(1, 2)"),
    function("f", fields='{"a": {"b": [1]}}'),
    function("f", fields="{'a': 1}"),
    function("f", fields="dict(a=1)"),
    function("f", either="5"),
    function("f", either="five"),
    function("f", complex="[1]"),
    function("f", complex="text"),
    function("f", kind="a"),
    function("f", kind="c"),
    function("f", unknown="5"),
    function("unknown", text="5", other="[1]"),
    function("f", text="a", number="1", flag="false", items="[]", fields="{}"),
    "<function=f>\n<parameter=text>\na\n</parameter>\n</function>",
    "<tool_call><function=f><parameter=text>a</parameter></function></tool_call>",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</function>",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=number>\n1\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</function>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=text>\ncut off in the mid",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n",
    "<tool_call>\n<function=f",
    "<tool_call>\n",
    "<tool_call>\nnothing\n</tool_call>",
    "<tool_call>\n" + F + "\n</tool_call>",
    "<tool_call>\n<function=>\n</function>\n</tool_call>",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=text>\nb\n</parameter>\n</function>",
    function("f", text="a") + function("f", text="b"),
    "</tool_call>",
    "</function>",
]

P = '{"name": "f", "parameters": {"text": "a"}}'
Q = '{"name": "g", "parameters": {}}'

LLAMA3_JSON = [
    "",
    "No call at all.",
    P,
    Q,
    F,
    f"<|python_tag|>{P}",
    f"{P}; {Q}",
    f"{P};{Q};{P}",
    f"{P}\n{Q}",
    f"<|python_tag|>{P}; {Q}",
    f"  {P}  ",
    f"I look it up: {P}",
    f"{P} is what I call.",
    '{"name": "f", "parameters": {"fields": {"a": {"b": [1, {}]}}, "items": [1]}}',
    '{"name": "f", "parameters": {"text": "}{"}}',
    '{"name": "f", "parameters": {"text": "é \\u00e9 \\"q\\""}}',
    '{"name": "f", "parameters": {"number": 3, "flag": false, "text": null}}',
    '{"type": "function", "name": "f", "parameters": {"text": "a"}}',
    '{"name": "f", "arguments": {"text": "a"}, "parameters": {"text": "b"}}',
    '{"name": "unknown", "parameters": {}}',
    '{"name": "f"}',
    '{"parameters": {}}',
    '{"name": 3, "parameters": {}}',
    '{"name": "f", "parameters": "a"}',
    '{"name": "f", "parameters": [1]}',
    '{"name": "f", "parameters": null}',
    '{"name": "f", "parameters": {"text": "a"}',
    '{"name": "f", "parameters": {"text": "cut off in the mid',
    "{'name': 'f', 'parameters': {}}",
    '{"name": "f", "parameters": {"flag": True}}',
    "{}",
    "{",
    "The set {1, 2} has two members.",
    'A dict is {"a": 1}.',
    f"{P}; {{",
    f"{{; {P}",
    "<|python_tag|>",
    "<|python_tag|>print(1)",
    '{"name": "f", "parameters": {"text": "a", "text": "b"}}',
    "[" + P + "]",
]

TEXTS = {"hermes": HERMES, "qwen3_coder": QWEN3_CODER, "llama3_json": LLAMA3_JSON}


# Texts that our parsers read without an error, and vLLM's otherwise; why. Where a call is broken, vLLM drops all
# calls of the turn and takes the text as an answer; ours has an error for this call, and the others are made.
DIFFERENT = {
    f"<tool_call>{F}<tool_call>{G}</tool_call>": "the next call ends a call, too",
    hermes('{"name": "f"}'): "a call without arguments has none",
    hermes('{"name": "f", "arguments": {"text": "</tool_call>"}}'): "a tag inside of a JSON string is text",
    hermes('{"name": "f", "parameters": {"text": "a"}}'): "parameters are as good as arguments, as in llama3_json",
    function("f", number="5.5"): "stays text; it is refused when arguments are checked, as every wrong type is",
    function("f", flag="True"): "stays text; it is read when arguments are checked",
    function("f", flag="1"): "stays text; it is read when arguments are checked",
    "<tool_call>\n<function=>\n</function>\n</tool_call>": "there is no tool of this name, which the model is told",
    '{"name": "f"}': "a call without arguments has none",
    f"{{; {P}": "a brace in a sentence is text",
}
# Texts that vLLM reads as calls, and ours as broken ones.
BROKEN = {
    hermes('{"name": "f", "arguments": "text"}'): "arguments are an object",
    hermes('{"name": "f", "arguments": [1]}'): "arguments are an object",
    hermes('{"name": "f", "arguments": null}'): "arguments are an object",
    hermes('{"name": "f", "arguments": {"text": "a"}, "id": 7}'): "another key may be meant as an argument",
    hermes('{"name": "f", "arguments": {"ratio": NaN}}'): "NaN is no JSON",
    hermes('{"name": "f", "arguments": {"text": "\\ud800"}}'): "half of a character cannot be encoded",
    hermes('{"name": "f", "arguments": {"text": "a", "text": "b"}}'): "one argument has two values",
    function("f", ratio="NaN"): "NaN is no JSON",
    "<tool_call>\n<function=f>\n<parameter=text>\ncut off in the mid": "half a call is not made",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n": "half a call is not made",
    "<tool_call>\n<function=f": "half a call is not made",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=number>\n1\n</parameter>\n</function>\n</tool_call>": (
        "the tag may be a part of the value"
    ),
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</function>\n</tool_call>": "the tag may be a part of the value",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=text>\nb\n</parameter>\n</function>": (
        "one parameter has two values"
    ),
    '{"name": "f", "parameters": "a"}': "parameters are an object",
    '{"name": "f", "parameters": [1]}': "parameters are an object",
    '{"name": "f", "parameters": null}': "parameters are an object",
    '{"name": "f", "parameters": {"text": "a", "text": "b"}}': "one parameter has two values",
    '{"name": "f", "arguments": {"text": "a"}, "parameters": {"text": "b"}}': "two objects of arguments",
}


def vllms(tool_format: str, text: str) -> dict[str, Any]:
    """Returns the text before the calls, and the calls as [name, arguments], as vLLM's parser reads them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=SCHEMAS)
    tokenizer = byte_level_tokenizer()
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}} if tool_format == "qwen3_coder" else {}
    parser = ToolParserManager.get_tool_parser(tool_format)(tokenizer, request.tools, **kwargs)
    found = parser.extract_tool_calls(text, request)
    calls = [[call.function.name, json.loads(call.function.arguments)] for call in found.tool_calls]
    return {"content": found.content or "", "calls": calls}


def byte_level_tokenizer() -> Any:
    """A tokenizer of bytes, and of the special tokens that vLLM's parsers look for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: index for index, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(tags)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


def table() -> dict[str, dict[str, Any]]:
    """Returns vLLM's answers to all texts, by format and text."""
    return {name: {text: vllms(name, text) for text in texts} for name, texts in TEXTS.items()}


if __name__ == "__main__":
    TABLE.write_text(json.dumps(table(), indent=1, ensure_ascii=True) + "\n")
