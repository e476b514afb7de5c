# SPDX-License-Identifier: Apache-2.0
"""One engine mode on a GPU: steering and capture against Hugging Face, and bit-identity in graphs.

    python -m tests.gpu.mode --name full_and_piecewise --model DIR --engine '{"..." : ...}'

Prints one JSON object a check. `tests/gpu/run.py` starts one process a mode. bfloat16 weights; the
reference computes in float32 on the CPU from the same weights, so errors are the engine's own
rounding. The unsteered read error is that noise, measured first; a steered one may be twice it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.conformance import reference as ref
from tests.gpu import capture, ends, focus, rules, steering, workload
from tests.gpu.model import HEADS, HIDDEN, LAYERS, VOCAB, prompts
from vllm.config.points import STREAM_POINTS

LLAMA = ref.Adapter(blocks="model.layers", branch=("self_attn",))
GENERATED = 8
NOISE_LIMIT = 0.03
"""Most relative L2 error of a row that bfloat16 may cause; what was seen is printed."""
LEAST_MOVE = 0.05


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(9e9).max())


class Mode:
    hidden, layers, adapter, noise_limit = HIDDEN, LAYERS, LLAMA, NOISE_LIMIT
    worst_row = staticmethod(worst_row)

    def __init__(
        self,
        model: Path,
        options: Mapping[str, Any],
        root: Path,
        reference: torch.nn.Module | None = None,
    ) -> None:
        """
        Args:
            root: where files are written.
            reference: transformers' model; default: the same folder, in float32.
        """
        from vllm import LLM

        self.root = str(root)
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "skip_tokenizer_init": True,
            "max_model_len": 256,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 1 << 30,
            "gpu_memory_utilization": 0.05,  # modes share the GPU; the line above decides
            "enable_steering": True,
            "capture_consumers": ["inline", f"filesystem:root={root}"],
            "capture_landing_bytes": 1 << 30,  # several modes run at a time
            "disable_log_stats": True,
            "seed": 0,
        }
        settings |= options
        if settings.get("distributed_executor_backend") == "ray":
            import ray

            # One of its own, without the dashboard: modes run side by side.
            ray.init("local", include_dashboard=False, object_store_memory=256 << 20)
        self.llm = LLM(model=str(model), **settings)
        self.hf: Any = self.load(model) if reference is None else reference

    @staticmethod
    def load(model: Path) -> Any:
        """Load transformers' model of a folder in float32."""
        return AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def run(
        self,
        tokens: Sequence[list[int]],
        steer: Sequence[Mapping[str, Any]],
        hooks: Any = None,
        making: Mapping[str, Any] | None = None,
        max_tokens: int = GENERATED,
        between: Callable[[], None] | None = None,
        versions: bool = False,
    ) -> list[tuple[list[int], dict[ref.Site, torch.Tensor]]]:
        """(prompt and generated tokens but the last, captured rows or scores) of each request.

        Args:
            making: fields of the capture that say what is made of rows.
            between: called after each step of the engine.
            versions: have the rows' versions too, at ("version", 0).
        """
        from vllm import SamplingParams

        inline = {"hooks": hooks or dict.fromkeys(STREAM_POINTS, "all"), "positions": "all"}
        inline |= making or {}
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                capture={"inline": inline},
                **fields,
            )
            for fields in steer
        ]
        fed: Any = [{"prompt_token_ids": t} for t in tokens]
        outputs = self._generate(fed, params, between)
        results = []
        for prompt, output in zip(tokens, outputs, strict=True):
            ids = [*prompt, *output.outputs[0].token_ids][:-1]
            assert output.capture_results is not None
            result = output.capture_results["inline"]
            if result.status != "ok":
                raise AssertionError(f"capture: {result}")
            for rows in result.payload.values():
                if rows.positions.tolist() != list(range(len(ids))):
                    raise AssertionError(f"positions {rows.positions}, expected 0-{len(ids) - 1}")
            found = {site: rows.values for site, rows in result.payload.items()}
            if versions:
                found["version", 0] = torch.from_numpy(rows.versions)
            results.append((ids, found))
        return results

    def _generate(self, fed: Any, params: Any, between: Callable[[], None] | None) -> list[Any]:
        engine: Any = self.llm.llm_engine
        if between is None:
            return self.llm.generate(fed, params, use_tqdm=False)
        step = engine.step

        def stepped() -> Any:
            outputs = step()
            between()
            return outputs

        engine.step = stepped
        try:
            return self.llm.generate(fed, params, use_tqdm=False)
        finally:
            del engine.step

    def logprobs(
        self, tokens: Sequence[list[int]], steer: Sequence[Mapping[str, Any]]
    ) -> list[torch.Tensor]:
        """float [n], of each request's prompt tokens but the first; nothing is captured."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=GENERATED,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                prompt_logprobs=0,
                **fields,
            )
            for fields in steer
        ]
        fed: Any = [{"prompt_token_ids": t} for t in tokens]
        outputs: list[Any] = self.llm.generate(fed, params, use_tqdm=False)
        return [
            torch.tensor([next(iter(at.values())).logprob for at in o.prompt_logprobs[1:]])
            for o in outputs
        ]

    def runner(self) -> Any:
        """The model runner; None where it is in another process."""
        executor = getattr(self.llm.llm_engine, "model_executor", None)
        worker = getattr(executor, "driver_worker", None)
        return worker and worker.worker.model_runner

    def read_error(self, results: Any) -> float:
        """The worst row's error of a plain run."""
        worst = 0.0
        for ids, rows in results:
            want = ref.run(self.hf, LLAMA, ids).rows
            worst = max(worst, *(worst_row(rows[site], want[site]) for site in want))
        return worst

    def read(self) -> dict[str, Any]:
        self.noise = worst = self.read_error(self.run(prompts(13), [{}] * 13))
        return {"error": worst, "limit": self.noise_limit, "ok": worst <= self.noise_limit}

    def write(self) -> dict[str, Any]:
        sites = [
            (point, layer)
            for point in STREAM_POINTS
            for layer in (0, self.layers // 2, self.layers - 1)
        ]
        tokens = prompts(len(sites), seed=2)
        generator = torch.Generator().manual_seed(3)
        vectors = []
        for (point, layer), ids in zip(sites, tokens, strict=True):
            stream = ref.run(self.hf, LLAMA, ids).rows[(point, layer)]
            vector = torch.randn(HIDDEN, generator=generator)
            vectors.append(vector * stream.norm(dim=-1).mean() / vector.norm())
        steer = [
            {"steering_vectors": {p: {n: v}}} for (p, n), v in zip(sites, vectors, strict=True)
        ]
        worst, least_move = 0.0, 9e9
        last = ("post_block", self.layers - 1)
        for site, vector, (ids, rows) in zip(sites, vectors, self.run(tokens, steer), strict=True):
            every = torch.ones(len(ids), dtype=torch.bool)
            want = ref.write(self.hf, LLAMA, ids, site, vector, every).rows
            plain = ref.run(self.hf, LLAMA, ids).rows[last]
            worst = max(worst, *(worst_row(rows[s], want[s]) for s in want))
            least_move = min(least_move, float((want[last] - plain).norm() / plain.norm()))
        limit = max(2 * self.noise, 0.01)
        ok = worst <= limit and least_move >= LEAST_MOVE
        return {"error": worst, "limit": limit, "least_move": least_move, "ok": ok}

    def bystanders(self, plain: int, steered: int) -> dict[str, Any]:
        """Plain rows are bit-identical whether or not their neighbours are steered."""
        tokens = prompts(plain + steered, seed=plain)
        vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(4)) * 2
        everywhere = {"steering_vectors": {point: {"all": vector} for point in STREAM_POINTS}}
        before = self.run(tokens, [{}] * (plain + steered))
        after = self.run(tokens, [{}] * plain + [everywhere] * steered)
        same = all(
            b[0] == a[0] and all(torch.equal(b[1][site], a[1][site]) for site in b[1])
            for b, a in zip(before[:plain], after[:plain], strict=True)
        )
        prompt = len(tokens[-1])
        last = ("post_block", LAYERS - 1)
        moved = worst_row(after[-1][1][last][:prompt], before[-1][1][last][:prompt].float())
        return {"identical": same, "steered_moved": moved, "ok": same and moved > 0.05}

    def zero_sum(self) -> dict[str, Any]:
        """A vector plus its negative is bit-identical to nothing."""
        tokens = prompts(8, seed=5)
        vector = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(6))
        minus = {p: {"all": -vector} for p in STREAM_POINTS}
        null = {
            "steering_vectors": {p: {"all": vector} for p in STREAM_POINTS},
            "prefill_steering_vectors": minus,
            "decode_steering_vectors": minus,
        }
        before, after = self.run(tokens, [{}] * 8), self.run(tokens, [null] * 8)
        same = all(
            b[0] == a[0] and all(torch.equal(b[1][s], a[1][s]) for s in b[1])
            for b, a in zip(before, after, strict=True)
        )
        return {"identical": same, "ok": same}


def count_graphs(runner: Any) -> Counter[str] | None:
    """Counts V2's graph replays by kind from here on; None where the runner is not in reach."""
    manager = getattr(runner, "cudagraph_manager", None)
    if manager is None:
        return None
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        method = getattr(manager, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return call

    for name in ("run_fullgraph", "run_pw_graph"):
        setattr(manager, name, counted(name))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", type=json.loads, default={})
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    mode = Mode(args.model, args.engine, args.model.parent / f"files-{args.name}")
    counts = count_graphs(mode.runner())
    checks = {
        "read": mode.read,
        "write": mode.write,
        "bystanders 13 of 16": lambda: mode.bystanders(13, 3),
        "bystanders 5 of 9": lambda: mode.bystanders(5, 4),
        "tiers": lambda: steering.tiers(mode, prompts(9, seed=7), HIDDEN),
        "positions": lambda: steering.positions(mode, prompts(9, seed=8), HIDDEN),
        "zero sum": mode.zero_sum,
        "projections": lambda: capture.projections(mode, prompts(9, seed=10), HIDDEN),
        "norms": lambda: capture.norms(mode, prompts(9, seed=10)),
        "rules": lambda: rules.rules(mode, prompts(9, seed=18), HIDDEN),
        "forms": lambda: workload.forms(mode, prompts(9, seed=11)),
        "few sites": lambda: workload.few_sites(mode, prompts(1, seed=22)[0]),
        "prefix cache": lambda: workload.prefix_cache(mode, prompts(9, seed=12)),
        "tiers under way": lambda: workload.tiers_under_way(mode, prompts(9, seed=13)),
        "files": lambda: capture.files(mode, prompts(9, seed=21)),
        "large step": lambda: capture.large_step(mode, VOCAB, HIDDEN),
    }
    if "final" in args.engine.get("capture_points", ["final"]):
        checks["ends"] = lambda: ends.ends(mode, prompts(9, seed=19), LAYERS)
    if "compat" in args.engine:
        checks["output_qk"] = lambda: ends.output_qk(mode, prompts(9, seed=20), LAYERS)
    if "capture_points" in args.engine:
        checks["heads"] = lambda: capture.heads(mode, prompts(13, seed=15))
        checks["attention"] = lambda: capture.attention(mode, prompts(13, seed=16))
        checks["written heads"] = lambda: capture.written_heads(mode, prompts(13, seed=17))
    if "capture_lens" in args.engine:
        checks["lens"] = lambda: capture.lens(mode, prompts(9, seed=18))
    if args.name == "preempt":
        checks = {"preemption": lambda: workload.preemption(mode, prompts(13, seed=14))}
    if "focus" in args.name:
        checks = {
            "focus": lambda: focus.focus(mode, VOCAB, LAYERS, HEADS),
            "focus weights": lambda: focus.focus_weights(mode, VOCAB, LAYERS),
            "bystanders 13 of 16": lambda: mode.bystanders(13, 3),
        }
    if args.name.startswith("ops"):
        checks["ops"] = lambda: steering.ops(mode, prompts(11, seed=9), HIDDEN)
    for name, check in checks.items():
        try:
            result = check()
        except Exception as error:
            result = {"ok": False, "exception": f"{type(error).__name__}: {error}"}
        print(json.dumps({"mode": args.name, "check": name, **result}), flush=True)
    if counts is not None:
        print(json.dumps({"mode": args.name, "check": "graph replays", **counts, "ok": True}))


if __name__ == "__main__":
    main()
