# SPDX-License-Identifier: Apache-2.0
"""What it costs the host to take in requests that are steered at all sites of a model: milliseconds
and Python calls a request, without a model.

    python -m benchmarks.admission [--requests 256] [--layers 32] [--hidden 4096]
    python -m benchmarks.admission --cases own --profile       (where the time goes)

The engine's own objects, in the order in which a request passes them. Stages:

    render     the renderer makes an engine input of the prompt's tokens
    process    `InputProcessor.process_inputs`: the plan is made
    register   the frontend's output processor takes the request in
    encode     the request becomes the message to the engine core, as its client encodes it
    decode     the engine core reads the message (without the socket)
    add        the engine core makes a `Request` of it, and the scheduler takes it in
    schedule   steps of the scheduler until all requests are admitted
    total      of all these

Cases, each with vectors at three points of all layers:

    plain      requests that ask for nothing
    own        vectors of each request's own: float32, bfloat16, or one tensor whose rows they are
    object     one object that all requests are given: float32, bfloat16, numpy, or lists of floats
    module     the name of a registered module

Cases take turns in each round; the clock is that of the thread. Calls are counted by the profiler,
of the Python functions and of those in C, in a pass of their own.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.results import Row, Run, add_arguments, publish, setup

POINTS = ("pre_attn", "post_attn", "post_block")
STAGES = ("render", "process", "register", "encode", "decode", "add", "schedule")
CASES = ("plain", "own", "own bfloat16", "own rows", "object", "object bfloat16", "object numpy",
         "object list", "module")  # fmt: skip
PROMPT = 16
MODULE = "module"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--top", type=int, default=25, help="functions to print of a case")
    add_arguments(parser)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    cases = tuple(args.cases)
    with host(args) as made:
        calls = {}
        for case in cases:
            made.admit(case, args.requests)  # warms up
            calls[case] = made.calls(case, args.requests)
        seen: dict[str, dict[str, list[float]]] = {c: {s: [] for s in STAGES} for c in cases}
        gc.collect()
        gc.freeze()  # as an engine does when it has started
        for _ in range(args.rounds):
            for case in cases:
                for stage, seconds in made.admit(case, args.requests).items():
                    seen[case][stage].append(seconds * 1e3 / args.requests)
        if args.profile:
            for case in cases:
                print(f"\n=== {case}, by own time ===")
                profile = made.profile(case, args.requests)
                pstats.Stats(profile).sort_stats("tottime").print_stats(args.top)
    rows = []
    for stage in (*STAGES, "total"):
        for case in cases:
            of = STAGES if stage == "total" else (stage,)
            times = list(map(sum, zip(*(seen[case][s] for s in of), strict=True)))
            facts = {"calls": sum(calls[case][s] for s in of)}
            rows.append(Row(case, "a request", "ms", times, {"stage": stage}, facts))
    publish(Run("admission", setup(args), rows, baselines=("plain",)), args.json)


@contextmanager
def host(args: argparse.Namespace) -> Iterator[Host]:
    """The frontend and the engine core of a Llama of the wanted size, without a worker."""
    with tempfile.TemporaryDirectory() as folder:
        yield Host(Path(folder), args.layers, args.hidden, args.requests)


class Host:
    """Takes in requests.

    Args:
        folder: empty, for the model's config.
        requests: the most that are there at once.
    """

    def __init__(self, folder: Path, layers: int, hidden: int, requests: int) -> None:
        import torch

        from vllm.config.points import STREAM_POINTS
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.interventions.frontend.results.outputs import CaptureOutputs
        from vllm.v1.interventions.shape import LayerShape, TapShape
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm.v1.steering.modules import parse_module

        torch.set_num_threads(1)  # as in an engine
        self.layers, self.hidden = layers, hidden
        (folder / "config.json").write_text(json.dumps(_llama(layers, hidden)))
        self.config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=requests,
            max_num_batched_tokens=max(requests * PROMPT, 1024),
            enable_steering=True,
            max_steering_configs=requests,
        ).create_engine_config()
        of_layer = LayerShape(STREAM_POINTS)
        self.config.tap_shape = TapShape(hidden, "bfloat16", dict.fromkeys(range(layers), of_layer))
        self.config.cache_config.num_gpu_blocks = 4 * requests
        self.inputs = InputProcessor(self.config)
        hash_fn = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(self.config.cache_config.block_size, hash_fn)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        value = {"vectors": self.rows(torch.randn(len(POINTS), layers, hidden))}
        steering = self.config.steering_config
        self.module = parse_module(value, MODULE, self.config.tap_shape, steering)
        self.inputs.modules.state.modules[MODULE] = self.module
        link: Any = SimpleNamespace(places=[], post=self.fields)  # nothing is captured
        self.captures = CaptureOutputs(self.config, link, self.inputs)
        self._content = torch.randn(len(POINTS), layers, hidden)

    def rows(self, values: Any) -> dict[str, dict[int, Any]]:
        """A tier's mapping: the rows of [points, layers, hidden], views."""
        return {p: dict(enumerate(each)) for p, each in zip(POINTS, values, strict=True)}

    def fields(self, case: str, requests: int) -> list[dict[str, Any]]:
        """The fields of `SamplingParams` of each request; their numbers were never seen before."""
        if case == "plain":
            return [{} for _ in range(requests)]
        if case == "module":
            return [{"steering_modules": [MODULE]} for _ in range(requests)]
        self._content += 1 / 64
        kind, _, form = case.partition(" ")
        if kind == "object":
            values = self._content.clone()
            given: Any = self.rows(values)
            if form == "bfloat16":
                given = self.rows(values.bfloat16())
            elif form:
                given = self.rows(values.numpy() if form == "numpy" else values.tolist())
            return [{"steering_vectors": given} for _ in range(requests)]
        fields = []
        for i in range(requests):
            values = self._content + i / 8
            mapping = self.rows(values.bfloat16() if form == "bfloat16" else values)
            if form != "rows":  # each in memory of its own
                mapping = {p: {n: v.clone() for n, v in of.items()} for p, of in mapping.items()}
            fields.append({"steering_vectors": mapping})
        return fields

    def admit(
        self, case: str, requests: int, around: Callable[[str], Any] | None = None
    ) -> dict[str, float]:
        """Seconds of each stage, for all requests of a case.

        Args:
            around: called with a stage's name, makes a context in which the stage runs.
        """
        from vllm import SamplingParams
        from vllm.renderers.inputs.preprocess import extract_prompt_components, parse_model_prompt
        from vllm.v1.engine.output_processor import OutputProcessor

        renderer = self.inputs.renderer
        outputs = OutputProcessor(None, log_stats=False)
        outputs.captures = self.captures
        scheduler, add = self._core()
        asked = self.fields(case, requests)
        params = [SamplingParams(max_tokens=8, detokenize=False, **each) for each in asked]
        seconds = dict.fromkeys(STAGES, 0.0)

        @contextmanager
        def stage(name: str) -> Iterator[None]:
            with around(name) if around is not None else _nothing():
                started = time.thread_time()
                yield
                seconds[name] += time.thread_time() - started

        # One after the other, as they come; no more than one message is there at a time.
        for i, each in enumerate(params):
            asked_prompt: Any = {"prompt_token_ids": [i % 200 + 1] * PROMPT}
            with stage("render"):
                parsed = parse_model_prompt(self.config.model_config, asked_prompt)
                [prompt] = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
            with stage("process"):
                made = self.inputs.process_inputs(f"{case} {i}", prompt, each, ("generate",))
                self.inputs.assign_request_id(made)
            with stage("register"):
                text, _, _ = extract_prompt_components(self.config.model_config, prompt)
                outputs.add_request(made, text, None, 0)
            with stage("encode"):
                message: Any = self.encoder.encode(made)
            sent = [bytes(message[0]), *message[1:]]
            with stage("decode"):
                got = self.decoder.decode(sent)
            with stage("add"):
                add(got)
            del made, message, sent, got
        with stage("schedule"):
            self._schedule(scheduler, requests)
        return seconds

    def _schedule(self, scheduler: Any, requests: int) -> None:
        while len(scheduler.running) < requests:
            before = len(scheduler.running)
            scheduler.schedule()
            assert len(scheduler.running) > before

    def _core(self) -> tuple[Any, Callable[[Any], None]]:
        """A new scheduler, and what an engine core does with a request that arrives."""
        import torch

        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request
        from vllm.v1.structured_output import StructuredOutputManager

        block_size = self.config.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        blocks = KVCacheConfig(self.config.cache_config.num_gpu_blocks or 0, [], groups)
        structured = StructuredOutputManager(self.config)
        scheduler = Scheduler(self.config, blocks, structured, block_size)
        modules = scheduler.interventions.modules
        modules.replace(None, self.module)

        def add(got: Any) -> None:
            got.plan = modules.fill(got.plan)
            scheduler.add_request(Request.from_engine_core_request(got, self.hasher))

        return scheduler, add

    def profile(self, case: str, requests: int) -> cProfile.Profile:
        """A profile of all stages together."""
        profile = cProfile.Profile()

        @contextmanager
        def around(_: str) -> Iterator[None]:
            profile.enable()
            yield
            profile.disable()

        self.admit(case, requests, around)
        return profile

    def calls(self, case: str, requests: int) -> dict[str, int]:
        """Calls of functions of each stage, of a request."""
        profiles = {name: cProfile.Profile() for name in STAGES}

        @contextmanager
        def around(name: str) -> Iterator[None]:
            profiles[name].enable()
            yield
            profiles[name].disable()

        self.admit(case, requests, around)
        totals = {name: pstats.Stats(each).total_calls for name, each in profiles.items()}  # type: ignore[attr-defined]
        return {name: round(total / requests) for name, total in totals.items()}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _llama(layers: int, hidden: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(hidden // 128, 1),
        "num_key_value_heads": max(hidden // 512, 1),
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
