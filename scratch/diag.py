import os, sys, time, threading, ctypes
import numpy as np, torch
from vllm.v1.capture.transport.landing import Landing
from vllm.v1.interventions.worker import pinning
from vllm.v1.interventions.worker.pinning import Pinning, PIECE_BYTES

def part1():
    dev = torch.device("cuda", 0); torch.cuda.set_device(dev); torch.zeros(1, device=dev)
    landing = Landing(4 << 30)
    t = time.time(); p = Pinning(landing, dev)
    while landing.ready < len(landing.memory): time.sleep(0.01)
    print("register 4 GiB s", time.time() - t, flush=True)
    src = torch.empty(256 << 20, dtype=torch.uint8, device=dev)
    place = landing.take(256 << 20)
    print("is_pinned whole", place.is_pinned(), "piece", place[:PIECE_BYTES].is_pinned())
    def bw(name, fn, n=5):
        fn(); torch.cuda.synchronize()
        t = time.time()
        for _ in range(n): fn()
        issue = time.time() - t
        torch.cuda.synchronize()
        print(name, "GB/s", n * src.numel() / (time.time() - t) / 1e9, "issue s", issue, flush=True)
    def split():
        for a in range(0, len(src), PIECE_BYTES):
            place[a:a+PIECE_BYTES].copy_(src[a:a+PIECE_BYTES], non_blocking=True)
    bw("split", split)
    pin = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    bw("pinned", lambda: pin.copy_(src, non_blocking=True))
    s = torch.cuda.Stream()
    def other():
        with torch.cuda.stream(s): split()
    bw("split, other stream", other)

def part2(buffer, landing):
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from benchmarks.engine_process import WORKER
    llm = LLM(model=sys.argv[1], load_format="benchmark", worker_extension_cls=WORKER, skip_tokenizer_init=True,
        max_model_len=2048, max_num_batched_tokens=8192, enable_prefix_caching=False, disable_log_stats=True,
        capture_consumers=["inline"], capture_inline_max_bytes=1<<34, capture_buffer_bytes=buffer, kv_cache_memory_bytes=12<<30, capture_landing_bytes=landing)
    g = np.random.default_rng(0)
    for n, l in ((16, 512), (32, 1024), (64, 1024)):
        prompts = [TokensPrompt(prompt_token_ids=g.integers(0, 128000, l).tolist()) for _ in range(n)]
        plain = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        every = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False, capture={"inline": {"hooks": {"post_block": "all"}, "positions": "all_prompt"}})
        for _ in range(2):
            t = time.time(); llm.generate(prompts, plain, use_tqdm=False); d = time.time() - t
            print(f"{n}x{l} plain {n*l/d:.0f}", flush=True)
        outs = None
        inbox = llm.llm_engine.output_processor.captures.inbox
        for call in range(4):
            t = time.time(); new = llm.generate(prompts, every, use_tqdm=False); d = time.time() - t
            pl = inbox._link.places
            held = pl.held
            t2 = time.time()
            for o in new: float(o.outputs[0].capture_results["inline"].payload["post_block", 31].values[-1, 0])
            d2 = time.time() - t2
            t3 = time.time(); outs = new; del new; d3 = time.time() - t3
            print(f"{n}x{l} call {call} {n*l/d:.0f} tok/s, {d:.3f} s, read {d2:.3f} s, free {d3:.3f} s, held {held/2**30:.2f} of {pl.size/2**30:.2f} GiB", flush=True)
        del outs
    llm.llm_engine.engine_core.shutdown()
if __name__ == "__main__":
    for b in sys.argv[2:]:
        part2(int(b) << 20, None)
