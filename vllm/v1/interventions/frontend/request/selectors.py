# SPDX-License-Identifier: Apache-2.0
"""Positions as a request may name them: checked and resolved on its prompt."""

from collections.abc import Iterator, Mapping, Sized
from typing import Any, NoReturn

import numpy as np

from vllm.tokenizers import TokenizerLike
from vllm.v1.capture import NO_TOKEN
from vllm.v1.interventions.errors import reject, show, unknown_keys
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.chat import ChatTurns, need_turns, tokens_of_turn
from vllm.v1.interventions.frontend.request.media import Media
from vllm.v1.interventions.frontend.request.text import (
    BROKEN,
    PromptText,
    decoded,
    last_place,
    occurrences,
)
from vllm.v1.interventions.frontend.request.written_text import WrittenText
from vllm.v1.interventions.positions import Positions, Run
from vllm.v1.interventions.values import plain, plain_list

KEYS = (
    ("text", "which"),
    ("token_ids", "which"),
    ("role", "turn"),
    ("images",),
    ("modality",),
    ("start", "stop", "step", "of"),
    ("at", "of"),
)
"""The keys of each selector that is a mapping; beside these there is `except`."""

NAMED_SELECTORS = (
    "last_prompt",
    "all_prompt",
    "all_generated",
    "last_generated",
    "predicting",
    "all",
)
WHICH = ("first", "last", "all")


class Prompt:
    """Prompt on which selectors are resolved. Make one for each request: it keeps its text.

    Args:
        token_ids: of the prompt, as the model gets it; `NO_TOKEN` where it gets an embedding.
        max_tokens: upper bound of the generated tokens. The last one is never fed back, so the
            request has at most `len(token_ids) + max_tokens - 1` rows.
        tokenizer: None if the engine has none.
        work: counts what resolving them costs.
        turns: those of the chat that the prompt is; None if it is none.
        media: its images, videos and sounds; None if it has none.
        written: what the tokenizer got; None if the prompt was given as tokens.
    """

    def __init__(
        self,
        token_ids: list[int],
        max_tokens: int,
        tokenizer: TokenizerLike | None,
        work: Work,
        turns: ChatTurns | None = None,
        media: Media | None = None,
        written: WrittenText | None = None,
    ) -> None:
        self.token_ids = token_ids
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer
        self.work = work
        self.turns = turns
        self.media = media if media is not None else Media({})
        self.written = written
        self._text: PromptText | None = None

    def text(self, path: str) -> PromptText:
        """The prompt as text, decoded when a selector first asks, at `path`."""
        if self._text is None:
            assert self.tokenizer is not None
            asked = self.work, path, self.media.positions
            self._text = decoded(self.token_ids, self.tokenizer, *asked)
        return self._text

    def texts(self, path: str) -> Iterator[PromptText]:
        """Yield the texts to search for a text, until one has it: the text that was written, then
        the text that the prompt's tokens decode to, which covers more of the tokens."""
        written, said = self.written, self.text(path)
        # Items stand in the prompt for more tokens than the text has.
        if written is not None and not self.media.items:
            assert self.tokenizer is not None
            self.work.charge(len(said.text), Unit.SEARCHED, path)
            start = last_place(said.text, written.text)
            if start >= 0:
                yield said.within(start, start + len(written.text))
            elif placed := written.placed(self.token_ids, self.tokenizer, self.work, path):
                yield placed
        yield said

    def without(self, text: str, path: str) -> NoReturn:
        """Raise ValueError, as no tokens of the prompt are a text."""
        there, said = f"which has {len(self.token_ids)} tokens", self.text(path).text
        # Where both have it, it is inside of a special token.
        if self.written is None or text in said or text not in self.written.text:
            reject(path, f"{show(text)} is not in the prompt, {there}")
        if self.written.truncated:
            reject(
                path,
                f"{show(text)} is not wholly in the truncated prompt, {there}; raise "
                "truncate_prompt_tokens",
            )
        reject(
            path,
            f"{show(text)} is not in the prompt as the tokenizer changed it, which says "
            f"{show(said)}; use what is there, or token_ids",
        )

    def need_tokens(self, path: str) -> None:
        """Raise ValueError if the prompt has no token that a field could mean."""
        if all(token_id == NO_TOKEN for token_id in self.token_ids):
            reject(
                path,
                "means tokens, and the prompt was given as embeddings; say positions by number, "
                "range or name",
            )

    def need_some(self, runs: Sized, path: str) -> None:
        """Raise ValueError if the positions that a field selects are none."""
        if not runs:
            reject(
                path,
                f"select nothing: the prompt has {len(self.token_ids)} tokens and "
                f"max_tokens={self.max_tokens} gives {max(self.max_tokens - 1, 0)} generated "
                "positions",
            )


class Selector:
    """Resolves one `positions` value and remembers what it said outright."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._length = len(prompt.token_ids)
        self._end = self._length + prompt.max_tokens - 1
        self._named: list[Run] = []
        self._excepted: list[Run] = []
        self.wants_last_generated = False
        """True if it was named; which position it is, is known only when the request has ended."""
        self.wants_all_generated = False

    @property
    def only_last_generated(self) -> bool:
        """True if the last generated position is wanted and not all of them."""
        return self.wants_last_generated and not self.wants_all_generated

    @property
    def named(self) -> Positions:
        """The positions said outright: by number, range, text or token ids."""
        return Positions(self._named) - Positions(self._excepted)

    def resolve(self, value: Any, path: str) -> Positions:
        """The positions a value means; maybe none: "all_generated" where one token is generated.

        Args:
            value: the name of a selector, a list of positions, a mapping with "start", "stop" and
                "step", with "at", with "text" or with "token_ids", or a list of these, which is
                their union without what mappings with "except" in it select.

        Raises:
            ValueError: none of these, a position out of reach, a text that is not in the prompt.
        """
        entries = plain_list(value)
        if entries is None:
            return Positions(self._entry(value, path))
        if not entries:
            reject(path, "is empty")
        # A slice, because a `range` may be longer than len() can say.
        self._prompt.work.charge(len(entries[: self._prompt.work.limit]), Unit.ENTRY, path)
        runs = []
        for i, given in enumerate(entries):
            if plain_list(given) is not None:
                reject(f"{path}[{i}]", "is a list inside a list")
            if isinstance(given, Mapping) and given.keys() == {"except"}:
                self._except(given["except"], f"{path}[{i}].except")
                continue
            entry = plain(given)
            if isinstance(entry, int) and not isinstance(entry, bool):
                position = self._one(entry, f"{path}[{i}]")
                runs += self._outright([(position, position + 1)])
            else:
                runs += self._entry(entry, f"{path}[{i}]")
        if self._excepted and self.wants_last_generated:
            reject(path, "'last_generated' and 'except' cannot be told apart before the end")
        return Positions(runs) - Positions(self._excepted)

    def _except(self, value: Any, path: str) -> None:
        other = Selector(self._prompt)
        entries = plain_list(value)
        if any(isinstance(e, Mapping) and "except" in e for e in entries or ()):
            reject(path, "is an 'except' inside an 'except'")
        runs = other.resolve(value, path).runs()
        # A union of all at the end: one after the other, n of them would take n squared steps.
        self._prompt.work.charge(len(runs), Unit.ENTRY, path)
        self._excepted += runs
        self.wants_last_generated |= other.wants_last_generated

    def _entry(self, value: Any, path: str) -> list[Run]:
        if isinstance(name := plain(value), str):
            return self._by_name(name, path)
        if isinstance(value, Mapping):
            match _kind(value):
                case "text":
                    return self._outright(self._by_text(value, path))
                case "token_ids":
                    return self._outright(self._by_token_ids(value, path))
                case "role":
                    return self._outright(self._by_role(value, path))
                case "images":
                    return self._outright(self._images(value["images"], f"{path}.images"))
                case "modality":
                    asked, path = value["modality"], f"{path}.modality"
                    runs = self._prompt.media.modality(asked, path, self._length)
                    return self._outright(self._few(runs, path))
                case "start":
                    return self._outright(self._range(value, path))
                case "at":
                    return self._outright(self._at(value, path))
            given = unknown_keys(value, ())
            reject(path, f"no selector has the keys {given}; {self._allowed()}")
        reject(path, f"unknown selector {show(value)}; {self._allowed()}")

    def _by_name(self, name: str, path: str) -> list[Run]:
        if name not in NAMED_SELECTORS:
            reject(path, f"unknown selector {show(name)}; {self._allowed()}")
        if name == "last_generated":
            self.wants_last_generated = True
        elif name in ("all_generated", "predicting", "all"):
            self.wants_all_generated = True
        run = {
            "last_prompt": (self._length - 1, self._length),
            "all_prompt": (0, self._length),
            "all_generated": (self._length, self._end),
            "last_generated": (self._length, self._end),
            "predicting": (self._length - 1, self._end),
            "all": (0, self._end),
        }[name]
        return [run]

    def _one(self, position: int, path: str, end: int | None = None) -> int:
        """An absolute position below `end`; negative counts from the prompt's end."""
        absolute = position + self._length if position < 0 else position
        end = self._end if end is None else end
        if not 0 <= absolute < end:
            reject(
                path,
                f"position {show(position)} is out of reach: the prompt has {self._length} tokens "
                f"and the last row is at {end - 1}",
            )
        return absolute

    def _bounds(self, value: Mapping[Any, Any], path: str) -> tuple[int, int]:
        """The position from which a mapping counts, and where what it can mean ends."""
        match plain(value.get("of")):
            case None:
                return 0, self._end
            case "prompt":
                return 0, self._length
            case "generated":
                return self._length, self._end
            case other:
                reject(f"{path}.of", f"must be 'prompt' or 'generated', got {show(other)}")

    def _after(self, first: int, number: Any, path: str) -> int:
        """The position that a number means, counted from `first`."""
        number = _need_int(number, path)
        if first and number < 0:
            reject(path, f"{show(number)} counts from the end of the answer, which is not known")
        return number + first

    def _at(self, value: Mapping[Any, Any], path: str) -> list[Run]:
        (first, end), entries = self._bounds(value, path), plain_list(value["at"])
        if not entries:
            reject(f"{path}.at", f"must be a list of positions, got {show(value['at'])}")
        self._prompt.work.charge(len(entries[: self._prompt.work.limit]), Unit.ENTRY, path)
        found = [
            self._one(self._after(first, entry, f"{path}.at[{i}]"), f"{path}.at[{i}]", end)
            for i, entry in enumerate(entries)
        ]
        return [(position, position + 1) for position in found]

    def _range(self, value: Mapping[Any, Any], path: str) -> list[Run]:
        first, end = self._bounds(value, path)
        numbers = {"start": first, "stop": end, "step": 1}
        for key in value.keys() & numbers.keys():
            from_first = first if key != "step" else 0
            numbers[key] = self._after(from_first, value[key], f"{path}.{key}")
        if numbers["step"] < 1:
            reject(f"{path}.step", f"must be at least 1, got {show(numbers['step'])}")
        start = self._one(numbers["start"], f"{path}.start", end)
        last = numbers["stop"] if numbers["stop"] >= 0 else numbers["stop"] + self._length
        if not start < last <= end:
            reject(
                f"{path}.stop",
                f"{show(numbers['stop'])} must be after start and at most {end}, "
                "one past the last row",
            )
        if numbers["step"] == 1:
            return [(start, last)]
        positions = range(start, last, numbers["step"])
        self._prompt.work.charge(len(positions), Unit.ENTRY, path)
        return [(p, p + 1) for p in positions]

    def _by_text(self, value: Mapping[Any, Any], path: str) -> list[Run]:
        """All tokens that have a character of a match."""
        text, which = value["text"], _need_which(value, path)
        path += ".text"
        if not isinstance(text, str):
            reject(path, f"must be a string, got {show(text)}")
        if not text:
            reject(path, "is empty")
        self._prompt.need_tokens(path)
        if BROKEN in text:
            reject(path, "has U+FFFD, which decoded text has in place of broken characters")
        if self._prompt.tokenizer is None:
            reject(
                path,
                "needs a tokenizer, and the engine was started with skip_tokenizer_init; "
                "start it without, or use token_ids",
            )
        for prompt in self._prompt.texts(path):
            self._prompt.work.charge(len(prompt.text), Unit.SEARCHED, path)
            found = prompt.find(text)
            if len(found):
                tokens = prompt.tokens_of(found[_chosen(which)], len(text))
                return self._few(_runs(tokens, 1), path)
        self._prompt.without(text, path)

    def _by_role(self, value: Mapping[Any, Any], path: str) -> list[Run]:
        """All tokens that have a character of a turn's content."""
        turn = None if value.get("turn") is None else _need_int(value["turn"], f"{path}.turn")
        prompt, turns = self._prompt, self._prompt.turns
        truncated = prompt.written is not None and prompt.written.truncated
        found: list[Run] = []
        for index in need_turns(turns, plain(value["role"]), turn, path):
            assert turns is not None
            chat, pieces = turns.characters(index, len(prompt.text(path).text), prompt.work, path)
            tokens = tokens_of_turn(chat, pieces, [*prompt.texts(path)], truncated, path)
            found += _runs(tokens, 1)
        return self._few(found, path)

    def _images(self, value: Any, path: str) -> list[Run]:
        work, entries = self._prompt.work, plain_list(value)
        if entries is not None:
            if not entries:
                reject(path, "is empty")
            work.charge(len(entries[: work.limit]), Unit.ENTRY, path)
        return self._few(self._prompt.media.images(value, entries, path), path)

    def _by_token_ids(self, value: Mapping[Any, Any], path: str) -> list[Run]:
        token_ids, which = plain_list(value["token_ids"]), _need_which(value, path)
        path += ".token_ids"
        if token_ids is None:
            reject(path, f"must be a list of token ids, got {show(value['token_ids'])}")
        if not token_ids:
            reject(path, "is empty")
        self._prompt.need_tokens(path)
        if len(token_ids) > self._length:
            reject(path, f"has {len(token_ids)} tokens, the prompt has {self._length}")
        token_ids = [_need_int(token_id, f"{path}[{i}]") for i, token_id in enumerate(token_ids)]
        self._prompt.work.charge(self._length, Unit.SEARCHED, path)
        found = occurrences(self._prompt.token_ids, token_ids) if NO_TOKEN not in token_ids else []
        if not found:
            given = ", ".join([show(t) for t in token_ids[:8]] + ["..."][: len(token_ids) > 8])
            reject(path, f"[{given}] is not in the prompt, which has {self._length} tokens")
        return self._few(_runs(found[_chosen(which)], len(token_ids)), path)

    def _outright(self, runs: list[Run]) -> list[Run]:
        self._named += runs
        return runs

    def _few(self, runs: list[Run], path: str) -> list[Run]:
        self._prompt.work.charge(len(runs), Unit.ENTRY, path)
        return runs

    @staticmethod
    def _allowed() -> str:
        return (
            f"use {', '.join(NAMED_SELECTORS)}, a list of positions, {{'start', 'stop', 'step', "
            "'of'}, {'at', 'of'}, {'text', 'which'}, {'token_ids', 'which'}, {'role', 'turn'}, "
            "{'images'}, {'modality'} or a list of these, with {'except'}"
        )


def _kind(value: Mapping[Any, Any]) -> str:
    """The first key of the selector that a mapping is; "" if it is none."""
    for kind in KEYS:
        # A range needs none of its keys.
        needed = kind[0] in value or kind[0] == "start"
        if needed and len(value) <= len(kind) and value.keys() <= {*kind}:
            return kind[0]
    return ""


def _need_int(value: Any, path: str) -> int:
    value = plain(value)
    if not isinstance(value, int) or isinstance(value, bool):
        reject(path, f"must be an int, got {show(value)}")
    return value


def _need_which(value: Mapping[Any, Any], path: str) -> str:
    which = value.get("which", "all")
    if not isinstance(which, str) or which not in WHICH:
        reject(f"{path}.which", f"must be {', '.join(WHICH)}, got {show(which)}")
    return which


def _chosen(which: str) -> slice:
    """Return the slice that chooses these of the matches, in order."""
    return {"first": slice(1), "last": slice(-1, None), "all": slice(None)}[which]


def _runs(begins: list[int] | np.ndarray, length: int) -> list[Run]:
    """Runs of `length` from each of `begins`, sorted; those that touch made one."""
    array = np.array(begins, dtype=np.int64)
    first = np.insert(array[1:] > array[:-1] + length, 0, True)
    last = np.roll(first, -1)
    return list(zip(array[first].tolist(), (array[last] + length).tolist(), strict=True))
