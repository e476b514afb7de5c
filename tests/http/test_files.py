# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`: captures in files, and clients that go away or do not read."""

from __future__ import annotations

import time
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from tests.http.checks import LAYER, PROMPT, SAID, STEER, Reference, answered, check_rows
from tests.http.server import Server, greedy
from vllm.entrypoints.serve.steering.client import Choice, SteeringClient, joined
from vllm.v1.capture import reader

pytestmark = pytest.mark.full

ROWS = {"hooks": {"post_block": [LAYER, 3]}, "positions": "all"}
MOST = 80
"""Tokens of a stream that is cut off; the prompt leaves room for so many."""


def both(name: str, tag: str = "http", **fields: Any) -> dict[str, Any]:
    """Capture in a file what comes inline, too."""
    return {"inline": ROWS, "filesystem": {**ROWS, "request_id": name, "tag": tag, **fields}}


def check_file(choice: Choice, root: Path, name: str) -> reader.StoredRequest:
    """What the answer says of a file is so, and its rows are those that came inline, bit by bit."""
    assert choice.capture_status == {"inline": "ok", "filesystem": "ok"}
    payload = choice.capture_results["filesystem"]["payload"]
    assert payload["request_id"] == name
    for path in payload["paths"]:
        assert not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts
        assert (root / path).is_file()
    stored = reader.open(str(root)).find(name, payload["tag"])
    assert stored.complete and set(stored.sites) == choice.rows.keys()
    for site, rows in choice.rows.items():
        read = stored.rows(*site)
        np.testing.assert_array_equal(read.numpy(), rows.values)
        np.testing.assert_array_equal(read.positions, rows.positions)
        np.testing.assert_array_equal(read.token_ids, rows.token_ids)
    return stored


@pytest.mark.parametrize("layout", ["packed", "per_file", "sharded"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, SAID], ids=["completion", "chat"])
def test_a_file_of_a_request(
    client: SteeringClient,
    reference: Reference,
    root: Path,
    prompt: Any,
    stream: bool,
    layout: str,
) -> None:
    name = f"one.{'chat' if prompt is SAID else 'text'}.{'stream' if stream else 'whole'}"
    asked = greedy(capture=both(name, layout, layout=layout), steering_vectors=STEER)
    choice = answered(client, prompt, asked, stream)
    stored = check_file(choice, root, name)
    assert stored.layout == layout
    inline = Choice(captures=choice.captures, capture_results={"inline": {"status": "ok"}})
    check_rows(inline, reference, {LAYER: STEER["post_block"][LAYER]})
    assert str(root) not in str(choice.capture_results)


@pytest.mark.parametrize(
    ("name", "prompts", "n"), [("samples", 1, 2), ("prompts", 2, 1), ("several", 2, 2)]
)
def test_choices_have_files_of_their_own(
    client: SteeringClient, root: Path, name: str, prompts: int, n: int
) -> None:
    given = [PROMPT, "We saw"][:prompts]
    asked = greedy(n=n, temperature=1.0, seed=5, capture=both(name), max_tokens=12)
    answer = client.complete(given, **asked)
    assert len({choice.text for choice in answer.choices}) == prompts * n
    for choice in answer.choices:
        prompt, sample = divmod(choice.index, n)
        stored = check_file(choice, root, f"{name}-{prompt}-{sample}")
        assert (stored.record.prompt, stored.sample) == (prompt, sample)
    assert len([s for s in reader.open(str(root)).requests("http") if s.name.startswith(name)]) == (
        prompts * n
    )


def test_a_name_that_is_taken(client: SteeringClient, root: Path) -> None:
    first = client.complete(PROMPT, **greedy(capture=both("taken"))).choices[0]
    answer = client.complete("We saw", **greedy(capture=both("taken")))
    again = answer.choices[0].capture_results
    assert (again["filesystem"]["status"], again["inline"]["status"]) == ("error", "ok")
    assert "http/taken exists already" in again["filesystem"]["error"]
    assert str(root) not in str(answer.raw)
    check_file(first, root, "taken")


def idle(client: SteeringClient, server: Server) -> None:
    """Waits until the server holds nothing for requests."""
    deadline = time.monotonic() + 300
    while True:
        consumers = server.get("/v1/capture").json()["consumers"]
        pending = {name: c["counters"]["pending"] for name, c in consumers.items()}
        state = client.state()
        in_use = state["slots"]["in_use"], state["rows"]["in_use"]
        if not any((*pending.values(), *in_use)):
            return
        assert time.monotonic() < deadline, (pending, in_use)
        time.sleep(0.02)


def found(root: Path, name: str) -> reader.StoredRequest:
    """The file of a request whose client is gone: no answer says when it is there."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return reader.open(str(root)).find(name, "http")
        except KeyError:
            assert time.monotonic() < deadline, f"no file of {name} came"
            time.sleep(0.02)


def test_a_client_that_goes_away_leaves_nothing_behind(
    server: Server, client: SteeringClient, root: Path
) -> None:
    """Its file has the rows there are, and says that it is not complete."""
    asked = greedy(max_tokens=MOST, steering_vectors=STEER)
    whole = client.complete(PROMPT, **asked, capture=both("gone.not")).choices[0]
    slots, cut = 0, []
    # Several: on a busy machine one may be through before its client has closed.
    for i in range(50):
        chunks = client.stream(PROMPT, **asked, capture=both(f"gone.{i}"))
        next(chunks)
        slots = max(slots, client.state()["slots"]["in_use"])
        chunks.close()
        idle(client, server)
        stored = found(root, f"gone.{i}")
        rows, want = stored.rows("post_block", 3), whole.rows["post_block", 3]
        assert stored.complete == (len(rows) == len(want.positions))
        np.testing.assert_array_equal(rows.token_ids, want.token_ids[: len(rows)])
        np.testing.assert_allclose(rows.numpy(), want.values[: len(rows)], rtol=1e-4, atol=1e-4)
        if not stored.complete:
            assert len(rows) >= len(PROMPT) and "abort" in str(stored.error)
            cut.append(i)
        if slots and len(cut) > 3:
            break
    assert slots, "none held a slot while it ran"
    assert cut, "none was cut off"
    assert not list(root.rglob("*.tmp"))


def test_a_client_that_does_not_read_holds_nothing(
    server: Server, client: SteeringClient, root: Path
) -> None:
    asked = greedy(max_tokens=MOST, steering_vectors=STEER)
    whole = client.complete(PROMPT, **asked, capture=both("read")).choices[0]
    chunks = client.stream(PROMPT, **asked, capture=both("unread"))
    got = [next(chunks)]
    idle(client, server)
    got += chunks
    assert joined(got).text == whole.text
    check_file(joined(got), root, "unread")
