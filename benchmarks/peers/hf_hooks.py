# SPDX-License-Identifier: Apache-2.0
"""Peer: transformers' own model with forward hooks, which is what most people start with.

python -m benchmarks.peers.hf_hooks --model DIR --stock STOCK

Static batches, bfloat16, SDPA attention, no gradients; logits of a prompt's last token alone.
Generation is one batch with a key-value cache; extraction takes the prompts in chunks of as many
tokens as a step of the engines has (--step-tokens). Steering adds to the input of a block, the
output of its attention (which is what adding to the stream between its halves comes to) and its
output.

"pinned": each row is copied once, without waiting, into memory that was pinned before anything is
timed, and all copies of a call are waited for at its end. There is one such memory, so a call
overwrites the rows of the one before; no other peer's does. ".cpu()" is what most people write:
every hook brings its rows to the host and keeps them in a list.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.workloads import (
    Answer,
    Facts,
    Load,
    Shape,
    T,
    Timer,
    arguments,
    installed,
    prompts,
    ready,
)
from benchmarks.random_weights import fill

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CASE = "transformers"
SCALE = 0.1

Edit = Callable[[torch.Tensor], torch.Tensor | None]
Part = tuple[slice, torch.Tensor]
"""Prompts of a chunk: which, and their ids."""


@contextmanager
def hooked(model: PreTrainedModel, point: str, layer: int, edit: Edit) -> Iterator[None]:
    """Within, `edit` gets the tensor at a point, and what it returns takes the tensor's place."""
    block = model.model.layers[layer]

    def before(_: object, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        changed = edit(given[0])
        return None if changed is None else (changed, *given[1:])

    def after(_: object, given: object, output: Any) -> Any:
        if not isinstance(output, tuple):
            return edit(output)
        changed = edit(output[0])
        return None if changed is None else (changed, *output[1:])

    if point == "pre_attn":
        handle = block.register_forward_pre_hook(before)
    else:
        module = block if point == "post_block" else block.self_attn
        handle = module.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def load_model(args: argparse.Namespace, answer: Answer) -> PreTrainedModel:
    """The model with the same weights as elsewhere, where there is a GPU on it."""
    from transformers import AutoConfig, AutoModelForCausalLM, __version__

    config = AutoConfig.from_pretrained(args.model)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    for name, parameter in model.named_parameters():
        fill(name, parameter.data)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    answer.versions |= {"transformers": __version__, "torch": torch.__version__}
    answer.settings |= {
        "attention": model.config._attn_implementation,
        "cache": "dynamic, no compilation",
        "batches": f"static, of at most {args.step_tokens} tokens in extraction",
        "GPUs": "one",
    }
    return model


def prefill(model: PreTrainedModel, asked: torch.Tensor) -> None:
    model(asked, use_cache=False, logits_to_keep=1)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ids(shape: Shape, requests: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(prompts(shape, requests, length), device=device)


class Pinned:
    """Memory that rows are copied to; of all shapes of extraction the largest has room."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        shape = Shape.of(args.model)
        self._hidden = shape.hidden
        rows = max(load.tokens for load in args.extract) * shape.layers
        pinned = device.type == "cuda"
        self._all = torch.empty(rows, shape.hidden, dtype=torch.bfloat16, pin_memory=pinned)

    def rows(self, layers: int, load: Load) -> torch.Tensor:
        """[layers, requests, prompt, hidden]."""
        rows = self._all[: layers * load.tokens]
        return rows.view(layers, load.requests, load.prompt, self._hidden)


def chunks(args: argparse.Namespace, load: Load) -> list[slice]:
    """Which prompts go through the model at once."""
    size = max(1, args.step_tokens // load.prompt)
    return [slice(first, first + size) for first in range(0, load.requests, size)]


def read_one_each(rows: torch.Tensor) -> torch.Tensor:
    """Read a number of each request's last layer; return the rows."""
    rows[-1, :, -1, -1].tolist()
    return rows


def mean_size(rows: torch.Tensor) -> Facts:
    """The mean size of the first request's rows of the last layer."""
    return {"mean |row|": rows[-1, 0].float().abs().mean().item()}


class Hooks:
    def __init__(self, args: argparse.Namespace, answer: Answer) -> None:
        self._args, self._timer, self._shape = args, Timer(args, answer), Shape.of(args.model)
        self._model: Any = load_model(args, answer)
        self._device = self._model.device
        self._pinned = Pinned(args, self._device)

    @torch.inference_mode()
    def run(self) -> None:
        ready(self._args)
        for load in self._args.extract:
            self._extract(load)
        self._steer()

    def _steer(self) -> None:
        args, timer = self._args, self._timer
        asked = ids(self._shape, args.requests, args.prompt, self._device)
        timer.generate(CASE, partial(self._generate, asked))
        with ExitStack() as hooks:
            for n, point in enumerate(("pre_attn", "post_attn", "post_block")):
                for layer in range(self._shape.layers):
                    hooks.enter_context(hooked(self._model, point, layer, self._adds(n, layer)))
            timer.generate(
                f"{CASE} + hooks, steering",
                partial(self._generate, asked),
                facts={
                    "steered": f"3 points x {self._shape.layers} layers",
                    "distinct": args.requests,
                },
            )

    def _extract(self, load: Load) -> None:
        asked = ids(self._shape, load.requests, load.prompt, self._device)
        parts = [(part, asked[part]) for part in chunks(self._args, load)]

        def plain() -> torch.Tensor:
            for _, chunk in parts:
                prefill(self._model, chunk)
            wait(self._device)
            return asked

        plain()
        self._timer.extract(load, CASE, plain, facts={"delivered": "nothing"})
        few, every = self._shape.few(self._args.few), list(range(self._shape.layers))
        for name, layers in {"all layers": every, f"{len(few)} layers": few}.items():
            rows = self._pinned.rows(len(layers), load)
            self._read(
                load,
                f"transformers hooks, pinned, {name}",
                layers,
                partial(self._into, rows, layers, parts),
                mean_size,
            )
        self._read(
            load,
            "transformers hooks, .cpu(), all layers",
            every,
            partial(self._to_lists, every, parts),
            lambda found: mean_size(found[0][-1][None]),
        )

    def _read(
        self,
        load: Load,
        case: str,
        layers: list[int],
        work: Callable[[], T],
        check: Callable[[T], Facts],
    ) -> None:
        row_bytes = len(layers) * self._shape.hidden * 2
        facts: Facts = {"delivered": "memory", "row bytes": row_bytes}
        self._timer.extract(load, case, work, check=check, facts=facts)

    def _into(self, rows: torch.Tensor, layers: list[int], parts: list[Part]) -> torch.Tensor:
        """Rows in pinned memory, [layers, requests, prompt, hidden]."""

        def copy(place: torch.Tensor, found: torch.Tensor) -> None:
            place.copy_(found, non_blocking=True)

        for part, chunk in parts:
            with ExitStack() as hooks:
                for layer, places in zip(layers, rows, strict=True):
                    edit = partial(copy, places[part])
                    hooks.enter_context(hooked(self._model, "post_block", layer, edit))
                prefill(self._model, chunk)
        wait(self._device)
        return read_one_each(rows)

    def _to_lists(self, layers: list[int], parts: list[Part]) -> list[list[torch.Tensor]]:
        """Rows of each chunk, of each layer, [requests, prompt, hidden]."""

        def keep(rows: list[torch.Tensor], found: torch.Tensor) -> None:
            rows.append(found.cpu())

        results: list[list[torch.Tensor]] = []
        for _, chunk in parts:
            results.append([])
            with ExitStack() as hooks:
                for layer in layers:
                    edit = partial(keep, results[-1])
                    hooks.enter_context(hooked(self._model, "post_block", layer, edit))
                prefill(self._model, chunk)
        for rows in results:
            read_one_each(rows[-1][None])
        return results

    def _adds(self, point: int, layer: int) -> Edit:
        seed = torch.Generator().manual_seed(point * self._shape.layers + layer)
        vectors = torch.randn(self._args.requests, 1, self._shape.hidden, generator=seed) * SCALE
        return vectors.to(self._device, torch.bfloat16).__add__

    def _generate(self, asked: torch.Tensor) -> None:
        tokens = self._args.generated
        out = self._model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            use_cache=True,
        )
        wait(self._device)
        if out.shape[1] != asked.shape[1] + tokens:
            raise SystemExit(f"{out.shape[1] - asked.shape[1]} tokens, not {tokens}")


def main() -> None:
    args = arguments(__doc__).parse_args()
    answer = Answer("hf_hooks")
    if installed(answer, "transformers"):
        Hooks(args, answer).run()
    answer.print()


if __name__ == "__main__":
    main()
