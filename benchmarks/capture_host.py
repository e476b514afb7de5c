# SPDX-License-Identifier: Apache-2.0
"""What captured rows cost the host: the engine's own objects, from the copy of the arena to the
results of all completions, without a model. And under them the floor: memory written once.

    python -m benchmarks.capture_host [--sites 1 32] [--requests 256] [--hidden 4096] [--steps 64]
    python -m benchmarks.capture_host --tokens 512 --requests 16 --steps 4      (prompts)

Each step hands every request `--tokens` rows of `--sites` sites. Stages of a step:

    rows      the step's rows are in host memory: cut them for their requests, and accept them
    output    take what goes with the request's output
    collect   the frontend gathers them; at the end of a step, too
    result    what all completions return, at their end (over the number of steps)
    total     of all these, wall time
    cpu       processor time of the engine's thread, and of all threads (less noisy than the others)

`--cumulative`: a stream of whole results, made at each step, is counted in `result`, too.
`--messages`: the rows also go through the message to the frontend's process (without the socket).

    python -m benchmarks.capture_host --profile-engine MODEL [--sites 1 32] [--batch 256]

profiles a whole engine in this process instead: an LLM of that config with random weights decodes
with `inline` capture of all generated tokens, and the functions that took longest are printed.
With `--processes --top 0` as users run it, in two processes; only the times are printed.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.results import Row, Run, add_arguments, publish, setup

STAGES = ("rows", "output", "collect", "result", "total", "cpu, own", "cpu, all")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sites", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1, help="of each request and step")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cumulative", action="store_true")
    parser.add_argument("--messages", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, help="ms between steps, as on a GPU")
    parser.add_argument("--profile-engine", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--top", type=int, default=40, help="functions to print; 0: no profile")
    parser.add_argument("--processes", action="store_true", help="the engine core in its own")
    parser.add_argument("--eager", action="store_true")
    add_arguments(parser)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.profile_engine:
        profile_engine(args)
        return
    import torch

    torch.set_num_threads(1)  # as in an engine
    rows = memory(args.rounds)
    for sites in args.sites:
        seen: dict[str, list[float]] = {stage: [] for stage in STAGES}
        size = sites * args.requests * args.tokens * args.hidden * 2
        for round_number in range(args.rounds + 1):
            gc.collect()
            gc.freeze()  # as an engine does when it has started
            times = run(args, sites)
            for stage in STAGES if round_number else ():  # the first round warms up
                seen[stage].append(times[stage] / args.steps * 1e3)
        facts = {"MB": size / 1e6}
        rows += [Row(s, "a step", "ms", v, {"sites": sites}, facts) for s, v in seen.items()]
    publish(Run("capture_host", setup(args), rows), args.json)


def memory(rounds: int) -> list[Row]:
    """The floor: GB/s of one thread that writes rows to memory in use, and to fresh memory."""
    import torch

    size, piece = 64 << 20, 256 << 10
    source = torch.ones(size, dtype=torch.uint8)
    used = torch.ones(size, dtype=torch.uint8)

    def pages() -> None:
        kept = []
        for i in range(0, size, piece):
            kept.append(torch.empty(piece, dtype=torch.uint8))
            kept[-1].copy_(source[i : i + piece])

    cases = {
        "memcpy, memory in use": lambda: used.copy_(source),
        "memcpy, fresh memory in 64 MB": lambda: torch.from_numpy(np.empty(size, np.uint8)).copy_(
            source
        ),
        "memcpy, fresh memory in 256 KB": pages,
    }
    rows = []
    for case, work in cases.items():
        values = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            work()
            values.append(size / (time.perf_counter() - started) / 1e9)
        rows.append(Row(case, "bandwidth", "GB/s", values[1:]))
    return rows


def run(args: argparse.Namespace, num_sites: int) -> dict[str, float]:
    """Seconds of each stage, over all steps."""
    import torch

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.capture.transport.landing import Landing, ReceivedPlaces
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.interventions.capture_groups import CaptureGroups
    from vllm.v1.interventions.frontend.results.outputs import CaptureOutputs
    from vllm.v1.interventions.messages import WorkerRequest
    from vllm.v1.interventions.plan import CapturePlan, Plan, Selection, Stream
    from vllm.v1.interventions.scheduler.consumers import CaptureSessions
    from vllm.v1.interventions.scheduler.relay import RowRelay
    from vllm.v1.interventions.scheduler.request import RequestInterventions
    from vllm.v1.interventions.shape import TapShape
    from vllm.v1.interventions.step_rows import Blocks, StepRows
    from vllm.v1.interventions.worker.making.maker import Captured, Material
    from vllm.v1.interventions.worker.making.shards import Shards
    from vllm.v1.interventions.worker.rows.outbox import Outbox
    from vllm.v1.interventions.worker.tables.matrices import ProjectionTable
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    sites = [("post_block", layer) for layer in range(num_sites)]
    num_rows = args.tokens * args.steps
    runs = [0, num_rows]
    stream = Stream(tuple(sites), args.hidden, "bfloat16", relayed=True, runs=tuple(runs))
    plan = Plan(
        capture=CapturePlan(
            sites=sites,
            runs=runs,
            streams=[stream],
            consumers={"inline": Selection(sites, runs)},
            arena_rows=num_sites,
            hidden_size=args.hidden,
            dtype="bfloat16",
        )
    )
    place = WorkerRequest(
        np.zeros(1, np.int64),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
        (Stream(tuple(sites), args.hidden, "bfloat16"),),
    )
    shape = TapShape(args.hidden, "bfloat16", {})
    layout = CaptureGroups({site: i for i, site in enumerate(sites)}, shape).of(place)
    assert layout is not None
    names = [str(i) for i in range(args.requests)]
    prompt = [1] * (num_rows if args.tokens > 1 else 1)
    landing = Landing(4 << 30)
    received = ReceivedPlaces()
    places = received.places if args.messages else [landing]
    config = SimpleNamespace(
        tap_shape=None,
        parallel_config=SimpleNamespace(_api_process_count=1),
        steering_config=SimpleNamespace(enable_steering=False),
        capture_config=SimpleNamespace(rules=None, capture_stop_after=None, consumers={}),
        model_config=SimpleNamespace(max_model_len=1 << 20),
    )
    link = SimpleNamespace(places=places)
    inputs = SimpleNamespace(tokenizer=None, modules=None)
    frontend = CaptureOutputs(config, link, inputs)  # type: ignore[arg-type]
    states: dict[str, Any] = {}
    for name in names:
        asked = EngineCoreRequest(
            name, prompt, None, SamplingParams(), None, 0.0, None, None, None, plan=plan
        )
        asked.external_req_id = name
        states[name] = RequestState.from_new_request(None, asked, None, None, 0, None, False, 1)
        frontend.open(states[name], asked)
    relay = RowRelay(CaptureSessions(VllmConfig()), None)
    core = [
        SimpleNamespace(
            request_id=name,
            client_index=0,
            _all_token_ids=[1],
            num_tokens=1,
            interventions=RequestInterventions(plan, len(prompt), None),
        )
        for name in names
    ]
    total = args.requests * args.tokens
    arena = torch.randn(total * num_sites, args.hidden).bfloat16()
    projections = ProjectionTable(args.hidden, torch.device("cpu"))
    members = [(n, np.arange(i * args.tokens, (i + 1) * args.tokens)) for i, n in enumerate(names)]
    blocks = Blocks({layout: members})
    outbox = Outbox(landing, Material(arena, projections, {}, Shards()))
    encoder = MsgpackEncoder(oob_tensor_consumer=relay.encoder)
    decoder = MsgpackDecoder(EngineCoreOutputs, oob_tensor_provider=received)
    times = dict.fromkeys(STAGES, 0.0)
    tokens: list[int] = []
    for state in states.values():
        state.detokenizer = SimpleNamespace(output_token_ids=tokens)
    for step in range(args.steps):
        first = step * args.tokens
        rows = StepRows(1, blocks, args.hidden, torch.bfloat16)
        positions = torch.arange(first, first + args.tokens).repeat(args.requests)
        outbox.next_step()
        # On a GPU the copy engine does this.
        outbox.send(rows, Captured(positions, positions))
        time.sleep(args.pause / 1e3)
        tokens += [1] * (args.tokens if args.tokens == 1 else 0)
        mark = [time.perf_counter()]
        own, every = time.thread_time(), time.process_time()
        came: dict[str, Any] = {}
        for request in core:
            request._all_token_ids += [1] * args.tokens
            request.num_tokens = len(request._all_token_ids)
            came[request.request_id] = request
        mark.append(time.perf_counter())
        outputs = [EngineCoreOutput(r.request_id, [1]) for r in core]
        message = EngineCoreOutputs(outputs=outputs)
        relay.join({0: message}, came, rows)
        if args.messages:
            sent = encoder.encode(message)
            outputs = decoder.decode([bytes(sent[0]), *sent[1:]]).outputs  # type: ignore[arg-type]
        mark.append(time.perf_counter())
        for output in outputs:
            if output.captured:
                frontend.handle_output(output)
        frontend.pop_ready(None)
        del rows, outputs, message
        mark.append(time.perf_counter())
        for state in states.values() if args.cumulative else ():
            state.capture.results(state, None)
        mark.append(time.perf_counter())
        times["cpu, own"] += time.thread_time() - own
        times["cpu, all"] += time.process_time() - every
        for stage, (start, stop) in zip(STAGES, pairwise(mark), strict=False):
            times[stage] += stop - start
    tokens.append(1)
    mark = [time.perf_counter()]
    own, every = time.thread_time(), time.process_time()
    results = [s.capture.results(s, FinishReason.LENGTH)["inline"] for s in states.values()]
    frontend.pop_ready(None)
    times["result"] += time.perf_counter() - mark[0]
    times["cpu, own"] += time.thread_time() - own
    times["cpu, all"] += time.process_time() - every
    times["total"] = sum(times[stage] for stage in STAGES[:4])
    for result in results:
        assert result.status == "ok", result.error
        assert all(len(r) == num_rows for r in result.payload.values())
    return times


def profile_engine(args: argparse.Namespace) -> None:
    """cProfile of an engine in this process that decodes, without capture and with it."""
    import cProfile
    import pstats

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(args.processes))
    import torch

    from benchmarks.engine_process import WORKER
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    room: dict[str, Any] = {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 1 << 30}
    llm = LLM(
        model=args.profile_engine,
        load_format="benchmark",
        worker_extension_cls=WORKER,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=args.batch,
        enforce_eager=args.eager,
        enable_prefix_caching=False,
        disable_log_stats=True,
        capture_consumers=["inline"],
        **room,
    )
    config = llm.llm_engine.model_config
    layers, vocabulary = config.hf_config.num_hidden_layers, config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)
    prompts = [
        TokensPrompt(
            prompt_token_ids=torch.randint(0, vocabulary, (32,), generator=generator).tolist()
        )
        for _ in range(args.batch)
    ]

    def seconds(sites: int, tokens: int) -> float:
        fields: dict[str, Any] = {}
        if sites:
            hooks = {"post_block": list(range(min(sites, layers)))}
            fields["capture"] = {"inline": {"hooks": hooks, "positions": "all_generated"}}
        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, **fields
        )
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - started
        del outputs
        return taken

    rows = memory(args.rounds)
    for sites in [0, *args.sites]:
        seconds(sites, args.steps)
        values = [
            (seconds(sites, 8 + args.steps) - seconds(sites, 8)) / args.steps * 1e3
            for _ in range(args.rounds)
        ]
        case = f"capture of {sites} layers" if sites else "off"
        rows.append(Row(case, "TPOT", "ms", values, {"batch": args.batch}))
        if not args.top:
            continue
        profile = cProfile.Profile()
        profile.enable()
        seconds(sites, 8 + args.steps)
        profile.disable()
        print(f"\n=== {case}: {8 + args.steps} steps, by own time ===")
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.top)
    publish(Run("capture_host", setup(args), rows, baselines=("off",), paired=False), args.json)


if __name__ == "__main__":
    main()
