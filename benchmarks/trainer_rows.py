# SPDX-License-Identifier: Apache-2.0
"""Rows a second that reach a trainer of sparse autoencoders, by several ways.

    python -m benchmarks.trainer_rows --model CONFIG_DIR --packages FOLDER [--json FILE]

Prompts of --prompt random tokens; `post_block` of --layer at every token (by default the last of
the first half), in batches of --batch on the device. FOLDER has SAELens as it was published
(`pip install --target FOLDER --no-deps -r requirements/trainers.txt`).

    stream        `dataset.feed` in an engine's process and `stream` in the trainer's, on one host
    disk          `dataset.capture`, as `vllm capture run` does it, until all rows are in --files
    SAELens       its `ActivationsStore` over the model by transformers, in the trainer's process

"rows" are taken and dropped; "trained" go through SAELens' own trainer, with a TopK autoencoder of
--features. Each way runs alone on the GPU, its trainer with its engine. The rate is that of
--seconds in the middle of a run; of "disk" that of all --examples. Weights are random, so that a
folder with config.json is a model. An engine with `capture_stop_after` runs no layer behind the
captured one; SAELens' store stops there, too, by its own hook.

On a CPU, in a minute: VLLM_USE_V2_MODEL_RUNNER=0 VLLM_CPU_OMP_THREADS_BIND=nobind python -m
benchmarks.trainer_rows --model TINY --packages FOLDER --dtype float32 --eager --kv-bytes 16777216
--prompt 60 --examples 200 --batch 64 --features 256 --seconds 3 --step-tokens 256 --buffer 1024
--landing-bytes 16777216 --files /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.engines import ROOT, add_arguments, common_options, model_shape
from benchmarks.results import Row, Run

WAYS = ("stream", "stream trained", "disk", "SAELens", "SAELens trained")
TRAINER = ROOT / "vllm" / "pilot" / "dataset"
"""The folder with `trainer`, which is all that a trainer gets of us."""
WARM = 3
"""Batches before the clock starts: the first of a way waits for compilation and for buffers."""
STORE_PROMPTS = 16
"""Prompts of a forward of SAELens' store, within a GPU's memory."""


def engine(args: argparse.Namespace) -> Any:
    from vllm import LLM

    return LLM(
        str(args.model),
        **common_options(args) | {"load_format": "dummy"},
        capture_consumers=["inline"],
        capture_points=["post_block"],
        capture_stop_after=args.layer,
        capture_landing_bytes=args.landing_bytes,
        max_model_len=args.prompt + 1,
        max_num_batched_tokens=args.step_tokens,
    )


def feed(args: argparse.Namespace) -> None:
    from vllm.pilot import dataset

    dataset.feed(
        engine(args), dataset.DataFile(args.data), args.address, "post_block", args.layer,
        batch_rows=args.batch, buffer_rows=args.buffer, epochs=None,
    )  # fmt: skip


def to_disk(args: argparse.Namespace) -> tuple[int, float]:
    from vllm.pilot import dataset

    llm, data = engine(args), dataset.DataFile(args.data)
    hooks = {"post_block": [args.layer]}
    with tempfile.TemporaryDirectory(dir=args.files) as folder:
        begun = time.perf_counter()
        dataset.capture(llm, data, folder, hooks, "all_prompt")
        took = time.perf_counter() - begun
    llm.llm_engine.engine_core.shutdown()
    return args.examples * args.prompt, took


def streamed(args: argparse.Namespace) -> Iterator[Any]:
    sys.path.insert(0, str(TRAINER))
    import trainer

    return iter(trainer.for_sae_lens(trainer.stream(args.address), args.device))


def stored(args: argparse.Namespace) -> Iterator[Any]:
    """SAELens' store over transformers' model."""
    import torch
    from datasets import Dataset
    from sae_lens import ActivationsStore
    from sae_lens.load_model import HookedProxyLM
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(args.model)
    dtype = getattr(torch, args.dtype)
    with torch.device(args.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    name = f"model.layers.{args.layer}"
    lines = Path(args.data).read_text().splitlines()
    tokens = [json.loads(line)["prompt"] for line in lines]
    store = ActivationsStore(
        model=HookedProxyLM(model, tokenizer=None, hook_names=[name]),
        dataset=Dataset.from_dict({"input_ids": tokens}),
        streaming=False, hook_name=name, hook_head_index=None, context_size=args.prompt,
        d_in=config.hidden_size, n_batches_in_buffer=args.buffer // args.prompt,
        total_training_tokens=1 << 40, store_batch_size_prompts=STORE_PROMPTS,
        train_batch_size_tokens=args.batch, prepend_bos=False, normalize_activations="none",
        device=torch.device(args.device), dtype=args.dtype, disable_concat_sequences=False,
        sequence_separator_token=None,
    )  # fmt: skip
    loader = store.get_data_loader()
    while True:
        yield next(loader).float()


def train(args: argparse.Namespace, rows: Iterator[Any]) -> tuple[int, float]:
    """Rows through SAELens' trainer, and seconds."""
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import (
        LoggingConfig,
        SAETrainerConfig,
    )

    width = model_shape(args.model)["hidden_size"]
    config = TopKTrainingSAEConfig(d_in=width, d_sae=args.features, k=32, device=args.device)
    marks: list[float] = []

    def ticking() -> Iterator[Any]:
        while not marks or len(marks) <= WARM or marks[-1] - marks[WARM] < args.seconds:
            batch = next(rows)
            settle(args)
            marks.append(time.perf_counter())
            yield batch

    asked = SAETrainerConfig(
        total_training_samples=1 << 40, train_batch_size_samples=args.batch, lr=3e-4, lr_end=3e-4,
        device=args.device, logger=LoggingConfig(log_to_wandb=False),
    )  # fmt: skip
    # Our data end before the trainer's plan does: so the clock stops while it still trains.
    try:
        SAETrainer(cfg=asked, sae=TopKTrainingSAE(config), data_provider=ticking()).fit()
    except (StopIteration, RuntimeError) as error:
        if len(marks) <= WARM + 1:
            raise RuntimeError("the trainer ended before it had trained") from error
    return (len(marks) - 1 - WARM) * args.batch, marks[-1] - marks[WARM]


def take(args: argparse.Namespace, rows: Iterator[Any]) -> tuple[int, float]:
    """Rows that are taken and dropped, and seconds."""
    for _ in range(WARM):
        next(rows)
    settle(args)
    begun, count = time.perf_counter(), 0
    while (took := time.perf_counter() - begun) < args.seconds:
        count += len(next(rows))
        settle(args)
    return count, took


def settle(args: argparse.Namespace) -> None:
    """Wait for the device."""
    if args.device == "cuda":
        import torch

        torch.cuda.synchronize()


def role(args: argparse.Namespace) -> None:
    if args.role == "feed":
        feed(args)
        return
    if args.role == "disk":
        count, took = to_disk(args)
    else:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
        sys.path.append(str(args.packages.resolve()))
        rows = streamed(args) if args.role.startswith("stream") else stored(args)
        count, took = (train if args.role.endswith("trained") else take)(args, rows)
    print(json.dumps({"rows": count, "seconds": took}), flush=True)
    os._exit(0)  # threads of the packages, and of an engine that is fed for ever


def measure(way: str, args: argparse.Namespace) -> float:
    """Rows a second, by a process of its own and its engine's."""

    def started(what: str, **more: Any) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.trainer_rows", *sys.argv[1:]]
        given = ["--role", what, "--data", args.data, "--address", args.address]
        return subprocess.Popen([*command, *given], text=True, **more)

    feeder = started("feed", stdout=subprocess.DEVNULL) if way.startswith("stream") else None
    try:
        reader = started(way, stdout=subprocess.PIPE)
        while feeder is not None and feeder.poll() is None and reader.poll() is None:
            time.sleep(0.1)
        if feeder is not None and feeder.poll() is not None:
            reader.kill()
        out, _ = reader.communicate(timeout=args.budget)
        if reader.returncode:
            raise RuntimeError(f"{way} ended with {reader.returncode}")
        told = json.loads(out.splitlines()[-1])
        return float(told["rows"] / told["seconds"])
    finally:
        if feeder is not None:
            feeder.kill()
            feeder.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, kv_bytes=4 << 30)
    results.add_arguments(parser)
    parser.add_argument("--packages", type=Path, required=True, help="a folder with SAELens")
    parser.add_argument("--layer", type=int, help="default: the last of the first half")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each")
    parser.add_argument("--examples", type=int, default=1024, help="prompts of the data")
    parser.add_argument("--batch", type=int, default=4096, help="rows of a batch")
    parser.add_argument("--buffer", type=int, default=1 << 18, help="rows shuffled together")
    parser.add_argument("--features", type=int, default=16384)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--step-tokens", type=int, default=8192, help="at most, of one step")
    parser.add_argument("--landing-bytes", type=int, default=8 << 30)
    parser.add_argument("--files", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = model_shape(args.model)
    args.layer = shape["num_hidden_layers"] // 2 - 1 if args.layer is None else args.layer
    if args.role:
        role(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.data, args.address = f"{folder}/data.jsonl", f"ipc://{folder}/rows"
        chance = random.Random(0)
        with open(args.data, "w") as file:
            for _ in range(args.examples):
                tokens = [chance.randrange(100) for _ in range(args.prompt)]
                file.write(json.dumps({"prompt": tokens}) + "\n")
        found: dict[str, list[float]] = {way: [] for way in args.ways}
        for _ in range(args.rounds):
            for way in args.ways:
                found[way].append(measure(way, args))
                print(way, round(found[way][-1]), "rows/s", flush=True)
    at = {"layer": args.layer, "prompt": args.prompt}
    rows = [Row(way, "rates", "rows/s", rates, at) for way, rates in found.items()]
    setup = results.setup(args, model=shape)
    results.publish(Run("trainer_rows", setup, rows, baselines=("SAELens",)), args.json)


if __name__ == "__main__":
    main()
