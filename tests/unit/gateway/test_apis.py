"""The same program by the clients of three APIs: what the policy is told is the same, and so is what comes back."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from environments.chat import ContextFull, ConversationOver
from environments.gateway.questions import Refused
from environments.gateway.request_fields import tools_of
from environments.gateway.session import Endpoint, Gateway
from environments.messages import Answer, TurnLimits
from tests.support.scripted_policy import ScriptedPolicy

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TURNS = (f"I add.{CALL}{CALL}", CALL, "It is 5.")


def says(turns: tuple[str, ...]) -> Callable[[Answer, int], str]:
    return lambda _answer, num_turns: turns[num_turns]


def openai_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)


def anthropic_client(endpoint: Endpoint, *, suffix: str = "/v1") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=endpoint.base_url.removesuffix(suffix), api_key=endpoint.api_key)


async def by_chat_completions(endpoint: Endpoint) -> str:
    messages: list[Any] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2+3?"}]
    tools: Any = [{"type": "function", "function": FUNCTION}]
    async with openai_client(endpoint) as client:
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=tools, max_tokens=9)
            message = answer.choices[0].message
            if not message.tool_calls:
                return str(message.content)
            results = [{"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls]
            messages += [message, *results]


async def by_messages(endpoint: Endpoint) -> str:
    messages: list[Any] = [{"role": "user", "content": "2+3?"}]
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    async with anthropic_client(endpoint) as client:
        while True:
            answer = await client.messages.create(
                model="m", system="Be kind.", messages=messages, tools=tools, max_tokens=9
            )
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": "5"} for call in calls]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


async def by_streamed_messages(endpoint: Endpoint) -> str:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    system: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
    async with anthropic_client(endpoint, suffix="") as client:
        while True:
            async with client.messages.stream(
                model="m", system=system, messages=messages, tools=tools, max_tokens=9
            ) as events:
                answer = await events.get_final_message()
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            text = [{"type": "text", "text": "5"}]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": text} for call in calls]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


async def by_responses(endpoint: Endpoint) -> str:
    items: list[Any] = [{"role": "user", "content": "2+3?"}]
    tools: Any = [{"type": "function", **FUNCTION}]
    async with openai_client(endpoint) as client:
        while True:
            answer = await client.responses.create(
                model="m", instructions="Be kind.", input=items, tools=tools, max_output_tokens=9
            )
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls]
            items += [*answer.output, *results]


async def by_streamed_responses(endpoint: Endpoint) -> str:
    items: list[Any] = [{"role": "developer", "content": "Be kind."}]
    items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+3?"}]})
    tools: Any = [{"type": "function", **FUNCTION}]
    async with openai_client(endpoint) as client:
        while True:
            async with client.responses.stream(model="m", input=items, tools=tools, max_output_tokens=9) as events:
                answer = await events.get_final_response()
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            results = [{"type": "function_call_output", "call_id": call.call_id, "output": "5"} for call in calls]
            items += [*(item.model_dump() for item in answer.output), *results]


PROGRAMS = (by_chat_completions, by_messages, by_streamed_messages, by_responses, by_streamed_responses)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_program_says_the_same_to_the_policy_by_every_api(
    gateway: Gateway, program: Callable[[Endpoint], Awaitable[str]]
) -> None:
    policy = ScriptedPolicy(says(TURNS))
    assert await program(gateway.session(policy.chat).endpoint) == "It is 5."

    def results(*call_ids: str) -> tuple[dict[str, str], ...]:
        return tuple({"role": "tool", "name": "add", "tool_call_id": one, "content": "5"} for one in call_ids)

    first = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": "2+3?"})
    tool = {"type": "function", "function": FUNCTION}
    told = [(answer.messages, answer.begins_context, answer.tools, answer.after_turn) for answer in policy.answers]
    assert told == [
        (first, True, (tool,), None),
        (results("call00100", "call00101"), False, None, None),
        (results("call00200"), False, None, None),
    ]
    assert {answer.limits for answer in policy.answers} == {TurnLimits(max_tokens=9)}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["", "x" * 300, "a\nb"])
async def test_a_call_of_whatever_name_can_be_sent_back(
    gateway: Gateway, program: Callable[[Endpoint], Awaitable[str]], name: str
) -> None:
    call = json.dumps({"name": name, "arguments": {"a": [None, 1e300, "\u2028"]}})
    policy = ScriptedPolicy(says((f"<tool_call>{call}</tool_call>", "It is 5.")))
    assert await program(gateway.session(policy.chat).endpoint) == "It is 5."
    assert [(answer.begins_context, answer.after_turn) for answer in policy.answers] == [(True, None), (False, None)]


async def test_a_message_has_its_stop_reason_and_usage(gateway: Gateway) -> None:
    policy = ScriptedPolicy(says(("a END b", "a b", CALL)), ended_by="context")
    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    async with anthropic_client(gateway.session(policy.chat).endpoint) as client:
        for stop, text, numbers in (("END", "a ", (10, 7)), (None, "a b", (20, 3)), (None, "", (30, len(CALL)))):
            answer = await client.messages.create(
                model="m",
                messages=[{"role": "user", "content": "x"}],
                max_tokens=9,
                stop_sequences=["END"],
                tools=tools,
                extra_body={"temperature": 1.0},
                tool_choice={"type": "any"},
            )
            reason = "stop_sequence" if stop else "max_tokens" if text else "tool_use"
            assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)
            assert "".join(block.text for block in answer.content if block.type == "text") == text
            assert (answer.usage.input_tokens, answer.usage.output_tokens) == numbers
    assert policy.answers[0].limits == TurnLimits(9, ("END",))
    assert gateway.ignored == {"temperature": 3, "tool_choice": 3}


async def test_a_response_that_is_cut_is_incomplete(gateway: Gateway) -> None:
    policy = ScriptedPolicy(ended_by="length")
    async with openai_client(gateway.session(policy.chat).endpoint) as client:
        answer = await client.responses.create(model="m", input="2+3?")
        async with client.responses.stream(model="m", input="2+3?") as events:
            kinds = [event.type async for event in events]
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (10, 6)
    assert kinds[-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 422),
        ({"messages": [{"role": "assistant", "content": "I"}]}, 422),
        ({"messages": [{"role": "system", "content": "I"}, {"role": "user", "content": "I"}]}, 400),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 422),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, 422),
        ({"max_tokens": 0}, 400),
        ({"messages": []}, 400),
    ],
)
async def test_messages_that_are_not_supported_are_one_sentence(
    gateway: Gateway, fields: dict[str, Any], status: int
) -> None:
    policy = ScriptedPolicy()
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **fields}
    async with anthropic_client(gateway.session(policy.chat).endpoint) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await client.messages.create(**asked)
    body = json.loads(caught.value.response.text)
    assert caught.value.status_code == status
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert "\n" not in body["error"]["message"]
    assert policy.answers == []


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"previous_response_id": "resp_1"}, 422),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 422),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 422),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}, 422),
        ({"tools": [{"type": "web_search"}]}, 422),
        ({"input": []}, 400),
        ({"input": [{"role": "user", "content": 5}]}, 400),
    ],
)
async def test_responses_that_are_not_supported_are_one_sentence(
    gateway: Gateway, fields: dict[str, Any], status: int
) -> None:
    policy = ScriptedPolicy()
    async with openai_client(gateway.session(policy.chat).endpoint) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.responses.create(**{"model": "m", "input": "x", **fields})
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert "\n" not in caught.value.body["message"]
    assert policy.answers == []


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"nam": "add"}, "tools[0], name: it is missing"),
        ({"name": ""}, "tools[0], name: expected 1 to 200 characters, got 0"),
        ({"name": "add", "parameters": {"properties": {"a": {"type": "intt"}}}}, "a, type: expected one of string,"),
        ({"name": "add", "parameters": {"properties": {"a": {"anyOf": [{"items": {"type": ["int"]}}]}}}}, "got 'int'"),
    ],
)
def test_a_schema_that_is_none_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as refused:
        tools_of({"tools": [fields]}, lambda tool: tool, "a tool")
    assert (refused.value.status, sentence in str(refused.value)) == (400, True)


def test_a_property_may_be_named_type() -> None:
    properties = {"type": {"type": ["string", "null"]}, "items": {"type": "array", "items": {"type": "number"}}}
    add = {"name": "add", "parameters": {"properties": properties}}
    assert tools_of({"tools": [add]}, lambda tool: tool, "a tool")


async def test_the_end_of_a_context_and_of_a_conversation_are_errors_of_anthropics_kind(gateway: Gateway) -> None:
    def speak(_answer: Answer, _turns: int) -> str:
        raise ContextFull("the messages have 900 tokens") if len(policy.answers) == 1 else ConversationOver

    policy = ScriptedPolicy(speak)
    endpoint = gateway.session(policy.chat).endpoint
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    async with anthropic_client(endpoint) as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the messages have 900 tokens"):
            await client.messages.create(**asked)
        with pytest.raises(anthropic.PermissionDeniedError, match="no further turn"):
            await client.messages.create(**asked)
        with pytest.raises(anthropic.AuthenticationError):
            await client.with_options(api_key="other").messages.create(**asked)
