# SPDX-License-Identifier: Apache-2.0
"""Bodies of endpoints that neither steer nor capture are refused, not answered unsteered."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import HTTPException, Request, UploadFile

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import (
    CohereEmbedRequest,
    EmbeddingChatRequest,
    EmbeddingCompletionRequest,
)
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.serve.steering import body as body_module
from vllm.entrypoints.serve.steering.access import SteeringAccess
from vllm.entrypoints.serve.steering.body import UnservedField, asked_fields
from vllm.entrypoints.serve.steering.client.requests import generation_call
from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest
from vllm.entrypoints.serve.utils.api_utils import redact_sensitive_args
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.interventions.frontend.compat.peers import KNOWN, NESTS
from vllm.v1.interventions.plan import PLAN_FIELDS

pytestmark = pytest.mark.quick

SAID = [{"role": "user", "content": "x"}]
SERVED = [
    (CompletionRequest, {"model": "m", "prompt": "x"}),
    (ChatCompletionRequest, {"model": "m", "messages": SAID}),
]
OTHERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (ResponsesRequest, {"model": "m", "input": "x"}),
    (BatchChatCompletionRequest, {"model": "m", "messages": [SAID]}),
    (AnthropicMessagesRequest, {"model": "m", "messages": SAID, "max_tokens": 1}),
    (EmbeddingCompletionRequest, {"model": "m", "input": "x"}),
    (EmbeddingChatRequest, {"model": "m", "messages": SAID}),
    (CohereEmbedRequest, {"model": "m", "texts": ["x"]}),
    (TokenizeCompletionRequest, {"model": "m", "prompt": "x"}),
    (TranscriptionRequest, {"model": "m", "file": UploadFile(io.BytesIO())}),
]
TOKENS: tuple[Callable[..., Any], dict[str, Any]] = (
    GenerateRequest,
    {"model": "m", "token_ids": [1], "sampling_params": {"max_tokens": 1}},
)
"""Takes the fields in its body, and in the sampling parameters there."""


@pytest.mark.parametrize("field", PLAN_FIELDS)
@pytest.mark.parametrize(("request_type", "body"), OTHERS)
def test_unserved_field_is_refused_by_name(
    request_type: Callable[..., Any], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnservedField, match=f"^{field}: this endpoint does not take") as raised:
        request_type(**body, **{field: {}})
    assert raised.value.parameter == field


@pytest.mark.parametrize("field", PLAN_FIELDS)
def test_fields_among_sampling_parameters(field: str) -> None:
    """They are the body's, but not in both places; a null there asks for nothing."""

    def request(value: Any, **beside: Any) -> GenerateRequest:
        sampling = {"max_tokens": 1, field: value}
        return GenerateRequest.model_validate(
            {"token_ids": [1], "sampling_params": sampling, **beside}
        )

    made = request({"a": 1})
    assert asked_fields(made) == {field: {"a": 1}}
    assert getattr(made.sampling_params, field) is None and made.sampling_params.max_tokens == 1
    assert asked_fields(request(None)) == {}
    assert asked_fields(request(None, **{field: {"a": 1}})) == {field: {"a": 1}}
    assert asked_fields(request({"a": 1}, **{field: None})) == {field: {"a": 1}}
    with pytest.raises(UnservedField, match=f"^sampling_params.{field}: .* twice") as raised:
        request({"a": 1}, **{field: {"a": 1}})
    assert raised.value.parameter == f"sampling_params.{field}"


def test_tokens_in_tokens_out_takes_no_ready_made_plan() -> None:
    body = {"token_ids": [1], "sampling_params": {"plan": {}}, "plan": {}}
    made = GenerateRequest.model_validate(body)
    assert not hasattr(made.sampling_params, "plan") and asked_fields(made) == {}


@pytest.mark.parametrize(("request_type", "body"), [*SERVED, TOKENS])
def test_served_fields_are_kept_as_they_came(
    request_type: Callable[..., Any], body: dict[str, Any]
) -> None:
    request = request_type(**body, capture={"inline": 1}, steering=None, other=2)
    assert asked_fields(request) == {"capture": {"inline": 1}}


@pytest.mark.parametrize(("request_type", "body"), [*SERVED, TOKENS, *OTHERS])
@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("steering_vector", "steering_vectors"),
        ("captures", "capture"),
        ("steering_module", "steering_modules"),
        ("prefill_vectors", "prefill_steering_vectors"),
        ("steeringVectors", "steering_vectors"),
        ("Capture", "capture"),
        ("steering_inherit", "steering_inherit_global"),
        ("vectors", "steering_vectors"),
        ("hooks", "capture"),
        ("ops", "steering"),
        ("Modules", "steering_modules"),
    ],
)
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(
    request_type: Callable[..., Any], body: dict[str, Any], field: str, meant: str
) -> None:
    with pytest.raises(UnservedField, match=f"^{field}: is not a field.* '{meant}' is") as raised:
        request_type(**body, **{field: {}})
    assert raised.value.parameter == field


@pytest.mark.parametrize("field", KNOWN)
@pytest.mark.parametrize(("request_type", "body"), OTHERS)
def test_a_field_of_another_tool_is_refused_where_nothing_is_served(
    request_type: Callable[..., Any], body: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnservedField, match=f"^{field}: is for .*coming-from") as raised:
        request_type(**body, **{field: {}})
    assert raised.value.parameter == field
    request_type(**body, **{field: None})  # the twin asks for nothing


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("field", ["steering", "steering_inherit_global", "patch", "steer"])
@pytest.mark.parametrize(("request_type", "body"), OTHERS)
def test_a_field_is_refused_in_what_nothing_reads(
    request_type: Callable[..., Any], body: dict[str, Any], field: str, nest: str
) -> None:
    given = {**body, nest: {**body.get(nest, {}), field: {}}}
    with pytest.raises(UnservedField, match=f"^{nest}.{field}: ") as raised:
        request_type(**given)
    assert raised.value.parameter == f"{nest}.{field}"
    request_type(**{**body, nest: {**body.get(nest, {}), "other": {}}})


@pytest.mark.parametrize("field", KNOWN)
@pytest.mark.parametrize(("request_type", "body"), [*SERVED, TOKENS])
def test_a_field_of_another_tool_is_left_to_the_engine_where_it_is_served(
    request_type: Callable[..., Any], body: dict[str, Any], field: str
) -> None:
    """An engine without steering and capture stays upstream's; `intervene` refuses in others."""
    asked: list[dict[str, Any]] = [{field: {}}, {"extra_body": {field: {}}}]
    for given in asked:
        assert request_type(**body, **given).model == "m"


def test_a_misspelt_sampling_parameter() -> None:
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 1, "captures": {}}}
    with pytest.raises(UnservedField, match=r"^sampling_params.captures: is not a field"):
        GenerateRequest(**body)  # type: ignore[arg-type]


def test_few_names_are_compared_letter_by_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a body, if it has few: objects in it may be thousands. With a twin that compares."""
    compared = []

    def counted(name: str, *given: Any) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(body_module, "get_close_matches", counted)
    names: dict[str, Any] = {f"srotcev_gnireets{n}": 0 for n in range(body_module.MOST_UNKNOWN)}
    tool: Any = {"type": "function", **names, "function": {"name": "f", **names}}
    said: dict[str, Any] = {"model": "m", "messages": SAID}
    ChatCompletionRequest(**said, tools=[tool] * 50, tool_choice="none")
    ChatCompletionRequest(**{**said, **names, "one_more": 0})
    assert not compared
    ChatCompletionRequest(**said, **names)
    assert sorted(compared) == sorted(names)


@pytest.mark.parametrize("field", ["some_other_field", "streaming", "features", "caption", "x" * 9])
@pytest.mark.parametrize(("request_type", "body"), [*SERVED, *OTHERS[:2]])
def test_other_unknown_fields_are_ignored_as_upstream_does(
    request_type: Callable[..., Any], body: dict[str, Any], field: str
) -> None:
    assert request_type(**body, **{field: 1}).model == "m"


@pytest.mark.parametrize(
    ("prompt", "request_type"), [("x", CompletionRequest), (SAID, ChatCompletionRequest)]
)
def test_the_client_takes_the_fields_of_the_endpoint_and_no_others(
    prompt: Any, request_type: type[CompletionRequest | ChatCompletionRequest]
) -> None:
    names = [*request_type.model_fields, *PLAN_FIELDS]
    names += [f.alias for f in request_type.model_fields.values() if f.alias is not None]
    assert generation_call(prompt, None, dict.fromkeys(names)).body.keys() == set(names)
    with pytest.raises(TypeError, match=r"'max_token' is not a field .*; 'max_tokens' is one"):
        generation_call(prompt, None, {"max_token": 5})
    with pytest.raises(TypeError, match=r"'extra_body' is not a field of /v1/[a-z/]*$"):
        generation_call(prompt, None, {"extra_body": {}})
    other = "suffix" if prompt == SAID else "messages"
    with pytest.raises(TypeError, match=f"'{other}' is not a field"):
        generation_call(prompt, None, {other: 1})


def test_flags_stand_in_groups_of_their_own() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    flags = {
        group.title: {flag for action in group._group_actions for flag in action.option_strings}
        for group in parser._action_groups
    }
    assert {"--enable-steering", "--steering-modules"} <= flags["SteeringConfig"]
    assert {"--capture-consumers", "--capture-overload-policy"} <= flags["CaptureConfig"]
    assert "--steering-api-key" in flags["Frontend"]


def test_the_log_of_options_has_no_keys() -> None:
    shown = redact_sensitive_args({"steering_api_key": ["secret"], "model": "m"})
    assert shown == {"steering_api_key": "***", "model": "m"}


def test_several_keys() -> None:
    access = SteeringAccess(["one", "two"], bearer=False)
    for key in ("one", "two"):
        access.need(Request({"type": "http", "headers": [(b"x-steering-key", key.encode())]}))


def test_development_mode_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request({"type": "http", "headers": []})
    with pytest.raises(HTTPException):
        SteeringAccess(None, bearer=True).need(request)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    SteeringAccess(None, bearer=True).need(request)
