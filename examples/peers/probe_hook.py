# SPDX-License-Identifier: Apache-2.0
"""The `LLM` and `AsyncLLM` of vllm-probe-hook over ours: change the import, and nothing else.

    from examples.peers.probe_hook import LLM, SamplingParams

    llm = LLM("/path/to/model", layers=[3, 4], include_prefill=True)
    (output,) = llm.generate(["Today I went"], SamplingParams(max_tokens=8))
    output.hidden_states[3]  # [generated - 1, hidden]: the last token is never fed back

Its document and not its code was read. Any dtype, CUDA graphs, and as many engines as you like.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch

import vllm
from vllm import AsyncEngineArgs, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM as Engine

__all__ = ["LLM", "AsyncLLM", "ProbedOutput", "SamplingParams"]

States = dict[int, torch.Tensor]
"""By layer, from 0: [n, hidden] in the model's dtype, what the block returns."""


class ProbedOutput(RequestOutput):
    """An output with what was read beside its text."""

    hidden_states: States
    """Of generated tokens."""
    prefill_hidden_states: States
    """Of prompt tokens; empty unless they were asked for."""


class _Probe:
    """What is read of every request.

    Raises:
        ValueError: there are no layers, or nothing of them is read.
    """

    def __init__(
        self,
        layers: Sequence[int | str],
        include_prefill: bool,
        include_decode: bool,
        last_prefill_token: bool,
        last_decode_token: bool,
    ) -> None:
        if not layers:
            raise ValueError("layers: must be a list of layers, or ['all']")
        self._hooks = {"post_block": "all" if list(layers) == ["all"] else list(layers)}
        self._positions: dict[str, str] = {}
        if include_prefill or last_prefill_token:
            self._positions["prefill"] = "last_prompt" if last_prefill_token else "all_prompt"
        if include_decode or last_decode_token:
            self._positions["decode"] = "last_generated" if last_decode_token else "all_generated"
        if not self._positions:
            raise ValueError("include_decode: is False, and so is include_prefill: nothing is read")

    def asked(self, params: SamplingParams) -> SamplingParams:
        """Return a copy of `params` that captures.

        Raises:
            ValueError: the request captures by itself, or has several completions.
        """
        if params.capture is not None or (params.n or 1) > 1:
            raise ValueError("capture, n: this class fills capture, for one completion")
        made = copy.copy(params)
        captures = [{"hooks": self._hooks, "positions": p} for p in self._read(params).values()]
        made.capture = {"inline": captures} if captures else None
        return made

    def _read(self, params: SamplingParams) -> dict[str, str]:
        """What is there to be read: with one token none is fed back."""
        return {
            phase: positions
            for phase, positions in self._positions.items()
            if phase == "prefill" or params.max_tokens != 1
        }

    def output(self, output: RequestOutput, params: SamplingParams) -> ProbedOutput:
        """Return an output with its states.

        Raises:
            RuntimeError: rows could not be read.
        """
        probed = ProbedOutput.__new__(ProbedOutput)
        vars(probed).update(vars(output))
        states: dict[str, States] = {"prefill": {}, "decode": {}}
        results = output.capture_results or {}
        for i, phase in enumerate(self._read(params)):
            result = results[f"inline[{i}]"]
            if result.status == "error":
                raise RuntimeError(f"capture: {result.error}")
            states[phase] = {n: rows.values for (_, n), rows in result.payload.items()}
        probed.prefill_hidden_states, probed.hidden_states = states["prefill"], states["decode"]
        return probed


class LLM:
    """An `LLM` whose outputs have `hidden_states`.

    Args:
        model: as of `vllm.LLM`, and so are `options`.
        layers: decoder blocks from 0, or `["all"]`.
        include_prefill: whether outputs have `prefill_hidden_states`.
        include_decode: whether they have `hidden_states`.
        last_prefill_token: only the last prompt token's.
        last_decode_token: only those of the last generated token that was fed back.
    """

    def __init__(
        self,
        model: str,
        layers: Sequence[int | str],
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        **options: Any,
    ) -> None:
        self._probe = _Probe(
            layers, include_prefill, include_decode, last_prefill_token, last_decode_token
        )
        self.llm = vllm.LLM(model=model, capture_consumers=["inline"], **options)

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, **more: Any
    ) -> list[ProbedOutput]:
        """`vllm.LLM.generate`, with one `SamplingParams` for all prompts."""
        params = sampling_params or self.llm.get_default_sampling_params()
        outputs = self.llm.generate(prompts, self._probe.asked(params), **more)
        return [self._probe.output(output, params) for output in outputs]

    def remove_hooks(self) -> None:
        """Do nothing: no module of the model was changed."""


class AsyncLLM:
    """An engine whose outputs have the states of all tokens so far. Options are those of `LLM`."""

    def __init__(
        self,
        model: str,
        layers: Sequence[int | str],
        include_prefill: bool = False,
        include_decode: bool = True,
        last_prefill_token: bool = False,
        last_decode_token: bool = False,
        **options: Any,
    ) -> None:
        self._probe = _Probe(
            layers, include_prefill, include_decode, last_prefill_token, last_decode_token
        )
        made = AsyncEngineArgs(model=model, capture_consumers=["inline"], **options)
        self.engine = Engine.from_engine_args(made)

    async def generate(
        self,
        prompt: str | Mapping[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
    ) -> AsyncIterator[ProbedOutput]:
        """Yield outputs as tokens come, each with all text and all states so far."""
        params = self._probe.asked(sampling_params)
        params.output_kind = RequestOutputKind.CUMULATIVE
        async for output in self.engine.generate(prompt, params, request_id):  # type: ignore[arg-type]
            yield self._probe.output(output, sampling_params)

    def shutdown(self) -> None:
        """End the engine."""
        self.engine.shutdown()
