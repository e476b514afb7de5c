# SPDX-License-Identifier: Apache-2.0
"""Requests with images: rows at their positions, selectors that say them, steering limited to them,
what the prefix cache shares, what is preempted or aborted. Real engines on tiny models,
transformers as the reference.

The engines' row budget is a few positions, so that prompts are computed in pieces that begin and
end inside images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.completions import as_prompt
from tests.conformance.engine import make_llm, shut_down
from tests.conformance.pictures import Shown, noise, prompts
from tests.support import serving
from tests.support.serving import capture, vector
from vllm import LLM, SamplingParams
from vllm.model_executor.models import registry
from vllm.multimodal.cache import MultiModalCacheMissError

if TYPE_CHECKING:
    from tests.conformance.pictures import Pictures
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.full, pytest.mark.v2, pytest.mark.pictures]

IMAGE_TOKENS = {
    "llava": ("<image>",),
    "qwen3_vl": ("<|image_pad|>",),
    "mistral3": ("[IMG]",),
    "molmo2": ("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>"),
}
"""What stands at an image's positions. Mistral 3 has other tokens between its lines, and those that
Molmo 2 has are the image's, too."""
POSITIONS_A_STEP = {"llava": 13, "qwen3_vl": 13, "mistral3": 13, "molmo2": 33}
"""An image of Molmo 2 is computed at once, of up to 31 tokens."""
BLOCKS = {"llava": 12, "qwen3_vl": 12, "mistral3": 12, "molmo2": 7}
"""Of 32 positions: enough for each request, and for half of a batch."""
LAYER = 1
STRONG = 100.0
"""The norm of a vector that shows after images, too, of which text sees little."""


@dataclass(frozen=True)
class Pair:
    """A model in our engine and in transformers, and prompts with two images, one and none."""

    llm: LLM
    reference: check.Reference
    pictures: Pictures
    shown: list[Shown]

    def at(self, prompt: Shown) -> list[int]:
        """The positions of all images: those of the tokens that stand for a piece of one."""
        tokens = {self.pictures.id_of(token) for token in IMAGE_TOKENS[self.reference.row.name]}
        return [i for i, t in enumerate(prompt) if t in tokens]

    def params(self, prompt: Shown, **fields: Any) -> SamplingParams:
        """Greedy, the log-probabilities those of the whole vocabulary."""
        settings: dict[str, Any] = {
            "max_tokens": 3,
            "temperature": 0.0,
            "logprobs": -1,
            "detokenize": False,
            "allowed_token_ids": list(range(prompt.num_words)),
        }
        return SamplingParams(**{**settings, **fields})

    def generate(self, prompt: Shown, **fields: Any) -> Any:
        """One request of these parameters."""
        prompts: Any = [as_prompt(prompt)]
        (output,) = self.llm.generate(prompts, self.params(prompt, **fields), use_tqdm=False)
        assert output.prompt_token_ids == list(prompt)
        return output

    def rows(self, prompt: Shown, positions: Any) -> Any:
        """Captured rows of one layer."""
        asked = capture(positions, ("post_block",), [LAYER])
        output = self.generate(prompt, **asked)
        return output.capture_results["inline"].payload["post_block", LAYER]


@pytest.fixture(scope="module", params=IMAGE_TOKENS)
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> Iterator[Pair]:
    row = tiny_models.row(request.param)
    assert row.pictures is not None
    path, shown = tiny_models.path(row.name), prompts(row.pictures)
    with pytest.MonkeyPatch.context() as patch:
        # vLLM looks at a model's class in a process of its own, which would lack our torchvision.
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        llm = make_llm(
            path,
            enable_steering=True,
            capture_consumers=["inline"],
            enable_prefix_caching=True,
            num_gpu_blocks_override=BLOCKS[row.name],
            capture_buffer_bytes=POSITIONS_A_STEP[row.name] * 3 * models.LAYERS * models.HIDDEN * 4,
            **row.engine,
        )
    yield Pair(llm, check.Reference(row, models.load(row, path), shown), row.pictures, shown)
    shut_down(llm)


def log_probs(output: Any) -> torch.Tensor:
    entries = output.outputs[0].logprobs
    return torch.tensor([[e[i].logprob for i in range(models.VOCAB)] for e in entries])


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((one - other).norm() / other.norm())


def test_rows_at_image_positions_are_those_of_transformers(pair: Pair) -> None:
    """Every point of every layer, at the positions of text and of images."""
    assert all(len(pair.at(p)) >= 4 * len(p.images) for p in pair.shown)
    results = check.read_errors(pair.llm, pair.reference, pair.shown)
    assert len(results) == 3 * models.LAYERS
    assert max(r.error for r in results) <= check.READ_TOLERANCE


def test_selectors_of_images_and_text(pair: Pair) -> None:
    two, one, none = pair.shown
    at = pair.at(two)
    edge = next(b for a, b in pairwise(at) if b - a > 2)  # words lie between
    first, second = [i for i in at if i < edge], [i for i in at if i >= edge]
    text = [i for i in range(len(two)) if i not in at]
    for asked, expected in [
        ({"images": 0}, first),
        ({"images": 1}, second),
        ({"images": -1}, second),
        ({"images": [1, 0]}, at),
        ({"images": "all"}, at),
        ({"modality": "image"}, at),
        ({"modality": "text"}, text),
        (["all_prompt", {"except": {"images": 0}}], sorted({*text, *second})),
        ([{"images": 0}, {"at": [-1], "of": "prompt"}], [*first, len(two) - 1]),
    ]:
        rows = pair.rows(two, asked)
        assert rows.positions.tolist() == expected, asked
        want = pair.reference.run(two).rows["post_block", LAYER][expected]
        assert check.worst_row(rows.values.float(), want) <= check.READ_TOLERANCE
        assert apart(rows.values.float().roll(1, 0), want) > check.LEAST_MOVE
    assert pair.rows(one, {"images": 0}).positions.tolist() == pair.at(one)
    assert pair.rows(none, {"modality": "text"}).positions.tolist() == list(range(len(none)))


def test_images_that_are_not_there_are_refused(pair: Pair) -> None:
    two, one, none = pair.shown
    path = "capture.inline.positions"
    for prompt, asked, message in [
        (none, {"images": 0}, f"{path}.images: asks for an image, and the prompt is without"),
        (none, {"modality": "image"}, f"{path}.modality: nothing of the prompt is 'image'"),
        (one, {"images": 1}, f"{path}.images: 1 is out of reach: the prompt has 1 images"),
        (two, {"images": [0, 2]}, f"{path}.images: 2 is out of reach: the prompt has 2 images"),
        (two, {"modality": "audio"}, f"{path}.modality: nothing of the prompt is 'audio'; it has "),
    ]:
        with pytest.raises(ValueError, match=message.replace("[", "\\[")):
            pair.rows(prompt, asked)


def test_text_is_found_in_text_alone(pair: Pair) -> None:
    """An image's tokens say nothing, and no text goes across them."""
    two = pair.shown[0]
    words = two.text.replace(pair.pictures.written, " ").split()
    image = pair.at(two)
    last = {"text": words[-1], "which": "last"}
    assert len(two) - 1 > max(image)
    assert pair.rows(two, last).positions.tolist() == [len(two) - 1]
    token = IMAGE_TOKENS[pair.reference.row.name][0]
    before, after = two.text.split(pair.pictures.written)[:2]
    for text in (token, f"{before.split()[-1]} {after.split()[0]}"):
        with pytest.raises(ValueError, match="is not in the prompt"):
            pair.rows(two, {"text": text})


@pytest.mark.parametrize("modality", ["image", "text"])
def test_steering_limited_to_images_or_text(pair: Pair, modality: str) -> None:
    two = pair.shown[0]
    at = torch.zeros(len(two), dtype=torch.bool)
    at[pair.at(two)] = True
    mask = at if modality == "image" else ~at
    added = vector(3, STRONG)
    entry = {"vector": added, "positions": {"modality": modality}}
    output = pair.generate(two, prefill_steering_vectors={"pre_attn": {0: entry}})
    fed = [*two, *output.outputs[0].token_ids[:-1]]
    rest = torch.zeros(len(fed) - len(two), dtype=torch.bool)

    def expected(mask: torch.Tensor) -> torch.Tensor:
        deltas = {("pre_attn", 0): torch.cat([mask, rest])[:, None] * added}
        logits = pair.reference.run(fed, deltas).logits
        return logits[len(two) - 1 :].log_softmax(-1)

    got = log_probs(output)
    assert check.worst_row(got, expected(mask)) <= check.WRITE_TOLERANCE
    for other in (~mask, torch.ones_like(mask), torch.zeros_like(mask)):
        assert apart(got, expected(other)) > check.LEAST_MOVE


def test_prefix_cache_tells_images_apart(pair: Pair) -> None:
    """The block with another image, or with a steered one, is another block; what comes before
    both is shared, and what is computed after a hit is right."""
    pictures = pair.pictures
    image, length = noise(64, 64, 7), 74
    words = [f"w{i}" for i in range(40, 74)]  # a block of text, then the image
    begun = f"{' '.join(words)} {pictures.written}"
    rest = " ".join(words[: length - len(Shown(pictures, begun, [image]))])
    prompt, twin = (
        Shown(pictures, f"{begun} {rest}", [shown]) for shown in (image, noise(64, 64, 8))
    )
    assert list(prompt) == list(twin) and len(prompt) == length and max(pair.at(prompt)) < 64
    reference = check.Reference(pair.reference.row, pair.reference.model, [prompt])
    other = check.Reference(pair.reference.row, pair.reference.model, [twin])
    entry: dict[str, Any] = {"vector": vector(5, STRONG), "positions": {"images": 0}}
    steered = {"prefill_steering_vectors": {"pre_attn": {0: entry}}}

    def run(shown: Shown, **fields: Any) -> tuple[int, torch.Tensor]:
        output = pair.generate(shown, **fields)
        return output.num_cached_tokens, log_probs(output)[0]

    def right(model: check.Reference) -> torch.Tensor:
        return model.run(prompt).logits[-1].log_softmax(-1)

    cached, plain = run(prompt)
    assert cached == 0 and apart(plain, right(reference)) < check.WRITE_TOLERANCE
    cached, again = run(prompt)
    assert cached == 64 and apart(again, right(reference)) < check.WRITE_TOLERANCE
    cached, seen = run(twin)
    assert cached == 32 and apart(seen, right(other)) < check.WRITE_TOLERANCE
    assert apart(right(other), right(reference)) > 10 * check.WRITE_TOLERANCE
    cached, moved = run(prompt, **steered)
    added = torch.zeros(len(prompt), models.HIDDEN)
    added[pair.at(prompt)] = entry["vector"]
    want = reference.run(prompt, {("pre_attn", 0): added}).logits[-1].log_softmax(-1)
    assert cached == 32 and apart(moved, want) < check.WRITE_TOLERANCE
    assert apart(moved, plain) > 10 * check.WRITE_TOLERANCE
    assert run(prompt, **steered)[0] == 64
    assert run(twin, **steered)[0] == 32
    cached, last = run(prompt)
    assert cached == 64 and torch.equal(last, again)


def test_requests_that_are_preempted_or_aborted(pair: Pair) -> None:
    """Of a batch with and without images, steered and captured, some are thrown out and computed
    anew, and some go away: each other one is what it is alone."""
    entry = {"vector": vector(9, STRONG), "positions": {"modality": "text"}}
    steered = {"prefill_steering_vectors": {"pre_attn": {0: entry}}}
    decoding = {"decode_steering_vectors": {"post_block": {LAYER: vector(10)}}}
    rows = capture("all", ("post_block",), [LAYER])
    asked = [
        (prompt, {**fields, **rows, "max_tokens": 90 - len(prompt)})
        for fields in ({}, steered, decoding)
        for prompt in pair.shown
    ]
    engine, gone = pair.llm.llm_engine, {1, 4, 6}
    done: dict[str, Any] = {}
    with serving.watching(pair.llm) as steps:
        for i, (prompt, fields) in enumerate(asked):
            given: Any = as_prompt(prompt)
            engine.add_request(f"{i}", given, pair.params(prompt, **fields))
        for step in count():
            if not engine.has_unfinished_requests():
                break
            done |= {output.request_id: output for output in engine.step() if output.finished}
            if step in (5, 20, 35):
                engine.abort_request([f"{sorted(gone)[step // 15]}"])
    assert len(set(steps.preempted)) > 1
    for i, (prompt, fields) in enumerate(asked):
        if i in gone:
            continue
        alone, got = pair.generate(prompt, **fields), done[f"{i}"]
        one, other = got.outputs[0], alone.outputs[0]
        assert one.token_ids == other.token_ids
        assert apart(log_probs(got), log_probs(alone)) < check.WRITE_TOLERANCE
        read, want = (
            o.capture_results["inline"].payload["post_block", LAYER] for o in (one, other)
        )
        assert read.positions.tolist() == want.positions.tolist()
        assert check.worst_row(read.values.float(), want.values.float()) < check.READ_TOLERANCE
        assert apart(read.values.float().roll(1, 0), want.values.float()) > check.LEAST_MOVE


def test_images_of_a_refused_request_are_sent_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is refused after its images were read does not fail the next one with them."""
    prompt = pair.shown[0]
    wrong = capture("all", ("post_block",), [models.LAYERS])
    want = list(pair.generate(prompt).outputs[0].token_ids)
    pair.llm.reset_mm_cache()
    with pytest.raises(ValueError, match="capture"):
        pair.generate(prompt, **wrong)
    assert list(pair.generate(prompt).outputs[0].token_ids) == want
    pair.llm.reset_mm_cache()
    cache = pair.llm.llm_engine.input_processor.renderer.mm_processor_cache
    assert cache is not None
    with monkeypatch.context() as patch:  # the twin
        patch.setattr(cache, "invalidate", lambda mm_hash: None)
        with pytest.raises(ValueError, match="capture"):
            pair.generate(prompt, **wrong)
        with pytest.raises(MultiModalCacheMissError):
            pair.generate(prompt)
    pair.llm.reset_mm_cache()


def test_images_differ() -> None:
    """The images of a prompt are no copies of each other."""
    for row in models.MODELS.values():
        if row.pictures is not None:
            first, second = row.pictures.images
            assert first.tobytes() != second.tobytes()
