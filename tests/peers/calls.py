# SPDX-License-Identifier: Apache-2.0
"""What other tools' calls mean, by the line of docs/coming-from.md: a formula that changes rows in
Hugging Face transformers, and our request for the same.

The formulas are written from the tools' documentation, in float64, and share nothing with ours.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from tests.peers.call import (
    ACROSS,
    AFTER,
    IN_PROMPT,
    LAYER,
    PROMPT,
    ROW,
    TOKEN,
    Call,
    Rows,
    U,
    V,
    W,
    add,
    along,
    at,
    keeping,
    norms,
    only,
    op,
    placed,
    to,
    without_v,
)
from tests.peers.spec_calls import SPECS
from vllm.v1.interventions.frontend.compat.easysteer import fields_of


def easy(*vectors: dict[str, Any], data: Any = V, **spec: Any) -> dict[str, Any]:
    """Our fields for a specification of EasySteer's, whose vectors are `data` at LAYER."""
    given = [{"data": data, "layers": [LAYER], **vector} for vector in vectors]
    return fields_of({"vectors": given, **spec})


def applied(**apply: Any) -> dict[str, Any]:
    return easy({"apply": apply})


PREFILL_ONLY = Call(
    {"prefill_steering_vectors": at(LAYER), "decode_steering_vectors": at(2, scale=-1.0)},
    {
        LAYER: lambda rows: only(rows, IN_PROMPT, add(1.0)),
        2: lambda rows: only(rows, AFTER, add(-1.0)),
    },
)
GATE = {"threshold": 1.0, "sharpness": 0.4, "when": "row"}


def gated(rows: Rows) -> Rows:
    return rows + torch.sigmoid(0.4 * (along(rows, U) - 1.0)) * V.double()


FILED = {
    "vectors": {
        "post_block": {
            "dtype": "float64",
            "shape": [1, len(V)],
            "layer_indices": [LAYER],
            "data": base64.b64encode(V.double().numpy().tobytes()).decode(),
            "scales": [0.5],
        }
    },
    "decode_vectors": {"post_block": {"2": {"vector": V.tolist(), "scale": -1.0}}},
}
"""A JSON file of RhizoNymph/vllm's."""

CALLS: dict[tuple[str, str], list[Call]] = {
    ("vLLM-Lens", "`output_residual_stream: [15]`"): [Call(layers=[LAYER])],
    ("vLLM-Lens", "`output_residual_stream: true`"): [Call()],
    ("vLLM-Lens", "`activations` of two dimensions, `scale`"): [
        Call({"steering_vectors": at(LAYER, scale=-0.5)}, {LAYER: add(-0.5)})
    ],
    ("vLLM-Lens", "`norm_match: true`"): [
        Call(
            {"steering": [op("norm_match", direction=V, scale=1.5)]},
            {
                LAYER: lambda rows: (
                    rows + 1.5 * norms(rows) * V.double() / (V.double().norm() + 1e-6)
                )
            },
        )
    ],
    ("vLLM-Lens", "`activations` of three dimensions, `position_indices`"): [
        Call(
            {"steering": [op("add", values=torch.stack([W, V]), positions=[4, 0], scale=0.6)]},
            {LAYER: lambda rows: placed(rows, {4: 0.6 * W.double(), 0: 0.6 * V.double()})},
        ),
        Call(
            {
                "steering": [
                    op("norm_match", values=torch.stack([W, V]), positions=[4, 0], scale=2.0)
                ]
            },
            {
                LAYER: lambda rows: placed(
                    rows,
                    {
                        4: 2.0 * rows[4].norm() * W.double() / W.double().norm(),
                        0: 2.0 * rows[0].norm() * V.double() / V.double().norm(),
                    },
                )
            },
        ),
    ],
    ("vLLM-Hook and MIA", "`hidden_states.layers` N (from 1), `mode: last_token`"): [
        Call(
            layers=[0, 1],
            positions="last_prompt",
            reads=lambda length: slice(len(PROMPT) - 1, len(PROMPT)),
        )
    ],
    ("vLLM-Hook and MIA", "`mode: all_tokens`"): [
        Call(layers=[0, 1], positions="all_prompt", reads=lambda length: IN_PROMPT)
    ],
    (
        "vLLM-Hook and MIA",
        "`steering.method: add_vector`, `coefficient`, `optimal_layer`",
    ): [Call({"steering_vectors": at(LAYER, scale=0.7)}, {LAYER: add(0.7)})],
    ("vLLM-Hook and MIA", "`adjust_rs`, `dir`, `avg_proj`"): [
        Call(
            {"steering": [op("pin", direction=U, value=6.0)]},
            {LAYER: lambda rows: rows + (6.0 - along(rows, U)) * U.double()},
        )
    ],
    ("vLLM-Hook and MIA", "the same with a `dir` of another length L"): [
        Call(
            {"steering": [op("pin", direction=V, value=6.0 / 24.0, strength=24.0 * 24.0)]},
            {LAYER: lambda rows: rows + (6.0 - along(rows, V)) * V.double()},
        )
    ],
    (
        "RhizoNymph/vllm",
        "`steering_vectors`, `prefill_steering_vectors`, `decode_steering_vectors`",
    ): [Call({"steering_vectors": at(LAYER)}, {LAYER: add(1.0)}), PREFILL_ONLY],
    ("RhizoNymph/vllm", "`steering_clamps` with `min`, `max`"): [
        Call(
            {
                "steering": [
                    op("clamp", direction=U, lo=3.0, hi=9.0),
                    op("clamp", direction=ACROSS, hi=-5.0),
                ]
            },
            {
                LAYER: lambda rows: to(lambda p: p.clamp(max=-5.0), ACROSS / ACROSS.norm())(
                    to(lambda p: p.clamp(3.0, 9.0))(rows)
                )
            },
        )
    ],
    ("RhizoNymph/vllm", "`steering_clamps` with `value`"): [
        Call(
            {"steering": [op("pin", direction=U, value=-7.0)]},
            {LAYER: to(lambda p: torch.full_like(p, -7.0))},
        )
    ],
    ("RhizoNymph/vllm", "`strength` of a clamp"): [
        Call(
            {"steering": [op("clamp", direction=U, lo=20.0, strength=0.5)]},
            {LAYER: to(lambda p: p + 0.5 * (p.clamp(min=20.0) - p))},
        ),
        Call(
            {"steering": [op("pin", direction=U, value=-9.0, strength=1.5)]},
            {LAYER: to(lambda p: p + 1.5 * (-9.0 - p))},
        ),
    ],
    ("RhizoNymph/vllm", "`steering_name`, `steering_module_ref`"): [
        Call({"steering_modules": [("happy", 0.4), "happy"]}, {LAYER: add(1.4)})
    ],
    ("RhizoNymph/vllm", "`patch`, `patch_vectors`"): [
        Call(
            {"steering": [op("replace", positions=[4], values=ROW[None])]},
            {LAYER: lambda rows: only(rows, [4], lambda r: ROW.double().expand_as(r))},
        )
    ],
    ("RhizoNymph/vllm", "gates: `when: probe`, `scope: this_token`, `apply: add`"): [
        Call(
            {
                "steering": [
                    op("add", vector=V, gate={**GATE, "probe": U}, positions="all_generated")
                ]
            },
            {LAYER: lambda rows: only(rows, AFTER, gated)},
        )
    ],
    ("RhizoNymph/vllm", "`--steering-modules name=x.json`"): [
        Call(
            {"steering_modules": ["filed"]},
            {LAYER: add(0.5), 2: lambda rows: only(rows, AFTER, add(-1.0))},
        )
    ],
    ("EasySteer", "`algorithm: direct`, `scale`, `layers`"): [
        Call(
            {"steering_vectors": {"post_block": {"1-2": {"vector": V, "scale": 0.5}}}},
            {1: add(0.5), 2: add(0.5)},
        ),
        Call(easy({"scale": 0.5, "layers": [1, 2]}), {1: add(0.5), 2: add(0.5)}),
        Call(fields_of({"vectors": [{"data": {1: V, "2": -V}}]}), {1: add(1.0), 2: add(-1.0)}),
        Call(fields_of({"vectors": [{"source": "happy", "scale": 0.4}]}), {LAYER: add(0.4)}),
    ],
    ("EasySteer", "`normalize: true` (the row keeps its norm, as their code has it)"): [
        Call(
            {"steering": [op("add", vector=V, scale=0.8), op("normalize")]},
            {LAYER: keeping(add(0.8))},
        ),
        Call(easy({"scale": 0.8, "normalize": True}), {LAYER: keeping(add(0.8))}),
        Call(
            easy(
                {"normalize": True},
                {"normalize": True, "data": W, "scale": -0.7},
                conflict="sequential",
            ),
            {LAYER: lambda rows: keeping(lambda r: r - 0.7 * W.double())(keeping(add(1.0))(rows))},
        ),
    ],
    ("EasySteer", "`erase`"): [
        Call(
            {"steering": [op("ablate", direction=V)]},
            {LAYER: without_v},
        ),
        Call(easy({"algorithm": "erase"}), {LAYER: without_v}),
    ],
    ("EasySteer", "`replace`"): [
        Call(
            {"steering": [op("replace", values=ROW, positions="predicting")]},
            {
                LAYER: lambda rows: only(
                    rows, slice(len(PROMPT) - 1, None), lambda r: ROW.double().expand_as(r)
                )
            },
        ),
        Call(
            easy({"algorithm": "replace", "apply": {"prompt": "none"}}, data=ROW),
            {LAYER: lambda rows: only(rows, AFTER, lambda r: ROW.double().expand_as(r))},
        ),
    ],
    ("EasySteer", "`prompt_positions`, `prompt_tokens`"): [
        Call(
            {"steering_vectors": at(LAYER, positions=[2, -1])},
            {LAYER: lambda rows: only(rows, [2, len(PROMPT) - 1], add(1.0))},
        ),
        Call(
            {"steering_vectors": at(LAYER, positions={"token_ids": [TOKEN]})},
            {
                LAYER: lambda rows: only(
                    rows, [i for i, t in enumerate(PROMPT) if t == TOKEN], add(1.0)
                )
            },
        ),
        Call(
            applied(prompt_positions=[2, -1], prompt_window=[4, 6], generation="none"),
            {LAYER: lambda rows: only(rows, [2, 4, 5, len(PROMPT) - 1], add(1.0))},
        ),
        Call(
            applied(prompt_tokens=[TOKEN], generation="none"),
            {
                LAYER: lambda rows: only(
                    rows, [i for i, t in enumerate(PROMPT) if t == TOKEN], add(1.0)
                )
            },
        ),
    ],
    ("EasySteer", '`generation: "all"`'): [
        Call(
            {"decode_steering_vectors": at(LAYER)},
            {LAYER: lambda rows: only(rows, AFTER, add(1.0))},
        ),
        Call(
            applied(generation="all", prompt="none"),
            {LAYER: lambda rows: only(rows, AFTER, add(1.0))},
        ),
    ],
    ("EasySteer", "`generation_window`, `generation_positions`"): [
        Call(
            {"steering_vectors": at(LAYER, positions={"start": 0, "stop": 1, "of": "generated"})},
            {LAYER: lambda rows: only(rows, [len(PROMPT)], add(1.0))},
        ),
        Call(
            {"decode_steering_vectors": at(LAYER, positions={"at": [1], "of": "generated"})},
            {LAYER: lambda rows: only(rows, [len(PROMPT) + 1], add(1.0))},
        ),
        Call(
            applied(generation_window=[0, 1], prompt="none"),
            {LAYER: lambda rows: only(rows, [len(PROMPT)], add(1.0))},
        ),
        Call(
            applied(generation_positions=[1]),
            {LAYER: lambda rows: only(rows, [*range(len(PROMPT)), len(PROMPT) + 1], add(1.0))},
        ),
    ],
    ("EasySteer", "`exclude_positions`"): [
        Call(
            {"steering_vectors": at(LAYER, positions=["all", {"except": [0, {"at": [2]}]}])},
            {
                LAYER: lambda rows: only(
                    rows, [i for i in range(len(rows)) if i not in (0, 2)], add(1.0)
                )
            },
        ),
        Call(
            applied(exclude_prompt_positions=[0, 2]),
            {
                LAYER: lambda rows: only(
                    rows, [i for i in range(len(rows)) if i not in (0, 2)], add(1.0)
                )
            },
        ),
    ],
    ("EasySteer", "`conflict: sequential`"): [
        Call(
            {"steering": [op("ablate", direction=W), op("add", vector=V)]},
            {LAYER: lambda rows: add(1.0)(rows - along(rows, W) * W.double() / (W @ W).double())},
        ),
        Call(
            easy({"algorithm": "erase", "data": W}, {}, conflict="sequential"),
            {LAYER: lambda rows: add(1.0)(rows - along(rows, W) * W.double() / (W @ W).double())},
        ),
    ],
    ("EasySteer", "`conflict: priority`, of the same layers"): [
        Call(
            easy({"apply": {"generation": "none"}}, {"scale": -0.5}, conflict="priority"),
            {LAYER: lambda rows: only(only(rows, AFTER, add(-0.5)), IN_PROMPT, add(1.0))},
        )
    ],
    (
        "vllm-probe-hook",
        "`include_prefill=True`: `.prefill_hidden_states[layer]`",
    ): [Call(positions="all_prompt", reads=lambda length: IN_PROMPT)],
    ("vllm-probe-hook", "`include_decode=True`: `.hidden_states[layer]`"): [
        Call(positions="all_generated", reads=lambda length: AFTER)
    ],
    ("vllm-probe-hook", "`last_prefill_token=True`"): [
        Call(positions="last_prompt", reads=lambda length: slice(len(PROMPT) - 1, len(PROMPT)))
    ],
    **SPECS,
    (
        "Upstream's extract_hidden_states",
        "layer id N of `eagle_aux_hidden_state_layer_ids`, from 1",
    ): [Call()],
    ("Upstream's extract_hidden_states", "layer id 0"): [Call(point="pre_attn", layers=[0])],
}
"""(section, first cell of the line) -> calls of that kind."""
