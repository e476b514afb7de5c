# SPDX-License-Identifier: Apache-2.0
"""The `MiaLLM` of MIA, the successor of vLLM-Hook, over ours: outputs with `probes`, in memory or
on disk.

    from examples.peers.mia_llm import MiaLLM

    llm = MiaLLM("/path/to/model", "capture_hs", config_file="config.json", hook_dir="captures")
    (output,) = llm.generate(["Today I went"], save_to_disk=True, run_id="first", max_tokens=1)

Any graph mode, both model runners, pipeline parallelism; files are those of docs/capture-files.md.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from examples.peers.hook_llm import PROBE, QK, STATES, STEER, HookLLM
from vllm import RequestOutput, SamplingParams
from vllm.v1.capture import reader

_WORKERS = {"capture_hs": PROBE, "capture_qk": QK, "steer": STEER}


class MiaOutput(RequestOutput):
    """An output with what was read beside its text."""

    probes: dict[str, Any]
    """`{"hidden_states": {"model.layers.0": [tokens, hidden]}}`; of capture_qk without an analyzer
    `{"qk": {"model.layers.0": {"q": [n, heads, width], "k": [n, heads, width]}}}`; on disk
    `{"run_id": ..., "request_id": ..., "paths": [...]}`, below `hook_dir`. Else empty."""


class MiaLLM(HookLLM):
    """A `HookLLM` whose outputs have `probes`.

    Args:
        model: as of `vllm.LLM`, and so are `options`.
        worker_name: "capture_hs", "capture_qk", "steer", or None.
        analyzer_name, config_file, download_dir, enable_hook: as of `HookLLM`.
        hook_dir: where files go; needed for `save_to_disk`.

    Raises:
        ValueError: as `HookLLM`.
    """

    def __init__(
        self,
        model: str,
        worker_name: str | None = None,
        analyzer_name: str | None = None,
        config_file: str | os.PathLike[str] | None = None,
        download_dir: str | None = None,
        enable_hook: bool = True,
        hook_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if worker_name not in (None, *_WORKERS):
            raise ValueError(f"worker_name: must be one of {list(_WORKERS)}, got {worker_name!r}")
        if hook_dir is not None and worker_name != "capture_hs":
            raise ValueError("hook_dir: only what capture_hs reads goes to files")
        self._root = os.path.abspath(hook_dir) if hook_dir is not None else None
        if self._root:
            files = {"name": "filesystem", "root": self._root}
            options["capture_consumers"] = ["inline", files]
        super().__init__(
            model,
            _WORKERS.get(worker_name or ""),
            analyzer_name,
            config_file,
            download_dir,
            enable_hook,
            **options,
        )

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | None = None,
        use_hook: bool | None = None,
        cleanup: bool = True,
        save_to_disk: bool = False,
        run_id: str | None = None,
        **fields: Any,
    ) -> list[MiaOutput]:
        """As `HookLLM.generate`; what it returns are `MiaOutput`.

        Args:
            save_to_disk: write what is read to `hook_dir`, and not into the outputs; it is on disk
                when this returns. The prompt with number i is `reader.open(hook_dir).find(i,
                tag=run_id)`.
            run_id: the folder; one of lower-case letters, digits, ".", "_" and "-". By default a
                new one. Nothing there is replaced: a run's name that is taken is an error.

        Raises:
            ValueError: nothing can be written, or it could not.
        """
        if not save_to_disk:
            if run_id is not None:
                raise ValueError("run_id: names what is written; say save_to_disk=True")
            plain = super().generate(prompts, sampling_params, use_hook, cleanup, **fields)
            return [self._probed(output, use_hook) for output in plain]
        if self._root is None or self._worker != PROBE or use_hook is False:
            raise ValueError("save_to_disk: needs hook_dir, capture_hs and its hook")
        if sampling_params is not None and fields:
            raise ValueError(f"sampling_params: cannot be combined with {sorted(fields)}")
        params, run = sampling_params or SamplingParams(**fields), run_id or uuid.uuid4().hex
        prompts = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        read = self._fields["capture"]["inline"]
        asked = [
            self._asked(
                params, {"capture": {"filesystem": {**read, "request_id": str(i), "tag": run}}}
            )
            for i in range(len(prompts))
        ]
        outputs = self._kept(self.llm.generate(prompts, asked), cleanup)
        return [self._probed(output, use_hook) for output in outputs]

    def states(self, output: RequestOutput) -> dict[str, torch.Tensor]:
        """Return the states of a prompt, read from its files where they are there."""
        results = output.capture_results or {}
        if self._root is None or "filesystem" not in results:
            return super().states(output)
        written = self._written(output)
        found = reader.open(self._root).find(written["request_id"], tag=written["tag"])
        return {f"model.layers.{n}": found.rows(point, n).values for point, n in found.sites}

    def _written(self, output: RequestOutput) -> dict[str, Any]:
        result = (output.capture_results or {})["filesystem"]
        if result.status != "ok":
            raise ValueError(f"save_to_disk: {result.error}")
        written: dict[str, Any] = result.payload
        return written

    def _probed(self, output: RequestOutput, use_hook: bool | None) -> MiaOutput:
        probed = MiaOutput.__new__(MiaOutput)
        vars(probed).update(vars(output))
        probed.probes = {} if use_hook is False else self._probes(output)
        return probed

    def _probes(self, output: RequestOutput) -> dict[str, Any]:
        results = output.capture_results or {}
        if "filesystem" in results:
            written = self._written(output)
            names = {"run_id": written["tag"], "request_id": written["request_id"]}
            return {**names, "paths": written["paths"]}
        if self._worker == PROBE:
            return {STATES: self.states(output)}
        if self._worker != QK or self._analyzer is not None:
            return {}
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name in ("inline[0]", "inline[1]"):
            if results[name].status != "ok":
                raise ValueError(f"probes: {results[name].error}")
            for (point, layer), rows in results[name].payload.items():
                found.setdefault(f"model.layers.{layer}", {})[point] = rows.values
        return {"qk": found}
