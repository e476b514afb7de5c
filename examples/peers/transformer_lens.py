# SPDX-License-Identifier: Apache-2.0
"""TransformerLens's names of activations over ours: `run_with_cache` and `run_with_hooks`.

    from examples.peers.transformer_lens import ENGINE, HookedLLM

    llm = HookedLLM(LLM("/path/to/model", **ENGINE))
    output, cache = llm.run_with_cache("Today I went", ["blocks.1.hook_resid_post"])
    cache["blocks.1.hook_resid_post"]  # [1, positions, hidden]
    llm.run_with_hooks("Today I went", [("blocks.1.attn.hook_z",
                       {"op": "scale", "heads": [2], "factor": 0.0})], max_tokens=8)

The numbers are those of a model without processing, as `TransformerBridge.boot_transformers` and
`HookedTransformer.from_pretrained_no_processing` have it. `capture_of` and `op_of` make the fields
of a request, also for HTTP. A hook is an operation: a request is data, not a program.
`hook_attn_out` and `hook_mlp_out` have what a hook adds to `hook_resid_mid` and `hook_resid_post`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm import LLM, RequestOutput, SamplingParams
from vllm.v1.capture import CaptureResult

POINTS = {
    "hook_resid_pre": "pre_attn",
    "hook_resid_mid": "post_attn",
    "hook_resid_post": "post_block",
    "hook_attn_out": "attn_out",
    "ln2.hook_out": "mlp_in",
    "hook_mlp_out": "mlp_out",
    "attn.hook_rot_q": "q",
    "attn.hook_rot_k": "k",
    "attn.hook_v": "v",
    "attn.hook_z": "z",
    "attn.hook_pattern": "attn",
}
"""What stands behind `blocks.{layer}.` -> our point; "attn" is the weights of attention."""
FINAL = "ln_final.hook_out"
_NAMES = {point: name for name, point in POINTS.items()}
_RESIDUAL = ["pre_attn", "post_attn", "post_block"]
ENGINE: dict[str, Any] = {
    "enable_steering": True,
    "steering_points": [*_RESIDUAL, "z", "mlp_in"],
    "steering_families": ["add", "ablate", "replace", "scale"],
    "capture_consumers": ["inline"],
    "capture_points": [*_RESIDUAL, "q", "k", "v", "z", "mlp_in", "final"],
}
"""Options of an engine that has all of these."""

Filter = str | Iterable[str] | Callable[[str], bool]


def site_of(name: str) -> tuple[str, int]:
    """Return the point and the layer that a name means; -1 is the last layer.

    Raises:
        ValueError: nothing of ours has such values.
    """
    if name == FINAL:
        return "final", -1
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if found is None or found[2] not in POINTS:
        known = ", ".join([*POINTS, FINAL])
        raise ValueError(f"{name}: is not captured; of a block there are {known}")
    return POINTS[found[2]], int(found[1])


def capture_of(names: Iterable[str]) -> dict[str, Any]:
    """Return the field `capture` of a request for `names`, at all positions."""
    layers: dict[str, list[int]] = {}
    for point, layer in map(site_of, names):
        layers.setdefault(point, []).append(layer)
    weights = layers.pop("attn", [])
    captures: list[dict[str, Any]] = [{"hooks": layers, "positions": "all"}] if layers else []
    if weights:
        read = {"heads": dict.fromkeys(weights, "all"), "queries": "all", "give": ["weights"]}
        captures.append({"attention": read})
    return {"inline": captures}


def cache_of(results: Mapping[str, CaptureResult]) -> dict[str, torch.Tensor]:
    """Return the rows of a completion by name, [1, positions, ...]; patterns are [1, heads,
    queries, keys]. float32 on the CPU where the model's dtype is.

    Raises:
        RuntimeError: rows could not be read.
    """
    cache: dict[str, torch.Tensor] = {}
    for name, result in results.items():
        if result.status != "ok":
            raise RuntimeError(f"{name}: {result.error}")
        for (point, layer), rows in result.payload.items():
            if point == "attn":
                queries = [torch.nn.functional.pad(w, (0, len(rows.weights) - w.shape[-1]))
                           for w in rows.weights]  # fmt: skip
                values = torch.stack(queries, dim=1)
            else:
                values = rows.values
            key = FINAL if point == "final" else f"blocks.{layer}.{_NAMES[point]}"
            cache[key] = values[None]
    return cache


def op_of(name: str, change: Any) -> dict[str, Any]:
    """Return the operation that makes `change` at what a name means.

    Args:
        change: an operation without `point` and `layers`; at `attn.hook_z` it may have a list of
            `heads`.

    Raises:
        ValueError: it is a function.
    """
    if not isinstance(change, Mapping):
        raise ValueError(
            f"{name}: a hook is an operation here, such as {{'op': 'add', 'vector': v}}"
        )
    point, layer = site_of(name)
    where = {"heads": {layer: change["heads"]}} if "heads" in change else {"layers": [layer]}
    return {**change, "point": point, **where}


class HookedLLM:
    """An engine by TransformerLens's names, started with `ENGINE` or with what you need of it."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def names(self) -> list[str]:
        """Return all that can be read of this model."""
        shape = self.llm.llm_engine.vllm_config.tap_shape
        assert shape is not None
        sites = [(p, n) for n in sorted(shape.layers) for p in (*shape.offers(n), "attn")]
        weights = {n for n, layer in shape.layers.items() if layer.rule is not None}
        return [
            f"blocks.{n}.{_NAMES[p]}"
            for p, n in sites
            if p in _NAMES and (p != "attn" or n in weights)
        ] + [FINAL]

    def run_with_cache(
        self,
        prompt: Any,
        names_filter: Filter | None = None,
        fwd_hooks: Sequence[tuple[str, Any]] = (),
        **sampling: Any,
    ) -> tuple[RequestOutput, dict[str, torch.Tensor]]:
        """Run a prompt; return its output, and what was read by name.

        Args:
            prompt: as of `LLM.generate`, one.
            names_filter: names, or what tells which of `names()`; all of them by default.
            fwd_hooks: as of `run_with_hooks`.
            sampling: of `SamplingParams`; one token by default, so that rows are the prompt's.
        """
        if callable(names_filter) or names_filter is None:
            asked = [name for name in self.names() if names_filter is None or names_filter(name)]
        else:
            asked = [names_filter] if isinstance(names_filter, str) else [*names_filter]
        output = self._run(prompt, fwd_hooks, {"capture": capture_of(asked), **sampling})
        return output, cache_of(output.capture_results or {})

    def run_with_hooks(
        self, prompt: Any, fwd_hooks: Sequence[tuple[str, Any]], **sampling: Any
    ) -> RequestOutput:
        """Run a prompt with operations at what names mean, in their order: `op_of`."""
        return self._run(prompt, fwd_hooks, sampling)

    def _run(
        self, prompt: Any, hooks: Sequence[tuple[str, Any]], fields: Mapping[str, Any]
    ) -> RequestOutput:
        steering = [op_of(name, change) for name, change in hooks] or None
        params = SamplingParams(**{"max_tokens": 1, "steering": steering, **fields})
        (output,) = self.llm.generate(prompt, params, use_tqdm=False)
        return output
