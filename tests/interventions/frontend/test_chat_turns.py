# SPDX-License-Identifier: Apache-2.0
"""Where the texts of a turn are in what a chat template writes, by upstream's parser of chats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal, cast

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.renderers.chat_utils import parse_chat_messages
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.chat import ChatTurns

pytestmark = pytest.mark.quick

HEAD, TAIL = "{% for m in messages %}<{{ m.role }}>", "</s>{% endfor %}"
EACH = "{% for part in m.content %}"
Template = tuple[Literal["string", "openai"], str]
TEMPLATES: dict[str, Template] = {
    "as it is": ("string", HEAD + " {{ m.content }} " + TAIL),
    "stripped": ("string", HEAD + "{{ m.content | trim }}" + TAIL),
    "list": ("openai", HEAD + EACH + "{{ part.text }}{% endfor %}" + TAIL),
    "list, stripped": ("openai", HEAD + EACH + "{{ part.text | trim }}\n{% endfor %}" + TAIL),
    "list with words": ("openai", HEAD + EACH + "[x{{ part.text }}]{% endfor %}" + TAIL),
}
DROPS: Template = ("openai", HEAD + EACH + "{{ part.text | replace('.', '') }}{% endfor %}" + TAIL)


class Renderer:
    """Upstream's, without a model."""

    def __init__(self, template: Template) -> None:
        self.format, self.template = template
        self.calls = 0

    def render_messages(self, messages: Any, params: Any) -> tuple[Any, dict[str, str]]:
        self.calls += 1
        config = cast("Any", SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False))
        chat, _, _ = parse_chat_messages(messages, config, self.format)
        return chat, {"prompt": jinja2.Template(self.template).render(messages=chat)}


def turns_of(messages: list[Any], template: Template) -> tuple[ChatTurns, str]:
    renderer = Renderer(template)
    turns = ChatTurns(messages, cast("Any", None), cast("Any", renderer))
    return turns, renderer.render_messages(messages, None)[1]["prompt"]


def message(role: str, texts: list[str]) -> dict[str, Any]:
    """As one string, where there is one; else parts, in each way that parts may say a text."""
    if len(texts) == 1:
        return {"role": role, "content": texts[0]}
    kinds = [("text", "text"), ("input_text", "text"), ("refusal", "refusal")]
    parts: list[Any] = [
        {"type": kind, key: text} for (kind, key), text in zip(kinds * 2, texts, strict=False)
    ]
    return {"role": role, "content": [*parts[:-1], texts[-1]]}


TEXTS = st.lists(st.text("x. \n", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=30, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.data())
def test_the_texts_of_a_turn(template: str, chat: list[list[str]], data: st.DataObject) -> None:
    """Of the same letters in all turns, which the template writes, too. The reference has letters
    that nothing else has in the place of those of the turn."""
    index = data.draw(st.integers(0, len(chat) - 1))
    marked = [
        [t.replace("x", "#").replace(".", "#") for t in texts] if i == index else texts
        for i, texts in enumerate(chat)
    ]
    whole, reference = (
        turns_of([message("user", texts) for texts in of], TEMPLATES[template])[1]
        for of in (chat, marked)
    )
    turns, _ = turns_of([message("user", texts) for texts in chat], TEMPLATES[template])
    letters = {i for i, c in enumerate(reference) if c == "#"}
    if not letters:
        with pytest.raises(ValueError, match="does not write this turn as it is"):
            turns.characters(index, len(whole), Work(1 << 23), "p")
        return
    text, runs = turns.characters(index, len(whole), Work(1 << 23), "p")
    assert text == whole
    found = {i for start, stop in runs for i in range(start, stop)}
    assert {i for i in found if not whole[i].isspace()} == letters
    for start, stop in runs:
        assert whole[start:stop] == whole[start:stop].strip()


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([message("user", ["a", "b"]), PICTURE], "the chat nothing but text"),
        ([message("user", ["", ""])], "must have text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "must have text"),
        ([{"role": "user", "content": [{"type": "tool_reference", "name": "a"}]}], "must have"),
    ],
)
def test_what_is_no_text_is_refused_before_it_is_rendered(messages: Any, said: str) -> None:
    """A rendering would fetch its images."""
    renderer = Renderer(TEMPLATES["list"])
    turns = ChatTurns(messages, cast("Any", None), cast("Any", renderer))
    with pytest.raises(ValueError, match=said):
        turns.characters(0, 9, Work(1 << 23), "p")
    assert renderer.calls == 0


def test_a_turn_that_the_template_changes_is_refused_and_others_are_not() -> None:
    chat = [message("user", ["a.", "b"]), message("user", ["a", "b"])]
    turns, whole = turns_of(chat, DROPS)
    assert turns.characters(1, 9, Work(1 << 23), "p") == (whole, [(len(whole) - 6, len(whole) - 4)])
    with pytest.raises(ValueError, match="does not write this turn as it is"):
        turns.characters(0, 9, Work(1 << 23), "p")


def test_parts_are_charged() -> None:
    chat = [message("user", ["a", "b"]), {"role": "tool", "content": ["c"] * 1000}]
    turns, _ = turns_of(chat, TEMPLATES["list"])
    assert turns.characters(0, 9, Work(1 << 16), "p")[1]
    with pytest.raises(ValueError, match="max_request_work"):
        turns.characters(0, 9, Work(1 << 14), "p")
