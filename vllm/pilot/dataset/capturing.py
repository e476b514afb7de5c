# SPDX-License-Identifier: Apache-2.0
"""Captures activations of whole data sets into shards, and goes on where the shards end."""

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from vllm import LLM
from vllm.pilot.dataset.activations import Activations
from vllm.pilot.dataset.capture_run import Captured, CaptureRun
from vllm.pilot.dataset.examples import Contents, DataFile, Example
from vllm.pilot.dataset.shard_store import Shard, ShardStore
from vllm.pilot.dataset.size import Estimate, estimate, size
from vllm.pilot.dataset.writer import ShardWriter, stored_bytes
from vllm.pilot.records import DatasetError
from vllm.v1.capture.small_rows import StoreDtype

SHARD_BYTES = 256 << 20
"""The bytes of rows at which a shard is closed."""
SHARD_SECONDS = 300.0
"""The age at which it is closed: what a kill may cost."""


def capture(
    llm: LLM,
    data: DataFile,
    out: str | os.PathLike[str],
    hooks: Mapping[str, Any],
    positions: Any = "last_prompt",
    *,
    more: Mapping[str, Any] | None = None,
    max_tokens: int = 1,
    dtype: StoreDtype | None = None,
    skip_refused: bool = False,
    shard_bytes: int = SHARD_BYTES,
    shard_seconds: float = SHARD_SECONDS,
    storage_options: Mapping[str, Any] | None = None,
    confirm: Callable[[Estimate], bool] | None = None,
    contents: Contents | None = None,
) -> Activations:
    """Capture activations of all examples of a data set that are not in `out` yet.

    Args:
        llm: an engine with `capture_consumers=["inline"]`.
        out: a folder or a URL of fsspec. One that a run like this began is continued.
        hooks, positions: as in `SamplingParams.capture`.
        more: further keys of the capture request, such as `project`.
        max_tokens: how many tokens are generated, greedily; for positions among them.
        dtype: what rows are stored as: "float32" for readers without bfloat16, "int8" or "float8"
            for a byte a value and a scale a row; None for the model's.
        skip_refused: go on where the engine refuses an example, as one that is too long: it has no
            rows then, and the manifest says why.
        shard_bytes, shard_seconds: how large or old a shard grows; the latter is what a kill costs.
        confirm: is told what it will come to, and says whether to start; by default whether the
            disk has room for it.
        contents: what `data.contents()` returned, if it was called already.

    Returns:
        What is in `out`, complete.

    Raises:
        DatasetError: the data cannot be read, an example is refused, the engine dies, the disk has
            no room or is full, `out` was begun with other arguments or data, or another run is
            writing to it. The message says what is safe.
        ValueError: the engine refuses hooks or positions.
    """
    out = os.fspath(out)
    store = ShardStore(out, storage_options)
    contents = contents or data.contents()
    asked = {"hooks": hooks, "positions": positions, **(more or {})}
    plan = plan_of(_identity(llm), asked, max_tokens, dtype, skip_refused, data, contents)
    run = CaptureRun(llm, asked, max_tokens, skip_refused, 2 * shard_bytes)
    with store.locked():
        store.check(plan)
        left = store.missing(contents.num_examples)
        with _saying_what_is_safe(store, contents):
            if left:
                told = _estimate(run, store, contents, left, dtype)
                if not (confirm(told) if confirm is not None else told.fits):
                    raise DatasetError(f"not started: {told}")
                store.begin(plan)
                writer = ShardWriter(store, token_text(llm), dtype, shard_bytes, shard_seconds)
                _capture(run, _examples(data, left), writer, _Progress(contents, left))
            store.write_manifest()
    return Activations(out, storage_options)


def plan_of(
    model: Mapping[str, Any],
    asked: Mapping[str, Any],
    max_tokens: int,
    dtype: StoreDtype | None,
    skip_refused: bool,
    data: DataFile,
    contents: Contents,
) -> dict[str, Any]:
    """Return what dataset.json says; a run that says otherwise is not this one continued."""
    return {
        "model": _plain(model),
        "capture": _plain(asked),
        "max_tokens": max_tokens,
        "dtype": dtype,
        "skip_refused": skip_refused,
        "data": {
            "sha256": contents.sha256,
            "examples": contents.num_examples,
            "prompt_column": data.prompt_column,
            "id_column": data.id_column,
            "label_column": data.label_column,
            "split": data.split,
        },
    }


def _capture(
    run: CaptureRun, examples: Iterator[Example], writer: ShardWriter, progress: "_Progress"
) -> None:
    """Run all examples; whatever ends it early, what is there is written."""
    try:
        for captured in run(examples):
            writer.add(captured)
            progress.add(captured)
    finally:
        progress.close()
        writer.close()


@contextlib.contextmanager
def _saying_what_is_safe(store: ShardStore, contents: Contents) -> Iterator[None]:
    """Make every failure, Ctrl-C too, say how far it came."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space" if full else "see that it can be written"
        raise DatasetError(
            f"{store.root}: cannot be written: {error}; {remedy}, and run the same again to go on"
            f"{_safe(store, contents)}"
        ) from error
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(f"interrupted{_safe(store, contents)}") from error
    except Exception as error:
        raise DatasetError(f"{error}{_safe(store, contents)}") from error


def _safe(store: ShardStore, contents: Contents) -> str:
    """Return the end of an error message: how many examples are safe on the disk."""
    shards = store.shards()
    done = sum(shard.stop - shard.start for shard in shards)
    return (
        f". {done:,} of {contents.num_examples:,} examples are safe in {store.root}, in "
        f"{len(shards)} shards"
    )


def _examples(data: DataFile, left: list[Shard]) -> Iterator[Example]:
    """The examples of these ranges."""
    ranges = iter(left)
    current = next(ranges, None)
    for example in data:
        while current is not None and example.number >= current.stop:
            current = next(ranges, None)
        if current is None:
            return
        if example.number >= current.start:
            yield example


def _estimate(
    run: CaptureRun,
    store: ShardStore,
    contents: Contents,
    left: list[Shard],
    dtype: StoreDtype | None,
) -> Estimate:
    begun = time.monotonic()
    sample = list(run(contents.sample))
    seconds = time.monotonic() - begun
    if not any(one.values for one in sample):
        raise DatasetError(f"each of {len(sample)} examples is refused: {sample[0].error}")
    num_left = sum(shard.stop - shard.start for shard in left)
    characters = contents.size * num_left / contents.num_examples
    free = store.free_bytes()
    return estimate(sample, stored_bytes(dtype), num_left, characters, seconds, free, store.root)


def _identity(llm: LLM) -> dict[str, Any]:
    """Return the properties of a model that change its activations."""
    config = llm.model_config
    model = str(config.model)
    return {
        "name": os.path.abspath(model) if os.path.isdir(model) else model,
        "revision": config.revision,
        "tokenizer": str(config.tokenizer),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": config.quantization and str(config.quantization),
    }


def _plain(value: Any) -> Any:
    """Arguments as JSON; of a matrix its digest."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().float().numpy()
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return {"shape": list(value.shape), "sha256": hashlib.sha256(value.tobytes()).hexdigest()}
    if isinstance(value, list | tuple | range | np.ndarray):
        return [_plain(entry) for entry in value]
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def token_text(llm: LLM) -> Callable[[int], str]:
    """Return what says which text a token stands for; without a tokenizer its number."""
    if llm.model_config.skip_tokenizer_init:
        return str
    tokenizer = llm.get_tokenizer()
    return lru_cache(1 << 18)(lambda token: tokenizer.decode([token]))


class _Progress:
    """A bar with the time left, and tokens and bytes a second."""

    def __init__(self, contents: Contents, left: list[Shard]) -> None:
        total = contents.num_examples
        done = total - sum(shard.stop - shard.start for shard in left)
        self._bar = tqdm(total=total, initial=done, unit="examples", dynamic_ncols=True)
        self._begun = time.monotonic()
        self._tokens = self._bytes = 0

    def add(self, captured: Captured) -> None:
        """Count an example."""
        self._tokens += captured.num_prompt_tokens + captured.num_generated
        self._bytes += captured.num_bytes
        seconds = max(time.monotonic() - self._begun, 1e-9)
        speed = f"{self._tokens / seconds:,.0f} tokens/s, {size(self._bytes / seconds)}/s"
        self._bar.set_postfix_str(speed, refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()
