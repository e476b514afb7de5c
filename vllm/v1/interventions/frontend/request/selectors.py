# SPDX-License-Identifier: Apache-2.0
"""Positions as a request may name them: checked and resolved on its prompt."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.v1.capture import NO_TOKEN
from vllm.v1.interventions.errors import reject, show, unknown_keys
from vllm.v1.interventions.frontend.request.budget import Unit
from vllm.v1.interventions.frontend.request.chat import need_turns, tokens_of_turn
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.text import BROKEN, occurrences
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.likely import likely_key
from vllm.v1.interventions.positions import Positions, Run
from vllm.v1.interventions.values import plain, plain_list

NAMED_SELECTORS = (
    "last_prompt",
    "all_prompt",
    "all_generated",
    "last_generated",
    "predicting",
    "all",
)


@dataclass(frozen=True)
class Kind:
    """A selector that is a mapping."""

    keys: tuple[str, ...]
    """Keys that it may have; the first says which selector it is."""
    find: "Callable[[Selector, Given], list[Run]]"
    """Function that returns the positions it means."""
    needed: bool = True
    """True if its first key must be there."""

    def reads(self, given: Given) -> bool:
        """True if the keys of a mapping are those of this selector."""
        keys = given.value.keys()
        named = not self.needed or self.keys[0] in keys
        return named and len(keys) <= len(self.keys) and keys <= {*self.keys}


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
            return Positions(self._entry(Given(value, path)))
        if not entries:
            reject(path, "is empty")
        # A slice, because a `range` may be longer than len() can say.
        self._prompt.work.charge(len(entries[: self._prompt.work.limit]), Unit.ENTRY, path)
        runs = []
        for i, entry in enumerate(entries):
            given = Given(entry, f"{path}[{i}]")
            if plain_list(entry) is not None:
                given.refuse("is a list inside a list")
            if isinstance(entry, Mapping) and entry.keys() == {"except"}:
                self._except(given["except"])
                continue
            number = plain(entry)
            if isinstance(number, int) and not isinstance(number, bool):
                position = self._one(number, given.path)
                runs += self._outright([(position, position + 1)])
            else:
                runs += self._entry(given)
        if self._excepted and self.wants_last_generated:
            reject(path, "'last_generated' and 'except' cannot be told apart before the end")
        return Positions(runs) - Positions(self._excepted)

    def _except(self, given: Given) -> None:
        other = Selector(self._prompt)
        entries = plain_list(given.value)
        if any(isinstance(e, Mapping) and "except" in e for e in entries or ()):
            given.refuse("is an 'except' inside an 'except'")
        runs = other.resolve(given.value, given.path).runs()
        # A union of all at the end: one after the other, n of them would take n squared steps.
        self._prompt.work.charge(len(runs), Unit.ENTRY, given.path)
        self._excepted += runs
        self.wants_last_generated |= other.wants_last_generated

    def _entry(self, given: Given) -> list[Run]:
        value = given.value
        if isinstance(plain(value), str):
            if value not in NAMED_SELECTORS and (meant := _likely(plain(value))):
                given.refuse(_UNKNOWN, show(value) + meant)
            return self._by_name(given.choice(NAMED_SELECTORS, _UNKNOWN, _ALSO))
        if not isinstance(value, Mapping):
            given.refuse(_UNKNOWN, show(value) + _likely(plain(value)))
        for kind in KINDS:
            if kind.reads(given):
                return self._outright(kind.find(self, given))
        keys = unknown_keys(value, ())
        others = [key for key in keys if key not in _ALL_KEYS]
        meant = likely_key(others[0], value, _ALL_KEYS) if others else ""
        reject(given.path, f"no selector has the keys {keys}{meant}; {_ALLOWED}")

    def _by_name(self, name: str) -> list[Run]:
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

    def _bounds(self, given: Given) -> tuple[int, int]:
        """The position from which a mapping counts, and where what it can mean ends."""
        of = given["of"]
        if of.plain() is None:
            return 0, self._end
        prompt = of.choice(("prompt", "generated"), _OF) == "prompt"
        return (0, self._length) if prompt else (self._length, self._end)

    def _after(self, first: int, given: Given) -> int:
        """The position that a number means, counted from `first`."""
        number = given.int()
        if first and number < 0:
            given.refuse("{given} counts from the end of the answer, which is not known")
        return number + first

    def _at(self, given: Given) -> list[Run]:
        (first, end), at = self._bounds(given), given["at"]
        if not (entries := plain_list(at.value)):
            at.refuse("must be a list of positions, got {given}")
        self._prompt.work.charge(len(entries[: self._prompt.work.limit]), Unit.ENTRY, given.path)
        listed = (Given(entry, f"{at.path}[{i}]") for i, entry in enumerate(entries))
        found = [self._one(self._after(first, entry), entry.path, end) for entry in listed]
        return [(position, position + 1) for position in found]

    def _range(self, given: Given) -> list[Run]:
        first, end = self._bounds(given)
        numbers = {"start": first, "stop": end, "step": 1}
        for key in given.value.keys() & numbers.keys():
            numbers[key] = self._after(first if key != "step" else 0, given[key])
        if numbers["step"] < 1:
            given["step"].refuse("must be at least 1, got {given}")
        start = self._one(numbers["start"], given["start"].path, end)
        last = numbers["stop"] if numbers["stop"] >= 0 else numbers["stop"] + self._length
        if not start < last <= end:
            given["stop"].refuse(
                f"{show(numbers['stop'])} must be after start and at most {end}, "
                "one past the last row",
            )
        if numbers["step"] == 1:
            return [(start, last)]
        positions = range(start, last, numbers["step"])
        self._prompt.work.charge(len(positions), Unit.ENTRY, given.path)
        return [(p, p + 1) for p in positions]

    def _by_text(self, given: Given) -> list[Run]:
        """All tokens that have a character of a match."""
        chosen, asked = _chosen(given), given["text"]
        text = asked.text("must be a string, got {given}")
        if not text:
            asked.refuse("is empty")
        self._prompt.need_tokens(asked.path)
        if BROKEN in text:
            asked.refuse("has U+FFFD, which decoded text has in place of broken characters")
        if self._prompt.tokenizer is None:
            asked.refuse(
                "needs a tokenizer, and the engine was started with skip_tokenizer_init; "
                "start it without, or use token_ids",
            )
        for prompt in self._prompt.texts(asked.path):
            self._prompt.work.charge(len(prompt.text), Unit.SEARCHED, asked.path)
            found = prompt.find(text)
            if len(found):
                tokens = prompt.tokens_of(found[chosen], len(text))
                return self._few(_runs(tokens, 1), asked.path)
        self._prompt.without(text, asked.path)

    def _by_role(self, given: Given) -> list[Run]:
        """All tokens that have a character of a turn's content."""
        prompt, turns, path = self._prompt, self._prompt.turns, given.path
        truncated = prompt.written is not None and prompt.written.truncated
        found: list[Run] = []
        for index in need_turns(turns, given):
            assert turns is not None
            chat, pieces = turns.characters(index, len(prompt.text(path).text), prompt.work, path)
            tokens = tokens_of_turn(chat, pieces, [*prompt.texts(path)], truncated, path)
            found += _runs(tokens, 1)
        return self._few(found, path)

    def _images(self, given: Given) -> list[Run]:
        work, asked = self._prompt.work, given["images"]
        entries = plain_list(asked.value)
        if entries is not None:
            if not entries:
                asked.refuse("is empty")
            work.charge(len(entries[: work.limit]), Unit.ENTRY, asked.path)
        return self._few(self._prompt.media.images(asked, entries), asked.path)

    def _modality(self, given: Given) -> list[Run]:
        asked = given["modality"]
        return self._few(self._prompt.media.modality(asked, self._length), asked.path)

    def _by_token_ids(self, given: Given) -> list[Run]:
        chosen, asked = _chosen(given), given["token_ids"]
        listed = plain_list(asked.value)
        if listed is None:
            asked.refuse("must be a list of token ids, got {given}")
        if not listed:
            asked.refuse("is empty")
        self._prompt.need_tokens(asked.path)
        if len(listed) > self._length:
            asked.refuse(f"has {len(listed)} tokens, the prompt has {self._length}")
        token_ids = [Given(entry, f"{asked.path}[{i}]").int() for i, entry in enumerate(listed)]
        self._prompt.work.charge(self._length, Unit.SEARCHED, asked.path)
        found = occurrences(self._prompt.token_ids, token_ids) if NO_TOKEN not in token_ids else []
        if not found:
            shown = ", ".join([show(t) for t in token_ids[:8]] + ["..."][: len(token_ids) > 8])
            asked.refuse(f"[{shown}] is not in the prompt, which has {self._length} tokens")
        return self._few(_runs(found[chosen], len(token_ids)), asked.path)

    def _outright(self, runs: list[Run]) -> list[Run]:
        self._named += runs
        return runs

    def _few(self, runs: list[Run], path: str) -> list[Run]:
        self._prompt.work.charge(len(runs), Unit.ENTRY, path)
        return runs


KINDS = (
    Kind(("start", "stop", "step", "of"), Selector._range, needed=False),
    Kind(("at", "of"), Selector._at),
    Kind(("text", "which"), Selector._by_text),
    Kind(("token_ids", "which"), Selector._by_token_ids),
    Kind(("role", "turn"), Selector._by_role),
    Kind(("images",), Selector._images),
    Kind(("modality",), Selector._modality),
)
"""Selectors that are mappings; beside these there is `except`, in a list."""

_ALL_KEYS = tuple(dict.fromkeys(key for kind in KINDS for key in kind.keys))
_ALSO = {
    "answer": "all_generated",
    "completion": "all_generated",
    "generated": "all_generated",
    "generation": "all_generated",
    "last": "last_prompt",
    "last_token": "last_prompt",
    "prefill": "all_prompt",
    "prompt": "all_prompt",
}
"""Common name of positions -> the selector that means them."""

_RANGE = re.compile(r"(\d{1,9})[-:](\d{1,9})")
_MAPPINGS = ", ".join("{" + ", ".join(map(repr, kind.keys)) + "}" for kind in KINDS)
_ALLOWED = (
    f"use {', '.join(NAMED_SELECTORS)}, a list of positions, {_MAPPINGS} or a list of these, with "
    "{'except'}"
)
_UNKNOWN = f"unknown selector {{given}}; {_ALLOWED}"
_OF = "must be 'prompt' or 'generated', got {given}"
_CHOSEN = {"first": slice(1), "last": slice(-1, None), "all": slice(None)}
_WHICH = f"must be {', '.join(_CHOSEN)}, got {{given}}"


def _likely(value: Any) -> str:
    """Name the selector that was probably meant by a value that is no list, mapping or name."""
    start = stop = None
    if isinstance(value, slice) and value.step is None:
        start, stop = plain(value.start), plain(value.stop)
    elif isinstance(value, str) and (match := _RANGE.fullmatch(value)):
        # As a layer's range has its last one in it, and a slice has not.
        start, stop = int(match[1]), int(match[2]) + ("-" in value)
        if stop <= start:
            return ""
    elif isinstance(value, bool):
        return " (for a mask say the positions where it is true)"
    elif isinstance(value, int):
        return f" (did you mean [{show(value)}]?)"
    bounds = {"start": start, "stop": stop}
    said = ", ".join(f"{k!r}: {show(n)}" for k, n in bounds.items() if isinstance(n, int))
    return f" (did you mean {{{said}}}?)" if said else ""


def _chosen(given: Given) -> slice:
    """Return the slice that chooses among the matches of a selector, in order."""
    which = given.get("which", "all").choice(
        _CHOSEN, f"must be {', '.join(_CHOSEN)}, got {{given}}"
    )
    return _CHOSEN[which]


def _runs(begins: list[int] | np.ndarray, length: int) -> list[Run]:
    """Runs of `length` from each of `begins`, sorted; those that touch made one."""
    array = np.array(begins, dtype=np.int64)
    first = np.insert(array[1:] > array[:-1] + length, 0, True)
    last = np.roll(first, -1)
    return list(zip(array[first].tolist(), (array[last] + length).tolist(), strict=True))
