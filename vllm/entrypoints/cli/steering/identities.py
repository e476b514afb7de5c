# SPDX-License-Identifier: Apache-2.0
"""Checks what must hold whatever the weights are, so that no reference is needed.

Bits are compared only between runs of the same batch: of requests that the engine starts together,
as long and captured alike. Otherwise errors are relative L2 of the worst row, and a few roundings
are allowed: of the numbers that are summed, which may be far larger than their sum.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch

from vllm.entrypoints.cli.steering.findings import Finding, Unknown
from vllm.entrypoints.cli.steering.head import head_log_probs
from vllm.entrypoints.cli.steering.probe import Completion, Probe, worst_row
from vllm.v1.interventions.plan import Site

ROUNDINGS = 4
"""Number of roundings that an error may be: of the model's dtype, or as they were measured."""
BETWEEN_BLOCKS = {"SolarForCausalLM": "this model mixes earlier streams in between blocks"}
"""The architectures whose model changes the stream between a block and the next, and how."""

Case = tuple[list[int], Mapping[str, Any]]
"""A prompt's token ids, and further fields of SamplingParams."""


def check_identities(probe: Probe) -> list[Finding]:
    """Make all checks of this module, in the order of the table."""
    plain = probe.run([(prompt, {}) for prompt in probe.prompts])
    return [
        same_stream(probe, plain),
        *head(probe, plain),
        *nothing_added(probe, plain),
        *neighbours(probe, plain),
        *sites(probe, plain[0]),
    ]


def steer(field: str, sites: Mapping[Site, torch.Tensor], scale: float = 1.0) -> dict[str, Any]:
    """Return the field of SamplingParams that adds these vectors, float32 [hidden] each."""
    vectors: dict[str, dict[int, Any]] = {}
    for (point, layer), vector in sites.items():
        vectors.setdefault(point, {})[layer] = {"vector": vector, "scale": scale}
    return {field: vectors}


def length(rows: torch.Tensor) -> float:
    """Return the mean L2 norm of rows [n, hidden]."""
    return float(rows.float().norm(dim=-1).mean())


def same_stream(probe: Probe, plain: list[Completion]) -> Finding:
    """Check that `post_block[l]` is `pre_attn[l + 1]`, and is not `pre_attn[l]`."""
    name = "post_block[l] = pre_attn[l+1]"
    if reason := BETWEEN_BLOCKS.get(probe.architecture):
        return Finding.skipped(name, reason)
    layers = list(probe.shape.layers)
    if len(layers) < 2:
        return Finding.skipped(name, "the model has one layer")
    errors = {
        layer: max(worst_row(a.rows["post_block", layer], a.rows["pre_attn", after]) for a in plain)
        for layer, after in pairwise(layers)
    }
    twin = min(
        worst_row(a.rows["pre_attn", layer], a.rows["post_block", layer])
        for a in plain
        for layer in layers
    )
    worst = max(errors, key=lambda layer: errors[layer])
    tolerance = ROUNDINGS * probe.rounding
    note = f"worst after layer {worst}; a block moves its stream by {twin:.1e} or more"
    return Finding.at_most(name, errors[worst], min(tolerance, twin / 4), note)


def head(probe: Probe, plain: list[Completion]) -> list[Finding]:
    """Check that the log-probabilities are made of the last block's rows.

    How far rounding moves them is measured: with each number of the rows changed by one.
    """
    name = "log_softmax(head(norm(last))) = logprobs"
    last = list(probe.shape.layers)[-1]
    generator = torch.Generator().manual_seed(5)

    def made(answer: Completion, rows: torch.Tensor) -> torch.Tensor:
        # Arguments of a call by function travel untyped: a tensor would arrive as a list.
        args = (rows.tolist(), answer.next_ids)
        for found in probe.llm.collective_rpc(head_log_probs, args=args):
            if isinstance(found, str):
                raise Unknown(found)
            if found is not None:
                return torch.tensor(found)
        raise Unknown("no rank has logits")

    first = plain[0]
    try:
        twin = made(first, first.rows["pre_attn", last])
    except Unknown as error:
        return [Finding.skipped(name, str(error))]
    other = float((twin - first.log_probs).abs().max())
    worst = noise = 0.0
    for answer in plain:
        rows = answer.rows["post_block", last].float()
        rounded = rows * (1 + probe.rounding * torch.randn(rows.shape, generator=generator))
        found, moved = (made(answer, each) for each in (rows, rounded))
        worst = max(worst, float((found - answer.log_probs).abs().max()))
        # A logit is a sum, rounded as often as it has terms: no less than itself is.
        size = probe.rounding * float(answer.log_probs.abs().max())
        noise = max(noise, size, float((moved - found).abs().max()))
    note = f"noise {noise:.1e}; from the last block's input: {other:.1e}"
    # A log-probability is a logit less the logarithm of a sum: both are rounded, on two roads.
    return [Finding.at_most(name, worst, min(4 * ROUNDINGS * noise, other / 4), note)]


def nothing_added(probe: Probe, plain: list[Completion]) -> list[Finding]:
    """Check that vectors with a scale of 0 change no bit."""
    vectors = {site: probe.direction(site) for site in probe.steered}
    fields = steer("steering_vectors", vectors, scale=0.0)
    zero = probe.run([(prompt, fields) for prompt in probe.prompts])
    return [_bits("scale 0 = unsteered, bit for bit", probe, zero, plain)]


def neighbours(probe: Probe, plain: list[Completion]) -> list[Finding]:
    """Check that steered neighbours in the batch move, and change no bit of an unsteered one."""
    vectors = {
        site: probe.direction(site) * 0.2 * length(plain[0].rows[site]) for site in probe.steered
    }
    fields = steer("steering_vectors", vectors)
    cases: list[Case] = [(probe.prompts[0], {}), *((p, fields) for p in probe.prompts[1:])]
    mixed = probe.run(cases)
    finding = _bits("unsteered beside steered, bit for bit", probe, mixed[:1], plain[:1])
    last = ("post_block", list(probe.shape.layers)[-1])
    count = mixed[1].num_prompt
    moved = worst_row(mixed[1].rows[last][:count], plain[1].rows[last][:count])
    return [finding, Finding.at_least("steered neighbours moved", moved, 0.01)]


def _bits(name: str, probe: Probe, got: list[Completion], want: list[Completion]) -> Finding:
    """Check that rows, tokens and log-probabilities are the same, bit for bit."""
    differing = [
        site
        for site in probe.sites
        if any(not torch.equal(a.rows[site], b.rows[site]) for a, b in zip(got, want, strict=True))
    ]
    differ = any(
        a.next_ids != b.next_ids or not torch.equal(a.log_probs, b.log_probs)
        for a, b in zip(got, want, strict=True)
    )
    measured = f"{len(differing)} of {len(probe.sites)} sites differ"
    note = f"first at {differing[0]}" if differing else "log-probabilities differ" if differ else ""
    return Finding(name, not differing and not differ, measured, "none", note)


def sites(probe: Probe, plain: Completion) -> list[Finding]:
    """Check each site on its own.

    The vector arrives, whole, at the positions of its phase. The branch that reads the site sees
    it, and it moves the output. Steered requests are compared with unsteered ones in their place of
    a batch of the same lengths and captures, so that only the vectors differ.
    """
    vectors = {s: probe.direction(s) * length(plain.rows[s]) for s in probe.steered}
    base: dict[Site, Completion] = {}
    steered: dict[str, dict[Site, Completion]] = {"prefill": {}, "decode": {}}
    for start in range(0, len(probe.steered), probe.slots):
        some = {site: vectors[site] for site in probe.steered[start : start + probe.slots]}
        captured = [around(probe, site) for site in some]
        base |= zip(some, probe.run([(probe.prompts[0], {})] * len(some), captured), strict=True)
        for phase, found in steered.items():
            fields = f"{phase}_steering_vectors"
            cases = [(probe.prompts[0], steer(fields, {s: v})) for s, v in some.items()]
            found |= zip(some, probe.run(cases, captured), strict=True)
    return [
        finding
        for phase, found in steered.items()
        for finding in _phase(probe, phase, base, found, vectors)
    ]


def around(probe: Probe, site: Site) -> list[Site]:
    """Return the two sites before one in the stream, itself, the next and the last one."""
    at = probe.sites.index(site)
    return list(dict.fromkeys([*probe.sites[max(at - 2, 0) : at + 2], probe.sites[-1]]))


def _phase(
    probe: Probe,
    phase: str,
    base: Mapping[Site, Completion],
    steered: Mapping[Site, Completion],
    vectors: Mapping[Site, torch.Tensor],
) -> list[Finding]:
    """Check the sites in one phase, "prefill" or "decode".

    Args:
        base: site -> the unsteered completion in the place of the steered one.
        steered: site -> the completion with its vector there.
        vectors: site -> its vector, float32 [hidden].
    """
    prompt = next(iter(base.values())).num_prompt
    # The first generated token is chosen by a prompt position: it is the same under "decode".
    acts = slice(0, prompt) if phase == "prefill" else slice(prompt, prompt + 1)
    arrived, seen, moved = {}, {}, {}
    before = 0.0
    last = probe.sites[-1]
    for site, answer in steered.items():
        rows, plain = answer.rows[site].float(), base[site].rows[site].float()
        delta, vector = rows[acts] - plain[acts], vectors[site]
        captured = around(probe, site)
        after = captured[min(captured.index(site) + 1, len(captured) - 1)]
        # The stream is the sum of an earlier one and of what branches add. Where they cancel each
        # other it is small, and its roundings are those of the summands.
        summands = [base[site].rows[s].float() for s in captured[: captured.index(site) + 1]]
        size = torch.stack([one[acts].norm(dim=-1) for one in (rows, *summands)]).amax(0)
        arrived[site] = float(
            ((delta - vector).norm(dim=-1) / size).nan_to_num(nan=torch.inf).max()
        )
        if phase == "decode":
            early = answer.rows[site][:prompt], base[site].rows[site][:prompt]
            before = max(before, worst_row(*early))
        plain_after = base[site].rows[after].float()
        adds = not torch.equal(plain_after, plain)  # some layers have no mixer
        if after[1] == site[1] and after != site and adds:
            change = answer.rows[after][acts].float() - plain_after[acts] - vector
            seen[site] = float(change.norm(dim=-1).max() / vector.norm())
        # What the head reads: a log-probability near 0 would hardly show that it moved.
        moved[site] = worst_row(answer.rows[last][acts], base[site].rows[last][acts])
    tolerance = ROUNDINGS * probe.rounding
    where = "prompt" if phase == "prefill" else "generated"

    def at(found: Mapping[Site, float], site: Site) -> str:
        return f"of {len(found)} sites; {'.'.join(map(str, site))}"

    worst = max(arrived, key=lambda s: arrived[s])
    dull = min(moved, key=lambda s: moved[s])
    least = probe.rounding
    findings = [
        Finding.at_most(
            f"steered - unsteered = vector ({where})", arrived[worst], tolerance, at(arrived, worst)
        ),
        Finding.at_least(
            f"every site moves the output ({where})", moved[dull], least, at(moved, dull)
        ),
    ]
    if seen:
        blind = min(seen, key=lambda s: seen[s])
        findings.insert(
            1,
            Finding.at_least(
                f"the branch reads the vector ({where})", seen[blind], least, at(seen, blind)
            ),
        )
    if phase == "decode":
        name = "decode steering leaves the prompt alone"
        findings.append(Finding.at_most(name, before, tolerance))
    return findings
