# SPDX-License-Identifier: Apache-2.0
"""Selectors by text and by token ids: exactly the tokens that a match touches, however it is split.

The tokenizers are real ones of `tokenizers`, made so that any piece of text can be a token.
"""

from __future__ import annotations

import time
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vllm.tokenizers import TokenizerLike
from vllm.v1.interventions.frontend.request import text as prompt_text
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.selectors import Selector
from vllm.v1.interventions.frontend.request.text import BROKEN, decoded, last_place, occurrences

pytestmark = pytest.mark.quick

LETTERS = "aab é€日😀👍🏽 e\u0301 "
"""Of one to four bytes, and two that are several characters."""
TEXTS = st.text(st.sampled_from(LETTERS), min_size=1, max_size=24)
START = "<|begin_of_text|>"


def tokenizer_of(pieces: list[str], decoder: Any, special: list[str]) -> TokenizerLike:
    backend = Tokenizer(WordLevel({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}))
    backend.decoder = decoder
    backend.add_special_tokens(special)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=special)
    return cast("TokenizerLike", made)  # what upstream does, too


def byte_level(pieces: list[bytes]) -> tuple[TokenizerLike, list[int]]:
    """As GPT-2, Llama 3 and Qwen write tokens; a token may begin or end within a character."""
    letters = bytes_to_unicode()
    written = [START if p == START.encode() else "".join(letters[b] for b in p) for p in pieces]
    ordinary = [w for w in written if w != START]
    tokenizer = tokenizer_of(["a", *ordinary], decoders.ByteLevel(), [START])
    return tokenizer, tokenizer.convert_tokens_to_ids(written)


def byte_fallback(pieces: list[bytes]) -> tuple[TokenizerLike, list[int]]:
    """As Llama 2 and Gemma do: pieces with ▁ for a space, and single bytes where there is none."""

    def write(piece: bytes) -> str:
        try:
            return piece.decode().replace(" ", "▁")
        except UnicodeDecodeError:
            assert len(piece) == 1
            return f"<0x{piece[0]:02X}>"

    written = [write(piece) for piece in pieces]
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = tokenizer_of(["a", *written], decoder, [])
    return tokenizer, tokenizer.convert_tokens_to_ids(written)


def cut(data: bytes, cuts: set[int]) -> list[bytes]:
    edges = [0, *sorted(c for c in cuts if 0 < c < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def by_character(text: str, whole: list[bool]) -> list[bytes]:
    """Each character as one piece or as its bytes."""
    pieces = []
    for i, character in enumerate(text):
        data = character.encode()
        if whole[i % len(whole)] or len(data) == 1:
            pieces.append(data)
        else:
            pieces += [data[j : j + 1] for j in range(len(data))]
    return pieces


def touched(text: str, part: str, pieces: list[bytes], which: str) -> list[int]:
    """The tokens that hold a byte of a match, found without any decoder."""
    begins = [i for i in range(len(text)) if text.startswith(part, i)]
    begins = {"first": begins[:1], "last": begins[-1:], "all": begins}[which]
    matched: set[int] = set()
    for begin in begins:
        first = len(text[:begin].encode())
        matched.update(range(first, first + len(part.encode())))
    ends = list(accumulate(map(len, pieces)))
    return [
        i
        for i, (end, p) in enumerate(zip(ends, pieces, strict=True))
        if matched & {*range(end - len(p), end)}
    ]


def select(tokenizer: TokenizerLike | None, prompt: list[int], **value: Any) -> list[int]:
    selector = Selector(Prompt(prompt, 3, tokenizer, Work(1 << 23)))
    positions = selector.resolve(value, "positions")
    assert selector.named == positions
    assert not selector.wants_last_generated
    return positions.array().tolist()


@st.composite
def texts_with_a_part(draw: st.DrawFn) -> tuple[str, str]:
    text = draw(TEXTS)
    begin = draw(st.integers(0, len(text) - 1))
    return text, text[begin : begin + draw(st.integers(1, 4))]


WHICH = st.sampled_from(["first", "last", "all"])


@settings(max_examples=300, deadline=None)
@given(texts_with_a_part(), st.sets(st.integers(1, 96)), WHICH)
@example(("a€a", "a"), {2, 3}, "all")  # a character over three tokens
@example(("€€", "€"), {1, 4}, "first")  # a token with the end of one and the start of another
@example(("aaa", "aa"), {1, 2}, "last")  # matches that overlap
def test_byte_level(texts: tuple[str, str], cuts: set[int], which: str) -> None:
    text, part = texts
    pieces = cut(text.encode(), cuts)
    tokenizer, token_ids = byte_level(pieces)
    assert decoded(token_ids, tokenizer, Work(1 << 23), "p").text == text
    assert select(tokenizer, token_ids, text=part, which=which) == touched(
        text, part, pieces, which
    )


@settings(max_examples=300, deadline=None)
@given(texts_with_a_part(), st.lists(st.booleans(), min_size=1), WHICH)
@example(("日日a", "日"), [False], "last")  # bytes after bytes
def test_byte_fallback(texts: tuple[str, str], whole: list[bool], which: str) -> None:
    text, part = texts
    pieces = by_character(text, whole)
    tokenizer, token_ids = byte_fallback(pieces)
    assert decoded(token_ids, tokenizer, Work(1 << 23), "p").text == text
    assert select(tokenizer, token_ids, text=part, which=which) == touched(
        text, part, pieces, which
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.binary(min_size=1, max_size=3), st.just(BROKEN.encode())), max_size=30),
    st.sets(st.integers(1, 9)),
    texts_with_a_part(),
)
def test_after_bytes_that_are_no_text(
    noise: list[bytes], cuts: set[int], texts: tuple[str, str]
) -> None:
    """A prompt may be cut anywhere, or be no text at all."""
    text, part = texts
    pieces = [*noise, b" ", *cut(text.encode(), cuts)]
    try:
        before = b"".join(noise).decode()
    except UnicodeDecodeError:
        before = ""
    assume(part not in before + " " + text[: len(part) - 1])
    tokenizer, token_ids = byte_level(pieces)
    expected = [i + len(noise) + 1 for i in touched(text, part, pieces[len(noise) + 1 :], "last")]
    assert select(tokenizer, token_ids, text=part, which="last") == expected


@pytest.mark.parametrize("noise", range(40))
def test_a_character_anywhere_after_noise(noise: int) -> None:
    """Wherever the decoder's window is cut, it does not cut a character."""
    pieces = [b"\xff"] * noise + [b"x\xf0", b"\x9f", b"\x98", b"\x80y"]
    tokenizer, token_ids = byte_level(pieces)
    assert select(tokenizer, token_ids, text="😀") == [noise + i for i in range(4)]
    assert select(tokenizer, token_ids, text="x") == [noise]
    assert select(tokenizer, token_ids, text="y") == [noise + 3]


def test_a_piece_too_many_would_be_seen() -> None:
    pieces = [b"a \xe2", b"\x82", b"\xac b"]
    tokenizer, token_ids = byte_level(pieces)
    assert select(tokenizer, token_ids, text="a") == [0]
    assert select(tokenizer, token_ids, text="€") == [0, 1, 2]
    assert select(tokenizer, token_ids, text="b") == [2]
    assert select(tokenizer, token_ids, text=" b") == [2]
    assert select(tokenizer, token_ids, text="a €") == [0, 1, 2]


def test_spaces() -> None:
    """Most tokens begin with their space; a text is found with it, without it, and at the start."""
    for make in (byte_level, byte_fallback):
        tokenizer, token_ids = make([b"Paris", b" is", b" not", b" Paris", b"ian", b" Par", b"is"])
        assert select(tokenizer, token_ids, text="Paris") == [0, 3, 5, 6]
        assert select(tokenizer, token_ids, text=" Paris") == [3, 5, 6]
        assert select(tokenizer, token_ids, text="Paris", which="first") == [0]
        assert select(tokenizer, token_ids, text="Paris", which="last") == [5, 6]
        assert select(tokenizer, token_ids, text="is") == [0, 1, 3, 6]


def test_a_decoder_that_treats_the_first_token_in_another_way() -> None:
    """Llama 2 drops the first space; a token decoded alone has none."""
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = tokenizer_of(["▁The", "▁cat", "s"], decoder, ["<s>"])
    assert decoded([0, 1, 2, 1], tokenizer, Work(1 << 23), "p").text == "The cats cat"
    assert select(tokenizer, [0, 1, 2, 1], text=" cat") == [1, 3]
    assert decoded([3, 0, 1], tokenizer, Work(1 << 23), "p").text == "<s> The cat"
    without_text = [0, 900, 900, 1]
    assert decoded(without_text, tokenizer, Work(1 << 23), "p").text == "The cat"
    assert select(tokenizer, [3, 0, 1], text=" The") == [1]


def test_tokens_without_text() -> None:
    """Placeholders of images have ids that no tokenizer knows; they do not hide what is around."""
    tokenizer, (a, b) = byte_level([b" one", b" two"])
    holes = [900] * 50
    assert decoded([*holes, a, *holes, b, *holes], tokenizer, Work(1 << 23), "p").text == " one two"
    assert select(tokenizer, [*holes, a, *holes, b], text=" two") == [101]
    assert select(tokenizer, [*holes, a, *holes, b], text="one two") == [50, 101]


def test_special_tokens_are_one_thing() -> None:
    pieces = [START.encode(), b"text", b" of", START.encode(), b"\xff", START.encode(), b"x"]
    tokenizer, token_ids = byte_level(pieces)
    assert select(tokenizer, token_ids, text="text") == [1]
    assert select(tokenizer, token_ids, text="of") == [2]
    assert select(tokenizer, token_ids, text=START) == [0, 3, 5]
    assert select(tokenizer, token_ids, text=START + "x") == [5, 6]
    for inside in ("|>", "begin", "|>text"):
        with pytest.raises(ValueError, match="is not in the prompt"):
            select(tokenizer, token_ids, text=inside)


@given(st.lists(st.integers(0, 2), min_size=1), st.integers(0, 40), st.integers(1, 4), WHICH)
def test_token_ids(token_ids: list[int], begin: int, length: int, which: str) -> None:
    begin %= len(token_ids)
    part = token_ids[begin : begin + length]
    begins = [i for i in range(len(token_ids)) if token_ids[i : i + len(part)] == part]
    begins = {"first": begins[:1], "last": begins[-1:], "all": begins}[which]
    expected = sorted({i + j for i in begins for j in range(len(part))})
    assert select(None, token_ids, token_ids=part, which=which) == expected


@given(st.text("ab"), st.text("ab", min_size=1))
def test_occurrences(text: str, part: str) -> None:
    assert occurrences(text, part) == [i for i in range(len(text)) if text.startswith(part, i)]


def test_all_is_the_default_and_lists_unite() -> None:
    tokenizer, token_ids = byte_level([b"a", b"b", b"a", b"c"])
    assert select(tokenizer, token_ids, text="a") == [0, 2]
    assert select(tokenizer, token_ids, token_ids=token_ids[:1]) == [0, 2]
    entries = [{"text": "a", "which": "last"}, {"token_ids": [token_ids[1]]}, -1, "last_generated"]
    selector = Selector(Prompt(token_ids, 3, tokenizer, Work(1 << 23)))
    assert selector.resolve(entries, "positions").array().tolist() == [1, 2, 3, 4, 5]
    assert selector.named.array().tolist() == [1, 2, 3]
    assert selector.wants_last_generated


def test_a_long_prompt_is_decoded_and_searched_soon() -> None:
    """Linear, also where a search is made to be slow. Of processor time, with much to spare."""
    tokenizer, token_ids = byte_level([b"a"] * 30_000 + [b"\xe2"] * 30_000 + [b"b"])
    prompt = Prompt(token_ids, 3, tokenizer, Work(1 << 23))
    began = time.process_time()
    for part in ("a" * 15_000, "a" * 29_999, "b"):
        assert len(Selector(prompt).resolve({"text": part}, "p"))
    with pytest.raises(ValueError, match="is not in the prompt"):
        Selector(prompt).resolve({"text": "a" * 15_000 + "c"}, "p")
    assert time.process_time() - began < 30


def test_decoding_is_charged_before_it_is_done() -> None:
    """By token, and for each call of the tokenizer where a character is spread over tokens."""
    tokenizer, whole = byte_level([b"a", b" b", b"\xc3\xa9"] * 40)
    most = len(whole) * Unit.DECODED
    assert decoded(whole, tokenizer, Work(most), "p").text == "a b\xe9" * 40
    with pytest.raises(ValueError, match="p: takes the request past max_request_work"):
        decoded(whole, tokenizer, Work(most - 1), "p")
    tokenizer, spread = byte_level([b"a", b"\xf0", b"\x9f\x98", b"\x80"] * 30)
    with pytest.raises(ValueError, match="p: takes the request past max_request_work"):
        decoded(spread, tokenizer, Work(most), "p")
    calls = 4 * len(spread)
    text = decoded(spread, tokenizer, Work(most + calls * Unit.ALONE), "p").text
    assert text == "a\U0001f600" * 30


def test_tokens_decoded_at_once_are_what_they_are_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for make in (byte_level, byte_fallback):
        pieces = [b"a", b" b", b"\xe2", b"\x82", b"\xac", b" ", b"a", b"\xff", b"c"] * 5
        tokenizer, token_ids = make(pieces)
        at_once = decoded(token_ids, tokenizer, Work(1 << 23), "p")
        with monkeypatch.context() as alone:
            alone.setattr(prompt_text, "_at_once", lambda *args: {})
            slowly = decoded(token_ids, tokenizer, Work(1 << 23), "p")
        assert at_once.text == slowly.text and "a b" in at_once.text
        assert np.array_equal(at_once.starts, slowly.starts)
        assert np.array_equal(at_once.ends, slowly.ends)
        assert not np.array_equal(at_once.starts, at_once.ends)


@given(st.text("ab"), st.text("ab", min_size=1))
def test_last_place(text: str, part: str) -> None:
    assert last_place(text, part) == text.rfind(part)


def test_searches_of_a_request_are_counted_together() -> None:
    token_ids = [1] * 100
    assert select(None, token_ids, token_ids=[1]) == list(range(100))
    search = {"token_ids": [1]}
    each = 100 + 2 * Unit.ENTRY  # what is searched, the entry, and the run that it comes to
    prompt = Prompt(token_ids, 3, None, Work(10 * each + 2 * Unit.ENTRY))
    Selector(prompt).resolve([search] * 7, "p")
    Selector(prompt).resolve([search] * 3, "p")
    with pytest.raises(ValueError, match=r"p\[1\]\.token_ids: takes the request past max_req"):
        Selector(prompt).resolve([0, search], "p")
