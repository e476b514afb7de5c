# SPDX-License-Identifier: Apache-2.0
"""Prompts given as embeddings, whole or in part: rows, steering, selectors and cached blocks are
those of the same prompt given as tokens, whose embeddings are rows of the model's table."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.runner import READ_TOLERANCE, WRITE_TOLERANCE, Reference
from tests.serving.test_capture_serving import add_tokenizer
from tests.support.serving import (
    Ask,
    Judge,
    capture,
    log_probs,
    prompt_of,
    relative,
    vector,
    watching,
    worst_row,
)
from vllm import LLM
from vllm.v1.capture import NO_TOKEN, reader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2]

PROMPT, OTHER = prompt_of(40, 70), prompt_of(75, 71)
FIRST, STOP = 12, 29
"""What of a mixed prompt is given as embeddings."""
EMBEDDED = range(FIRST, STOP)
STEERED = {"steering_vectors": {"post_attn": {1: vector(70)}}}


@dataclass(frozen=True)
class Pair:
    """An engine that takes embeddings, and the model in transformers."""

    llm: LLM
    judge: Judge
    table: torch.Tensor
    written: Path

    def embeds(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, hidden]: those of the model's table."""
        return self.table[token_ids].clone()

    def whole(self, token_ids: list[int]) -> Any:
        """A prompt of embeddings alone."""
        return {"prompt_embeds": self.embeds(token_ids)}

    def mixed(self, token_ids: list[int]) -> Any:
        """One whose middle is embeddings; what stands there as tokens are others."""
        is_token = [i not in EMBEDDED for i in range(len(token_ids))]
        return {
            "prompt_embeds": self.embeds(token_ids) * ~torch.tensor(is_token)[:, None],
            "prompt_token_ids": [5 if i in EMBEDDED else t for i, t in enumerate(token_ids)],
            "prompt_is_token_ids": is_token,
        }

    def generate(self, prompts: list[Any], fields: list[dict[str, Any]]) -> list[Any]:
        """Greedy completions with all log-probabilities, in one batch."""
        asked = [Ask([], one).params() for one in fields]
        return self.llm.generate(prompts, asked, use_tqdm=False)

    def check(self, ask: Ask, completion: Any, unknown: range, positions: list[int]) -> None:
        """Rows and log-probabilities are the model's at `ask.prompt`, which was sent otherwise."""
        sequence = [*ask.prompt, *completion.token_ids][:-1]
        forward = self.judge.reference.run(sequence, self.judge.deltas(ask, sequence))
        result = completion.capture_results["inline"]
        assert result.status == "ok" and result.payload
        for site, rows in result.payload.items():
            assert rows.positions.tolist() == positions
            said = [NO_TOKEN if p in unknown else sequence[p] for p in positions]
            assert rows.token_ids.tolist() == said
            assert worst_row(rows.values, forward.rows[site][positions]) <= READ_TOLERANCE
        if completion.logprobs is not None:
            error, moved = self.judge.log_prob_errors(ask, completion)
            assert error <= WRITE_TOLERANCE
            assert not ask.steered or moved > 0.02


@pytest.fixture(scope="module")
def pair(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    directory = tmp_path_factory.mktemp("llama") / "model"
    written = tmp_path_factory.mktemp("rows")
    shutil.copytree(path, directory)
    add_tokenizer(directory)
    llm = make_llm(
        directory,
        enable_steering=True,
        enable_prompt_embeds=True,
        capture_consumers=["inline", f"filesystem:root={written}"],
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=24,
        skip_tokenizer_init=False,
    )
    model = models.load(row, path)
    embedding: Any = model.get_input_embeddings()
    table = embedding.weight.detach().float()
    yield Pair(llm, Judge(Reference(row, model)), table, written)
    shut_down(llm)


@pytest.mark.parametrize("fields", [{}, STEERED], ids=["plain", "steered"])
def test_rows_are_those_of_the_same_tokens(pair: Pair, fields: dict[str, Any]) -> None:
    """Tokens, embeddings and a mixture in one batch, computed in pieces; a twin with others from
    some position on has other rows from there on, and equal ones before."""
    asked = {**fields, **capture("all")}
    changed = pair.whole(PROMPT)
    changed["prompt_embeds"][20:] = changed["prompt_embeds"][20:].flip(0)
    prompts = [{"prompt_token_ids": PROMPT}, pair.whole(PROMPT), pair.mixed(PROMPT), changed]
    tokens, whole, mixed, twin = [o.outputs[0] for o in pair.generate(prompts, [asked] * 4)]
    everything = list(range(len(PROMPT) + len(tokens.token_ids) - 1))
    ask = Ask(PROMPT, asked)
    pair.check(ask, tokens, range(0), everything)
    pair.check(ask, whole, range(len(PROMPT)), everything)
    pair.check(ask, mixed, EMBEDDED, everything)
    site = "post_block", 2
    ours, others = (c.capture_results["inline"].payload[site].values for c in (whole, twin))
    assert worst_row(others[:20], ours[:20]) <= READ_TOLERANCE
    apart = (others[20 : len(PROMPT)] - ours[20 : len(PROMPT)]).norm(dim=-1)
    assert (apart / ours[20 : len(PROMPT)].norm(dim=-1)).min() > 10 * READ_TOLERANCE
    assert relative(log_probs(twin), log_probs(whole)) > 10 * WRITE_TOLERANCE


SELECTED: list[tuple[Any, list[int]]] = [
    ("last_prompt", [39]),
    ([0, -2], [0, 38]),
    ({"start": 10, "stop": 14}, [10, 11, 12, 13]),
    ({"modality": "prompt_embeds"}, list(EMBEDDED)),
    ({"modality": "text"}, [i for i in range(40) if i not in EMBEDDED]),
    ({"text": "t77"}, [0, 35]),
    ({"token_ids": [77]}, [0, 35]),
]
"""Of a mixed prompt with token 77 at 0, 20 and 35: at 20 there is an embedding."""


@pytest.mark.parametrize(("positions", "expected"), SELECTED)
def test_selectors_of_a_mixed_prompt(pair: Pair, positions: Any, expected: list[int]) -> None:
    """Those of vectors mean the same."""
    prompt = [77 if i in (0, 20, 35) else t if t != 77 else 78 for i, t in enumerate(PROMPT)]
    read = capture(positions, ("post_block",), [1])
    moved = {"vector": vector(71), "positions": positions}
    fields = {**read, "steering_vectors": {"post_block": {1: moved}}, "max_tokens": 2}
    plain, steered = (
        o.outputs[0].capture_results["inline"].payload["post_block", 1]
        for o in pair.generate([pair.mixed(prompt)] * 2, [{**read, "max_tokens": 2}, fields])
    )
    assert plain.positions.tolist() == expected == steered.positions.tolist()
    added = steered.values - plain.values
    assert worst_row(added, vector(71).expand(len(expected), -1)) <= 100 * READ_TOLERANCE
    if "token_ids" in positions:
        with pytest.raises(ValueError, match=r"^capture\.inline\.positions\.token_ids: \[5\] is"):
            pair.generate([pair.mixed(prompt)], [capture({"token_ids": [5]})])


@pytest.mark.parametrize("name", ["text", "token_ids"])
def test_what_means_tokens_is_refused_where_there_are_none(pair: Pair, name: str) -> None:
    asked = {"text": "t77"} if name == "text" else {"token_ids": [NO_TOKEN]}
    said = "means tokens, and the prompt was given as embeddings"
    with pytest.raises(ValueError, match=rf"^capture\.inline\.positions\.{name}: {said}"):
        pair.generate([pair.whole(PROMPT)], [capture(asked)])
    steered = {"post_block": {1: {"vector": vector(72), "positions": asked}}}
    with pytest.raises(ValueError, match=rf"positions\.{name}: {said}"):
        pair.generate([pair.whole(PROMPT)], [{"steering_vectors": steered}])


def test_texts_and_files_say_which_rows_had_no_token(pair: Pair) -> None:
    fields = capture([FIRST - 1, FIRST, 39], ("post_block",), [1])
    fields["capture"]["inline"]["tokens"] = True
    fields["capture"]["filesystem"] = {
        "hooks": {"post_block": [1]},
        "positions": "all_prompt",
        "request_id": "mixed",
    }
    (output,) = pair.generate([pair.mixed(PROMPT)], [fields])
    results = output.outputs[0].capture_results
    rows = results["inline"].payload["post_block", 1]
    assert rows.tokens == [f"t{PROMPT[FIRST - 1]}", "", f"t{PROMPT[39]}"]
    assert results["filesystem"].status == "ok"
    kept = reader.open(str(pair.written)).find("mixed", "default").rows("post_block", 1)
    want = [NO_TOKEN if p in EMBEDDED else t for p, t in enumerate(PROMPT)]
    assert kept.token_ids.tolist() == want


def test_cached_blocks(pair: Pair) -> None:
    """Equal embeddings share blocks up to the first row that is wanted; tokens, other embeddings
    and steered ones have their own."""
    embeds, other = pair.whole(OTHER), pair.whole(OTHER)
    other["prompt_embeds"][0] *= 1.5
    last = capture("last_prompt", ("post_block",), [2])
    pair.generate([embeds], [{"max_tokens": 1}])

    def cached(prompt: Any, fields: dict[str, Any]) -> tuple[int, Any]:
        (output,) = pair.generate([prompt], [{"max_tokens": 1, **fields}])
        return output.num_cached_tokens, output.outputs[0]

    hit, completion = cached(embeds, last)
    assert hit == 64
    pair.check(Ask(OTHER, last), completion, range(75), [74])
    assert cached(embeds, capture([40]))[0] == 32
    assert cached(embeds, {**STEERED, **last})[0] == 0
    assert cached(embeds, {**STEERED, **last})[0] == 64, "its own"
    assert cached(other, last)[0] == 0
    assert cached({"prompt_token_ids": OTHER}, last)[0] == 0


def test_several_completions_of_prompts_in_pieces(pair: Pair) -> None:
    asked = {**STEERED, **capture("all"), "n": 2, "max_tokens": 4, "temperature": 1.0}
    with watching(pair.llm) as steps:
        outputs = pair.generate([pair.whole(PROMPT), pair.mixed(OTHER)], [asked] * 2)
    assert max(len(steps.chunks(i)) for i in range(2)) > 2, "prompts are computed in pieces"
    for prompt, output, unknown in zip(
        (PROMPT, OTHER), outputs, (range(40), EMBEDDED), strict=True
    ):
        for completion in output.outputs:
            everything = list(range(len(prompt) + 3))
            pair.check(Ask(prompt, asked), completion, unknown, everything)
