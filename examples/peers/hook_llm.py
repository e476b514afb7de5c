# SPDX-License-Identifier: Apache-2.0
"""The `HookLLM` of IBM's vLLM-Hook over ours: its workers, its JSON configurations, its analyzer.

    from examples.peers.hook_llm import HookLLM

    llm = HookLLM("/path/to/model", worker_name="steer_hook_act", config_file="steer.json")
    llm.generate(["Today I went"], max_tokens=8)

Its documents and not its code were read. One pass is made where its own makes two, results are in
the order of the prompts, graphs and the prefix cache stay on, and nothing goes through files.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vllm
from vllm import RequestOutput, SamplingParams

PROBE, STEER = "probe_hidden_states", "steer_hook_act"
ATTENTION = {"probe_hook_qk", "attn_tracker", "core_reranker"}
_REDUCTIONS = ("none", "mean", "norm")
_SWITCHES = ("VLLM_HOOK_", "MIA_")
_ARRAYS: list[Any] = [
    np.ndarray,
    np.dtype,
    *(type(np.dtype(name)) for name in ("f2", "f4", "f8")),
    *(
        (made, f"{module}.multiarray.{name}")
        for name, made in (
            ("_reconstruct", np.zeros(1).__reduce__()[0]),
            ("scalar", np.float32(0).__reduce__()[0]),
        )
        for module in ("numpy.core", "numpy._core")
    ),
]
"""What of numpy may be unpickled: arrays and numbers."""


class HookLLM:
    """An `LLM` that reads or steers all its requests as one configuration says.

    Args:
        model: as of `vllm.LLM`, and so are `options`.
        worker_name: "probe_hidden_states", "steer_hook_act", or None for neither.
        analyzer_name: "hidden_states" or None.
        config_file: JSON with a section `hidden_states` or `steering`.
        download_dir: where weights are kept.
        enable_hook: False is a plain `LLM`.
        hook_dir: refused, for nothing goes through files.

    Raises:
        NotImplementedError: what is asked for reads attention weights.
        ValueError: something else is not known, or cannot be done exactly; the message names it.
    """

    def __init__(
        self,
        model: str,
        worker_name: str | None = None,
        analyzer_name: str | None = None,
        config_file: str | os.PathLike[str] | None = None,
        download_dir: str | None = None,
        enable_hook: bool = True,
        hook_dir: str | None = None,
        **options: Any,
    ) -> None:
        for name in (worker_name, analyzer_name):
            if name in ATTENTION:
                raise _needs_attention(str(name))
        if worker_name not in (None, PROBE, STEER):
            raise ValueError(f"worker_name: must be {PROBE!r} or {STEER!r}, got {worker_name!r}")
        if analyzer_name not in (None, "hidden_states"):
            raise ValueError(f"analyzer_name: must be 'hidden_states', got {analyzer_name!r}")
        if hook_dir is not None:
            raise ValueError("hook_dir: nothing goes through files; see the filesystem consumer")
        if ignored := sorted(name for name in os.environ if name.startswith(_SWITCHES)):
            warnings.warn(f"ignored, they set nothing here: {', '.join(ignored)}", stacklevel=2)
        config = _read_config(config_file)
        self._worker = worker_name if enable_hook else None
        self._outputs: list[RequestOutput] = []
        options |= {"download_dir": os.path.expanduser(download_dir)} if download_dir else {}
        self._fields: dict[str, Any] = {}
        if self._worker == PROBE:
            self._fields = capture_of(config)
            options["capture_consumers"] = ["inline"]
        elif self._worker == STEER:
            self._fields = steering_of(config)
            options |= {"enable_steering": True, "steering_families": ["add", "pin"]}
        self.llm = vllm.LLM(model=model, **options)

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self.llm.get_tokenizer()

    @property
    def llm_engine(self) -> Any:
        """That of `llm`."""
        return self.llm.llm_engine

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | None = None,
        use_hook: bool | None = None,
        cleanup: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Generate, once, and keep what was read for `analyze`.

        Args:
            prompts: as of `vllm.LLM.generate`.
            sampling_params: or `fields` of one.
            use_hook: False asks nothing of the worker this time.
            cleanup: forget what was read before; else it is kept, and this is added.
        """
        if sampling_params is not None and fields:
            raise ValueError(f"sampling_params: cannot be combined with {sorted(fields)}")
        params = (sampling_params or SamplingParams(**fields)).clone()
        for name, value in self._fields.items() if use_hook is not False else ():
            if getattr(params, name) is not None:
                raise ValueError(f"{name}: is filled by the worker {self._worker}")
            setattr(params, name, value)
        outputs = self.llm.generate(prompts, params)
        if use_hook is not False and self._worker == PROBE:
            self._outputs = outputs if cleanup else self._outputs + outputs
        return outputs

    def analyze(self, analyzer_spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what was read, `{"hidden_states": [{"model.layers.0": tensor}]}`, by prompt.

        Args:
            analyzer_spec: `{"reduce": "none"}` for tensors [tokens, hidden] (of one token as well),
                "mean" for their mean, [hidden], or "norm" for each length, float32 [tokens].

        Raises:
            ValueError: nothing was read, or something else is asked for.
        """
        spec = dict(analyzer_spec or {})
        reduce = spec.pop("reduce", "none")
        if {"input_range", "attn_func", "query_spec", "na_spec"} & spec.keys():
            raise _needs_attention("analyzer_spec")
        if spec or reduce not in _REDUCTIONS:
            raise ValueError(f"analyzer_spec: takes 'reduce' alone, one of {_REDUCTIONS}")
        if not self._outputs:
            raise ValueError(f"analyze: nothing was read; generate first, with {PROBE}")
        return {"hidden_states": [_reduced(output, reduce) for output in self._outputs]}


def capture_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that a section `hidden_states` means: N of `layers`, which count from 1, is
    what block N - 1 returns.

    Raises:
        ValueError: something in it is not known.
    """
    section = _section(config, "hidden_states", {"layers", "mode"})
    mode, layers = section.get("mode", "last_token"), section.get("layers")
    positions = {"last_token": "last_prompt", "all_tokens": "all_prompt"}.get(mode)
    if positions is None:
        raise ValueError(f"hidden_states.mode: must be last_token or all_tokens, got {mode!r}")
    if not isinstance(layers, list) or not layers or min(layers) < 1:
        raise ValueError("hidden_states.layers: must be a list of numbers from 1 on")
    hooks = {"post_block": [n - 1 for n in layers]}
    return {"capture": {"inline": {"hooks": hooks, "positions": positions}}}


def steering_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field that a section `steering` means.

    Raises:
        ValueError: something in it is not known, or its vector cannot be read.
    """
    known = {"method", "optimal_layer", "coefficient", "vector_path"}
    section = _section(config, "steering", known | {"apply_at_all_positions", "phase", "positions"})
    if section.get("apply_at_all_positions", True) is not True:
        raise ValueError("steering.apply_at_all_positions: must be true; see 'positions'")
    vector = read_vector(section.get("vector_path", ""))
    layer = section.get("optimal_layer", 15)
    entry = {"point": "post_block", "layers": layer if layer == "all" else _listed(layer)}
    entry |= _where(section)
    method = section.get("method", "adjust_rs")
    direction = vector["dir"].reshape(-1).float()
    if method == "add_vector":
        change = {"op": "add", "vector": direction, "scale": section.get("coefficient", 0.0)}
    elif method == "adjust_rs":
        if "avg_proj" not in vector:
            raise ValueError("steering.vector_path: adjust_rs needs 'avg_proj' in the file")
        # r + (avg_proj - r.d) d, with d as it is: pin along d/|d|, |d|^2 times the change.
        length = float(direction.double().norm())
        value = float(torch.as_tensor(vector["avg_proj"]))
        change = {"op": "pin", "direction": direction, "value": value / length}
        change["strength"] = length * length
    else:
        raise ValueError(f"steering.method: must be add_vector or adjust_rs, got {method!r}")
    return {"steering": [{**entry, **change}]}


def read_vector(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a vector file: `dir` [hidden], and `avg_proj` for `adjust_rs`.

    Tensors and numpy arrays are all that is unpickled.

    Raises:
        ValueError: there is no file, or something else is in it.
    """
    try:
        with torch.serialization.safe_globals(_ARRAYS):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"steering.vector_path: {path} cannot be read: {error}") from error
    if not isinstance(found, Mapping) or "dir" not in found:
        raise ValueError(f"steering.vector_path: {path} has no 'dir'")
    return {**found, "dir": torch.as_tensor(found["dir"])}


def _where(section: Mapping[str, Any]) -> dict[str, Any]:
    """The positions of `phase` and `positions`; nothing where all are meant."""
    phase, where = section.get("phase", "both"), section.get("positions", "all_tokens")
    found = {
        ("both", "all_tokens"): None,
        ("prefill", "all_tokens"): "all_prompt",
        ("decode", "all_tokens"): "all_generated",
        ("both", "last_token"): "predicting",
        ("prefill", "last_token"): "last_prompt",
        ("decode", "last_token"): "all_generated",
    }
    if (phase, where) not in found:
        raise ValueError(f"steering.phase, steering.positions: not known: {phase!r}, {where!r}")
    positions = found[phase, where]
    return {} if positions is None else {"positions": positions}


def _listed(layer: Any) -> list[int]:
    return list(layer) if isinstance(layer, Sequence) else [layer]


def _read_config(path: str | os.PathLike[str] | None) -> dict[str, Any]:
    config: dict[str, Any] = {} if path is None else json.loads(Path(path).read_text())
    if config.get("hookq") or config.get("params", {}).get("important_heads"):
        raise _needs_attention("hookq, params.important_heads")
    return config


def _section(config: Mapping[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise ValueError(f"config_file: has no section {name!r}")
    if unknown := sorted(section.keys() - known):
        raise ValueError(f"{name}: unknown keys {unknown}; known are {sorted(known)}")
    return section


def _reduced(output: RequestOutput, reduce: str) -> dict[str, torch.Tensor]:
    assert output.capture_results is not None
    result = output.capture_results["inline"]
    if result.status != "ok":
        raise ValueError(f"analyze: {result.error}")
    found = {}
    for (_, layer), rows in result.payload.items():
        values = rows.values
        if reduce == "mean":
            values = values.mean(dim=0)
        elif reduce == "norm":
            values = values.float().norm(dim=-1)
        found[f"model.layers.{layer}"] = values
    return found


def _needs_attention(name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: not built here; a capture can read queries, keys and attention weights "
        "(docs/attention.md)"
    )
