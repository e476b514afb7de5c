# SPDX-License-Identifier: Apache-2.0
"""Starts vLLM, ours or upstream's, in the same way for every peer that runs in it."""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.workloads import Answer, Load, Shape, prompts

if TYPE_CHECKING:
    from vllm import LLM


def prepare() -> None:
    """Before the first import of vllm."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `redraw` goes to the worker
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def need_stock(tree: Path) -> None:
    """This process must run upstream's files, and they must be upstream's."""
    import vllm

    # Not resolved: the tree may be made of links.
    found = Path(vllm.__file__).parent.absolute()
    if found != tree.absolute() / "vllm":
        raise SystemExit(f"vllm is {found}, not {tree}/vllm: put {tree} first in PYTHONPATH")
    if (found / "v1/interventions/worker/runner.py").exists():
        raise SystemExit(f"{found} is patched: it has v1/interventions/worker/runner.py")


def start(args: argparse.Namespace, **options: Any) -> LLM:
    from vllm import LLM

    llm = LLM(
        model=str(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        tensor_parallel_size=args.tensor_parallel_size,
        max_model_len=max(args.prompt + args.generated, *(load.prompt + 1 for load in args.extract))
        + 16,
        max_num_seqs=max(args.requests, *(load.requests for load in args.extract)),
        max_num_batched_tokens=args.step_tokens,
        kv_cache_memory_bytes=args.kv_bytes,
        gpu_memory_utilization=0.1,  # of no use but to refuse; the line above decides
        enforce_eager=args.eager,
        enable_prefix_caching=False,  # every round has the same prompts
        disable_log_stats=True,
        **options,
    )
    llm.apply_model(redraw)
    return llm


def redraw(model: torch.nn.Module) -> None:
    """Fill parameters by name, as `benchmarks.random_weights` does, in a worker that has loaded.

    It may be in a process that knows no load format of ours. With tensor parallelism the workers'
    parts of a parameter are alike, and the model is not that of one worker.
    """
    from benchmarks.random_weights import fill

    for name, parameter in model.named_parameters():
        fill(name, parameter.data)


def stop(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def describe(answer: Answer, llm: LLM, **more: str) -> None:
    """What else decides how fast an engine is."""
    import vllm

    config = llm.llm_engine.vllm_config
    apart = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
    answer.versions |= {"vllm": vllm.__version__, "torch": torch.__version__}
    answer.settings |= {
        "model runner": "V2" if config.use_v2_model_runner else "V1",
        "CUDA graphs": str(config.compilation_config.cudagraph_mode),
        "engine": "a process of its own" if apart else "in the asking process",
        "tensor parallel": str(config.parallel_config.tensor_parallel_size),
        "asynchronous scheduling": str(config.scheduler_config.async_scheduling),
        "prefix cache": "off",
        **more,
    }


class Asks:
    """The requests of both workloads, for an `LLM`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self.shape = Shape.of(args.model)
        self._generate = self._prompts(args.requests, args.prompt)
        self._extract = {load: self._prompts(load.requests, load.prompt) for load in args.extract}

    def generate(self, llm: LLM, fields: list[dict[str, Any]] | None = None) -> list[Any]:
        """The outputs. `fields`: what each request says beside its prompt."""
        return self._run(llm, self._generate, self._args.generated, fields)

    def extract(self, llm: LLM, load: Load, fields: dict[str, Any] | None = None) -> list[Any]:
        """The outputs. `fields`: what every request says beside its prompt."""
        each = None if fields is None else [fields] * load.requests
        return self._run(llm, self._extract[load], 1, each)

    def _prompts(self, requests: int, length: int) -> list[Any]:
        return [{"prompt_token_ids": p} for p in prompts(self.shape, requests, length)]

    def _run(
        self,
        llm: LLM,
        asked: list[Any],
        tokens: int,
        fields: list[dict[str, Any]] | None,
    ) -> list[Any]:
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                **(fields[i] if fields else {}),
            )
            for i in range(len(asked))
        ]
        outputs = llm.generate(asked, params, use_tqdm=False)
        for output in outputs:
            if len(output.outputs[0].token_ids) != tokens:
                raise SystemExit(f"{len(output.outputs[0].token_ids)} tokens, not {tokens}")
        return outputs
