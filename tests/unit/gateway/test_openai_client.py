"""Chat completions by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from environments.chat import ContextFull, ConversationOver
from environments.gateway.session import Gateway, Session
from environments.messages import Answer, TurnLimits
from tests.support.scripted_policy import ScriptedPolicy

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
USER = {"role": "user", "content": "2+3?"}


def client(session: Session, **options: Any) -> openai.AsyncOpenAI:
    endpoint = session.endpoint
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, **options)


async def test_the_first_request_is_the_prompt_and_the_next_one_follows_its_turn(gateway: Gateway) -> None:
    policy = ScriptedPolicy()
    session = gateway.session(policy.chat)
    assert not session.began.is_set()
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]}
    ]
    messages.append(USER)
    async with client(session) as asked:
        first = await asked.chat.completions.create(model="any", messages=messages)
        assert session.began.is_set()
        messages += [first.choices[0].message, {"role": "user", "content": "and 4?"}]
        second = await asked.chat.completions.create(model="any", messages=messages)
    assert policy.answers == [
        Answer(messages=({"role": "system", "content": "Be kind."}, USER), begins_context=True, tools=()),
        Answer(messages=({"role": "user", "content": "and 4?"},), text="turn 1"),
    ]
    assert [answer.choices[0].message.content for answer in (first, second)] == ["turn 1", "turn 2"]
    assert second.choices[0].finish_reason == "stop"
    assert second.usage is not None
    assert (second.usage.prompt_tokens, second.usage.completion_tokens, second.usage.total_tokens) == (20, 6, 26)
    assert (second.model, first.id != second.id) == ("any", True)


async def test_calls_and_their_results_go_to_and_fro(gateway: Gateway) -> None:
    policy = ScriptedPolicy(lambda _answer, turns: f"I add.{CALL}" if turns == 0 else CALL)
    messages: list[Any] = [USER]
    async with client(gateway.session(policy.chat)) as asked:
        for content in ("I add.", None):
            answer = await asked.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            choice = answer.choices[0]
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
            assert choice.message.tool_calls is not None
            [call] = choice.message.tool_calls
            assert call.type == "function"
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
            messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        await asked.chat.completions.create(model="m", messages=messages, tools=[TOOL])
    assert policy.answers[0].tools == (TOOL,)
    results = [
        {"role": "tool", "name": "add", "tool_call_id": f"call00{number}00", "content": "5"} for number in (1, 2)
    ]
    assert [answer.messages for answer in policy.answers[1:]] == [(result,) for result in results]
    assert [len(answer.calls) for answer in policy.answers] == [0, 1, 1]


@pytest.mark.parametrize(
    ("tools", "said", "num_bad_calls"),
    [([], CALL, 0), ([TOOL], "<tool_call>{broken</tool_call>" + CALL, 1)],
    ids=["no tools", "a broken call"],
)
async def test_what_is_no_call_is_text(gateway: Gateway, tools: list[Any], said: str, num_bad_calls: int) -> None:
    policy = ScriptedPolicy(lambda *_: said)
    async with client(gateway.session(policy.chat)) as asked:
        for messages in ([USER], [USER, {"role": "assistant", "content": said}, USER]):
            answer = await asked.chat.completions.create(model="m", messages=messages, tools=tools)
    assert answer.choices[0].message.content == said
    assert answer.choices[0].message.tool_calls is None
    told = policy.answers[1]
    assert (told.begins_context, told.calls, told.num_bad_calls) == (False, (), num_bad_calls)


async def test_limits_are_those_of_the_turn_and_a_stop_text_is_not_told(gateway: Gateway) -> None:
    policy = ScriptedPolicy(lambda *_: "Thought: add\nObservation: 5", ended_by="length")
    async with client(gateway.session(policy.chat)) as asked:
        answer = await asked.chat.completions.create(
            model="m",
            messages=[USER],
            max_completion_tokens=7,
            max_tokens=9,
            stop=["Obs", "Observation:"],
            logprobs=True,
        )
        cut = await asked.chat.completions.create(model="m", messages=[USER])
    assert policy.answers[0].limits == TurnLimits(7, ("Obs", "Observation:"), with_log_probs=True)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Thought: add\n", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(one.token, one.logprob) for one in choice.logprobs.content[:2]] == [("T", -0.5), ("h", -0.5)]
    assert (cut.choices[0].finish_reason, cut.choices[0].logprobs) == ("length", None)


async def test_a_stream_has_the_turn_its_end_and_the_usage(gateway: Gateway) -> None:
    policy = ScriptedPolicy(lambda *_: f"I add.{CALL}")
    async with client(gateway.session(policy.chat)) as asked:
        events = await asked.chat.completions.create(
            model="m",
            messages=[USER],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in events]
    assert [chunk.choices[0].delta.content for chunk in chunks[:2]] == ["I add.", None]
    assert chunks[0].choices[0].delta.tool_calls is not None
    [call] = chunks[0].choices[0].delta.tool_calls
    assert (call.index, call.function and call.function.arguments) == (0, '{"a":2}')
    assert [chunk.choices[0].finish_reason for chunk in chunks[:2]] == [None, "tool_calls"]
    assert chunks[2].choices == []
    assert chunks[2].usage is not None
    assert chunks[2].usage.prompt_tokens == 10


async def test_parameters_of_the_run_are_ignored_and_counted(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    policy = ScriptedPolicy()
    async with client(gateway.session(policy.chat)) as asked:
        for _ in range(3):
            await asked.chat.completions.create(
                model="m", messages=[USER], temperature=0.1, tool_choice="required", tools=[TOOL]
            )
    assert gateway.ignored == {"temperature": 3, "tool_choice": 3}
    assert len([line for line in caplog.messages if "requests of agents set temperature" in line]) == 1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"n": 2}, openai.UnprocessableEntityError),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, openai.UnprocessableEntityError),
        ({"extra_body": {"previous_response_id": "x"}}, openai.UnprocessableEntityError),
        ({"modalities": ["text", "audio"]}, openai.UnprocessableEntityError),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, openai.UnprocessableEntityError),
        ({"tools": [{"type": "web_search"}]}, openai.UnprocessableEntityError),
        ({"messages": []}, openai.BadRequestError),
        ({"messages": [{"role": "narrator", "content": "x"}]}, openai.BadRequestError),
        ({"messages": [{"role": "tool", "content": "x"}]}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, openai.BadRequestError),
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"stop": [""]}, openai.BadRequestError),
        ({"stop": ["a"] * 17}, openai.BadRequestError),
        ({"messages": "x" * 17_000_000}, openai.APIStatusError),
    ],
)
async def test_what_is_wrong_or_not_supported_is_one_sentence(
    gateway: Gateway, fields: dict[str, Any], error: type[openai.APIStatusError]
) -> None:
    policy = ScriptedPolicy()
    async with client(gateway.session(policy.chat)) as asked:
        with pytest.raises(error) as caught:
            await asked.chat.completions.create(**{"model": "m", "messages": [USER], **fields})
    assert isinstance(caught.value.body, dict)
    message = caught.value.body["message"]
    assert "\n" not in message
    assert len(message) < 300
    assert policy.answers == []


async def test_a_full_context_is_refused_and_the_conversation_goes_on(gateway: Gateway) -> None:
    def speak(answer: Answer, _turns: int) -> str:
        if answer.messages[-1]["content"] == "too much":
            raise ContextFull("the messages have 900 tokens")
        return "well"

    policy = ScriptedPolicy(speak)
    async with client(gateway.session(policy.chat)) as asked:
        first = await asked.chat.completions.create(model="m", messages=[USER])
        history: list[Any] = [USER, first.choices[0].message]
        with pytest.raises(openai.BadRequestError, match="900 tokens") as caught:
            await asked.chat.completions.create(model="m", messages=[*history, {"role": "user", "content": "too much"}])
        assert caught.value.code == "context_length_exceeded"
        await asked.chat.completions.create(model="m", messages=[*history, {"role": "user", "content": "less"}])
    assert policy.answers[-1] == Answer(messages=({"role": "user", "content": "less"},))


@pytest.mark.parametrize("how", ["over", "failed", "closed"])
async def test_no_further_turn_is_an_error_without_retries(gateway: Gateway, how: str) -> None:
    def speak(_answer: Answer, _turns: int) -> str:
        raise ConversationOver if how == "over" else RuntimeError("a broken parser")

    policy = ScriptedPolicy(speak)
    session = gateway.session(policy.chat)
    if how == "closed":
        session.close()
    async with client(session) as asked:
        error = openai.AuthenticationError if how == "closed" else openai.PermissionDeniedError
        for _ in range(2):
            with pytest.raises(error):
                await asked.chat.completions.create(model="m", messages=[USER])
    assert session.is_over.is_set()
    assert str(session.failure) == ("a broken parser" if how == "failed" else "None")
    assert len(policy.answers) == (how != "closed")


async def test_a_key_is_good_for_its_own_conversation_alone(gateway: Gateway) -> None:
    policies = [ScriptedPolicy(), ScriptedPolicy()]
    sessions = [gateway.session(policy.chat) for policy in policies]
    async with client(sessions[1]) as asked:
        models = await asked.models.list()
        assert [model.id for model in models.data] == [sessions[1].endpoint.model]
        await asked.chat.completions.create(model="m", messages=[USER])
        assert [len(policy.answers) for policy in policies] == [0, 1]
        for key in ("", "sk-other", sessions[1].reward_key):
            with pytest.raises(openai.AuthenticationError):
                await asked.with_options(api_key=key or "x").chat.completions.create(model="m", messages=[USER])
        with pytest.raises(openai.NotFoundError):
            await asked.embeddings.create(model="m", input="x")


async def test_rewards_are_taken_only_where_they_count_and_with_their_own_key(gateway: Gateway) -> None:
    without, session = (gateway.session(ScriptedPolicy().chat, takes_rewards=takes) for takes in (False, True))
    async with client(session) as asked:
        for key, error in (
            (session.endpoint.api_key, openai.AuthenticationError),
            (without.reward_key, openai.PermissionDeniedError),
        ):
            with pytest.raises(error):
                await asked.with_options(api_key=key).post("/reward", body={"score": 1}, cast_to=object)
        assert (without.posted, session.posted) == (None, None)
        rewarding = asked.with_options(api_key=session.reward_key)
        with pytest.raises(openai.BadRequestError, match="expected a number"):
            await rewarding.post("/reward", body={"score": "9"}, cast_to=object)
        await rewarding.post("/reward", body={"score": 0.5, "acc": 1}, cast_to=object)
    assert session.posted == {"score": 0.5, "acc": 1}
