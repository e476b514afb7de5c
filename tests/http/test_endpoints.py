# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`: /v1/steering and /v1/capture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from tests.conformance.models import HIDDEN, LAYERS
from tests.http.server import KEY, Server, greedy
from vllm.entrypoints.serve.steering.client import (
    SteeringClient,
    SteeringError,
    pack_layers,
)
from vllm.entrypoints.serve.steering.client.requests import Call
from vllm.pilot import Autoencoder

if TYPE_CHECKING:
    pass

from tests.http.checks import LAYER, PROMPT, READ, STEER, VECTOR, Reference, check_rows

pytestmark = pytest.mark.quick


def test_global_tiers(client: SteeringClient, reference: Reference) -> None:
    assert client.state()["enabled"]
    before = client.state()["version"]
    version = client.set(STEER)
    assert version == before + 1
    state = client.state()
    assert state["tiers"]["base"]["norms"]["post_block"] == {
        str(LAYER): pytest.approx(float(np.linalg.norm(VECTOR)), rel=1e-5)
    }
    assert str(float(VECTOR[0])) not in json.dumps(state)
    steered = client.complete(PROMPT, **greedy(capture=READ))
    check_rows(steered.choices[0], reference, {LAYER: VECTOR})
    assert set(steered.rows["post_block", LAYER].versions.tolist()) == {version}
    alone = client.complete(PROMPT, **greedy(capture=READ, steering_inherit_global=False))
    check_rows(alone.choices[0], reference, {})
    with pytest.raises(SteeringError, match=r"decode_vectors\.post_block\.1: has") as raised:
        client.set({"post_block": {2: VECTOR}}, decode_vectors={"post_block": {1: [0.0]}})
    assert (raised.value.status, raised.value.param) == (400, "decode_vectors.post_block.1")
    assert client.state()["version"] == version, "nothing of it was done"
    client.set(prefill_vectors={"post_block": pack_layers({0: VECTOR})}, replace=True)
    assert client.state()["tiers"].keys() == {"prefill"}
    with pytest.raises(SteeringError, match="tier: unknown tier 'both'"):
        client.clear("both")
    client.clear("prefill")
    assert client.state()["tiers"] == {}


def test_modules(client: SteeringClient, reference: Reference, tmp_path: Path) -> None:
    digest = client.register_module("happy", STEER)
    assert client.modules()["happy"]["digest"] == digest
    steered = client.complete(PROMPT, **greedy(capture=READ, steering_modules=[["happy", 0.5]]))
    check_rows(steered.choices[0], reference, {LAYER: 0.5 * VECTOR})
    file = tmp_path / "happy.safetensors"
    safetensors.numpy.save_file({f"base.post_block.{LAYER}": VECTOR}, file)
    assert client.register_module("file", file) == digest
    unit = VECTOR / np.linalg.norm(VECTOR)
    op = {"op": "ablate", "point": "post_block", "layers": [3], "direction": unit}
    client.register_module("flat", {"ops": [op]})
    flat = client.complete(PROMPT, **greedy(capture=READ, steering_modules=["flat"]))
    along = flat.rows["post_block", 3].values @ unit
    assert np.abs(along).max() < 1e-3
    for body, param in (
        ({"name": "../x", "vectors": {}}, "name"),
        ({"name": "x", "path": "/etc/passwd"}, "path"),
        ({"name": "x", "source": str(file)}, "source"),
        ({"name": "x", "vectors": str(file)}, "vectors"),
        ({"name": "x", "safetensors": str(file)}, "safetensors"),
        ({"name": "x", "ops": [{**op, "direction": unit.tolist(), "positions": [0]}]}, "ops[0]"),
        ({"name": "x", "vectors": {"post_block": {"9": [0]}}}, "vectors.post_block.9"),
    ):
        with pytest.raises(SteeringError) as raised:
            client._call(Call("POST", "/modules", body))
        assert (raised.value.status, raised.value.param) == (400, param)
    client.unregister_module("happy")
    with pytest.raises(SteeringError, match="unknown module 'happy'") as raised:
        client.complete(PROMPT, **greedy(steering_modules=["happy"]))
    assert raised.value.param == "steering_modules[0]"
    with pytest.raises(SteeringError, match="unknown module 'happy'"):
        client.unregister_module("happy")


def test_features_from_the_operators_folder(
    client: SteeringClient, reference: Reference, features: Path
) -> None:
    client.register_features("more", "made", "post_block", LAYER)
    add = {"op": "add", "features": "more", "id": 3, "scale": 4.0}
    steered = client.complete(PROMPT, **greedy(capture=READ, steering=[add]))
    moved = 4 * Autoencoder.load(features).direction(3).numpy()
    check_rows(steered.choices[0], reference, {LAYER: moved})
    asked = [{"features": {"name": name, "top": 3}} for name in ("made", "more")]
    seen = client.complete(PROMPT, **greedy(capture={"inline": asked})).choices[0].features
    of_start, late = (next(iter(seen[f"inline[{i}]"].values())) for i in range(2))
    assert (late.features, bool(late.given["top_values"].any())) == ("more", True)
    assert np.array_equal(of_start.given["top_values"], late.given["top_values"])
    site = {"point": "post_block", "layer": 2}
    for body, param in (
        ({"name": "x", "path": "/etc/passwd", **site}, "path"),
        ({"name": "x", "path": "made/../../made", **site}, "path"),
        ({"name": "made", "path": "made", **site}, "name"),
        ({"name": "x", "path": "made", **site, "layer": 99}, "features.x"),
        ({"name": "x", **site}, "path"),
        ({"name": "x", "path": "made", **site, "root": "/"}, "root"),
        ({"name": "x", "path": "none", **site}, "path"),
        ({"name": "x", "path": "made", **site, "reconstruct": True}, "reconstruct"),
    ):
        with pytest.raises(SteeringError) as raised:
            client._call(Call("POST", "/features", body))
        assert (raised.value.status, raised.value.param) == (400, param)
    client.unregister_features("more")
    with pytest.raises(SteeringError, match="unknown features 'more'"):
        client.complete(PROMPT, **greedy(steering=[add]))
    with pytest.raises(SteeringError, match="unknown name 'more'"):
        client.unregister_features("more")


def test_a_default_module(client: SteeringClient, reference: Reference) -> None:
    """It acts on requests that say nothing of steering, while it is registered."""
    assert client.state()["default_steering_modules"] == ["house"]
    client.register_module("house", STEER)
    steered = client.complete(PROMPT, **greedy(capture=READ))
    without = client.complete(PROMPT, **greedy(capture=READ, steering_inherit_global=False))
    client.unregister_module("house")
    after = client.complete(PROMPT, **greedy(capture=READ))
    check_rows(steered.choices[0], reference, {LAYER: VECTOR})
    for plain in (without, after):
        check_rows(plain.choices[0], reference, {})


def test_operations_of_all_requests(client: SteeringClient) -> None:
    unit = VECTOR / np.linalg.norm(VECTOR)
    op = {"op": "ablate", "point": "post_block", "layers": [LAYER], "direction": unit}
    version = client.set({"post_block": {3: VECTOR}}, ops=[op])
    state = client.state()
    assert (state["version"], state["ops"], state["modules"]) == (version, ["ablate"], {})

    def along(**fields: Any) -> float:
        choice = client.complete(PROMPT, **greedy(capture=READ, **fields)).choices[0]
        return float(np.abs(choice.rows["post_block", LAYER].values @ unit).max())

    assert along() < 1e-3 < 0.1 < along(steering_inherit_global=False)
    client.clear("ops")
    assert along() > 0.1 and client.state()["tiers"].keys() == {"base"}
    with pytest.raises(SteeringError) as raised:
        client.set(ops=[{**op, "positions": [0]}])
    assert (raised.value.status, raised.value.param) == (400, "ops[0]")
    client.clear()


def test_changes_need_a_key(server: Server) -> None:
    body = {"vectors": {"post_block": {str(LAYER): VECTOR.tolist()}}}
    bearer = {"Authorization": f"Bearer {KEY}"}
    before = server.get("/v1/steering").json()["version"]
    for path in ("set", "clear", "modules"):
        for headers in ({}, {"X-Steering-Key": "wrong"}, {"Authorization": "Bearer wrong"}):
            answer = server.post(f"/v1/steering/{path}", body, **headers)
            assert answer.status_code == 403
            assert answer.json()["error"]["message"].startswith("Forbidden: ")
    assert httpx.delete(f"{server.url}/v1/steering/modules/x", timeout=300).status_code == 403
    assert server.get("/v1/steering").json()["version"] == before
    assert server.post("/v1/steering/clear", {}, **bearer).status_code == 200
    assert server.get("/v1/steering").json()["version"] == before + 1


def test_layers(client: SteeringClient) -> None:
    offered = client.layers()
    assert (offered["hidden_size"], offered["dtype"]) == (HIDDEN, "float32")
    assert (offered["num_layers"], offered["lanes"]) == (LAYERS, 1)
    assert offered["layers"]["0"] == ["pre_attn", "post_attn", "post_block"]


def test_capture_counters(server: Server, client: SteeringClient) -> None:
    def counters() -> dict[str, int]:
        state = server.get("/v1/capture").json()
        assert state["enabled"]
        assert state["consumers"].keys() == {"inline", "filesystem"}
        counted: dict[str, int] = state["consumers"]["inline"]["counters"]
        return counted

    rows = 2 * len(PROMPT)
    moved = {
        "rows": rows,
        "bytes": rows * HIDDEN * 4,
        "pending": 0,
        "ok": 1,
        "partial_error": 0,
        "error": 0,
    }
    before = counters()
    client.complete(PROMPT, **greedy(capture=READ, max_tokens=1))
    after = {name: before[name] + more for name, more in moved.items()}
    deadline = time.monotonic() + 60
    while counters() != after and time.monotonic() < deadline:
        time.sleep(0.05)
    assert counters() == after
