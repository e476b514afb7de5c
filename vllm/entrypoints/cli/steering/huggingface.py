# SPDX-License-Identifier: Apache-2.0
"""Compares the engine with Hugging Face transformers, on the CPU and in the engine's dtype.

Rounding alone moves the streams of two implementations apart. How far is measured: the reference
runs again with each block's input changed by about one rounding, and several times the distance
that this makes is allowed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn

from vllm import LLM
from vllm.entrypoints.cli.steering.findings import Finding, Unknown
from vllm.entrypoints.cli.steering.identities import steer
from vllm.entrypoints.cli.steering.probe import Completion, Probe, without_largest, worst_row
from vllm.v1.interventions.plan import Site

Rows = Mapping[Site, torch.Tensor]

NOISES = 4
"""Multiple of the reference's own rounding noise that an error may be."""
LEAST = 1e-5
"""The error that is allowed in any case: float32 sums in another order."""

SECOND_NORMS = (
    "pre_feedforward_layernorm",
    "pre_mlp_layernorm",
    "post_attention_layernorm",
    "ffn_norm",
    "ln_2",
    "norm_2",
)
"""The names that the norm before the MLP may have, whose input is the stream. The first that a
block has counts."""


def why_not(llm: LLM) -> str:
    """Say why transformers is left out; "" when its weights fit in half of the free memory."""
    folder = Path(llm.llm_engine.model_config.model)
    if not folder.is_dir():
        return "MODEL is no local directory, so its size is not known: ask with --hf"
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = psutil.virtual_memory().available
    if not size or size > free / 2:
        return f"{size >> 20} MiB of weights, {free >> 20} MiB of memory free: ask with --hf"
    return ""


def compare(probe: Probe) -> list[Finding]:
    """Compare reads at every site, and writes at the first, a middle and the last layer."""
    try:
        reference = Reference(probe)
    except (Unknown, ValueError, OSError, ImportError) as error:
        return [Finding.skipped("transformers", str(error).split("\n")[0])]
    answer = probe.run([(probe.prompts[0], {})])[0]
    rows, log_probs = reference.run(answer, {})
    noisy_rows, noisy = reference.run(answer, {}, noise=probe.rounding)
    findings = []
    for point in dict.fromkeys(point for point, _ in probe.sites):
        at = [site for site in probe.sites if site[0] == point and site in rows]
        if not at:
            findings.append(Finding.skipped(f"read {point} = transformers", "no norm known there"))
            continue
        findings.append(_read(f"read {point} = transformers", at, answer.rows, noisy_rows, rows))
        # A row is compared once more without what would hide the rest of it.
        some = [
            {site: without_largest(of[site], rows[site]) for site in at}
            for of in (answer.rows, noisy_rows, rows)
        ]
        findings.append(_read(f"read {point} but for its largest channels", at, *some))
    base = float((noisy - log_probs).abs().max())
    plain = float((answer.log_probs - log_probs).abs().max())
    allowed = max(10 * LEAST, NOISES * base)
    findings.append(Finding.at_most("logprobs = transformers", plain, allowed, f"noise {base:.1e}"))
    return findings + writes(probe, reference, answer, allowed)


def _read(check: str, at: Sequence[Site], got: Rows, noisy: Rows, want: Rows) -> Finding:
    """Compare the rows of some sites; what they may be off is measured at all of them."""
    errors = {site: worst_row(got[site], want[site]) for site in at}
    noise = max(worst_row(noisy[site], want[site]) for site in at)
    worst = max(errors, key=lambda site: errors[site])
    note = f"worst at layer {worst[1]}; noise {noise:.1e}"
    return Finding.at_most(check, errors[worst], max(LEAST, NOISES * noise), note)


def writes(probe: Probe, reference: "Reference", plain: Completion, least: float) -> list[Finding]:
    """Compare writes of a quarter of the stream's length, at each point of three layers.

    Args:
        plain: the unsteered completion.
        least: the error of log-probabilities that is allowed in any case.
    """
    layers = list(probe.shape.layers)
    chosen = sorted({layers[0], layers[len(layers) // 2], layers[-1]})
    sites = [s for s in probe.steered if s[1] in chosen and s in reference.sites]
    vectors = {
        s: probe.direction(s) * float(plain.rows[s].float().norm(dim=-1).mean()) / 4 for s in sites
    }
    cases = [(probe.prompts[0], steer("steering_vectors", {s: v})) for s, v in vectors.items()]
    findings = []
    for site, answer in zip(sites, probe.run(cases, [[s] for s in sites]), strict=True):
        _, want = reference.run(answer, {site: vectors[site]})
        _, noisy = reference.run(answer, {site: vectors[site]}, noise=probe.rounding)
        _, unsteered = reference.run(answer, {})
        error = float((answer.log_probs - want).abs().max())
        noise = float((noisy - want).abs().max())
        moved = float((want - unsteered).abs().max())
        allowed = min(max(least, NOISES * noise), moved / 2)
        note = f"logprobs moved by {moved:.1e}; noise {noise:.1e}"
        name = f"write {site[0]}[{site[1]}] = transformers"
        findings.append(Finding.at_most(name, error, allowed, note))
    return findings


class Reference:
    """The transformers model with hooks on its blocks."""

    def __init__(self, probe: Probe) -> None:
        config = probe.llm.llm_engine.model_config
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            config.model,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=probe.shape.torch_dtype,
            # Other kernels leave out what some models do to their scores.
            attn_implementation="eager",
        )
        self.model.train(False)
        count = len(probe.shape.layers)
        lists = [m for m in self.model.modules() if isinstance(m, nn.ModuleList)]
        blocks = [m for m in lists if len(m) == count and "DecoderLayer" in type(m[0]).__name__]
        blocks = blocks or [m for m in lists if len(m) == count]
        if not blocks:
            raise Unknown(f"{type(self.model).__name__} has no list of {count} blocks")
        self.blocks = dict(zip(probe.shape.layers, blocks[0], strict=True))
        self.norms = {}
        for layer, block in self.blocks.items():
            children = dict(block.named_children())
            found = next((children[name] for name in SECOND_NORMS if name in children), None)
            if found is not None and "post_attn" in probe.shape.layers[layer].points:
                self.norms[layer] = found
        self.sites = {(p, n) for n in self.blocks for p in ("pre_attn", "post_block")}
        # A block that ends by scaling the stream scales what its skip carries, too.
        plain = [n for n, b in self.blocks.items() if "layer_scalar" not in dict(b.named_buffers())]
        self.sites |= {("post_attn", layer) for layer in plain if layer in self.norms}
        self.noise = torch.Generator().manual_seed(3)

    @torch.inference_mode()
    def run(
        self, answer: Completion, vectors: Mapping[Site, torch.Tensor], noise: float = 0.0
    ) -> tuple[dict[Site, torch.Tensor], torch.Tensor]:
        """Run the model on a completion's tokens.

        Args:
            vectors: site -> float32 [hidden], added at all positions.
            noise: the relative change of each block's input, about one rounding.

        Returns:
            The rows of every site, [n, hidden], and the log-probabilities of the completion's
            tokens, both as in `Completion`.
        """
        rows: dict[Site, torch.Tensor] = {}
        with self._hooks(rows, vectors, noise):
            logits = self.model(torch.tensor([answer.token_ids]), use_cache=False).logits[0]
        table = logits.float().log_softmax(-1)
        index = torch.arange(len(answer.next_ids)), torch.tensor(answer.next_ids)
        return rows, table[index]

    @contextlib.contextmanager
    def _hooks(
        self, rows: dict[Site, torch.Tensor], vectors: Mapping[Site, torch.Tensor], noise: float
    ) -> Iterator[None]:
        """Add vectors and noise, and keep the rows of every site in `rows`, while this is open."""

        def changed(site: Site, stream: torch.Tensor) -> torch.Tensor:
            if site in vectors:
                stream = (stream.float() + vectors[site]).to(stream.dtype)
            rows[site] = stream[0].clone()
            return stream

        def before(layer: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                stream = args[0] if args else kwargs["hidden_states"]
                if noise:
                    random = torch.randn(stream.shape, generator=self.noise)
                    stream = (stream.float() * (1 + noise * random)).to(stream.dtype)
                stream = changed(("pre_attn", layer), stream)
                if args:
                    return (stream, *args[1:]), kwargs
                return args, {**kwargs, "hidden_states": stream}

            return hook

        def after(layer: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: Any, output: Any) -> Any:
                stream = output[0] if isinstance(output, tuple) else output
                if ("post_attn", layer) in vectors:
                    # The norm's hook does not reach the skip.
                    stream = (stream.float() + vectors["post_attn", layer]).to(stream.dtype)
                stream = changed(("post_block", layer), stream)
                return (stream, *output[1:]) if isinstance(output, tuple) else stream

            return hook

        def middle(layer: int) -> Callable[..., Any]:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
                return (changed(("post_attn", layer), args[0]), *args[1:])

            return hook

        with contextlib.ExitStack() as stack:
            handles = []
            for layer, block in self.blocks.items():
                handles.append(block.register_forward_pre_hook(before(layer), with_kwargs=True))
                handles.append(block.register_forward_hook(after(layer)))
            for layer, norm in self.norms.items():
                handles.append(norm.register_forward_pre_hook(middle(layer)))
            for handle in handles:
                stack.callback(handle.remove)
            yield
