# SPDX-License-Identifier: Apache-2.0
"""The process of one engine that `benchmarks.engines` started: works until the pipe ends.

The engine core runs in this process, or in one that vLLM starts from here. Weights are random
(`benchmarks.random_weights`), prompts are random tokens, the same in each engine. Imports nothing
that only our tree has, as upstream's own may be what is here.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.engines import Answer, Asks, Batch, CopyToHost, Start, WeightBytes

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles where it runs; the host may have no compiler
}
WORKER = "benchmarks.engine_worker.EngineWorker"
"""Named, not imported: nothing but vLLM itself prepares the process that it may fork."""
POINTS = ("pre_attn", "post_attn", "post_block")
LAYER = "layer "
MASS = ("mass", "a few")
FEW_LAYERS, FEW_HEADS = 6, [0, 1, 2, 3]
STRENGTH = 0.1
"""Of steering vectors, a component; those of the stream are of order one."""


class Served:
    """The engine, and what it answers batches with."""

    def __init__(self, start: Start) -> None:
        from vllm import LLM

        self._llm = LLM(model=start.model, worker_extension_cls=WORKER, **start.options)
        if (self._worker("process_id") != os.getpid()) != start.processes:
            raise RuntimeError("the engine core is not in the process where it was wanted")
        config = self._llm.llm_engine.model_config
        self._hidden = config.get_hidden_size()
        self._layers = config.hf_config.num_hidden_layers
        self._ends = start.options.get("capture_stop_after") is not None
        self._vocabulary = config.get_vocab_size()
        for index in range(start.modules):
            self.register(f"module-{index}", index)

    def register(self, name: str, index: int, strength: float = STRENGTH) -> None:
        """A module with a vector of its own for each point of each layer."""
        import torch

        seed = torch.Generator().manual_seed(1000 + index)
        values = torch.randn(len(POINTS), self._layers, self._hidden, generator=seed) * strength
        vectors = {p: dict(enumerate(rows)) for p, rows in zip(POINTS, values, strict=True)}
        llm: Any = self._llm
        llm.steering.register_module(name, {"vectors": vectors})

    def answer(self, batch: Batch) -> Answer:
        prompts, params = self._requests(batch)
        engine: Any = self._llm.llm_engine
        outputs = []
        finished: dict[int, float] = {}
        gc.collect()
        started = time.perf_counter()
        # What `LLM.generate` does, with a look at the clock whenever a request is complete.
        self._llm.enqueue(prompts, params, use_tqdm=False)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    finished[int(output.request_id)] = time.perf_counter() - started
                    outputs.append(output)
        outputs.sort(key=lambda output: int(output.request_id))
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert [len(ids) for ids in tokens] == [0 if self._ends else batch.tokens] * batch.requests
        return Answer(
            finished=tuple(finished[number] for number in sorted(finished)),
            digests=tuple(zlib.crc32(repr(list(ids)).encode()) for ids in tokens),
            captured=self._captured(batch, outputs) if batch.asks.capture else 0,
        )

    def _requests(self, batch: Batch) -> tuple[list[Any], list[Any]]:
        import torch

        from vllm import SamplingParams

        seed = torch.Generator().manual_seed(batch.requests)
        shape = (batch.requests, batch.prompt)
        prompts = torch.randint(0, self._vocabulary, shape, generator=seed).tolist()
        params = [
            SamplingParams(
                max_tokens=batch.tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                **(self._fields(batch.asks, i) if i % batch.asks.every == 0 else {}),
            )
            for i in range(batch.requests)
        ]
        return [{"prompt_token_ids": ids} for ids in prompts], params

    def _fields(self, asks: Asks, index: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if asks.distinct:
            number = index // asks.every % asks.distinct
            fields["steering_modules"] = [f"{asks.modules}-{number}"]
        if asks.focus:
            span = {"start": 8 + index, "stop": 40 + index}  # no two requests have the same keys
            entry = {"op": "focus", "layers": "all", "span": span, "factor": asks.focus}
            fields["steering"] = [entry]
        if asks.feature:
            entry = {"op": "feature", "features": "sae", "id": 100 + index, "value": 8.0}
            fields["steering"] = [entry]
        if asks.rule:
            probe = [1.0] * self._hidden
            rule = {"name": "never", "point": "post_block", "probe": probe, "threshold": 1e30}
            fields["rules"] = [{**rule, "layer": self._layers // 2, "then": "stop"}]
        if asks.capture:
            fields["capture"] = {"inline": self._inline(asks, index)}
        return fields

    def _inline(self, asks: Asks, index: int) -> dict[str, Any]:
        if asks.capture in MASS:
            edge = 8 + index  # no two requests have the same ranges
            few = dict.fromkeys(range(min(self._layers, FEW_LAYERS)), FEW_HEADS)
            attention = {
                "heads": few if asks.capture == "a few" else "all",
                "queries": asks.positions,
                "keys": {"instruction": {"stop": edge}, "data": {"start": edge}},
                "give": ["mass"],
            }
            return {"attention": attention}
        if asks.capture == "features":
            return {"features": {"name": "sae", "top": 32}, "positions": asks.positions}
        hooks: dict[str, Any] = {"q": "all", "z": "all"}
        if asks.capture != "q and z":
            hooks = {"post_block": self._captured_layers(asks)}
        read = {}
        if asks.capture == "lens":
            read = {"lens": {"name": "logit", "top_k": 10, "entropy": True}}
        return {"hooks": hooks, "positions": asks.positions, **read}

    def _captured_layers(self, asks: Asks) -> list[int]:
        if asks.capture.startswith(LAYER):
            return [int(asks.capture.removeprefix(LAYER))]
        return [*range(self._layers)] if asks.capture == "all" else [self._layers // 2]

    def _captured(self, batch: Batch, outputs: list[Any]) -> int:
        """Bytes of all rows, which are all that were asked for."""
        size = 0
        rows = {
            "all_generated": batch.tokens - 1,  # the last one is not fed back
            "all_prompt": batch.prompt,
            "last_prompt": 1,
        }[batch.asks.positions]
        for output in outputs[:: batch.asks.every]:
            result = output.capture_results["inline"]
            assert result.status == "ok", result.error
            few, layers = min(self._layers, FEW_LAYERS), len(self._captured_layers(batch.asks))
            sites = {"q and z": 2 * self._layers, "mass": self._layers, "a few": few}
            assert len(result.payload) == sites.get(batch.asks.capture, layers)
            for site in result.payload.values():
                values = _values(site, batch.asks.capture)
                assert len(values) == rows
                size += values.nbytes
        return size

    def copy_rate(self, work: CopyToHost) -> float:
        return float(self._worker("copy_rate", work.size, work.repeats))

    def weight_bytes(self) -> int:
        return int(self._worker("weight_bytes"))

    def check_origin(self, stock: str) -> None:
        """Upstream's engine must be upstream's in every module, and not be patched."""
        from benchmarks.engine_worker import modules_not_from

        if (Path(stock) / "vllm/v1/interventions/plan.py").exists():
            raise RuntimeError(f"{stock} is patched, it is not upstream's own tree")
        foreign = [*modules_not_from(stock), *self._worker("modules_not_from", stock)]
        if foreign:
            raise RuntimeError(f"not from {stock}: {foreign[:5]}")

    def shut_down(self) -> None:
        """Else this process waits for that of its engine core, at its end."""
        self._llm.llm_engine.engine_core.shutdown()

    def _worker(self, method: str, *args: Any) -> Any:
        """What the one worker answers."""
        [answer] = self._llm.collective_rpc(method, args=args)
        return answer


def _values(rows: Any, capture: str) -> Any:
    """Values of the rows at a site: float32 [rows, ...]."""
    if capture in MASS:
        return rows.mass
    if capture == "features":
        return rows.top_values
    return rows.top_logprobs if capture == "lens" else rows.values


def serve(pipe: Connection, start: Start, served: Served) -> None:
    """Until the pipe ends: `EOFError`."""
    import vllm

    if start.stock:
        served.check_origin(start.tree)
    pipe.send(f"{vllm.__version__} from {Path(vllm.__file__).parent}")
    while True:
        work = pipe.recv()
        if isinstance(work, WeightBytes):
            pipe.send(served.weight_bytes())
        elif isinstance(work, CopyToHost):
            pipe.send(served.copy_rate(work))
        else:
            pipe.send(served.answer(work))


def main() -> None:
    pipe = Connection(int(sys.argv[1]))
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        start: Start = pipe.recv()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(start.processes))
        served = Served(start)
        try:
            serve(pipe, start, served)
        finally:
            served.shut_down()
    except EOFError:
        pass
    except Exception:
        pipe.send(RuntimeError(traceback.format_exc()))


if __name__ == "__main__":
    main()
