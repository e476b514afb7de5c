# SPDX-License-Identifier: Apache-2.0
"""Rules on a GPU, for `tests.gpu.mode`: what they say is what the rows of the same run say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.gpu.mode import Mode

SITE = ("post_block", 5)
GENERATED = 32


def rules(mode: Mode, tokens: list[list[int]], hidden: int) -> dict[str, Any]:
    """Every request has a threshold of its own, between two scores of its answer that are far
    apart. A rule that flags changes no bit; one that stops ends the answer at the row that fired,
    where its own rows say so."""
    from vllm import SamplingParams

    probe = torch.randn(hidden, generator=torch.Generator().manual_seed(18))
    hooks = {SITE[0]: [SITE[1]]}
    plain = mode.run(tokens, [{}] * len(tokens), hooks, max_tokens=GENERATED)
    asked = []
    for prompt, (_, rows) in zip(tokens, plain, strict=True):
        scores = (rows[SITE].double() @ probe.double())[len(prompt) :].sort().values
        upper = scores[len(scores) // 2 :]
        at = int(upper.diff().argmax())
        asked.append(
            {
                "name": "r",
                "point": SITE[0],
                "layer": SITE[1],
                "probe": probe,
                "threshold": float(upper[at] + upper[at + 1]) / 2,
            }
        )
    fed: Any = [{"prompt_token_ids": t} for t in tokens]
    same, wrong, stopped = True, 0, 0
    for then in ("flag", "stop"):
        params = [
            SamplingParams(
                max_tokens=GENERATED,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                capture={"inline": {"hooks": hooks, "positions": "all"}},
                rules=[{**rule, "then": then}],
            )
            for rule in asked
        ]
        outputs: list[Any] = mode.llm.generate(fed, params, use_tqdm=False)
        for rule, prompt, before, output in zip(asked, tokens, plain, outputs, strict=True):
            answer = output.outputs[0]
            rows = output.capture_results["inline"].payload[SITE].values
            scores = (rows.double() @ probe.double())[len(prompt) :]
            fires = (scores > rule["threshold"]).nonzero().flatten().tolist()
            said = answer.rules["r"]
            if then == "flag":
                same &= torch.equal(rows, before[1][SITE])
                first = len(prompt) + fires[0] if fires else None
                wrong += (said.fired_at, said.fired) != (first, len(fires))
                continue
            stopped += answer.stop_reason == "rule:r"
            end = len(prompt) + len(answer.token_ids) - 1
            ended = (said.fired_at, answer.stop_reason) == (end, "rule:r")
            wrong += bool(fires) or not (ended or len(answer.token_ids) == GENERATED)
    ok = same and not wrong and stopped >= len(tokens) - 1
    return {"identical": same, "wrong": wrong, "stopped": stopped, "ok": ok}
