# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --compat lens`: vLLM-Lens's wire form, its own client as it was published, and
malformed vectors."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

from tests.http.server import NAME, Server, greedy
from tests.peers.lens_fuzz import fuzz_vectors
from tests.peers.packages import folder_of
from tests.support.serving import relative, vector

zstandard = pytest.importorskip("zstandard")

pytestmark = pytest.mark.full

PROMPT = "Today I went"
SAID = [{"role": "user", "content": PROMPT}]
LAYER = 1
V = vector(31)


def asked(**more: Any) -> dict[str, Any]:
    """`vllm_xargs` that capture a layer, and add V there if `scale` is given."""
    from vllm.v1.interventions.frontend.compat import wire

    args: dict[str, Any] = {"output_residual_stream": f"[{LAYER}]"}
    if more:
        entry = {"activations": wire.encoded(V[None]), "layer_indices": [LAYER], **more}
        args["apply_steering_vectors"] = json.dumps([entry])
    return {"vllm_xargs": args}


def rows_of(answer: Any) -> torch.Tensor:
    """[1, n, hidden] of an answer, or of one of its choices."""
    from vllm.v1.interventions.frontend.compat import wire

    return wire.decoded(answer["activations"]["residual_stream"], "activations")


def test_completion(server: Server) -> None:
    plain = server.complete(PROMPT, **asked())
    (choice,) = plain["choices"]
    rows = rows_of(plain)
    assert rows.shape == (1, len(PROMPT) + 5, V.numel())
    assert torch.equal(rows_of(choice), rows)
    assert choice["capture_results"]["inline"]["status"] == "ok"
    steered = rows_of(server.complete(PROMPT, **asked(scale=2.0)))
    moved = steered[:, : len(PROMPT)] - rows[:, : len(PROMPT)]
    assert relative(moved, (2.0 * V).expand_as(moved)) < 1e-4
    matched = rows_of(server.complete(PROMPT, **asked(scale=2.0, norm_match=True)))
    moved = matched[0, : len(PROMPT)] - rows[0, : len(PROMPT)]
    assert relative(moved.norm(dim=-1), 2.0 * rows[0, : len(PROMPT)].norm(dim=-1)) < 1e-4
    assert "activations" not in server.complete(PROMPT)


def test_prompts_and_samples_have_their_own(server: Server) -> None:
    answer = server.complete([PROMPT, "I"], n=2, temperature=1.0, **asked())
    lengths = [rows_of(choice).shape[1] for choice in answer["choices"]]
    assert lengths == [len(PROMPT) + 5] * 2 + [6] * 2
    assert torch.equal(rows_of(answer), rows_of(answer["choices"][0]))


def test_chat_and_its_stream(server: Server) -> None:
    body = greedy(messages=SAID, **asked(scale=1.0))
    whole = server.post("/v1/chat/completions", body).json()
    want = rows_of(whole)
    assert torch.equal(rows_of(whole["choices"][0]), want)
    url = server.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last.keys() == {"activations"}
    assert torch.equal(rows_of(last), want)
    assert sum("activations" in json.loads(event) for event in events[:-1]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_refusals(server: Server, stream: bool) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"vllm_xargs": {"apply_hooks": "[1]"}}, "vllm_xargs.apply_hooks"),
        (
            {"vllm_xargs": {"output_residual_stream": "[99]"}},
            "vllm_xargs.output_residual_stream[0]",
        ),
        ({"vllm_xargs": {"apply_steering_vectors": "[{"}}, "vllm_xargs.apply_steering_vectors"),
        (asked(scale="x"), "vllm_xargs.apply_steering_vectors[0].scale"),
        ({**asked(), "capture": {"inline": {}}}, "capture"),
    ]
    if not stream:  # upstream has no streamed beam search
        bad.append(({**asked(), "use_beam_search": True}, "vllm_xargs.output_residual_stream"))
    for fields, named in bad:
        answer = server.post("/v1/completions", greedy(prompt=PROMPT, stream=stream, **fields))
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == named


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """vLLM-Lens's package, its plug-in off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LENS_DISABLE", "1")
        patch.setattr(sys, "path", [str(folder_of("lens")), *sys.path])
        yield importlib.import_module("vllm_lens")


def test_their_client(server: Server, theirs: Any) -> None:
    """Unmodified: what it sends is read, and it reads what is answered."""
    client = importlib.import_module("vllm_lens.client").VLLMLensClient(server.url, model=NAME)
    plain = client.generate(PROMPT, max_tokens=4, capture_layers=[LAYER, 3])
    rows = plain.activations["residual_stream"]
    assert rows.shape == (2, len(PROMPT) + 3, V.numel())
    steer = theirs.SteeringVector(
        activations=V[None], layer_indices=[LAYER], scale=2.0, norm_match=True
    )
    steered = client.generate(
        PROMPT, max_tokens=4, capture_layers=[LAYER], steering_vectors=[steer]
    ).activations["residual_stream"]
    prompt = slice(0, len(PROMPT))
    moved = (steered[0, prompt] - rows[0, prompt]).norm(dim=-1) / rows[0, prompt].norm(dim=-1)
    assert torch.allclose(moved, torch.tensor(2.0), atol=1e-3)
    chat = client.chat(SAID, max_tokens=4, capture_layers=[LAYER])
    assert chat.activations["residual_stream"].shape[0] == 1


def test_their_client_captures_attention(server: Server, theirs: Any) -> None:
    """What it reads are the rows that ours gives, its own function makes weights of them; streamed
    the same. `test_lens_qk.py` compares the weights with transformers."""
    from vllm.entrypoints.serve.steering.client import SteeringClient

    patterns = importlib.import_module("vllm_lens.attention").attention_patterns
    client = importlib.import_module("vllm_lens.client").VLLMLensClient(server.url, model=NAME)
    found = client.chat(SAID, max_tokens=4, capture_qk=[LAYER, 3]).activations
    hooks = {"q": [LAYER, 3], "k": [LAYER, 3]}
    asked = {"inline": {"hooks": hooks, "positions": "all"}}
    fields = {"temperature": 0, "max_tokens": 4}
    native = SteeringClient(server.url, model=NAME).complete(SAID, capture=asked, **fields).rows
    for i, layer in enumerate((LAYER, 3)):
        for name in ("q", "k"):
            rows = torch.from_numpy(native[name, layer].values)
            assert torch.equal(found[f"attn_{name}"][i], rows)
        assert native["q", layer].form == {"scale": 32**-0.5, "group": 2}
    n = found["attn_q"].shape[1]
    weights = [patterns(found, layer=layer) for layer in (LAYER, 3)]
    for made in weights:
        assert made.shape == (4, n, n) and not made.triu(1).any()
        assert torch.allclose(made.sum(-1), torch.ones(4, n), atol=1e-5)
    assert relative(weights[0], weights[1]) > 0.01
    body = greedy(messages=SAID, vllm_xargs={"output_qk": f"[{LAYER}, 3]"}, max_tokens=4)
    url = server.url + "/v1/chat/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as answer:
        events = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    whole = server.post("/v1/chat/completions", body).json()["activations"]
    streamed = json.loads(events[-2])["activations"]
    assert whole.keys() == streamed.keys() == {"attn_q", "attn_k", "qk_layers", "qk_meta"}
    assert streamed == whole and whole["qk_layers"] == {"__json__": [LAYER, 3]}


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_malformed_vectors(server: Server, count: int) -> None:
    """What `make fuzz` does, over a socket."""

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            ended = await fuzz_vectors(client, count, seed=count)
            assert ended["refused"] > 0.8 * count and ended["acted"] > 0

    asyncio.run(run())
