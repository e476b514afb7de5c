# SPDX-License-Identifier: Apache-2.0
"""The text that a prompt was written as: for texts that its tokens do not decode to."""

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.inputs import TokensPrompt
from vllm.tokenizers import TokenizerLike
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.text import PromptText, tokens_at

if TYPE_CHECKING:
    from transformers import TokenizersBackend

    from vllm.config import VllmConfig
    from vllm.renderers.params import TokenizeParams

KEY = "tokenize_params"
"""The key of an engine input that has the `TokenizeParams` of its text."""

_SPACES = re.compile(r"^([Ġ▁\s]*)(.*?)([Ġ▁\s]*)$", re.DOTALL)
"""A token, without the spaces at its ends."""


def keep_params(engine_input: Any, params: "TokenizeParams | None", config: "VllmConfig") -> None:
    """Give an engine input what its text was tokenized with, where a request may look for texts."""
    enabled = config.steering_config.enable_steering or config.capture_config.enabled
    if params is not None and enabled:
        engine_input[KEY] = params


def written_text(engine_input: Mapping[str, Any]) -> "WrittenText | None":
    """Return the text of an engine input; None if it was given as tokens."""
    text, params = engine_input.get("prompt"), engine_input.get(KEY)
    return WrittenText(text, params) if text and params is not None else None


class WrittenText:
    """The text that the tokenizer got. Make one per request: it keeps the characters of each token.

    Tokenizers change a text before they cut it: they compose or drop accents, make it lower case,
    replace characters, strip spaces. Fast ones say which of its characters each token is.
    """

    def __init__(self, text: str, params: "TokenizeParams") -> None:
        self.text = text
        self.truncated = params.truncate_prompt_tokens is not None
        """True if the prompt may lack tokens of it."""
        self._params = params
        self._placed: PromptText | None = None
        self._tried = False

    def placed(
        self, token_ids: list[int], tokenizer: TokenizerLike, work: Work, path: str
    ) -> PromptText | None:
        """The text with the characters of each token of the prompt; None if these are not known."""
        if not self._tried:
            work.charge(len(self.text) * (1 + self.truncated), Unit.TOKENIZED, path)
            self._placed, self._tried = self._place(token_ids, tokenizer), True
        return self._placed

    def _place(self, token_ids: list[int], given: TokenizerLike) -> PromptText | None:
        from transformers import TokenizersBackend

        tokenizer: object = given
        if not isinstance(tokenizer, TokenizersBackend):
            return None
        params = self._params
        prompt = _cut(tokenizer, self.text, **params.get_encode_kwargs())
        params.apply_post_tokenization(given, prompt)
        if prompt["prompt_token_ids"] != token_ids:
            return None
        starts, ends = _edges(prompt, len(token_ids))
        cut = None
        if self.truncated:
            whole = _cut(tokenizer, self.text, add_special_tokens=params.add_special_tokens)
            edges = _edges(whole, len(whole["prompt_token_ids"]))
            cut = tokens_at(*edges, len(self.text)) > tokens_at(starts, ends, len(self.text))
        special = np.isin(token_ids, list(tokenizer.all_special_ids))
        return PromptText(self.text, starts, ends, special, cut)


def _edges(prompt: TokensPrompt, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The characters of each token: starts, ends, int64 [tokens]. Padding has none."""
    spans = np.zeros((length, 2), dtype=np.int64)
    given = prompt["prompt_token_offsets"] or []
    spans[: len(given)] = np.reshape(np.array(given, dtype=np.int64), (-1, 2))
    return spans[:, 0], spans[:, 1]


def _cut(tokenizer: "TokenizersBackend", text: str, **kwargs: Any) -> TokensPrompt:
    """Tokenize a text, with the characters of each token."""
    encoding = tokenizer(text, return_offsets_mapping=True, verbose=False, **kwargs)
    trims, spans = _trims(tokenizer), []
    for token, (start, end) in zip(encoding.tokens(), encoding["offset_mapping"], strict=True):
        spaces = _SPACES.match(token)
        assert spaces is not None
        before, inner, after = map(len, spaces.groups())
        if trims:
            # The first token may have a space that nobody wrote.
            start, end = max(start - before, 0), end + after if inner else end
        unwritten = not inner and text[start:end].strip() == text[start:end]
        spans.append((start, start if unwritten else end))
    return TokensPrompt(prompt_token_ids=encoding["input_ids"], prompt_token_offsets=spans)


def _trims(tokenizer: "TokenizersBackend") -> bool:
    """Tell whether the spaces at the ends of tokens are left out of what it says of their
    characters."""
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None:
        return False
    state = json.loads(processor.__getstate__())
    return any(part.get("trim_offsets") for part in state.get("processors", [state]))
