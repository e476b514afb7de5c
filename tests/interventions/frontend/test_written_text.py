# SPDX-License-Identifier: Apache-2.0
"""Texts are found as they were written, whatever a tokenizer makes of them before it cuts them.

The tokenizers are small ones of `tokenizers`, with each kind of normalizer that models have.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import normalizers as norms
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.selectors import Selector
from vllm.v1.interventions.frontend.request.text import decoded
from vllm.v1.interventions.frontend.request.written_text import WrittenText

pytestmark = pytest.mark.quick

LETTERS = "abB  Éé€日😀ﬁａ\u0301\t"
"""Of one to four bytes; a mark that composes with what is before it, a ligature, a wide letter."""
MERGES = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁", "▁"), ("Ġ", "Ġ"), ("Ġ", "a"), ("Ġ", "ab")]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
START = AddedToken("<s>", special=True)


def with_start(backend: Tokenizer) -> Tokenizer:
    """Each prompt begins with a token that nobody wrote."""
    backend.add_special_tokens([START])
    start = [("<s>", backend.token_to_id("<s>"))]
    template = processors.TemplateProcessing("<s> $A", special_tokens=start)
    before = [backend.post_processor] if backend.post_processor else []
    backend.post_processor = processors.Sequence([*before, template])
    return backend


def byte_level(normalizer: Any = None, trim: bool = False, prefix: bool = False) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen; with `trim`, offsets lack the spaces of their tokens."""
    merges = [pair for pair in MERGES if "▁" not in pair[0]]
    pieces = [*bytes_to_unicode().values(), *map("".join, merges)]
    backend = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.post_processor = processors.ByteLevel(add_prefix_space=prefix, trim_offsets=trim)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return with_start(backend)


def byte_fallback(*before: Any, metaspace: bool = False) -> Tokenizer:
    """As Llama 2, Gemma and Mistral: a ▁ for a space, and bytes for what has no token."""
    merges = [pair for pair in MERGES if "Ġ" not in pair[0]]
    pieces = ["<unk>", *BYTES, "▁", "a", "b", *map("".join, merges)]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    spaces = [norms.Prepend("▁"), norms.Replace(" ", "▁")]
    backend.normalizer = norms.Sequence([*before, *([] if metaspace else spaces)])
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ends = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*ends, decoders.Strip(" ", 1, 0)])
    return with_start(backend)


def unigram(rule: str) -> Tokenizer:
    """As T5 and XLM-R: the normalizer that sentencepiece compiled into their models."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab a b Bab"] * 9), model_writer=model, vocab_size=14,
        normalization_rule_name=rule, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    compiled = ModelProto.FromString(model.getvalue())
    pieces = ["<unk>", "▁", "▁a", "a", "b", "ab", "B", "é", "€", "日", "😀", "f", "i", "É"]
    backend = Tokenizer(Unigram([(piece, -1.0 - len(piece)) for piece in pieces], unk_id=0))
    backend.normalizer = norms.Sequence(
        [
            norms.Precompiled(compiled.normalizer_spec.precompiled_charsmap),
            norms.Replace(Regex(" {2,}"), " "),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return with_start(backend)


def word_pieces(**settings: bool) -> Tokenizer:
    """As BERT: control characters go, spaces are of no token, and an unknown word is one."""
    pieces = ["[UNK]", "a", "b", "B", "##a", "##b", "##B", "e", "##e", "é", "日", "##日", "ab"]
    backend = Tokenizer(WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.normalizer = norms.BertNormalizer(**settings)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return with_start(backend)


STRIPPED = norms.Sequence([norms.NFD(), norms.StripAccents()])
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "trimmed": partial(byte_level, trim=True),
    "prefix space": partial(byte_level, prefix=True),
    "trimmed prefix space": partial(byte_level, trim=True, prefix=True),
    "trimmed lower case": partial(byte_level, norms.Lowercase(), trim=True),
    "trimmed NFKC": partial(byte_level, norms.NFKC(), trim=True, prefix=True),
    "lower case": partial(byte_level, norms.Lowercase()),
    "NFC": partial(byte_level, norms.NFC()),
    "NFD": partial(byte_level, norms.NFD()),
    "NFKC": partial(byte_level, norms.NFKC()),
    "NFKD": partial(byte_level, norms.NFKD()),
    "accents": partial(byte_level, STRIPPED),
    "strip": partial(byte_level, norms.Strip()),
    "replace": partial(byte_level, norms.Replace("b", "aa")),
    "replace spaces": partial(byte_level, norms.Replace(Regex(r"\s+"), " ")),
    "fallback": byte_fallback,
    "fallback metaspace": partial(byte_fallback, metaspace=True),
    "fallback NFKC": partial(byte_fallback, norms.NFKC()),
    "fallback lower case": partial(byte_fallback, norms.Lowercase(), metaspace=True),
    "nmt_nfkc": partial(unigram, "nmt_nfkc"),
    "nfkc_cf": partial(unigram, "nfkc_cf"),
    "BERT": word_pieces,
    "BERT cased": partial(word_pieces, lowercase=False, strip_accents=False),
}


@cache
def made(kind: str) -> tuple[Any, Tokenizer]:
    """A tokenizer as the engine has it, and one that leaves no space out of its offsets."""
    backend = KINDS[kind]()
    tokenizer = get_cached_tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    )
    settings = {name: v for name, v in getattr(KINDS[kind], "keywords", {}).items()}
    if settings.pop("trim", False):
        backend = byte_level(*cast("partial[Any]", KINDS[kind]).args, **settings)
    return maybe_make_thread_pool(cast("Any", tokenizer)), backend


def select(
    tokenizer: Any, ids: list[int], text: str, params: TokenizeParams | None, part: str, which: str
) -> list[int]:
    written = WrittenText(text, params or TokenizeParams(None))
    prompt = Prompt(ids, 3, cast("TokenizerLike", tokenizer), Work(1 << 23), written=written)
    value = {"text": part, "which": which}
    return Selector(prompt).resolve(value, "p").array().tolist()


def spans_of(encoding: Encoding, text: str) -> list[tuple[int, int]]:
    """The characters of each token. A space that nobody wrote has none."""
    spans = []
    for token, (a, b) in zip(encoding.tokens, encoding.offsets, strict=True):
        written = any(c.isspace() for c in text[a:b]) or set(token) - set("Ġ▁")
        spans.append((a, b) if written else (0, 0))
    return spans


def matches(text: str, part: str, spans: list[tuple[int, int]]) -> list[set[int]]:
    """The tokens of each match, by where the tokenizer says they are; none of a match without."""
    begins = [i for i in range(len(text)) if text[i:].startswith(part)]
    over = [
        {n for n, (a, b) in enumerate(spans) if max(a, begin) < min(b, begin + len(part))}
        for begin in begins
    ]
    return [tokens for tokens in over if tokens]


def chosen(found: list[set[int]], which: str) -> list[int]:
    kept = {"first": found[:1], "last": found[-1:], "all": found}[which]
    return sorted(set().union(*kept))


@st.composite
def texts_with_a_part(draw: st.DrawFn) -> tuple[str, str]:
    # A letter first, which has a token with the space that some put before it.
    text = "a" + draw(st.text(st.sampled_from(LETTERS), max_size=20))
    begin = draw(st.integers(0, len(text) - 1))
    return text, text[begin : begin + draw(st.integers(1, 4))]


WHICH = st.sampled_from(["first", "last", "all"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(texts_with_a_part(), WHICH)
def test_the_tokens_of_what_was_written(kind: str, texts: tuple[str, str], which: str) -> None:
    (text, part), (tokenizer, whole) = texts, made(kind)
    ids = tokenizer(text)["input_ids"]
    assert ids == whole.encode(text).ids
    found = matches(text, part, spans_of(whole.encode(text), text))
    if found:
        assert select(tokenizer, ids, text, None, part, which) == chosen(found, which)
    with pytest.raises(ValueError, match="is not in the prompt"):
        select(tokenizer, ids, text, None, part + "Q", which)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(texts_with_a_part(), st.integers(1, 16), st.sampled_from([None, "left", "right"]), WHICH)
def test_of_a_truncated_prompt(
    kind: str, texts: tuple[str, str], limit: int, side: Any, which: str
) -> None:
    """A match counts if the prompt has all of its tokens, not if a piece of it is left."""
    (text, part), (tokenizer, whole) = texts, made(kind)
    params = TokenizeParams(64, truncate_prompt_tokens=limit, truncation_side=side)
    encoded = whole.encode(text)
    count = len(encoded.ids)
    if side is None:
        # The tokenizer does it, and keeps what it puts before the text.
        kept = [0, *range(1, min(limit, count))]
        assume(limit > 1)
    else:
        kept = [*range(count)][-limit:] if side == "left" else [*range(count)][:limit]
    ids = [encoded.ids[i] for i in kept]
    found = [
        {kept.index(i) for i in tokens}
        for tokens in matches(text, part, spans_of(encoded, text))
        if tokens <= set(kept)
    ]
    if found:
        assert select(tokenizer, ids, text, params, part, which) == chosen(found, which)
    elif part not in decoded(ids, tokenizer, Work(1 << 23), "p").text:
        with pytest.raises(ValueError, match=r"is not (in|wholly in) the"):
            select(tokenizer, ids, text, params, part, which)


class Lower(PreTrainedTokenizer):
    """A slow one, which has no offsets."""

    def __init__(self) -> None:
        self._letters = "abcdefghijklmnopqrstuvwxyz "
        super().__init__()

    @property
    def vocab_size(self) -> int:
        return len(self._letters)

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self._letters)}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text.lower())

    def _convert_token_to_id(self, token: str) -> int:
        return self._letters.index(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self._letters[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_a_slow_tokenizer_says_what_it_made_of_a_text() -> None:
    tokenizer = Lower()
    text = "In Paris"
    ids = tokenizer(text)["input_ids"]
    assert select(tokenizer, ids, text, None, "paris", "all") == [*range(3, 8)]
    with pytest.raises(ValueError, match=r"'Paris' is not .* changed it, which says 'in paris'"):
        select(tokenizer, ids, text, None, "Paris", "all")


def test_what_tokens_say_counts_where_nobody_wrote_it() -> None:
    """Special tokens that the tokenizer adds, and what it makes of other letters."""
    tokenizer, _ = made("lower case")
    text = "Ab aB <s>b"
    ids = tokenizer(text)["input_ids"]
    names = tokenizer.convert_ids_to_tokens(ids)
    assert names == ["<s>", "ab", "Ġab", "Ġ", "<s>", "b"]
    for part, expected in {"Ab": [1], "aB": [2], "ab": [1, 2], "<s>": [4], "<s>b": [4, 5]}.items():
        assert select(tokenizer, ids, text, None, part, "all") == expected
    for part in ("s>", "AB", "<s>B"):
        with pytest.raises(ValueError, match="is not in the prompt, which has 6 tokens"):
            select(tokenizer, ids, text, None, part, "all")
    first = tokenizer("Ab")["input_ids"]
    assert select(tokenizer, first, "Ab", None, "<s>", "all") == [0]


def test_a_text_beside_other_tokens_is_not_theirs() -> None:
    """A client may give both; the tokens are the prompt."""
    tokenizer, _ = made("lower case")
    ids = tokenizer("Ab b")["input_ids"]
    assert select(tokenizer, ids, "Ab b", None, "Ab", "all") == [1]
    for text in ("Ab bb", "B Ab"):
        with pytest.raises(ValueError, match="'Ab' is not in the prompt"):
            select(tokenizer, ids, text, None, "Ab", "all")
    with pytest.raises(ValueError, match="'Ab' is not in the prompt, which has"):
        Selector(Prompt(ids, 3, tokenizer, Work(1 << 23))).resolve({"text": "Ab"}, "p")


def test_a_text_is_tokenized_again_once_and_charged_before() -> None:
    tokenizer, _ = made("NFC")
    text = "e\u0301 " * 100
    ids = tokenizer(text)["input_ids"]
    decoding = Work(1 << 23)
    decoded(ids, tokenizer, decoding, "p")
    again = Unit.TOKENIZED * len(text) + decoding._spent

    def search(work: Work, times: int) -> None:
        prompt = Prompt(ids, 3, tokenizer, work, written=WrittenText(text, TokenizeParams(None)))
        Selector(prompt).resolve([{"text": "e\u0301"}] * times, "p")

    # What it decodes to and what was written are searched.
    each = len(tokenizer.decode(ids)) + len(text) + 2 * Unit.ENTRY + 100 * Unit.ENTRY
    search(Work(again + 3 * each), 3)
    with pytest.raises(ValueError, match=r"p\[0\]\.text: takes the request past"):
        search(Work(again), 1)
    with pytest.raises(ValueError, match=r"p\[2\]\.text: takes the request past"):
        search(Work(again + 2 * each + Unit.ENTRY), 3)
