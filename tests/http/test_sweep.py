# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/steering/sweep`: every cell is what hooks on transformers' model give."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.http.checks import Reference
from tests.http.server import NAME, Server
from tests.support.serving import vector
from vllm.entrypoints.serve.steering.client import AsyncSteeringClient, SteeringClient, pack
from vllm.pilot import head_sweep, patch_sweep

pytestmark = pytest.mark.full

PROMPT, CLEAN = "Rome is in the", "Nice is in the"
LAYERS = [0, 2, 3]
ASKED: dict[str, Any] = {
    "prompt": PROMPT, "clean": CLEAN, "layers": LAYERS, "answer": "a", "other": "Z",
}  # fmt: skip
EXACT = 1e-3
"""Nats, in float32."""
MOVED = 0.05
"""What a cell must change at least somewhere, or equal cells would say nothing."""


class Hooked:
    """transformers, with rows of one run put into another."""

    def __init__(self, reference: Reference) -> None:
        self.model, self.tokenizer = reference.model, reference.tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def streams(self, text: str) -> list[torch.Tensor]:
        """[n, hidden] behind each block."""
        found: list[torch.Tensor] = []
        handles = [
            block.register_forward_hook(lambda m, i, output: found.append(_hidden(output)[0]))
            for block in self.model.model.layers
        ]
        self.odds(text)
        for handle in handles:
            handle.remove()
        return found

    def odds(self, text: str) -> float:
        with torch.no_grad():
            logits = self.model(torch.tensor([self.ids(text)])).logits[0, -1].float()
        scores = logits.log_softmax(-1)
        return float(scores[self.ids("a")[0]] - scores[self.ids("Z")[0]])

    def changed(self, layer: int, position: int, change: Any) -> float:
        """The odds where `change` is made of one row behind a block."""

        def hook(module: Any, inputs: Any, output: Any) -> Any:
            hidden = _hidden(output).clone()
            hidden[0, position] = change(hidden[0, position])
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        handle = self.model.model.layers[layer].register_forward_hook(hook)
        try:
            return self.odds(PROMPT)
        finally:
            handle.remove()


def _hidden(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


@pytest.fixture(scope="module")
def hooked(reference: Reference) -> Hooked:
    return Hooked(reference)


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Each event's name and data; the end is one, too."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line == "data: [DONE]":
            yield "[DONE]", None
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_every_cell_is_the_reference(
    server: Server, client: SteeringClient, hooked: Hooked
) -> None:
    before = server.complete(PROMPT, logprobs=5)["choices"][0]["logprobs"]
    found = client.sweep(**ASKED)
    grid = np.array(found["grid"])
    positions = list(range(len(PROMPT)))
    assert grid.shape == (1, len(LAYERS), len(PROMPT)) and found["cells"] == grid.size
    assert (found["points"], found["layers"]) == (["post_block"], LAYERS)
    assert (found["positions"], "".join(found["tokens"])) == (positions, PROMPT)
    assert found["metric"] == "diff" and found["scales"] is None and found["cells_per_second"] > 0
    rows = hooked.streams(CLEAN)
    want = np.array(
        [[hooked.changed(n, p, lambda _, n=n, p=p: rows[n][p]) for p in positions] for n in LAYERS]
    )
    assert np.abs(grid[0] - want).max() <= EXACT
    assert found["corrupt"] == pytest.approx(hooked.odds(PROMPT), abs=EXACT)
    assert found["clean"] == pytest.approx(hooked.odds(CLEAN), abs=EXACT)
    assert np.abs(want - hooked.odds(PROMPT)).max() > MOVED
    # A row that is replaced by itself changes not one bit.
    assert found["noise_floor"] == 0.0
    # No patched block of the cache is read by others.
    assert server.complete(PROMPT, logprobs=5)["choices"][0]["logprobs"] == before
    same = client.sweep(**ASKED)
    assert same["grid"] == found["grid"]


def test_what_is_recovered(client: SteeringClient) -> None:
    odds, share = (client.sweep(**ASKED, metric=metric) for metric in ("diff", "recovered"))
    clean, corrupt = odds["clean"], odds["corrupt"]
    want = (np.array(odds["grid"]) - corrupt) / (clean - corrupt)
    assert np.allclose(share["grid"], want, atol=1e-6)
    # Behind the last block only the last row is looked at, and with it all is back.
    last = np.array(share["grid"])[0, -1]
    assert last[-1] == pytest.approx(1.0, abs=1e-3) and not np.abs(last[:-1]).any()
    only = client.sweep(**{**ASKED, "other": None}, metric="logprob", positions=[-1])
    assert np.array(only["grid"]).shape == (1, 3, 1) and only["positions"] == [len(PROMPT) - 1]
    assert only["grid"][0][-1][0] == pytest.approx(only["clean"], abs=EXACT)


def test_an_operation_with_scales(client: SteeringClient, hooked: Hooked) -> None:
    push = vector(3)
    asked = {key: value for key, value in ASKED.items() if key != "clean"}
    op = {"op": "add", "vector": push.numpy()}
    scales = [-2.0, 0.0, 1.0]
    found = client.sweep(**asked, op=op, scales=scales, positions=[2, {"text": "the"}])
    assert found["positions"] == [2, *range(len(PROMPT) - 3, len(PROMPT))]
    want = [
        [
            [hooked.changed(n, p, lambda row, s=s: row + s * push) for s in scales]
            for p in found["positions"]
        ]
        for n in LAYERS
    ]
    grid = np.array(found["grid"])
    assert grid.shape == (1, 3, 4, 3) and np.abs(grid[0] - want).max() <= EXACT
    assert np.abs(grid - found["corrupt"]).max() > MOVED
    assert found["clean"] is None and found["noise_floor"] is None


def test_a_stream(server: Server) -> None:
    plain = server.post("/v1/steering/sweep", {"model": NAME, **ASKED}).json()
    body = {"model": NAME, **ASKED, "stream": True}
    with httpx.stream("POST", server.url + "/v1/steering/sweep", json=body, timeout=300) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        (first, start), *cells, (last, summary), (done, _) = events(answer)
    assert (first, last, done) == ("start", "summary", "[DONE]")
    assert {name for name, _ in cells} == {"cell"} and len(cells) == plain["cells"]
    assert start | {"grid": summary["grid"]} == {
        key: value for key, value in plain.items() if key != "cells_per_second"
    }
    for _, cell in cells:
        at = LAYERS.index(cell["layer"]), cell["position"]
        assert cell == {
            "point": "post_block", "layer": LAYERS[at[0]], "position": at[1],
            "value": plain["grid"][0][at[0]][at[1]],
        }  # fmt: skip


def test_a_closed_connection_ends_it(server: Server) -> None:
    body = {"model": NAME, **ASKED, "prompt": PROMPT * 6, "clean": CLEAN * 6, "layers": "all"}
    body["points"] = ["pre_attn", "post_attn", "post_block"]

    def taken() -> float:
        """Tokens that the engine generated since the start, one for each cell."""
        lines = server.get("/metrics").text.splitlines()
        (line,) = (one for one in lines if one.startswith("vllm:generation_tokens_total"))
        return float(line.split()[-1])

    def streamed(_: float) -> None:
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=300) as answer:
            kinds = events(answer)
            assert next(kinds)[1]["cells"] == 1008 and next(kinds)[0] == "cell"

    def whole(seconds: float) -> None:
        with suppress(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=seconds)

    url = server.url + "/v1/steering/sweep"
    for ask in (streamed, whole):
        # Some of its cells are never begun, unless this process stands still for as long as all
        # of them take; a server that does not notice goes through all of them each time.
        for seconds in (0.5, 0.5, 0.2, 0.1, 0.05):
            begun = taken()
            ask(seconds)
            # Until no cell comes for a while; then the server goes on with others.
            after, quiet = begun, 0
            while quiet < 4:
                time.sleep(0.5)
                quiet = quiet + 1 if (now := taken()) == after else 0
                after = now
            if begun < after < begun + 1008:
                break
        else:
            raise AssertionError(f"{ask.__name__}: all cells were done")
        assert server.complete()["usage"]["completion_tokens"] == 6


def test_prompts_of_two_lengths(client: SteeringClient) -> None:
    asked = {**ASKED, "clean": "Paris is in the", "align": "end"}
    found = client.sweep(**asked)
    assert found["positions"] == list(range(len(PROMPT)))
    assert np.array(found["grid"])[0, -1, -1] == pytest.approx(found["clean"], abs=EXACT)
    swapped = client.sweep(**{**asked, "prompt": "Paris is in the", "clean": PROMPT})
    # The first token of the longer one has none opposite.
    assert swapped["positions"] == list(range(1, len(PROMPT) + 1))


def test_chats_and_ids(server: Server, client: SteeringClient, hooked: Hooked) -> None:
    said = [[{"role": "user", "content": text}] for text in (PROMPT, CLEAN)]
    asked = {**ASKED, "prompt": said[0], "clean": said[1], "positions": {"role": "user"}}

    async def ask() -> dict[str, Any]:
        async with AsyncSteeringClient(server.url, model=NAME) as other:
            return await other.sweep(**asked)

    chat = asyncio.run(ask())
    assert "".join(chat["tokens"]) == PROMPT
    texts = [f"u:{text}\na:" for text in (PROMPT, CLEAN)]
    ids = {"prompt": hooked.ids(texts[0]), "clean": hooked.ids(texts[1])}
    same = client.sweep(**{**ASKED, **ids, "positions": chat["positions"]})
    assert np.allclose(same["grid"], chat["grid"], atol=1e-5)


def test_from_python(client: SteeringClient, tmp_path: Path) -> None:
    asked = {key: value for key, value in ASKED.items() if key != "prompt"}
    found = patch_sweep(client, PROMPT, **asked)
    raw = client.sweep(**ASKED)
    assert np.array_equal(found.values, raw["grid"]) and found.noise_floor == 0.0
    strongest = np.abs(found.values - found.corrupt).max() + found.corrupt
    said = repr(found)
    assert f"{strongest:+.3f}" in said or f"{2 * found.corrupt - strongest:+.3f}" in said
    found.draw(tmp_path / "map.png", "where")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_only_layers_that_have_the_point(client: SteeringClient) -> None:
    found = client.sweep(**{**ASKED, "layers": "0-1"}, points=["pre_attn", "post_block"])
    assert found["points"] == ["pre_attn", "post_block"] and found["layers"] == [0, 1]
    grid = np.array(found["grid"])
    # What block 0 gives is what block 1 reads.
    assert np.abs(grid[1, 0] - grid[0, 1]).max() <= EXACT < np.abs(grid[0, 0] - grid[0, 1]).max()


class Headed:
    """transformers, with one head's rows changed before they are joined."""

    def __init__(self, hooked: Hooked) -> None:
        self.hooked, model = hooked, hooked.model
        self.heads = model.config.num_attention_heads
        self.joins = [block.self_attn.o_proj for block in model.model.layers]

    def rows(self, text: str, layer: int) -> torch.Tensor:
        """[n, heads, width] at z."""
        found: list[torch.Tensor] = []
        seen = self.joins[layer].register_forward_pre_hook(lambda m, given: found.append(given[0]))
        self.hooked.odds(text)
        seen.remove()
        return found[0][0].unflatten(-1, (self.heads, -1))

    def changed(self, layer: int, head: int, positions: list[int], to: Any) -> float:
        """The odds where a head's rows are others: a factor, or rows [n, width]."""

        def change(module: Any, given: Any) -> Any:
            parts = given[0].unflatten(-1, (self.heads, -1)).clone()
            own = parts[0, positions, head]
            parts[0, positions, head] = to * own if isinstance(to, float) else to
            return (parts.flatten(-2),)

        handle = self.joins[layer].register_forward_pre_hook(change)
        try:
            return self.hooked.odds(PROMPT)
        finally:
            handle.remove()


def test_heads_are_an_axis(client: SteeringClient, hooked: Hooked) -> None:
    """Taken out at all positions, and patched at some; another head's number is another."""
    headed, asked = Headed(hooked), {**ASKED, "points": "z", "layers": [1, 2]}
    taken = client.sweep(**{**asked, "clean": None})
    everywhere, some = list(range(len(PROMPT))), [3, 11, 12]
    grid, numbers = np.array(taken["grid"]), list(range(headed.heads))
    assert grid.shape == (1, 2, headed.heads) and taken["cells"] == grid.size
    assert (taken["points"], taken["layers"], taken["heads"]) == (["z"], [1, 2], numbers)
    want = [[headed.changed(n, h, everywhere, 0.0) for h in numbers] for n in (1, 2)]
    assert np.abs(grid[0] - want).max() <= EXACT
    assert np.abs(np.array(want) - taken["corrupt"]).min() > 10 * EXACT

    patched = client.sweep(**asked, positions=some)
    grid = np.array(patched["grid"])
    want = [
        [headed.changed(n, h, some, headed.rows(CLEAN, n)[some, h]) for h in numbers]
        for n in (1, 2)
    ]
    assert np.abs(grid[0] - want).max() <= EXACT
    assert patched["clean"] == pytest.approx(hooked.odds(CLEAN), abs=EXACT)
    assert patched["positions"] == some and patched["noise_floor"] <= EXACT

    one = client.sweep(**{**asked, "clean": None, "layers": {"2": [1]}})
    assert one["grid"] == [[[None, pytest.approx(taken["grid"][0][1][1], abs=EXACT)]]]
    found = head_sweep(
        client, PROMPT, answer=ASKED["answer"], other=ASKED["other"], layers=[1, 2], factor=0.5
    )
    want = [[headed.changed(n, h, everywhere, 0.5) for h in numbers] for n in (1, 2)]
    assert np.abs(found.values - want).max() <= EXACT
    assert "head 1" in repr(patch_sweep(client, PROMPT, answer="a", points=["z"]))


def test_cells_of_heads_in_a_stream(server: Server) -> None:
    body = {"model": NAME, **ASKED, "clean": None, "points": ["z"], "stream": True}
    with httpx.stream("POST", server.url + "/v1/steering/sweep", json=body, timeout=300) as answer:
        (_, head), *cells, (_, summary), _ = events(answer)
    assert [cell.keys() for _, cell in cells] == [{"point", "layer", "head", "value"}] * len(cells)
    for _, cell in cells:
        assert (
            summary["grid"][0][head["layers"].index(cell["layer"])][cell["head"]] == cell["value"]
        )


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "must be a text"),
    ({"prompt": [[1]]}, "prompt", "must be a text"),
    ({"prompt": [{"content": 3}]}, "prompt", "is no chat"),
    ({"clean": None}, "clean", "is missing"),
    ({"clean": "Paris is in the"}, "clean", "has 15 tokens and prompt 14"),
    ({"align": "start"}, "align", "must be 'end'"),
    ({"points": "mlp"}, "points[0]", "unknown point"),
    ({"points": ["post_block"] * 2}, "points", "each once"),
    ({"layers": 99}, "layers", "out of range"),
    ({"positions": [99]}, "positions[0]", "out of reach"),
    ({"positions": "all_generated"}, "positions", "no token"),
    ({"answer": None}, "answer", "is missing"),
    ({"answer": "two"}, "answer", "is 3 tokens"),
    ({"other": 1 << 40}, "other", "out of range"),
    ({"metric": "odds"}, "metric", "must be logprob, diff, recovered"),
    ({"other": None, "metric": "diff"}, "other", "is missing"),
    ({"clean": PROMPT, "metric": "recovered"}, "metric", "nothing to recover"),
    ({"scales": [1.0]}, "scales", "is for the ops"),
    ({"op": {"op": "add", "vector": [1.0]}}, "clean", "is for the op 'replace'"),
    ({"clean": None, "op": {"op": "add", "vector": [1.0]}}, "op.vector", "1"),
    ({"clean": None, "op": {"op": "add", "layers": 1}}, "op.layers", "is an axis"),
    ({"clean": None, "op": {"op": "norm_match"}}, "op.op", "--steering-families"),
    (
        {"clean": None, "op": {"op": "add", "vector": pack(vector(1))}, "scales": [0.5] * 9999},
        "positions", "a sweep has at most 65536",
    ),
    ({"clean": None, "points": "z", "op": {"op": "scale", "heads": {}}}, "op.heads", "is an axis"),
    ({"points": ["z", "post_block"]}, "points[0]", "unknown point"),
    ({"points": "z", "layers": 99}, "layers", "out of range"),
    ({"points": "z", "layers": {"1": [9]}}, "layers.1", "head 9 is out of range"),
    ({"clean": None, "points": "z", "op": {"op": "ablate", "direction": pack(vector(1))}},
     "op.op", "does not act on heads"),
    ({"rows": 1}, "rows", "is not a field of this endpoint"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(server: Server, stream: bool) -> None:
    for changed, param, said in REFUSED:
        body = {"model": NAME, **ASKED, **changed, "stream": stream}
        answer = server.post("/v1/steering/sweep", body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), (changed, error)
        assert error["message"].startswith(param) and said in error["message"], error
    unknown = server.post("/v1/steering/sweep", {**ASKED, "model": "none"})
    assert unknown.status_code == 404
    large = server.post("/v1/steering/sweep", {**ASKED, "prompt": "a" * (17 << 20)})
    assert large.status_code == 413
