# SPDX-License-Identifier: Apache-2.0
"""The `HookLLM` of IBM's vLLM-Hook over ours: its workers, its JSON configurations, its analyzer.

    from examples.peers.hook_llm import HookLLM

    llm = HookLLM("/path/to/model", worker_name="steer_hook_act", config_file="steer.json")
    llm.generate(["Today I went"], max_tokens=8)

`examples/peers/hook_attention.py` has what reads attention, `examples/peers/mia_llm.py` its
successor's class. Its documents and not its code were read. One pass is made where its own makes
two, results are in the order of the prompts, graphs and the prefix cache stay on, and nothing goes
through files.
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
from examples.peers.hook_attention import RERANKER, TRACKER, qk_of, reranked, tracked
from vllm import RequestOutput, SamplingParams
from vllm.pilot.rows import reduce_rows

PROBE, STEER, QK = "probe_hidden_states", "steer_hook_act", "probe_hook_qk"
STATES = "hidden_states"
_ANALYZERS = {PROBE: (None, STATES), STEER: (None,), QK: (None, TRACKER, RERANKER)}
"""What may follow each worker."""
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
        worker_name: "probe_hidden_states", "steer_hook_act", "probe_hook_qk", or None for neither.
        analyzer_name: of "probe_hidden_states" "hidden_states"; of "probe_hook_qk" "attn_tracker"
            or "core_reranker", or None for q and k themselves; else None.
        config_file: JSON with a section `hidden_states` or `steering`; `hookq` and
            `params.important_heads`, which may be left out.
        download_dir: where weights are kept.
        enable_hook: False is a plain `LLM`.
        hook_dir: refused, for nothing goes through files.

    Raises:
        ValueError: something is not known, or cannot be done exactly; the message names it.
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
        if worker_name not in (None, *_ANALYZERS):
            raise ValueError(f"worker_name: must be one of {list(_ANALYZERS)}, got {worker_name!r}")
        if analyzer_name not in _ANALYZERS.get(worker_name or "", (None, STATES)):
            raise ValueError(f"analyzer_name: {analyzer_name!r} is not of worker {worker_name!r}")
        if hook_dir is not None:
            raise ValueError("hook_dir: nothing goes through files; see the filesystem consumer")
        if ignored := sorted(name for name in os.environ if name.startswith(_SWITCHES)):
            warnings.warn(f"ignored, they set nothing here: {', '.join(ignored)}", stacklevel=2)
        config = _read_config(config_file)
        self._worker, self._analyzer = worker_name if enable_hook else None, analyzer_name
        self._outputs: list[RequestOutput] = []
        options |= {"download_dir": os.path.expanduser(download_dir)} if download_dir else {}
        self._fields: dict[str, Any] = {}
        if self._worker == PROBE:
            self._fields = capture_of(config)
            options.setdefault("capture_consumers", ["inline"])
        elif self._worker == QK:
            self._fields = qk_of(config, analyzer_name)
            options.setdefault("capture_consumers", ["inline"])
            options["capture_points"] = ["q", "z"] if analyzer_name else ["q", "k"]
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
    ) -> Sequence[RequestOutput]:
        """Generate, once, and keep what was read for `analyze`.

        Args:
            prompts: as of `vllm.LLM.generate`.
            sampling_params: or `fields` of one.
            use_hook: False asks nothing of the worker this time.
            cleanup: forget what was read before; else it is kept, and this is added.
        """
        if sampling_params is not None and fields:
            raise ValueError(f"sampling_params: cannot be combined with {sorted(fields)}")
        params = sampling_params or SamplingParams(**fields)
        if use_hook is False:
            return self.llm.generate(prompts, params)
        return self._kept(self.llm.generate(prompts, self._asked(params, self._fields)), cleanup)

    def _asked(self, params: SamplingParams, fields: Mapping[str, Any]) -> SamplingParams:
        """A copy of `params` with the worker's fields."""
        made = params.clone()
        for name, value in fields.items():
            if getattr(made, name) is not None:
                raise ValueError(f"{name}: is filled by the worker {self._worker}")
            setattr(made, name, value)
        return made

    def _kept(self, outputs: list[RequestOutput], cleanup: bool) -> list[RequestOutput]:
        """`outputs`, which are kept if they have what `analyze` reads."""
        if self._worker in (PROBE, QK):
            self._outputs = outputs if cleanup else self._outputs + outputs
        return outputs

    def analyze(self, analyzer_spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return what was read, by prompt: `{"hidden_states": [{"model.layers.0": tensor}]}`, or
        what `hook_attention.tracked` and `reranked` say.

        Args:
            analyzer_spec: `{"reduce": "none"}` for tensors [tokens, hidden] (of one token as well),
                "mean" for their mean, [hidden], or "norm" for each length, float32 [tokens]; that
                of the attention's analyzers is theirs.

        Raises:
            ValueError: nothing was read, or something else is asked for.
        """
        spec = dict(analyzer_spec or {})
        if not self._outputs:
            raise ValueError(f"analyze: nothing was read; generate first, with {PROBE} or {QK}")
        if self._worker == QK:
            if self._analyzer is None:
                raise ValueError(f"analyze: q and k have no analyzer; name {TRACKER} or {RERANKER}")
            return (tracked if self._analyzer == TRACKER else reranked)(self._outputs, spec)
        reduce = spec.pop("reduce", "none")
        if spec:
            raise ValueError(f"analyzer_spec: takes 'reduce' alone, got {sorted(spec)} too")
        return {
            STATES: [
                {name: reduce_rows(rows, reduce) for name, rows in self.states(output).items()}
                for output in self._outputs
            ]
        }

    def states(self, output: RequestOutput) -> dict[str, torch.Tensor]:
        """Return the states that were read of a prompt, `{"model.layers.0": [tokens, hidden]}`.

        Raises:
            ValueError: they could not be read.
        """
        result = (output.capture_results or {})["inline"]
        if result.status != "ok":
            raise ValueError(f"states: {result.error}")
        return {f"model.layers.{n}": rows.values for (_, n), rows in result.payload.items()}


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
    return config


def _section(config: Mapping[str, Any], name: str, known: set[str]) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise ValueError(f"config_file: has no section {name!r}")
    if unknown := sorted(section.keys() - known):
        raise ValueError(f"{name}: unknown keys {unknown}; known are {sorted(known)}")
    return section
