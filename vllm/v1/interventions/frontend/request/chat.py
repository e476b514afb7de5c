# SPDX-License-Identifier: Apache-2.0
"""Places of the turns of a chat in its prompt, for selectors that name a role."""

import itertools
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.text import PromptText, last_place
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.positions import Run

if TYPE_CHECKING:
    from vllm.renderers.base import BaseRenderer
    from vllm.renderers.params import ChatParams

KEY = "chat_turns"
"""The key of an engine input that has the `ChatTurns` of its chat."""


class ChatTurns:
    """The messages of a chat, and the template that wrote its prompt.

    A turn's characters are what the template writes in place of its texts: the chat is rendered
    again with words of its own there. Whatever else differs then, the template decides by content,
    and the turn is refused.
    """

    def __init__(
        self, messages: Sequence[Any], params: "ChatParams", renderer: "BaseRenderer[Any]"
    ) -> None:
        self._messages = messages
        self._write = partial(_written, params, renderer)

    def of(self, role: str) -> list[int]:
        """The indices of the messages of a role."""
        return [i for i, message in enumerate(self._messages) if message.get("role") == role]

    @property
    def roles(self) -> list[str]:
        """The roles there are, in order."""
        return list(dict.fromkeys(str(message.get("role")) for message in self._messages))

    @cached_property
    def _texts(self) -> list[list[str] | None]:
        """The texts of each message; None for a message that has anything else."""
        return [_texts(message) for message in self._messages]

    @cached_property
    def _whole(self) -> str | None:
        return self._write(self._messages)

    def characters(self, index: int, length: int, work: Work, path: str) -> tuple[str, list[Run]]:
        """Return the text that the template writes, and the runs of it that are a turn, without the
        space around the turn.

        Args:
            index: of the turn's message.
            length: of the prompt, as text.

        Raises:
            ValueError: the chat has more than text in it, or it is not certain which characters are
                the turn's.
        """
        texts = self._texts[index]
        if not texts or any(of is None for of in self._texts):
            reject(path, "a turn must have text, and the chat nothing but text")
        length = max(length, sum(len(text) for of in self._texts for text in of or ()))
        work.charge(2 * length, Unit.SEARCHED, path)
        work.charge(2 * len(self._messages), Unit.SEGMENT, path)
        work.charge(2 * sum(len(of or ()) for of in self._texts), Unit.ENTRY, path)
        if self._whole is None:
            reject(path, f"the prompt is not the text that the chat template writes; {_REMEDY}")
        runs = self._runs(index, texts, self._whole)
        if not runs:
            reject(path, f"the chat template does not write this turn as it is; {_REMEDY}")
        return self._whole, runs

    def _runs(self, index: int, texts: list[str], whole: str) -> list[Run]:
        word = uuid.uuid4().hex
        messages = list(self._messages)
        messages[index] = _with_words(messages[index], word)
        parts = re.split(rf"turn{word}n([0-9]+)e", self._write(messages) or "")
        order, (before, *between, after) = parts[1::2], parts[::2] if len(parts) > 1 else ["", ""]
        if order != [str(i) for i in range(len(texts))]:
            return []
        start, stop = len(before), len(whole) - len(after)
        if start > stop or not whole.startswith(before) or not whole.endswith(after):
            return []
        written = whole[start:stop]
        if not "".join(between).strip() and written.strip() in _joined(texts, between):
            return _solid_runs([written], [], start)
        # A template may strip the turn, or each of its texts.
        ends = [texts[0].lstrip(), *texts[1:]]
        ends[-1] = ends[-1].rstrip()
        for said in (texts, ends, [text.strip() for text in texts]):
            if _joined(said, between) == written:
                return _solid_runs(said, between, start)
        return []


def tokens_of_turn(
    chat: str, pieces: list[Run], texts: Sequence[PromptText], truncated: bool, path: str
) -> np.ndarray:
    """Return the tokens that have a character of a turn: int64 [n].

    Args:
        chat, pieces: as `ChatTurns.characters` gives them.
        texts: of the prompt, what its tokens decode to last.
        truncated: whether the prompt may lack tokens of the chat.

    Raises:
        ValueError: the prompt is not the chat, or not all of this turn.
    """
    for text in texts:
        shift = last_place(text.text, chat)
        if shift >= 0:
            if not all(text.has_all(shift + start, shift + stop) for start, stop in pieces):
                reject(path, f"the prompt has not all of this turn: {_TRUNCATED}")
            return _tokens_of([(shift + start, shift + stop) for start, stop in pieces], text)
    # Decoders add and leave out spaces beside special tokens, so only what is solid counts.
    said = texts[-1]
    solid = [i for i, c in enumerate(said.text) if not c.isspace()]
    written = _solid(chat)
    if not _solid(said.text).endswith(written):
        why = f" ({_TRUNCATED})" if truncated else ""
        reject(path, f"the prompt is not the text that the chat template writes{why}; {_REMEDY}")
    found = []
    for start, stop in pieces:
        first = len(solid) - len(written) + len(_solid(chat[:start]))
        last = first + len(_solid(chat[start:stop])) - 1
        found.append((solid[first], solid[last] + 1))
    return _tokens_of(found, said)


def _tokens_of(pieces: list[Run], text: PromptText) -> np.ndarray:
    found = [text.tokens_of(np.array([start]), stop - start) for start, stop in pieces]
    return np.unique(np.concatenate(found))


def _solid(text: str) -> str:
    return "".join(text.split())


_REMEDY = "use 'text' or 'token_ids'"
_TRUNCATED = "truncate_prompt_tokens cuts it"
_TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a message's part -> the field with its text, for the types that have a text."""


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else [content] if content else []


def _text(part: Any) -> str | None:
    """The text of a part; None if it is something else."""
    if isinstance(part, Mapping):
        part = part.get(_TEXT_FIELDS.get(str(part.get("type")), ""))
    return part if isinstance(part, str) else None


def _texts(message: Mapping[str, Any]) -> list[str] | None:
    """The texts of a message that are not empty; None if it has anything else."""
    texts = [_text(part) for part in _parts(message)]
    return None if None in texts else [text for text in texts if text]


def _with_words(message: Mapping[str, Any], word: str) -> dict[str, Any]:
    """A message with a word of its own in place of each of its texts, numbered."""
    parts, number = [], itertools.count()
    for part in _parts(message):
        if _text(part):
            said = f"turn{word}n{next(number)}e"
            part = {**part, _TEXT_FIELDS[part["type"]]: said} if isinstance(part, dict) else said
        parts.append(part)
    return {**message, "content": parts if isinstance(message["content"], list) else parts[0]}


def _joined(texts: Sequence[str], between: Sequence[str]) -> str:
    return "".join(itertools.chain(*itertools.zip_longest(texts, between, fillvalue="")))


def _solid_runs(texts: Sequence[str], between: Sequence[str], start: int) -> list[Run]:
    """Return the runs of characters of texts that begin at `start`, without space around them. The
    characters between two texts are in no run, unless they are space."""
    runs: list[Run] = []
    joins = False
    for text, gap in itertools.zip_longest(texts, between, fillvalue=""):
        if text.strip():
            stop = start + len(text.rstrip())
            first = start + len(text) - len(text.lstrip())
            runs.append((runs.pop()[0] if joins else first, stop))
            joins = True
        joins &= not gap.strip()
        start += len(text) + len(gap)
    return runs


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


def need_turns(turns: ChatTurns | None, given: Given) -> list[int]:
    """The indices of the messages that a selector means.

    Args:
        turns: None where the prompt is no chat.
        given: the selector, with a `role`, and a `turn`: which one of the role's, negative from the
            last; all if there is none.
    """
    role, turn = given["role"], given["turn"]
    number = None if turn.value is None else turn.int()
    if turns is None:
        given.refuse("is for chats: LLM.chat and /v1/chat/completions")
    found = turns.of(role.text("must be a string, got {given}"))
    shown = show(role.value)
    if not found:
        reject(role.path, f"no turn is of {shown}; roles are {', '.join(turns.roles)[:80]}")
    if number is None:
        return found
    if not -len(found) <= number < len(found):
        reject(turn.path, f"{show(number)} is out of reach: {shown} has {len(found)} turns")
    return [found[number]]
