# SPDX-License-Identifier: Apache-2.0
"""A prompt as text, with the characters of each token: for selectors that say a text."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from tokenizers.models import BPE

from vllm.tokenizers import TokenizerLike
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.positions import Positions

BROKEN = "\ufffd"
"""Character that decoders write for bytes that are no character (yet)."""

_NONE = Positions()
_AT_ONCE = 4096
"""Tokens that are decoded in one call: while it begins and ends, no other thread runs."""
_MOST_PENDING = 16
_MOST_TOKENS_OF_A_CHARACTER = 4


class PromptText:
    """A text of the prompt, with the characters of each of its tokens.

    Args:
        text: what is searched.
        starts, ends: int64 [tokens], the characters of each token. A character that is spread over
            several tokens is of all of them. A token without text has none.
        special: bool [tokens], whether a token is one of the tokenizer's special ones.
        cut: bool [characters], those of which the prompt has no token, or not all; None if none is.
    """

    def __init__(
        self,
        text: str,
        starts: np.ndarray,
        ends: np.ndarray,
        special: np.ndarray,
        cut: np.ndarray | None = None,
    ) -> None:
        self.text, self.starts, self.ends, self._special = text, starts, ends, special
        self._inside_special = np.zeros(len(text) + 1, dtype=bool)
        for start, end in zip(starts[special], ends[special], strict=True):
            # Some take the space around them, which is none of theirs.
            written = text[start:end]
            first = start + len(written) - len(written.lstrip())
            self._inside_special[first + 1 : start + len(written.rstrip())] = True
        self._with_token = _sums(tokens_at(starts, ends, len(text)) > 0)
        self._cut = _sums(np.zeros(len(text), dtype=bool) if cut is None else cut)

    def find(self, text: str) -> np.ndarray:
        """Return the indices where `text` begins and the prompt has tokens of it: int64 [n].
        Matches may overlap.

        A special token is one thing: no match begins or ends inside. Otherwise "text" would be
        found in "<|begin_of_text|>".
        """
        # What is longer cannot be in it, and a search would first make a table of its length.
        places = occurrences(self.text, text) if len(text) <= len(self.text) else []
        found = np.array(places, dtype=np.int64)
        behind = found + len(text)
        found = found[~(self._inside_special[found] | self._inside_special[behind])]
        behind = found + len(text)
        there = self._with_token[behind] > self._with_token[found]
        return found[there & (self._cut[behind] == self._cut[found])]

    def within(self, start: int, stop: int) -> "PromptText":
        """These characters of it alone; all tokens, of which those elsewhere have none."""
        starts, ends = (np.clip(edges, start, stop) - start for edges in (self.starts, self.ends))
        return PromptText(self.text[start:stop], starts, ends, self._special)

    def has_all(self, start: int, stop: int) -> bool:
        """Tell whether the prompt has all tokens of these characters."""
        return bool(self._cut[start] == self._cut[stop])

    def tokens_of(self, found: np.ndarray, length: int) -> np.ndarray:
        """The tokens with a character in a match of `length` from one of `found`: int64 [n]."""
        matched = _sums(tokens_at(found, found + length, len(self.text)) > 0)
        return np.flatnonzero(matched[self.ends] > matched[self.starts])


def tokens_at(starts: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """Number of tokens that have each of `length` characters: int64 [length]."""
    edges = np.zeros(length + 1, dtype=np.int64)
    np.add.at(edges, starts, 1)
    np.add.at(edges, ends, -1)
    return np.cumsum(edges)[:-1]


def _sums(flags: np.ndarray) -> np.ndarray:
    """Number of flags before each place, and before the end, that are true."""
    return np.concatenate([[0], np.cumsum(flags)])


def decoded(
    token_ids: list[int],
    tokenizer: TokenizerLike,
    work: Work,
    path: str,
    silent: Positions = _NONE,
) -> PromptText:
    """Return what the prompt's tokens say, special tokens included.

    Found with nothing but `decode`, which every tokenizer has, and in linear time: token by token,
    behind the few tokens before it, since many decoders treat the first token in another way.

    Raises:
        InterventionError: for `path`, it would be more than what `work` has left.

    Positions in `silent`, those of images, are no text, whatever their tokens say: in their place
    stands `BROKEN`, of no token and in no text that is looked for, so none is found across them.
    """
    special = set(tokenizer.all_special_ids)
    work.charge(len(token_ids), Unit.DECODED, path)
    at_once = _at_once([t for i, t in enumerate(token_ids) if i not in silent], tokenizer)
    decoder = _Decoder(tokenizer, at_once, lambda: work.charge(1, Unit.ALONE, path))
    for position, token_id in enumerate(token_ids):
        if position in silent:
            decoder.skip()
        else:
            decoder.add(token_id, token_id in special)
    text = decoder.finish()
    starts, ends = (
        np.clip(np.array(edges, dtype=np.int64), 0, len(text))
        for edges in (decoder.starts, decoder.ends)
    )
    return PromptText(text, starts, ends, np.array([t in special for t in token_ids], dtype=bool))


def _at_once(token_ids: list[int], tokenizer: TokenizerLike) -> dict[tuple[int, ...], str]:
    """Tokens -> what they decode to, for each token and each pair of neighbours.

    The library of fast tokenizers decodes many in one call, which lets other threads run and takes
    a tenth of the time. Others have none here.
    """
    from transformers import TokenizersBackend

    fast: object = tokenizer
    if (
        not isinstance(fast, TokenizersBackend)
        or type(fast)._decode is not TokenizersBackend._decode
        # transformers does not do this to what BPE gives, whatever the flag says.
        or (fast.clean_up_tokenization_spaces and not isinstance(fast.backend_tokenizer.model, BPE))
        or fast.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
    ):
        return {}
    texts: dict[tuple[int, ...], str] = {}
    for start in range(0, len(token_ids), _AT_ONCE):
        part = token_ids[start : start + _AT_ONCE + 1]
        new = list({*zip(part), *pairwise(part)} - texts.keys())
        found = fast.backend_tokenizer.decode_batch(new, skip_special_tokens=False)
        texts |= zip(new, found, strict=True)
    return texts


def last_place(text: str, part: str) -> int:
    """Return the index where `part` begins last in `text`; -1 if nowhere.

    The time is linear; that of `str.rfind` is not, for texts that are made for it.
    """
    if text.endswith(part):
        return len(text) - len(part)
    return max(occurrences(text, part), default=-1) if len(part) <= len(text) else -1


def occurrences(text: Sequence[Hashable], part: Sequence[Hashable]) -> list[int]:
    """Return the indices where `part`, not empty, begins in `text`; matches may overlap.

    The search takes linear time (Knuth, Morris, Pratt): both may be a client's, and made to be
    slow.
    """
    borders = [0]  # [i]: length of the longest proper beginning of part[: i + 1] that also ends it
    length = 0
    for item in part[1:]:
        while length and item != part[length]:
            length = borders[length - 1]
        length += item == part[length]
        borders.append(length)
    found: list[int] = []
    length = 0
    for end, item in enumerate(text, start=1):
        while length and item != part[length]:
            length = borders[length - 1]
        if item == part[length]:
            length += 1
            if length == len(part):
                found.append(end - length)
                length = borders[-1]
    return found


class _Decoder:
    """Decodes token by token, and notes which characters each token has.

    Args:
        at_once: what some tokens decode to.
        charge: is called before others are decoded.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        at_once: Mapping[tuple[int, ...], str],
        charge: Callable[[], None],
    ) -> None:
        self._tokenizer, self._at_once, self._charge = tokenizer, at_once, charge
        self.starts: list[int] = []
        self.ends: list[int] = []
        self._text: list[str] = []
        self._length = 0  # of what is in _text
        self._context: list[int] = []  # the last tokens before the pending ones that had text
        self._known = 0  # characters of the context alone
        self._pending: list[int] = []
        self._decoded = ""  # of context and pending

    def add(self, token_id: int, special: bool) -> None:
        before = self._decoded
        self._pending.append(token_id)
        decoded = self._decoded = self._decode(self._context + self._pending)
        shift = self._length - self._known
        # The last character may have been a part of one that this token goes on with.
        goes_on = before.endswith(BROKEN) and not special
        self.starts.append(shift + len(before) - goes_on)
        self.ends.append(shift + len(decoded))
        shrank = len(decoded) < len(before)
        if shrank:
            # A byte fallback writes BROKEN for each byte of the run until it is complete.
            for i in range(1, len(self._pending) + 1):
                self.starts[-i], self.ends[-i] = self._length, shift + len(decoded)
        if shrank or not decoded.endswith(BROKEN):
            self._settle(len(self._pending))
        elif len(self._pending) == _MOST_PENDING:
            # Bytes that are no text, or text with BROKEN in it: no need to wait.
            self._settle(_MOST_PENDING - _MOST_TOKENS_OF_A_CHARACTER)

    def skip(self) -> None:
        """A token that is no text."""
        self._settle(len(self._pending))
        self._text.append(BROKEN)
        self._length += 1
        self.starts.append(self._length)
        self.ends.append(self._length)

    def finish(self) -> str:
        self._settle(len(self._pending))
        return "".join(self._text)

    def _settle(self, count: int) -> None:
        """The first `count` pending tokens become text, and the context of those to come."""
        done, self._pending = self._pending[:count], self._pending[count:]
        if self._pending:
            self._decoded = self._decode(self._context + done)
        text = self._decoded[self._known :]
        self._text.append(text)
        self._length += len(text)
        if text:
            self._context = done
        self._decoded = self._decode(self._context)
        self._known = len(self._decoded)
        if self._pending:
            self._decoded = self._decode(self._context + self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        text = self._at_once.get(tuple(token_ids))
        if text is None:
            self._charge()
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
