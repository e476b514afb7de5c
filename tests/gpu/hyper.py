# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections on a GPU: a tiny random HY-V4, stock, then steered and captured, eagerly and in
CUDA graphs. One line a check, exit status 1 on any failure.

    python -m tests.gpu.hyper [--device cpu]

Needs the fork on sys.path (CONTRIBUTING.md), no model. The reference is HY-V4's formulas in float32
(`Plain`), which takes nothing from vLLM or transformers but the weights. Attention is dense: what
sparse attention needs (DeepGEMM, FlashMLA) is not checked here. One process a mode, all at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn import functional as F

from tests.conformance.engine import prepare_environment
from tests.gpu.processes import Processes, all_good

LANES, HIDDEN, LAYERS, HEADS, VOCAB = 4, 256, 4, 4, 251
NOPE, ROPE, VALUE, LATENT, QUERY, INNER = 64, 64, 128, 512, 96, 512
EPS, HC_EPS, MAGNITUDE, THETA = 1e-5, 0.01, 1.6, 10000.0
CONFIG: dict[str, Any] = {
    "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "torch_dtype": "bfloat16",
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "max_position_embeddings": 256, "rms_norm_eps": EPS, "hidden_act": "silu",
    "q_lora_rank": QUERY, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "tie_word_embeddings": False,
    "mlp_layer_types": ["dense"] * LAYERS, "layer_types": ["full_attention"] * LAYERS,
    "learnable_sink": False, "gated_mla": True, "gating_type": "elementwise", "enable_ihc": True,
    "hc_mult": LANES, "hc_magnitude": MAGNITUDE, "hc_eps": HC_EPS, "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip

POINTS = ("pre_attn", "post_attn", "post_block")
MODES: dict[str, dict[str, Any]] = {
    "stock eager": {"enforce_eager": True},
    "stock graphs": {"enforce_eager": False},
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False},
}
"""What stock modes start has neither steering nor capture."""
LIMITS = {"cuda": 0.03, "cpu": 1e-4}
"""Most relative L2 error of a row: what bfloat16 may cause, and float32."""

FIRST, LAST = "log-probabilities", "a plain request beside steered ones, in bits"
"""Checks of a mode; in stock ones the first is the last."""

Site = tuple[str, int]
Change = Callable[[torch.Tensor], torch.Tensor]
"""Rows [n, lanes, hidden] -> what steering makes of them."""


def save_model(folder: Path) -> None:
    """A random model with streams of order one, every norm, gate and bias random."""
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 1.5 * shape[1] ** -0.5).bfloat16()

    def around(middle: float, *shape: int) -> torch.Tensor:
        return middle + 0.3 * torch.randn(shape, generator=generator)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
        "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": around(1, HIDDEN).bfloat16(),
        "model.hc_head.hc_head_fn": matrix(LANES, LANES * HIDDEN).float(),
        "model.hc_head.hc_head_base": around(0, LANES),
        "model.hc_head.hc_head_scale": around(1, 1),
    }
    widths = {
        "self_attn.q_a_proj": (QUERY, HIDDEN),
        "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), QUERY),
        "self_attn.kv_a_proj_with_mqa": (LATENT + ROPE, HIDDEN),
        "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
        "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
        "self_attn.linear_gate": (HEADS * VALUE, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    norms = {
        "input_layernorm": HIDDEN,
        "post_attention_layernorm": HIDDEN,
        "self_attn.q_a_layernorm": QUERY,
        "self_attn.kv_a_layernorm": LATENT,
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {f"{at}{name}.weight": matrix(*shape) for name, shape in widths.items()}
        weights |= {f"{at}{name}.weight": around(1, n).bfloat16() for name, n in norms.items()}
        for half in ("hc_attn_layer", "hc_mlp_layer"):
            weights[f"{at}{half}.hc_pre.hc_fn"] = matrix(2 * LANES, LANES * HIDDEN).float()
            weights[f"{at}{half}.hc_pre.hc_base"] = around(0, 2 * LANES)
            weights[f"{at}{half}.hc_pre.hc_scale"] = around(1, 2)
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def rms(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Plain:
    """HY-V4's block stream in float32, one sequence at a time (docs/hook-contract.md)."""

    def __init__(self, folder: Path) -> None:
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        self.weights = {name: tensor.float() for name, tensor in stored.items()}

    def w(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"model.layers.{layer}.{name}"]

    def gates(self, x: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
        """Of all lanes together: [n, lanes, hidden] -> [n, len(fn)]."""
        flat = x.flatten(1)
        return flat @ fn.T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)

    def mix(self, x: torch.Tensor, layer: int, half: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The one input of a sub-layer, and how much of its output each lane gets."""
        fn, base, scale = (self.w(layer, f"{half}.hc_pre.hc_{n}") for n in ("fn", "base", "scale"))
        raw = self.gates(x, fn)
        pre = torch.sigmoid(raw[:, :LANES] * scale[0] + base[:LANES]) + HC_EPS
        post = MAGNITUDE * torch.sigmoid(raw[:, LANES:] * scale[1] + base[LANES:]) + HC_EPS
        return (pre[..., None] * x).sum(1), post

    def attend(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return x @ self.w(layer, f"self_attn.{name}.weight").T

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            return rms(x) * self.w(layer, f"self_attn.{name}.weight")

        n = len(h)
        q = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", h))).view(n, HEADS, -1)
        latent, k_rope = linear("kv_a_proj_with_mqa", h).split([LATENT, ROPE], -1)
        kv = linear("kv_b_proj", norm("kv_a_layernorm", latent)).view(n, HEADS, -1)
        k, v = kv.split([NOPE, VALUE], -1)
        angles = torch.arange(n)[:, None] * THETA ** -(torch.arange(0, ROPE, 2) / ROPE)
        turn = torch.polar(torch.ones(()), angles)[:, None]

        def rotate(x: torch.Tensor) -> torch.Tensor:  # neighbours are the pairs
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2)

        q = torch.cat([q[..., :NOPE], rotate(q[..., NOPE:])], -1)
        k = torch.cat([k, rotate(k_rope[:, None]).expand(-1, HEADS, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * (NOPE + ROPE) ** -0.5
        seen = torch.ones(n, n).tril().bool()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return linear("o_proj", out.flatten(1) * torch.sigmoid(linear("linear_gate", h)))

    def feed(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.w(layer, f"mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
        return (F.silu(h @ gate.T) * (h @ up.T)) @ down.T

    def half(self, x: torch.Tensor, layer: int, point: str) -> torch.Tensor:
        """The stream at the point after `point`, "pre_attn" or "post_attn", in the same block."""
        first = point == "pre_attn"
        one, post = self.mix(x, layer, "hc_attn_layer" if first else "hc_mlp_layer")
        norm = self.w(layer, f"{'input' if first else 'post_attention'}_layernorm.weight")
        made = (self.attend if first else self.feed)(layer, rms(one) * norm)
        return x + post[..., None] * made[:, None]

    def final(self, x: torch.Tensor) -> torch.Tensor:
        fn, base, scale = (
            self.weights[f"model.hc_head.hc_head_{n}"] for n in ("fn", "base", "scale")
        )
        pre = torch.sigmoid(self.gates(x, fn) * scale + base) + HC_EPS
        return rms((pre[..., None] * x).sum(1)) * self.weights["model.norm.weight"]

    def log_probs(self, final: torch.Tensor) -> torch.Tensor:
        return (final @ self.weights["lm_head.weight"].T).log_softmax(-1)

    def run(
        self, tokens: list[int], changes: Mapping[Site, Change] | None = None
    ) -> tuple[dict[Site, torch.Tensor], torch.Tensor]:
        """Rows [n, lanes, hidden] of every site, after what changes it, and log-probabilities."""
        changes, rows = changes or {}, dict[Site, torch.Tensor]()
        x = self.weights["model.embed_tokens.weight"][tokens][:, None].expand(-1, LANES, -1)
        for layer in range(LAYERS):
            for i, point in enumerate(POINTS):
                x = self.half(x, layer, POINTS[i - 1]) if i else x
                x = rows[point, layer] = changes.get((point, layer), lambda rows: rows)(x)
        return rows, self.log_probs(self.final(x))


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative L2 error of a row of a lane."""
    got = got.float().reshape(want.shape)
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(9e9).max())


def steerings() -> dict[str, tuple[dict[str, Any], Site, Change, Change]]:
    """What is asked for, where, what it must do there, and what that must not be."""
    generator = torch.Generator().manual_seed(3)
    each = 4.0 * torch.randn(LANES, HIDDEN, generator=generator)
    one = each[0]
    unit, units = one / one.norm(), each / each.norm(dim=-1, keepdim=True)

    def on(lane: int, change: Change) -> Change:
        keep = torch.arange(LANES)[:, None] != lane
        return lambda rows: torch.where(keep, rows, change(rows))

    def along(h: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return (h * u).sum(-1, keepdim=True) * u

    found: dict[str, tuple[dict[str, Any], Site, Change, Change]] = {}
    for layer in range(LAYERS):
        for point in POINTS:
            given = {"steering_vectors": {point: {layer: one}}}
            found[f"all lanes {point} {layer}"] = (
                given, (point, layer), lambda h: h + one, on(1, lambda h: h + one),
            )  # fmt: skip
    for point in POINTS:
        site = (point, 1)
        lane = {"steering_vectors": {point: {1: {"vector": one, "lane": 2}}}}
        found[f"one lane {point}"] = (
            lane, site, on(2, lambda h: h + one), on(1, lambda h: h + one),
        )  # fmt: skip
        found[f"lane by lane {point}"] = (
            {"steering_vectors": {point: {1: each}}}, site, lambda h: h + each,
            lambda h: h + each.flip(0),
        )  # fmt: skip
        pin = {"op": "pin", "point": point, "layers": 1, "direction": each, "value": 20.0}
        found[f"pin lane by lane {point}"] = (
            {"steering": [pin]}, site, lambda h: h - along(h, units) + 20 * units,
            lambda h: h - along(h, units.flip(0)) + 20 * units.flip(0),
        )  # fmt: skip
        op = {"op": "ablate", "point": point, "layers": 1, "direction": one, "strength": 16.0}
        found[f"ablate one lane {point}"] = (
            {"steering": [{**op, "lane": 3}]}, site, on(3, lambda h: h - 16 * along(h, unit)),
            on(0, lambda h: h - 16 * along(h, unit)),
        )  # fmt: skip
    return found


def checks(llm: Any, plain: Plain, stock: bool, limit: float) -> Iterator[tuple[str, Any]]:
    """(name, numbers with "ok") of each check."""
    from tests.conformance import runner

    prompts = runner.prompts()
    told = runner.complete(llm, [(p, {}) for p in prompts])
    errors, moved = [], []
    for done in told:
        said, wanted = runner.log_probs_of(done), plain.run(done.token_ids)[1]
        errors.append(worst(said, wanted))
        moved.append(float((said.roll(1, 0) - wanted).norm() / wanted.norm()))
    yield FIRST, within(max(errors), limit, min(moved))
    if stock:
        return

    def read(cases: list[Any]) -> list[Any]:
        capture = {"hooks": {p: "all" for p in POINTS} | {"final": "all"}, "positions": "all"}
        return runner.complete(llm, cases, log_probs=False, capture=capture)

    alone = read([(p, {}) for p in prompts])
    whole, wrong, step, skew, head = [], [], [], [], []
    for done in alone:
        rows, _ = plain.run(done.token_ids)
        got = {s: r.unflatten(1, (LANES, -1)) for s, r in done.rows.items() if s[0] in POINTS}
        for site, want in rows.items():
            whole.append(worst(got[site], want))
        for layer in range(LAYERS):
            for here, after in (("pre_attn", "post_attn"), ("post_attn", "post_block")):
                want = plain.half(got[here, layer], layer, here)
                step.append(worst(got[after, layer], want))
                skew.append(worst(got[after, layer].roll(1, 1), want))
                wrong.append(worst(got[here, layer], want))
        last = plain.final(got["post_block", LAYERS - 1])
        head.append(worst(done.rows["final", LAYERS - 1], last))
    # What each half block rounds adds up, steered or not; alone each has half of this limit below.
    yield "rows of the whole model", within(max(whole), 2 * limit, min(skew))
    yield "each half block from the captured rows before it", within(max(step), limit, min(wrong))
    yield "head from the captured last rows", within(max(head), limit, min(skew))

    asked = steerings()
    cases = [(prompts[i % 3], given) for i, (given, *_) in enumerate(asked.values())]
    wrote = runner.complete(llm, cases)
    seen = read(cases)
    for (name, (_, site, change, other)), steered, captured in zip(
        asked.items(), wrote, seen, strict=True
    ):
        _, log_probs = plain.run(steered.token_ids, {site: change})
        _, not_this = plain.run(steered.token_ids, {site: other})
        _, unsteered = plain.run(steered.token_ids)
        error = worst(runner.log_probs_of(steered), log_probs)
        least = min(float((x - log_probs).norm() / log_probs.norm()) for x in (not_this, unsteered))
        by_rows = plain.run(captured.token_ids, {site: change})[0]
        read_error = max(worst(captured.rows[s], r) for s, r in by_rows.items())
        yield f"steered: {name}", within(max(error, read_error), 2 * limit, least, 0.03)

    neighbours = [(prompts[0], {}), *cases[:6]]
    [first, *_] = read([(p, {}) for p, _ in neighbours])
    [beside, other_row, *_] = read(neighbours)
    same = all(torch.equal(first.rows[s], beside.rows[s]) for s in first.rows)
    apart = any(not torch.equal(first.rows[s], other_row.rows[s]) for s in first.rows)
    yield LAST, {"same": same, "ok": same and apart}


def within(error: float, limit: float, other: float, least: float = 0.05) -> dict[str, Any]:
    """The numbers of a check: the error, and how far off what must differ is."""
    ok = error <= limit and other >= max(least, 2 * error)
    return {"error": float(f"{error:.2g}"), "limit": limit, "other": round(other, 3), "ok": ok}


def run_mode(name: str, folder: Path, device: str) -> int:
    """In a process of its own: start the engine, and print a line a check."""
    prepare_environment("v2" if device == "cuda" else "v1", "cuda" if device == "cuda" else "cpu")
    from tests.conformance.engine import make_llm, shut_down
    from vllm.v1.interventions.terms import OPS

    settings: dict[str, Any] = dict(MODES[name])
    if device == "cuda":
        settings |= {
            "dtype": "bfloat16", "block_size": None, "kv_cache_memory_bytes": 1 << 30,
            "gpu_memory_utilization": 0.05, "max_num_seqs": 32,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 256]},
        }  # fmt: skip
    else:
        settings |= {
            "block_size": 16, "compilation_config": {"custom_ops": ["none"]},
            "attention_config": {"backend": "CPU_MLA"},
        }  # fmt: skip
    stock = name.startswith("stock")
    if not stock:
        settings |= {
            "enable_steering": True, "steering_families": list(OPS), "max_steering_ops": 4,
            "max_steering_configs": 40, "capture_consumers": ["inline"],
            "capture_points": [*POINTS, "final"],
        }  # fmt: skip
    llm = make_llm(folder, **settings)
    ok = True
    for check, numbers in checks(llm, Plain(folder), stock, LIMITS[device]):
        print(json.dumps({"mode": name, "check": check, **numbers}), flush=True)
        ok &= numbers["ok"]
    shut_down(llm)
    return 0 if ok else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.hyper", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="*", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--mode", choices=tuple(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=140, help="seconds for one mode")
    options = parser.parse_args()
    if options.mode:
        return run_mode(options.mode, options.folder, options.device)
    processes = Processes()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        command = [sys.executable, "-m", "tests.gpu.hyper", "--device", options.device]
        command += ["--folder", folder, "--mode"]
        modes = [
            partial(
                processes.checks, [*command, name], dict(os.environ), options.timeout,
                FIRST if name.startswith("stock") else LAST,
            )
            for name in options.only
        ]  # fmt: skip
        return 0 if all_good(processes, modes, len(modes)) else 1


if __name__ == "__main__":
    sys.exit(main())
