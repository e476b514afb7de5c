# SPDX-License-Identifier: Apache-2.0
"""Checks of focus for `tests.gpu.mode`: against transformers, and bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs

from tests.conformance import reference as ref
from tests.support.focus import Focusing, focused

if TYPE_CHECKING:
    from tests.gpu.mode import Mode

LONG = 1500
"""Tokens of a prompt whose keys many programs read."""


@contextmanager
def compiled() -> Iterator[list[str]]:
    """The names of kernels that this process compiles meanwhile: none may be, as all would wait."""
    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook

    def noted(**told: Any) -> Any:
        names.append(told["fn"].name)
        return before(**told) if before else None

    knobs.runtime.jit_post_compile_hook = noted
    yield names
    knobs.runtime.jit_post_compile_hook = before


def focus(mode: Mode, vocabulary: int, layers: int, heads: int) -> dict[str, Any]:
    """Every row of focused requests, of prompts and answers, is what transformers computes with a
    bias in its mask; plain requests beside them keep their bits, as do those whose span is of
    factor 1."""
    generator = torch.Generator().manual_seed(31)
    every = {layer: list(range(heads)) for layer in range(layers)}
    asked: list[list[Focusing]] = [
        [Focusing(every, range(4, 9), factor=8.0)],
        [Focusing(every, [2, 3, 7], factor=0.001)],
        [Focusing({3: every[3]}, range(4, 9), factor=0.0), Focusing({3: [0]}, [1], factor=9.0)],
        [Focusing({1: [1], 5: [0, 6]}, range(2, 6), factor=50.0)],
        [Focusing(every, range(3, 12), range(30, 1 << 20), factor=20.0)],
        [Focusing(every, range(3, 12), share=0.5)],
        [Focusing(every, range(3, 12), share=0.4, ratio=True)],
        [Focusing(every, range(4, 9), factor=1.0)],
        [],
        [Focusing(every, range(20, 60), factor=6.0)],
        [Focusing(every, range(20, 60), share=0.3)],
    ]
    lengths = [31, 40, 17, 64, 31, 90, 33, 20, 50, LONG, LONG]
    tokens = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    steer = [
        {"steering": [e.request(n + 6) for e in each]} if each else {}
        for n, each in zip(lengths, asked, strict=True)
    ]
    hooks = {"z": "all", "post_block": "all"}
    with compiled() as late:
        plain, made = mode.run(tokens, [{}] * len(tokens), hooks), mode.run(tokens, steer, hooks)
    late = [name for name in late if name in ("sum_kernel", "join_kernel")]
    worst, least_move, same = 0.0, 9e9, True
    noise = 0.0
    blocks = list(mode.hf.get_submodule(mode.adapter.blocks).children())
    for prompt, each, (ids, rows), (ids_before, before) in zip(
        tokens, asked, made, plain, strict=True
    ):
        if not each or each[0].factor == 1.0:
            same &= ids == ids_before and all(torch.equal(rows[s], before[s]) for s in rows)
            continue
        exact = ref.run(mode.hf, mode.adapter, ids_before).rows
        with focused(mode.hf, blocks, each):
            want = ref.run(mode.hf, mode.adapter, ids)
        at = slice(0, len(prompt))
        last = ("post_block", layers - 1)
        moves = mode.worst_row(want.rows[last][at], exact[last][at])
        least_move = min(least_move, moves)
        for layer in range(layers):
            site = ("post_block", layer)
            noise = max(noise, mode.worst_row(before[site], exact[site]))
            worst = max(worst, mode.worst_row(rows[site], want.rows[site]))
            z, exact_z = rows["z", layer].flatten(1), want.heads["z", layer].flatten(1)
            worst = max(worst, mode.worst_row(z, exact_z))
    limit = 2 * mode.noise_limit
    ok = same and worst <= limit and least_move > limit and not late
    return {
        "error": worst, "plain_error": noise, "limit": limit, "least_move": least_move,
        "bits": same, "compiled_late": late, "ok": ok,
    }  # fmt: skip


def focus_weights(mode: Mode, vocabulary: int, layers: int) -> dict[str, Any]:
    """Captured weights of a focused request have its share; with it the span has that, without it
    less."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(32)
    ids = torch.randint(0, vocabulary, (70,), generator=generator).tolist()
    asked = {"heads": "all", "keys": {"span": list(range(10, 20))}, "give": ["mass"]}
    asked["queries"] = {"start": 25}
    steering = [{"op": "focus", "layers": "all", "span": list(range(10, 20)), "share": 0.6}]
    found = []
    both: list[dict[str, Any]] = [{"steering": steering}, {}]
    for fields in both:
        params = SamplingParams(
            max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False,
            capture={"inline": {"attention": asked}}, **fields,
        )  # fmt: skip
        fed: Any = [{"prompt_token_ids": ids}]
        output = mode.llm.generate(fed, params, use_tqdm=False)[0]
        assert output.capture_results is not None
        payload = output.capture_results["inline"].payload
        found.append(torch.cat([payload["attn", n].mass.flatten() for n in range(layers)]))
    with_it, without = found
    off = float((with_it.clamp_min(0.6) - with_it).abs().max())
    lower = float((without < 0.59).float().mean())
    ok = off <= 1e-3 and lower > 0.5
    return {"off": off, "lower_without": lower, "ok": ok}
