# SPDX-License-Identifier: Apache-2.0
"""Fields of other tools, over a real server: each is a 400 that says which of ours does it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests import ROOT
from tests.docs.links import anchors
from tests.http.checks import PROMPT, SAID
from tests.http.server import Server, greedy
from tests.support.plans import config_of
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.frontend.compat import peers
from vllm.v1.interventions.frontend.compat.peers import (
    KNOWN,
    NESTS,
    refuse_peer_args,
    refuse_peer_fields,
    refuse_peer_ops,
)
from vllm.v1.interventions.plan import PLAN_FIELDS

pytestmark = pytest.mark.full

BODIES: dict[str, dict[str, Any]] = {
    **{f"vllm_xargs.{key}": {"vllm_xargs": {key: "[1]"}} for key in KNOWN},
    **{field: {field: "x"} for field in KNOWN},
    **{f"extra_body.{key}": {"extra_body": {key: "x"}} for key in ("steer", "patch")},
    **{f"extra_args.{key}": {"extra_args": {key: "x"}} for key in ("steer", "patch")},
    "capture_wait": {"capture_wait": False},
    "conversation_id": {"steering": [], "conversation_id": "a"},
    "steering": {"steering": {"algorithm": "direct"}},
    "steering[0]": {"steering": [{"when": "probe", "scope": "this_token", "apply": "add"}]},
}
"""What is refused, by the path that the error names."""
MISPLACED: dict[str, dict[str, Any]] = {
    **{f"vllm_xargs.{field}": {"vllm_xargs": {field: "[]"}} for field in PLAN_FIELDS},
    **{f"{nest}.{field}": {nest: {field: {}}} for nest in NESTS for field in PLAN_FIELDS},
}
"""Fields of ours where nothing reads them."""
NOTHING: list[dict[str, Any]] = [
    *({"vllm_xargs": {key: 0}} for key in KNOWN),
    *({field: None} for field in KNOWN),
    {"vllm_xargs": {"other": "x"}, "extra_body": {"steering": None, "other": {"steering": []}}},
    {"extra_body": "x", "extra_args": [], "sampling_params": {"temperature": 1.0}},
    {"capture_wait": True},
    {"conversation_id": "a"},
    {"vllm_xargs": {"run_id": "a"}},
]
"""What asks for nothing, or for what is done anyway."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_each_is_a_400_that_names_it(server: Server, chat: bool, stream: bool) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = greedy(stream=stream, **({"messages": SAID} if chat else {"prompt": PROMPT}))
    for named, fields in BODIES.items():
        answer = server.post(path, {**asked, **fields})
        assert answer.status_code == 400, (named, answer.text)
        error = answer.json()["error"]
        assert error["param"] == named
        assert error["message"].startswith(f"{named}: is for ")
        assert "docs/coming-from.md#" in error["message"]
    for named, fields in MISPLACED.items():
        answer = server.post(path, {**asked, **fields})
        assert answer.status_code == 400, (named, answer.text)
        error = answer.json()["error"]
        assert error["param"] == named
        assert "would be ignored; " in error["message"]


def test_what_asks_for_nothing_is_answered(server: Server) -> None:
    """The twin."""
    plain = server.complete()["choices"]
    for fields in NOTHING:
        assert server.complete(**fields)["choices"] == plain


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"vllm_xargs": {"steer": "{}"}}),
        ("/v1/responses", {"vllm_xargs": {"steering": "[]"}}),
        ("/v1/responses", {"steering_clamps": {}}),
        ("/v1/responses", {"output_hidden_states": True}),
        ("/v1/responses", {"extra_body": {"steering": []}}),
        ("/v1/messages", {"steering_clamps": {}}),
        ("/v1/messages", {"vllm_xargs": {"capture": "{}"}}),
        ("/v1/messages", {"extra_args": {"steer": {}}}),
    ],
)
def test_other_endpoints_refuse_them_too(server: Server, path: str, fields: dict[str, Any]) -> None:
    said = {"input": PROMPT} if "responses" in path else {"messages": SAID, "max_tokens": 1}
    answer = server.post(path, {"model": "tiny", **said, **fields})
    assert answer.status_code == 400, answer.text
    assert "would be ignored; " in answer.text


@pytest.mark.quick
@pytest.mark.parametrize("named", [*BODIES, *MISPLACED])
def test_an_engine_without_steering_and_capture_stays_upstreams(named: str) -> None:
    fields = dict((BODIES | MISPLACED)[named])
    xargs = fields.pop("vllm_xargs", None)
    plain = config_of(steering=False, capture=False)
    refuse_peer_fields(fields, plain)
    refuse_peer_args(xargs, plain)
    for config in (config_of(capture=False), config_of(steering=False)):  # the twins
        with pytest.raises(InterventionError):
            refuse_peer_fields(fields, config)
            refuse_peer_args(xargs, config)
            refuse_peer_ops(fields.get("steering"))


@pytest.mark.quick
def test_keys_of_a_plug_in_that_is_loaded_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    params, hook = {"output_residual_stream": [1]}, {"steer": "{}"}
    monkeypatch.setitem(peers.sys.modules, "vllm_lens._activations_plugin", peers)
    monkeypatch.delenv("VLLM_LENS_DISABLE", raising=False)
    refuse_peer_args(params, config_of())
    with pytest.raises(InterventionError, match="vLLM-Hook"):
        refuse_peer_args(hook, config_of())
    monkeypatch.setenv("VLLM_LENS_DISABLE", "1")
    with pytest.raises(InterventionError, match="vLLM-Lens"):
        refuse_peer_args(params, config_of())


@pytest.mark.quick
def test_each_error_links_a_section_of_the_page() -> None:
    found = anchors((ROOT / "docs" / "coming-from.md").read_text())
    assert {foreign.peer.anchor for foreign in KNOWN.values()} <= found


_PAGE = re.compile(r"docs/([\w-]+\.md)(?:#([\w-]+))?")


@pytest.mark.quick
def test_pages_and_sections_that_our_sources_name_are_there() -> None:
    """Messages have links of their own, too."""
    found = {
        link: path
        for path in sorted((ROOT / "vllm").rglob("*.py"))
        for link in _PAGE.findall(path.read_text())
    }
    assert ("coming-from.md", "vllm-lens") in found
    for (page, anchor), path in found.items():
        text = (ROOT / "docs" / page).read_text()
        assert not anchor or anchor in anchors(text), f"{path}: docs/{page}#{anchor}"
