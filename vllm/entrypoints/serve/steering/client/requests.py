# SPDX-License-Identifier: Apache-2.0
"""The requests of HTTP that clients send."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_FIELDS = {
    "steering_vectors", "prefill_steering_vectors", "decode_steering_vectors", "steering_modules",
    "steering", "steering_inherit_global", "capture", "rules", "add_special_tokens",
    "allowed_token_ids", "bad_words", "cache_salt", "ec_transfer_params", "echo",
    "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logit_bias",
    "logprob_token_ids", "logprobs", "max_tokens", "min_p", "min_tokens", "mm_payload", "model",
    "n", "presence_penalty", "priority", "prompt_logprobs", "repetition_detection",
    "repetition_penalty", "request_id", "response_format", "return_mm_kwargs", "return_token_ids",
    "return_token_offsets", "return_tokens_as_token_ids", "routed_experts_prompt_start", "seed",
    "session_id", "skip_special_tokens", "spaces_between_special_tokens", "stop",
    "stop_token_ids", "stream", "stream_interval", "stream_options", "structured_outputs",
    "temperature", "thinking_token_budget", "top_k", "top_p", "truncate_prompt_tokens",
    "truncation_side", "use_beam_search", "user", "vllm_xargs", "watermarking",
}  # fmt: skip
"""The fields of completions and of chats."""

_ONLY_COMPLETIONS = {"prompt", "prompt_embeds", "suffix"}
_ONLY_CHATS = {
    "add_generation_prompt", "chat_template", "chat_template_kwargs", "continue_final_message",
    "documents", "include_reasoning", "max_completion_tokens", "media_io_kwargs", "messages",
    "mm_processor_kwargs", "parallel_tool_calls", "reasoning_effort", "return_prompt_text",
    "tool_choice", "tools", "top_logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A request of HTTP; the two clients differ in how they send it."""

    method: str
    path: str
    body: Any = None


def features_call(name: str, path: str, point: str, layer: int, reconstruct: bool) -> Call:
    """Make the request that names an autoencoder."""
    body = {"name": name, "path": path, "point": point, "layer": layer}
    return Call("POST", "/features", body | {"reconstruct": True} if reconstruct else body)


def set_call(
    vectors: Any, prefill_vectors: Any, decode_vectors: Any, ops: Any, replace: bool
) -> Call:
    """Make the request that sets or adds to the global steering."""
    body = {
        "vectors": vectors,
        "prefill_vectors": prefill_vectors,
        "decode_vectors": decode_vectors,
        "ops": ops,
        "replace": replace,
    }
    return Call("POST", "/set", {key: value for key, value in body.items() if value is not None})


def register_call(name: str, source: Any) -> Call:
    """Make the request that registers a module, of vectors and operations or of a file here."""
    if isinstance(source, str | Path):
        content = base64.b64encode(Path(source).read_bytes()).decode()
        return Call("POST", "/modules", {"name": name, "safetensors": content})
    if not source.keys() & {"vectors", "prefill_vectors", "decode_vectors", "ops"}:
        source = {"vectors": source}
    return Call("POST", "/modules", {"name": name, **source})


def generation_call(prompt: Any, model: str | None, fields: Mapping[str, Any]) -> Call:
    """Make the request for completions; it is a chat if the prompt is a list of messages."""
    chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], Mapping)
    path, name = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
    known = _FIELDS | (_ONLY_CHATS if chat else _ONLY_COMPLETIONS)
    for field_name in fields.keys() - known:
        # The server would ignore it.
        alike = get_close_matches(field_name, known, 1)
        hint = f"; {alike[0]!r} is one" if alike else ""
        raise TypeError(f"{field_name!r} is not a field of {path}{hint}")
    body = {name: prompt, **fields}
    if model is not None:
        body["model"] = model
    return Call("POST", path, body)


def sweep_call(prompt: Any, model: str | None, fields: Mapping[str, Any]) -> Call:
    """Make the request for a sweep."""
    return Call(
        "POST", "/sweep", {"prompt": prompt, **({"model": model} if model else {}), **fields}
    )
