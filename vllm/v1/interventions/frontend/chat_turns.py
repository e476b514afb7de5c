# SPDX-License-Identifier: Apache-2.0
"""Where the turns of a chat stand in its prompt: for selectors that say a role."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.work import Unit, Work

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer
    from vllm.renderers.params import ChatParams

KEY = "chat_turns"
"""The key of an engine input that has the `ChatTurns` of its chat."""


class ChatTurns:
    """The messages of a chat, and the template that wrote its prompt.

    A turn's characters are what the template writes in place of its content: the chat is rendered
    again with a word of its own there. Whatever else differs then, the template decides by content,
    and the turn is refused.
    """

    def __init__(
        self, messages: Sequence[Any], params: "ChatParams", renderer: "BaseRenderer[Any]"
    ) -> None:
        self._messages = messages
        self._write = partial(_written, params, renderer)
        self._whole: str | None = None

    def of(self, role: str) -> list[int]:
        """The indices of the messages of a role."""
        return [i for i, message in enumerate(self._messages) if message.get("role") == role]

    @property
    def roles(self) -> list[str]:
        """The roles there are, in order."""
        return list(dict.fromkeys(str(message.get("role")) for message in self._messages))

    def characters(self, index: int, prompt: str, work: Work, path: str) -> tuple[int, int]:
        """The characters of a turn, without space around it: first, stop.

        Args:
            index: of its message.
            prompt: the prompt's tokens as text.

        Raises:
            ValueError: the chat has more than text in it, or it is not certain which they are.
        """
        content = _content(self._messages[index])
        if any(_content(m) is None for m in self._messages if m.get("content")) or not content:
            reject(path, "a turn must have text, as one piece, and the chat nothing but text")
        work.charge(2 * len(prompt), Unit.SEARCHED, path)
        work.charge(2 * len(self._messages), Unit.SEGMENT, path)
        whole = self._whole = self._whole or self._write(self._messages)
        word = f"turn{uuid.uuid4().hex}"
        messages = [dict(message) for message in self._messages]
        messages[index]["content"] = word
        parts = (self._write(messages) or "").split(word)
        # Decoders add and leave out spaces beside special tokens, so only what is solid counts.
        solid = [i for i, c in enumerate(prompt) if not c.isspace()]
        shift = len(solid) - len(_solid(whole or ""))
        if not whole or not _solid(prompt).endswith(_solid(whole)):
            reject(path, f"the prompt is not the text that the chat template writes; {_REMEDY}")
        before, after = parts if len(parts) == 2 else ("", "")
        start, stop = len(before), len(whole) - len(after)
        found = whole[start:stop].strip()
        exact = len(parts) == 2 and whole.startswith(before) and whole.endswith(after)
        if not exact or not found or found not in content:
            reject(path, f"the chat template does not write this turn as it is; {_REMEDY}")
        first = shift + len(_solid(before))
        return solid[first], solid[first + len(_solid(found)) - 1] + 1


def _solid(text: str) -> str:
    return "".join(text.split())


_REMEDY = "use 'text' or 'token_ids'"


def _content(message: Mapping[str, Any]) -> str | None:
    """The text of a message; None if it has anything else, or several pieces."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _written(
    params: "ChatParams", renderer: "BaseRenderer[Any]", messages: Sequence[Any]
) -> str | None:
    """The text of a chat; None if its template writes tokens."""
    _, prompt = renderer.render_messages(list(messages), params)
    text = prompt.get("prompt")
    return text if isinstance(text, str) else None


def add_turns(
    prompts: Iterable[Any],
    chats: Iterable[Sequence[Any]],
    params: "ChatParams",
    renderer: "BaseRenderer[Any]",
) -> None:
    """Give each engine input the turns of its chat, where a request may ask for them."""
    config = renderer.config
    if config.steering_config.enable_steering or config.capture_config.enabled:
        for prompt, messages in zip(prompts, chats, strict=True):
            prompt[KEY] = ChatTurns(messages, params, renderer)


def need_turns(turns: ChatTurns | None, role: Any, turn: Any, path: str) -> list[int]:
    """The indices of the messages that a selector means.

    Args:
        turns: None where the prompt is no chat.
        turn: which of the role's, negative from the last; None for all.
    """
    if turns is None:
        reject(path, "is for chats: LLM.chat and /v1/chat/completions")
    if not isinstance(role, str):
        reject(f"{path}.role", f"must be a string, got {show(role)}")
    found = turns.of(role)
    if not found:
        reject(
            f"{path}.role", f"no turn is of {show(role)}; roles are {', '.join(turns.roles)[:80]}"
        )
    if turn is None:
        return found
    if not -len(found) <= turn < len(found):
        reject(f"{path}.turn", f"{show(turn)} is out of reach: {show(role)} has {len(found)} turns")
    return [found[turn]]
