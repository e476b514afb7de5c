# SPDX-License-Identifier: Apache-2.0
"""Checks of capture on a GPU beyond reading rows, for `tests.gpu.mode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.conformance import reference as ref
from tests.conformance.runner import unread
from vllm.config.points import HEAD_POINTS

if TYPE_CHECKING:
    from tests.gpu.mode import Mode


FLOAT32 = 1e-4
"""Most error of a score, relative to the norms it is made of: TF32 would be above it."""


def projections(mode: Mode, tokens: list[list[int]], hidden: int) -> dict[str, Any]:
    """Scores are the rows' of the same batch, in float32; another matrix gives others."""
    rows = mode.run(tokens, [{}] * len(tokens))
    worst, least_other, same_tokens = 0.0, 9e9, True
    for k in (1, 7, hidden // 2):
        project = torch.randn(k, hidden, generator=torch.Generator().manual_seed(k))
        other = project.flip(1)
        made = mode.run(tokens, [{}] * len(tokens), making={"project": project})
        for (ids, values), (again, scores) in zip(rows, made, strict=True):
            same_tokens &= ids == again
            for site, row in values.items():
                size = row.double().norm(dim=-1).max() * project.double().norm(dim=-1).max()
                want = row.double() @ project.double().T
                wrong = row.double() @ other.double().T
                worst = max(worst, float((scores[site].double() - want).abs().max() / size))
                moved = float((scores[site].double() - wrong).abs().max() / size)
                least_other = min(least_other, moved)
    ok = same_tokens and worst <= FLOAT32 and least_other > 10 * FLOAT32
    return {"error": worst, "limit": FLOAT32, "least_other": least_other, "ok": ok}


def norms(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """Lengths are those of the rows of the same batch, in float32; a neighbour's are others."""
    rows = mode.run(tokens, [{}] * len(tokens))
    made = mode.run(tokens, [{}] * len(tokens), making={"norms": True})
    worst, least_other, same_tokens = 0.0, 9e9, True
    for (ids, values), (again, lengths) in zip(rows, made, strict=True):
        same_tokens &= ids == again
        for site, row in values.items():
            want = row.double().norm(dim=-1, keepdim=True)
            worst = max(worst, float(((lengths[site].double() - want) / want).abs().max()))
            moved = ((lengths[site].double() - want.roll(1, 0)) / want).abs().max()
            least_other = min(least_other, float(moved))
    ok = same_tokens and worst <= FLOAT32 and least_other > 10 * FLOAT32
    return {"error": worst, "limit": FLOAT32, "least_other": least_other, "ok": ok}


def heads(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """q, k, v and z of all heads are transformers', beside rows of the stream; a neighbouring
    head's are others."""
    hooks = {**dict.fromkeys(HEAD_POINTS, "all"), "post_block": [0]}
    worst, least_other = 0.0, 9e9
    for ids, rows in mode.run(tokens, [{}] * len(tokens), hooks):
        want = ref.run(mode.hf, mode.adapter, ids)
        for site, values in rows.items():
            if site[0] not in HEAD_POINTS:
                worst = max(worst, mode.worst_row(values, want.rows[site]))
                continue
            worst = max(worst, mode.worst_row(values.flatten(1), want.heads[site].flatten(1)))
            others = mode.worst_row(values.roll(1, 1).flatten(1), want.heads[site].flatten(1))
            least_other = min(least_other, others)
    ok = worst <= mode.noise_limit and least_other > 0.5
    return {"error": worst, "limit": mode.noise_limit, "least_other": least_other, "ok": ok}


def written_heads(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """What is written at z is what transformers computes with it; one head without its output is
    zero there, and its neighbours and requests that steer nothing keep their bits."""
    layer, width = 3, 512
    vector = 2 * torch.randn(width, generator=torch.Generator().manual_seed(1))
    ablated = {"op": "scale", "point": "z", "heads": {layer: [2]}, "factor": 0.0}
    fields: list[dict[str, Any]] = [{}, {"steering_vectors": {"z": {layer: vector}}}]
    fields.append({"steering": [ablated]})
    hooks = {"z": "all", "post_block": "all"}
    # The tapped variant in both: what compiles otherwise may round otherwise.
    plain = mode.run(tokens, [{}] * len(tokens), hooks)
    steer = [fields[i % 3] for i in range(len(tokens))]
    worst, moved, same = 0.0, 9e9, True
    for i, (ids, rows) in enumerate(mode.run(tokens, steer, hooks)):
        before = plain[i][1]
        if not fields[i % 3]:
            same &= ids == plain[i][0] and all(torch.equal(rows[s], before[s]) for s in rows)
            continue
        prompt = slice(0, len(tokens[i]))  # what is generated differs
        moves = rows["post_block", layer][prompt].float(), before["post_block", layer][prompt]
        moved = min(moved, mode.worst_row(moves[0], moves[1].float()))
        z = rows["z", layer]
        if i % 3 == 2:
            same &= not z[:, 2].any() and torch.equal(z[prompt, 3:], before["z", layer][prompt, 3:])
        else:
            want = ref.run(mode.hf, mode.adapter, ids, {("z", layer): vector.expand(len(ids), -1)})
            for site in (("post_block", layer), ("post_block", layer + 1)):
                worst = max(worst, mode.worst_row(rows[site], want.rows[site]))
            worst = max(worst, mode.worst_row(z.flatten(1), want.heads["z", layer].flatten(1)))
    ok = same and worst <= mode.noise_limit and moved > 0.05
    return {"error": worst, "limit": mode.noise_limit, "moved": moved, "bits": same, "ok": ok}


def attention(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """The weights of all heads and queries are transformers', a neighbouring head's others; no
    layer failed the start-up proof."""
    from vllm import SamplingParams

    shape = mode.llm.llm_engine.vllm_config.tap_shape
    assert shape is not None
    if refused := unread(shape):
        return {"unread": refused, "ok": False}
    asked = {"attention": {"heads": "all", "queries": "all", "give": ["weights"]}}
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, capture={"inline": asked}
    )
    fed: Any = [{"prompt_token_ids": ids} for ids in tokens]
    worst = apart = 0.0
    for prompt, output in zip(tokens, mode.llm.generate(fed, params, use_tqdm=False), strict=True):
        assert output.capture_results is not None
        want = ref.run(mode.hf, mode.adapter, [*prompt, *output.outputs[0].token_ids][:-1]).heads
        for site, rows in output.capture_results["inline"].payload.items():
            for t, weights in enumerate(rows.weights):
                exact = want[site][t, :, : t + 1]
                worst = max(worst, float((weights - exact).abs().max()))
                apart = max(apart, float((weights - exact.roll(1, 0)).abs().max()))
    ok = worst <= mode.noise_limit and apart > 0.1
    return {"error": worst, "limit": mode.noise_limit, "other": apart, "ok": ok}


def files(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """Rows in files are those in memory, bit for bit; another request's are others."""
    from vllm import SamplingParams
    from vllm.v1.capture import reader

    asked = {"hooks": dict.fromkeys(("pre_attn", "post_block"), "all"), "positions": "all"}
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False,
        capture={"inline": asked, "filesystem": asked},
    )  # fmt: skip
    fed: Any = [{"prompt_token_ids": ids} for ids in tokens]
    same, count, last = True, 0, None
    for output in mode.llm.generate(fed, params, use_tqdm=False):
        assert output.capture_results is not None
        rows, written = (output.capture_results[n] for n in ("inline", "filesystem"))
        if written.status != "ok":
            raise AssertionError(f"capture: {written}")
        stored = reader.open(mode.root).find(written.payload["request_id"], written.payload["tag"])
        same &= list(stored.sites) == list(rows.payload)
        for site, values in rows.payload.items():
            kept = stored.rows(*site)
            same &= torch.equal(kept.values, values.values)
            same &= kept.positions.tolist() == values.positions.tolist()
            count += len(kept)
        now = stored.rows("post_block", 0).values[:1].float()
        same &= last is None or mode.worst_row(now, last) > 0.1
        last = now
    return {"rows": count, "identical": same, "ok": same and count > 0}


LENS_LIMIT = 0.1
"""Most error of a log-probability under a lens, in nats: logits of bfloat16 near 8 are rounded to
multiples of 1/32, and the normed row before them."""


@torch.no_grad()
def lens(mode: Mode, tokens: list[list[int]]) -> dict[str, Any]:
    """What a lens says of all points of all layers is what transformers' norm and head say of the
    same rows in float32; of the next layer's they say something else. The last layer is what the
    engine sampled from. Prompts are cut so that no step has too many rows."""
    from vllm import SamplingParams

    hooks, named = dict.fromkeys(("pre_attn", "post_attn", "post_block"), "all"), [3, 1000, 2047]
    asked = {"name": "logit", "top_k": 5, "tokens": named, "entropy": True}
    captures = [{"hooks": hooks, "positions": "all", "lens": asked}]
    captures.append({"hooks": hooks, "positions": "all"})
    params = SamplingParams(
        max_tokens=8,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        capture={"inline": captures},
    )
    fed: Any = [{"prompt_token_ids": ids} for ids in tokens]
    worst = sampled = 0.0
    least_other, same = 9e9, True
    for prompt, output in zip(tokens, mode.llm.generate(fed, params, use_tqdm=False), strict=True):
        assert output.capture_results is not None and output.outputs[0].logprobs is not None
        under, rows = (output.capture_results[f"inline[{i}]"].payload for i in range(2))
        last = max(layer for _, layer in under)
        for (point, layer), made in under.items():
            want, other = (
                mode.hf.lm_head(mode.hf.model.norm(rows[point, n].values.float())).log_softmax(-1)
                for n in (layer, (layer + 1) % (last + 1))
            )
            worst = max(worst, _off(made, want, named))
            least_other = min(least_other, _off(made, other, named))
            best = want.topk(2).values
            clear = best[:, 0] - best[:, 1] > 2 * LENS_LIMIT
            same &= bool((made.top_ids[:, 0] == want.argmax(-1))[clear].all())
        final = under["post_block", last]
        chosen: list[Any] = list(output.outputs[0].logprobs)
        for i, token in enumerate(output.outputs[0].token_ids):
            at = len(prompt) - 1 + i
            same &= int(final.top_ids[at, 0]) == token
            off = final.top_logprobs[at, 0] - chosen[i][token].logprob
            sampled = max(sampled, float(off.abs()))
    ok = same and worst <= LENS_LIMIT and sampled <= LENS_LIMIT and least_other > 5 * LENS_LIMIT
    return {
        "error": worst, "limit": LENS_LIMIT, "sampled": sampled, "least_other": least_other,
        "top1": same, "ok": ok,
    }  # fmt: skip


def _off(made: Any, exact: torch.Tensor, named: list[int]) -> float:
    """The largest difference of what a lens gave from that of log-probabilities [n, vocabulary]."""
    entropy = torch.special.entr(exact.exp()).sum(-1)
    parts = (
        made.token_logprobs - exact[:, named],
        made.top_logprobs - exact.topk(5).values,
        made.entropy - entropy,
    )
    return max(float(part.abs().max()) for part in parts)


def large_step(mode: Mode, vocabulary: int, hidden: int) -> dict[str, Any]:
    """Many long prompts at once: megabytes of rows a step arrive whole, as transformers', and again
    the same; those of another request are others."""
    generator = torch.Generator().manual_seed(17)
    tokens = [torch.randint(0, vocabulary, (240,), generator=generator).tolist() for _ in range(16)]
    one, two = (mode.run(tokens, [{}] * len(tokens)) for _ in range(2))
    size = sum(v.numel() * v.element_size() for _, values in one for v in values.values())
    same = all(
        a[0] == b[0] and all(torch.equal(a[1][site], b[1][site]) for site in a[1])
        for a, b in zip(one, two, strict=True)
    )
    error, limit = mode.read_error(one), mode.noise_limit
    other = mode.read_error([(one[0][0], one[1][1])])
    ok = same and size > 48 << 20 and error <= limit and other > 0.5
    return {
        "megabytes": size / 2**20, "identical": same, "error": error, "limit": limit,
        "other": other, "ok": ok,
    }  # fmt: skip
