# SPDX-License-Identifier: Apache-2.0
"""Runs the check's requests on the engine, and returns tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm import LLM, RequestOutput, SamplingParams
from vllm.config.points import STREAM_POINTS
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.sites import need_one_lane

GENERATED = 4
"""Number of tokens that each request generates."""
LENGTHS = (23, 9, 14)
"""Number of tokens in the prompts."""


SHARE = 64
"""One channel in so many is left out where a row is compared without its largest ones."""


@dataclass(frozen=True)
class Completion:
    """One request's completion."""

    token_ids: list[int]
    """The tokens that were fed, prompt + generated - 1."""
    num_prompt: int
    log_probs: torch.Tensor
    """The log-probability of the token after each position, float32 [prompt - 1 + generated]."""
    next_ids: list[int]
    """The token after each position."""
    rows: dict[Site, torch.Tensor]
    """The rows of each captured site, [n, hidden] in the model's dtype, one for each fed token."""


class Probe:
    """The engine and what the checks need to know of its model."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        config = llm.llm_engine.vllm_config
        shape = config.tap_shape
        assert shape is not None
        need_one_lane("vllm steering check", shape)
        self.shape = shape
        self.sites: list[Site] = [(p, n) for n, layer in shape.layers.items() for p in layer.points]
        steered = config.steering_config.steering_points
        self.steered = [site for site in self.sites if site[0] in steered]
        self.rounding = torch.finfo(shape.torch_dtype).eps
        self.slots = config.steering_config.max_steering_configs
        """Number of requests with vectors of their own that run at a time."""
        self.architecture: str = config.model_config.architecture
        self._config = config
        self.prompts = self._prompts()

    def facts(self) -> dict[str, Any]:
        """Return what was started, as JSON takes it."""
        config = self._config
        parallel, compilation = config.parallel_config, config.compilation_config
        eager = config.model_config.enforce_eager
        return {
            "architecture": self.architecture,
            "layers": len(self.shape.layers),
            "hidden_size": self.shape.hidden_size,
            "dtype": self.shape.dtype,
            "tp": parallel.tensor_parallel_size,
            "pp": parallel.pipeline_parallel_size,
            "mode": "eager" if eager else compilation.mode.name.lower(),
            "graphs": "none" if eager else str(compilation.cudagraph_mode),
            "points": [p for p in STREAM_POINTS if any(p == site[0] for site in self.sites)],
        }

    def describe(self) -> str:
        """Describe in a line what was started."""
        facts = self.facts()
        return (
            f"{facts['architecture']}, {facts['layers']} layers of {facts['hidden_size']}, "
            f"{facts['dtype']}, tp {facts['tp']}, pp {facts['pp']}, {facts['mode']}, "
            f"graphs {facts['graphs']}, points {', '.join(facts['points'])}"
        )

    def _prompts(self) -> list[list[int]]:
        """Make the prompts, of random tokens."""
        # Below the ids that stand for images or sound, above most special ones.
        vocab = self._config.model_config.get_vocab_size()
        generator = torch.Generator().manual_seed(1)
        longest = self._config.model_config.max_model_len - GENERATED
        sizes = [min(length, longest) for length in LENGTHS]
        ids = [torch.randint(vocab // 20, vocab // 2, (n,), generator=generator) for n in sizes]
        return [row.tolist() for row in ids]

    def direction(self, site: Site) -> torch.Tensor:
        """Return a vector of length 1, float32 [hidden], another one for each site."""
        seed = 7 + self.sites.index(site)
        vector = torch.randn(self.shape.hidden_size, generator=torch.Generator().manual_seed(seed))
        return vector / vector.norm()

    def run(
        self,
        cases: Sequence[tuple[list[int], Mapping[str, Any]]],
        sites: Sequence[Sequence[Site]] | None = None,
    ) -> list[Completion]:
        """Complete prompts greedily, in one batch.

        The engine starts when all requests are there. Else a first step would have as many of them
        as have arrived, and cases of the same lengths would not be the same batch.

        Args:
            cases: for each request its prompt, and further fields of SamplingParams.
            sites: for each case what to capture, at all positions; default: all.

        Raises:
            RuntimeError: the rows are not there, or not those of the sequence.
        """
        wanted = [self.sites] * len(cases) if sites is None else sites
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=GENERATED,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                prompt_logprobs=0,
                skip_reading_prefix_cache=True,
                capture={"inline": {"hooks": _hooks(at), "positions": "all"}},
                **fields,
            )
            for (_, fields), at in zip(cases, wanted, strict=True)
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in cases]
        self.llm.sleep(level=0)
        try:
            self.llm.enqueue(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
        finally:
            self.llm.wake_up(["scheduling"])
        outputs = self.llm.wait_for_completion(RequestOutput, use_tqdm=False)
        return [_answer(p, output) for (p, _), output in zip(cases, outputs, strict=True)]


def _hooks(sites: Sequence[Site]) -> dict[str, list[int]]:
    hooks: dict[str, list[int]] = {}
    for point, layer in sites:
        hooks.setdefault(point, []).append(layer)
    return hooks


def _answer(prompt: list[int], output: Any) -> Completion:
    """Read an output of the engine, whose rows must be those of its sequence."""
    sample = output.outputs[0]
    result = output.capture_results["inline"]
    if result.status != "ok":
        raise RuntimeError(f"capture ended with status {result.status}: {result.error}")
    fed = [*prompt, *sample.token_ids[:-1]]
    for site, rows in result.payload.items():
        if rows.positions.tolist() != list(range(len(fed))) or rows.token_ids.tolist() != fed:
            raise RuntimeError(f"{site}: the rows are not those of the sequence")
    # Entry i of prompt_logprobs is what position i - 1 gave token i.
    entries = [*output.prompt_logprobs[1:], *sample.logprobs]
    next_ids = [*prompt[1:], *sample.token_ids]
    log_probs = [entry[token].logprob for entry, token in zip(entries, next_ids, strict=True)]
    rows = {site: rows.values for site, rows in result.payload.items()}
    return Completion(fed, len(prompt), torch.tensor(log_probs), next_ids, rows)


def without_largest(rows: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Return rows with zeros for the channels that are largest in `want`, one of `SHARE` or one.

    In a row of numbers of order one and a single one of 20,000 the error of the whole row is that
    of this number: all others may be wrong.

    Args:
        rows, want: [n, width].
    """
    largest = want.float().abs().topk(max(1, want.shape[-1] // SHARE), dim=-1).indices
    return rows.scatter(-1, largest, 0.0)


def worst_row(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest relative L2 error of a row.

    Args:
        got, want: rows, [n, width].

    Returns:
        max over rows of |got - want| / |want|; infinite where that is not a number.
    """
    off = (got.float() - want.float()).norm(dim=-1)
    # Rows of zeros are what some tokens have.
    errors = off.where(off == 0, off / want.float().norm(dim=-1))
    return float(errors.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
