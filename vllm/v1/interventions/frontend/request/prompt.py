# SPDX-License-Identifier: Apache-2.0
"""Prompt of a request, as the selectors of positions see it."""

from collections.abc import Iterator, Sized
from typing import NoReturn

from vllm.tokenizers import TokenizerLike
from vllm.v1.capture import NO_TOKEN
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.chat import ChatTurns
from vllm.v1.interventions.frontend.request.media import Media
from vllm.v1.interventions.frontend.request.text import PromptText, decoded, last_place
from vllm.v1.interventions.frontend.request.written_text import WrittenText


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
