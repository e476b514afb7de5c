# SPDX-License-Identifier: Apache-2.0
"""Peer: transformers' own model with forward hooks, which is what most people start with.

python -m benchmarks.peers.hf_hooks --model DIR --stock STOCK

One static batch, bfloat16, SDPA attention, a key-value cache, no gradients; logits of a prompt's
last token alone. Steering adds to the input of a block, the output of its attention (which is what
adding to the stream between its halves comes to) and its output. Rows go to pinned memory made
beforehand, and all copies of a batch are waited for once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.peers.workloads import (
    OUTPUT,
    PROMPT,
    Answer,
    Shape,
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


def load(args: argparse.Namespace, answer: Answer) -> PreTrainedModel:
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
        "batch": "static, all requests",
    }
    return model


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def ids(shape: Shape, requests: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(prompts(shape, requests, length), device=device)


def host_rows(layers: int, asked: torch.Tensor, hidden: int) -> torch.Tensor:
    """Where rows are copied to, layer by layer."""
    pinned = asked.device.type == "cuda"
    return torch.empty(layers, *asked.shape, hidden, dtype=torch.bfloat16, pin_memory=pinned)


class Hooks:
    def __init__(self, args: argparse.Namespace, answer: Answer) -> None:
        self._args, self._timer, self._shape = args, Timer(args, answer), Shape.of(args.model)
        self._model: Any = load(args, answer)
        self._device = self._model.device

    @torch.inference_mode()
    def run(self) -> None:
        args, timer = self._args, self._timer
        ready(args)
        asked = ids(self._shape, args.requests, args.prompt, self._device)
        timer.time(OUTPUT, CASE, partial(self._generate, asked))
        with ExitStack() as hooks:
            for n, point in enumerate(("pre_attn", "post_attn", "post_block")):
                for layer in range(self._shape.layers):
                    hooks.enter_context(hooked(self._model, point, layer, self._adds(n, layer)))
            timer.time(
                OUTPUT,
                f"{CASE} + hooks, steering",
                partial(self._generate, asked),
                steered=f"3 points x {self._shape.layers} layers",
                distinct=args.requests,
            )
        asked = ids(self._shape, args.extract_requests, args.extract_prompt, self._device)
        timer.time(PROMPT, CASE, partial(self._prefill, asked), delivered="nothing")
        few = self._shape.few(args.few)
        for name, layers in {
            f"{len(few)} layers": few,
            "all layers": list(range(self._shape.layers)),
        }.items():
            self._read(asked, name, layers)

    def _read(self, asked: torch.Tensor, name: str, layers: list[int]) -> None:
        rows = host_rows(len(layers), asked, self._shape.hidden)

        def into(place: torch.Tensor, found: torch.Tensor) -> None:
            place.copy_(found, non_blocking=True)

        with ExitStack() as hooks:
            for place, layer in zip(rows, layers, strict=True):
                edit = partial(into, place)
                hooks.enter_context(hooked(self._model, "post_block", layer, edit))
            work = partial(self._prefill, asked)
            work()
            size = rows[-1, 0].float().abs().mean().item()
            row_bytes = len(layers) * self._shape.hidden * 2
            facts: dict[str, Any] = {"row bytes": row_bytes, "mean |row|": size}
            timer, case = self._timer, f"{CASE} + hooks, {name}"
            timer.time(PROMPT, case, work, delivered="memory", **facts)

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

    def _prefill(self, asked: torch.Tensor) -> None:
        self._model(asked, use_cache=False, logits_to_keep=1)
        wait(self._device)


def main() -> None:
    args = arguments(__doc__).parse_args()
    answer = Answer("hf_hooks")
    if installed(answer, "transformers"):
        Hooks(args, answer).run()
    answer.print()


if __name__ == "__main__":
    main()
