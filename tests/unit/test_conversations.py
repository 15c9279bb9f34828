"""Conversations: what is learned of each, under several chat templates, and the rows that cannot be learned."""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import (
    Conversation,
    DataError,
    Message,
    Sequence,
    carry_addition,
    encode_conversations,
    prompt_ids,
    read_conversations,
    response_ids,
)

# Llama 3's: header and content, which is stripped, and a begin token before the first
LLAMA = (
    "{% for message in messages %}{% if loop.first %}<|begin|>{% endif %}"
    "<|header|>{{ message['role'] }}<|header_end|>\n\n{{ message['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header_end|>\n\n{% endif %}"
)
CHATML = carry_addition.CHAT_TEMPLATE
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>{{ '\n' }}{% endif %}" + CHATML
)
CONTENT = "{{ message['content'] }}"
# reasoning is kept in the last message alone
STRIPPING = CHATML.replace(
    CONTENT, "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}"
)
# Qwen3's: without reasoning, the last message gets an empty one
THINKING = CHATML.replace(
    CONTENT, "{% if loop.last and message['role'] == 'assistant' %}<think></think>{% endif %}" + CONTENT
)
# what ends a turn is not the eos token
OTHER_END = CHATML.replace("<|im_end|>", "<|eot|>")
# Llama 2's: white space around an answer, eos behind answers alone, no header
BRACKETS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %} {{ message['content'] }} <|im_end|>"
    "{% else %}[{{ message['content'] }}]{% endif %}{% endfor %}"
)
BARE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
ANSWERS = BARE.replace("}}", "if message['role'] == 'assistant' }}")
ALTERNATING = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)


@cache
def tokenizer(template: str) -> Any:
    made = carry_addition.build_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<|begin|>", "<|header|>", "<|header_end|>", "<|eot|>"]})
    made.chat_template = template
    if template == LLAMA:
        made.eos_token = "<|eot|>"
    return made


def talk(*messages: tuple[str, str]) -> Conversation:
    return Conversation([Message(role, content) for role, content in messages], 3)


def encoded(template: str, conversation: Conversation, roles: Items[str] = ("assistant",)) -> Sequence:
    (sequence,) = encode_conversations(tokenizer(template), [conversation], 10_000, roles)
    return sequence


def learned_texts(template: str, sequence: Sequence) -> list[str]:
    return [tokenizer(template).decode(sequence.input_ids[first:end]) for first, end in sequence.learned]


GREETING = talk(("user", "Hi"), ("assistant", "Hello!"), ("user", "2+2="), ("assistant", "4"), ("user", "Bye"))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Hello!<|im_end|>", "4<|im_end|>"]),
        (LLAMA, ["Hello!<|eot|>", "4<|eot|>"]),
        (DEFAULT_SYSTEM, ["Hello!<|im_end|>", "4<|im_end|>"]),
        (STRIPPING, ["Hello!<|im_end|>", "4<|im_end|>"]),
        (THINKING, ["Hello!<|im_end|>", "4<|im_end|>"]),
        (ALTERNATING, ["Hello!<|im_end|>", "4<|im_end|>"]),
        (OTHER_END, ["Hello!<|eot|>\n", "4<|im_end|>"]),
        (BRACKETS, [" Hello! <|im_end|>", "4<|im_end|>"]),
    ],
)
def test_an_answer_is_learned_with_the_end_of_its_turn(template: str, expected: list[str]) -> None:
    sequence = encoded(template, GREETING)
    assert learned_texts(template, sequence) == expected
    assert sequence.learned[-1][1] == len(sequence.input_ids), "what follows the last answer is left out"
    assert sequence.learned_length == sum(end - first for first, end in sequence.learned)


@pytest.mark.parametrize("template", [CHATML, LLAMA, DEFAULT_SYSTEM, THINKING])
def test_an_answer_follows_what_a_rollout_would_be_asked(template: str) -> None:
    sequence = encoded(template, GREETING)
    assert sequence.input_ids[: sequence.prompt_length] == prompt_ids(tokenizer(template), "Hi")
    turns = [{"role": message.role, "content": message.content} for message in GREETING.messages]
    for (first, _), asked in zip(sequence.learned, (turns[:1], turns[:3]), strict=True):
        ids = tokenizer(template).apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        assert sequence.input_ids[:first] == ids


@pytest.mark.parametrize("template", [CHATML, LLAMA, DEFAULT_SYSTEM, STRIPPING, THINKING, OTHER_END, BRACKETS])
@pytest.mark.parametrize("response", ["46", " a \n", "\n<answer>46</answer>", "<think>2+4</think>6"])
def test_one_turn_is_the_same_row_in_either_form(tmp_path: Path, template: str, response: str) -> None:
    messages = [{"role": "user", "content": "12+34="}, {"role": "assistant", "content": response}]
    rows: list[Any] = [{"messages": messages}, {"prompt": "12+34=", "response": response, "messages": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, other = encode_conversations(tokenizer(template), read_conversations(tmp_path / "rows.jsonl"), 1000)
    prompt, answer = prompt_ids(tokenizer(template), "12+34="), response_ids(tokenizer(template), response)
    assert one == other == Sequence(prompt + answer, [(len(prompt), len(prompt) + len(answer))])


def test_other_roles_are_learned_as_the_template_writes_them() -> None:
    conversation = talk(("system", "Add."), ("user", "1+1="), ("assistant", "2"), ("tool", "right"), ("user", "Bye"))
    sequence = encoded(CHATML, conversation, ["tool", "assistant"])
    assert learned_texts(CHATML, sequence) == ["2<|im_end|>", "<|im_start|>tool\nright<|im_end|>\n"]
    assert sequence.learned[-1][1] == len(sequence.input_ids)
    alone = encoded(CHATML, conversation, ["user"])
    assert learned_texts(CHATML, alone) == [f"<|im_start|>user\n{text}<|im_end|>\n" for text in ("1+1=", "Bye")]


def written(template: str, messages: list[Message], roles: Items[str]) -> list[tuple[str, bool]]:
    """What the template writes and whether that is learned, part by part up to the last that is; by other means."""
    parts = [("<|begin|>", False)] if template == LLAMA else []
    last = max(number for number, message in enumerate(messages) if message.role in roles)
    for number, message in enumerate(messages):
        learned, answer = message.role in roles, message.role == "assistant"
        raw = template == CHATML or (number == last and answer)
        content = message.content if raw else message.content.strip()
        if template == CHATML:
            header, end, behind = f"<|im_start|>{message.role}\n", "<|im_end|>", "\n"
        else:
            header, end, behind = f"<|header|>{message.role}<|header_end|>\n\n", "<|eot|>", ""
        other = learned and not answer
        parts += [(header, other), (content + end, learned), (behind, other)]
    ends = [number for number, (text, learned) in enumerate(parts) if learned and text]
    return parts[: ends[-1] + 1]


contents = st.text("ab1 \n\té🙂", min_size=1, max_size=12).filter(lambda text: text.strip() != "")
conversations = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), contents), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=300)
@given(
    template=st.sampled_from([CHATML, LLAMA]),
    messages=conversations,
    roles=st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, unique=True),
)
def test_just_what_should_be_is_learned(template: str, messages: list[Message], roles: list[str]) -> None:
    conversation = Conversation([Message("developer", "x"), *messages], 1)
    if not any(message.role in roles for message in messages):
        with pytest.raises(DataError, match="line 1: nothing to learn"):
            encoded(template, conversation, roles)
        return
    sequence, parts = encoded(template, conversation, roles), written(template, conversation.messages, roles)
    assert tokenizer(template).decode(sequence.input_ids) == "".join(text for text, _ in parts)
    runs = groupby((part for part in parts if part[0]), key=lambda part: part[1])
    assert learned_texts(template, sequence) == ["".join(text for text, _ in run) for learned, run in runs if learned]


def test_the_tokens_do_not_depend_on_which_questions_are_learned() -> None:
    """Though some lie across the end of a message; then they are learned with the message in which they begin."""
    conversation = talk(("system", "us"), ("user", "er\n"), ("tool", "\nassi"), ("user", "stant"), ("assistant", "5"))
    assert tokenizer(BARE).tokenize("user\n\nassistant") == ["user", "Ċ", "Ċ", "assistant"]
    end = "5<|im_end|>"
    for roles, expected in (
        (["assistant"], [end]),
        (["assistant", "user"], ["\n", end]),
        (["assistant", "tool"], [f"\nassistant{end}"]),
    ):
        sequence = encoded(BARE, conversation, roles)
        assert sequence.input_ids == tokenizer(BARE)(f"user\n\nassistant{end}").input_ids
        assert learned_texts(BARE, sequence) == expected


def test_many_conversations_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [talk(("user", f"{i}+1="), ("assistant", f"{i + 1}")) for i in range(7)]
    whole = encode_conversations(tokenizer(CHATML), rows, 100)
    monkeypatch.setattr("megarl.data.sequence.ENCODED_AT_ONCE", 3)
    assert encode_conversations(tokenizer(CHATML), rows, 100) == whole
    assert [learned_texts(CHATML, row) for row in whole] == [[f"{i + 1}<|im_end|>"] for i in range(7)]


def test_a_conversation_that_is_too_long_is_named() -> None:
    rows = [Conversation(GREETING.messages, line) for line in (1, 2)]
    length = len(encoded(CHATML, GREETING).input_ids)
    assert len(encode_conversations(tokenizer(CHATML), rows, length)) == 2
    rows[1] = Conversation([*GREETING.messages, Message("assistant", "!")], 2)
    with pytest.raises(DataError, match=f"^line 2: {length + 14} tokens, more than the model's {length} positions;"):
        encode_conversations(tokenizer(CHATML), rows, length)


REASONED = talk(("user", "a"), ("assistant", "<think>b</think>c"), ("user", "d"), ("assistant", "e"))
CHECKED = talk(("system", "a"), ("user", "0+1="), ("assistant", "1"), ("tool", "right"))


@pytest.mark.parametrize(
    ("template", "conversation", "roles", "complaint"),
    [
        (
            CHATML,
            talk(("user", "a")),
            ["assistant"],
            "nothing to learn: expected a message of role assistant, found user",
        ),
        (CHATML, talk(("user", "a"), ("assistant", " \n")), ["assistant"], "message 2: 'content' is empty"),
        (CHATML, talk(("assistant", "a")), ["assistant"], r"message 1 \(assistant\) is learned, and its first token"),
        (CHATML, talk(("user", "a"), ("assistant", "b")), ["user"], r"message 1 \(user\) is learned"),
        (STRIPPING, REASONED, ["assistant"], "precedes message 3 as it was: it writes 'c<.*, expected '<think>b</"),
        (THINKING, CHECKED, ["assistant", "tool"], "precedes message 4 as it was: it writes '<think></think>1.*'"),
        (BARE, talk(("user", "us"), ("tool", "er")), ["tool"], "nothing to learn: no token begins in a message"),
        (ANSWERS, CHECKED, ["tool"], "message 4: the chat template writes nothing of it"),
        (ALTERNATING, CHECKED, ["assistant"], "refuses messages of the roles system, user: roles must alternate"),
        ("{{ 1 / 0 }}", GREETING, ["assistant"], "template refuses messages of the roles user: division by zero"),
    ],
)
def test_what_cannot_be_learned_is_named_by_line(
    template: str, conversation: Conversation, roles: list[str], complaint: str
) -> None:
    with pytest.raises(DataError, match=f"^line 3: .*{complaint}"):
        encoded(template, conversation, roles)
