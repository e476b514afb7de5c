# SPDX-License-Identifier: Apache-2.0
"""The demo's use of vLLM: read rows of the stream, and write texts under steering.

Everything here goes through the public interface (`LLM`, `SamplingParams`, `stack`), as any
program would use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

POINT = "post_block"
MAX_LENGTH = 256  # tokens of prompt and answer; every prompt of the demo is much shorter


@dataclass(frozen=True)
class Steering:
    """`scale * vector` added at `post_block[layer]`, at every position of prompt and answer.

    vector: float32 [hidden], in the units of the stream.
    """

    layer: int
    vector: torch.Tensor
    scale: float

    def fields(self) -> dict[str, Any]:
        """The fields of `SamplingParams`.

        Scale 0 is sent as v, minus v for the prompt and minus v for the answer: a sum of zero that
        passes through a slot of the steering table like any other content.
        """

        def at_layer(scale: float) -> dict[str, Any]:
            return {POINT: {self.layer: {"vector": self.vector, "scale": scale}}}

        if self.scale:
            return {"steering_vectors": at_layer(self.scale)}
        return {
            "steering_vectors": at_layer(1.0),
            "prefill_steering_vectors": at_layer(-1.0),
            "decode_steering_vectors": at_layer(-1.0),
        }


@dataclass(frozen=True)
class Written:
    """What the model wrote after a prompt. `finished`: it ended the text itself."""

    prompt: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finished: bool

    def whole_words(self) -> str:
        """The text without a last word that the token limit may have cut."""
        return self.text if self.finished else self.text.rpartition(" ")[0]


class Bench:
    """One engine, and how the demo asks it for things."""

    def __init__(
        self, model: Path, dtype: Literal["auto", "float32"], temperature: float, answer_tokens: int
    ) -> None:
        """Starts the engine.

        Args:
            model: a directory in Hugging Face format.
            dtype: as `LLM` takes it.
            temperature: of every text written here; 0 is greedy. Above it, the seed is the index
                of the prompt, so the same prompt draws alike under any steering.
            answer_tokens: most tokens of an answer.
        """
        from vllm import LLM

        self.llm: LLM = LLM(
            model=str(model),
            dtype=dtype,
            enable_steering=True,
            max_steering_configs=32,
            capture_consumers=["inline"],
            enforce_eager=True,  # compiling would take longer than the demo runs
            max_model_len=MAX_LENGTH,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            kv_cache_memory_bytes=1 << 30,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
        )
        self.tokenizer = self.llm.get_tokenizer()
        self.temperature = temperature
        self.answer_tokens = answer_tokens
        sites = self.llm.llm_engine.model_config.hf_text_config
        self.layers: int = sites.num_hidden_layers
        self.hidden: int = sites.hidden_size

    def close(self) -> None:
        """Ends the engine and frees what it holds."""
        self.llm.llm_engine.engine_core.shutdown()

    def encode(self, prompt: str) -> list[int]:
        return list(self.tokenizer.encode(prompt))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """One `generate` call over token ids, one `SamplingParams` per prompt."""
        from vllm.inputs import TokensPrompt

        return self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts],
            list(params),
            use_tqdm=False,
        )

    def last_rows(self, prompts: Sequence[str]) -> torch.Tensor:
        """float32 [prompts, layers, hidden]: `post_block` of all layers at the last token."""
        from vllm import SamplingParams
        from vllm.v1.capture import stack

        layers = list(range(self.layers))
        request = {"hooks": {POINT: layers}, "positions": "last_prompt"}
        params = SamplingParams(max_tokens=1, temperature=0.0, capture={"inline": request})
        outputs = self.generate([self.encode(p) for p in prompts], [params] * len(prompts))
        return stack(outputs, POINT, layers, position=-1).float()

    def write(
        self, prompts: Sequence[str], steerings: Sequence[Steering | None]
    ) -> list[list[Written]]:
        """Answers to every prompt under every steering, [steerings][prompts], in one call."""
        ids = [self.encode(p) for p in prompts]
        params = [self._params(i, s) for s in steerings for i in range(len(prompts))]
        outputs = self.generate(ids * len(steerings), params)
        answers = [
            self._written(prompts[i % len(prompts)], output) for i, output in enumerate(outputs)
        ]
        return [answers[i : i + len(prompts)] for i in range(0, len(answers), len(prompts))]

    def trace(
        self, prompts: Sequence[str], steerings: Sequence[Steering | None], layer: int
    ) -> list[tuple[Written, torch.Tensor]]:
        """Answers of all prompts under all steerings, prompts slowest, in one call; each with
        float32 [answer - 1, hidden], `post_block[layer]` of its tokens.

        Row i has read token i of the answer; the last token is never fed back.
        """
        request = {"inline": {"hooks": {POINT: [layer]}, "positions": "all_generated"}}
        asked = [
            (p, self._params(i, s, capture=request))
            for i, p in enumerate(prompts)
            for s in steerings
        ]
        outputs = self.generate([self.encode(p) for p, _ in asked], [params for _, params in asked])
        traces = []
        for (prompt, _), output in zip(asked, outputs, strict=True):
            results = output.capture_results
            assert results is not None  # it was asked for
            rows = results["inline"].payload[POINT, layer].values
            traces.append((self._written(prompt, output), rows.float()))
        return traces

    def surprise(self, answers: Sequence[Written]) -> torch.Tensor:
        """float64 [answers, 2]: nats and tokens of each answer under the unsteered model."""
        ids = [[*a.prompt_ids, *a.token_ids] for a in answers]
        logprobs = self.prompt_logprobs(ids, [None] * len(ids))
        return torch.tensor(
            [
                (-sum(values[len(a.prompt_ids) :]), len(a.token_ids))
                for a, values in zip(answers, logprobs, strict=True)
            ],
            dtype=torch.float64,
        )

    def prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], steerings: Sequence[Steering | None]
    ) -> list[list[float]]:
        """log P of every token of each prompt given those before it; 0.0 for the first."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=2, temperature=0.0, prompt_logprobs=0, **(s.fields() if s else {})
            )
            for s in steerings
        ]
        found = []
        for ids, output in zip(prompts, self.generate(prompts, params), strict=True):
            entries = output.prompt_logprobs
            assert entries is not None  # they were asked for
            pairs = zip(ids, entries, strict=True)
            found.append([entry[token].logprob if entry else 0.0 for token, entry in pairs])
        return found

    def _params(self, seed: int, steering: Steering | None, **fields: Any) -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(
            max_tokens=self.answer_tokens,
            temperature=self.temperature,
            seed=seed if self.temperature else None,
            **(steering.fields() if steering else {}),
            **fields,
        )

    def _written(self, prompt: str, output: RequestOutput) -> Written:
        answer = output.outputs[0]
        return Written(
            prompt=prompt,
            prompt_ids=tuple(output.prompt_token_ids or ()),
            token_ids=tuple(answer.token_ids),
            text=answer.text,
            finished=answer.finish_reason == "stop",
        )
