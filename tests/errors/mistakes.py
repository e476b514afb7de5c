# SPDX-License-Identifier: Apache-2.0
"""Mistakes that people make, and how each error names what they meant.

Run `python -m tests.errors.mistakes` to write their table into docs/errors.md.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.errors.page import BEGIN, PAGE
from tests.support.plans import HEADS, HIDDEN, VECTOR, config_of, plan_of, with_layers
from vllm import LLM, PoolingParams, SamplingParams
from vllm.config.points import CAPTURE_POINTS
from vllm.config.steering import FAMILIES
from vllm.sampling_params import BeamSearchParams
from vllm.v1.steering.modules import parse_module

MODEL = with_layers(HEADS, [1], branches=("attn_out", "mlp_out"))
LAYERS = torch.ones(4, HIDDEN)
"""A vector of each layer of the tests' model."""


class Said(str):
    """An expression, written in the page as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


V, ROWS, MATRIX = Said("v"), Said("rows"), Said("m.T")
RULE = {"name": "r", "point": "post_block", "threshold": 0.0}
ADD = {"op": "add", "point": "post_block", "vector": V}
VALUES: dict[str, Any] = {"v": VECTOR, "rows": LAYERS, "m.T": torch.ones(HIDDEN, 2)}
"""Expression -> its value here."""


def op(**fields: Any) -> dict[str, Any]:
    return {"steering": [{"op": "add", "point": "post_block", "layers": [1], **fields}]}


def inline(**fields: Any) -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": {"post_block": [1]}, **fields}}}


def hooks(asked: Any) -> dict[str, Any]:
    return {"capture": {"inline": {"hooks": asked}}}


def vectors(asked: Any) -> dict[str, Any]:
    return {"steering_vectors": asked}


def at(positions: Any) -> dict[str, Any]:
    return inline(positions=positions)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    # Points.
    *(
        (vectors({said: {1: V}}), f"(did you mean {meant!r}?)")
        for said, meant in {
            "resid_post": "post_block",
            "resid_pre": "pre_attn",
            "resid_mid": "post_attn",
            "hook_resid_post": "post_block",
            "blocks.5.hook_resid_post": "post_block",
            "post-block": "post_block",
            "postblock": "post_block",
            "Post_Block": "post_block",
            "post_blok": "post_block",
            "pre_atn": "pre_attn",
            "block_output": "post_block",
            "residual": "post_block",
            "hidden_states": "post_block",
            "hook_z": "z",
        }.items()
    ),
    *(
        (hooks({said: [1]}), f"(did you mean {meant!r}?)")
        for said, meant in {
            "resid_post": "post_block",
            "resid_post.10": "post_block",
            "blocks.5.hook_out": "post_block",
            "blocks.5.attn.hook_out": "attn_out",
            "blocks.5.hook_mlp_out": "mlp_out",
            "ln_final.hook_normalized": "final",
            "model.layers[5].output[0]": "post_block",
            "model.layers.5.self_attn.output": "attn_out",
            "model.layers.5.self_attn.o_proj.input": "z",
            "model.layers.5.mlp.output": "mlp_out",
            "model.norm.output": "final",
            "lm_head.input": "final",
            "model.embed_tokens.output": "embed",
            "hook_mlp_out": "mlp_out",
            "mlp_output": "mlp_out",
            "mlp_input": "mlp_in",
            "hook_mlp_in": "post_attn",
            "attention_output": "attn_out",
            "hook_attn_out": "attn_out",
            "blocks.1.attn.hook_z": "z",
            "hook_rot_q": "q",
            "ln_final": "final",
            "embedding": "embed",
            "layers_output[5]": "post_block",
            "mlps_output[5]": "mlp_out",
            "attn_out_post.5": "attn_out",
            "mlp_out_post.5": "mlp_out",
            "mlp_in.5": "mlp_in",
            "value.5": "v",
            "blocks.5.mlp.hook_post": "mlp_act",
            "model.layers.5.mlp.down_proj.input": "mlp_act",
            "model.layers.5.mlp.gate.output": "router_logits",
        }.items()
    ),
    (vectors({2: V}), "(a point stands before its layers"),
    (vectors({"post_block": V}), "(name the layer: {2: v})"),
    (hooks({"pattern": [1]}), "'attention' in place of 'hooks'"),
    (hooks({"attn_probs.5": [1]}), "'attention' in place of 'hooks'"),
    # Layers.
    (hooks({"post_block": "1:3"}), "(did you mean '1-2'?)"),
    (hooks({"post_block": 2.0}), "(did you mean 2?)"),
    (hooks({"post_block": [1.0]}), "(did you mean 1?)"),
    (vectors({"post_block": {"0:2": V}}), "(did you mean '0-1'?)"),
    (vectors({"post_block": ROWS}), "dict(enumerate(rows))"),
    # Operations, and their keys.
    *(
        (op(op=said, direction=V), f"(did you mean {meant!r}?)")
        for said, meant in {
            "project_out": "ablate",
            "ablation": "ablate",
            "abblate": "ablate",
            "erase": "ablate",
            "orthogonalize": "ablate",
            "steer": "add",
            "caa": "add",
            "ActAdd": "add",
            "set": "pin",
            "patch": "replace",
            "norm-match": "norm_match",
            "clmap": "clamp",
            "normalise": "normalize",
        }.items()
    ),
    ({"steering": {"op": "add", "vector": V}}, "(one operation stands in a list of one)"),
    ({"steering": [{**ADD, "layer": 1}]}, "(did you mean 'layers'?)"),
    ({"steering": [{"type": "add", "point": "post_block", "layers": 1}]}, "'op' by 'type'?)"),
    ({"steering": [{"method": "add", "point": "post_block", "layers": 1}]}, "'op' by 'method'?)"),
    (op(op="ablate", vector=V), "(did you mean 'direction'?)"),
    (op(op="ablate", direction=V, scale=1.0), "(did you mean 'strength'?)"),
    (op(direction=V), "(did you mean 'vector'?)"),
    (op(vec=V), "(did you mean 'vector'?)"),
    (op(vector=V, coefficient=2.0), "(did you mean 'scale'?)"),
    (op(vector=V, scal=2.0), "(did you mean 'scale'?)"),
    (op(vector=V, multiplier=2.0), "(did you mean 'scale'?)"),
    (op(vector=V, position="all"), "(did you mean 'positions'?)"),
    (op(op="clamp", direction=V, max=1.0), "(did you mean 'hi'?)"),
    (op(op="clamp", direction=V, min=1.0), "(did you mean 'lo'?)"),
    (op(op="ablate", direction=V, strenght=1.0), "(did you mean 'strength'?)"),
    (vectors({"post_block": {1: {"vec": V}}}), "(did you mean 'vector'?)"),
    (vectors({"post_block": {1: {"vector": V, "coeff": 2}}}), "(did you mean 'scale'?)"),
    # Positions.
    *(
        (at(said), f"(did you mean {meant}?)")
        for said, meant in {
            "last": "'last_prompt'",
            "last_token": "'last_prompt'",
            "last_promt": "'last_prompt'",
            "prompt": "'all_prompt'",
            "generated": "'all_generated'",
            "completion": "'all_generated'",
            "all-prompt": "'all_prompt'",
            "0-3": "{'start': 0, 'stop': 4}",
            "0:3": "{'start': 0, 'stop': 3}",
            -1: "[-1]",
            4: "[4]",
        }.items()
    ),
    (at(slice(0, 3)), "(did you mean {'start': 0, 'stop': 3}?)"),
    (at(slice(-2, None)), "(did you mean {'start': -2}?)"),
    (at([True, False]), "(for a mask say the positions where it is true)"),
    (at({"start": 0, "end": 3}), "(did you mean 'stop'?)"),
    (at({"txt": "a"}), "(did you mean 'text'?)"),
    (at({"string": "a"}), "(did you mean 'text'?)"),
    (at({"tokens": [5]}), "(did you mean 'token_ids'?)"),
    (at({"token_id": [5]}), "(did you mean 'token_ids'?)"),
    (at({"text": "a", "wich": "all"}), "(did you mean 'which'?)"),
    # Captures.
    ({"capture": {"hooks": {"post_block": [1]}}}, "(name the consumer: {'inline': {'hooks'"),
    ({"capture": {"hooks": {}, "positions": "all"}}, "(name the consumer: {'inline': {'hooks'"),
    ({"capture": {"inlin": {}}}, "(did you mean 'inline'?)"),
    ({"capture": {"in-line": {}}}, "(did you mean 'inline'?)"),
    (inline(position="all"), "(did you mean 'positions'?)"),
    (inline(projet=V), "(did you mean 'project'?)"),
    ({"capture": {"inline": {"hook": {"post_block": [1]}}}}, "(did you mean 'hooks'?)"),
    ({"capture": {"inline": {"layers": [1]}}}, "(did you mean 'hooks'?)"),
    (inline(project=MATRIX), "(transpose it)"),
    ({"capture": True}, "({'inline': {'hooks': {'post_block': 'all'}}})"),
    ({"capture": ["post_block"]}, "({'inline': {'hooks': {'post_block': 'all'}}})"),
    ({"capture": {"inline": {"attention": {"layers": [1]}}}}, "(did you mean 'heads'?)"),
    # Rules.
    *(
        ({"rules": [{**RULE, "probe": V, key: value}]}, f"(did you mean {meant!r}?)")
        for key, value, meant in (("action", "stop", "then"), ("layers", 1, "layer"))
    ),
    ({"rules": [{**RULE, "direction": V}]}, "(did you mean 'probe'?)"),
    # Modules.
    ({"steering_modules": ["hapy"]}, "(did you mean 'happy'?)"),
    ({"steering_modules": ["Happy"]}, "(did you mean 'happy'?)"),
    ({"steering_modules": {"happy": 1}}, "(a name with a scale is a pair in it)"),
]
"""What is asked, and a part of the error's text that says what was meant."""

BEAMS = "BeamSearchParams(beam_width=2, max_tokens=5, "
CALLS: list[tuple[str, str]] = [
    ("SamplingParams(steering_vector={})", "(did you mean 'steering_vectors'?)"),
    ("SamplingParams(captures={})", "(did you mean 'capture'?)"),
    ("SamplingParams(hooks={})", "(did you mean 'capture'?)"),
    ("SamplingParams(vectors={})", "(did you mean 'steering_vectors'?)"),
    ("SamplingParams(max_token=5)", "(did you mean 'max_tokens'?)"),
    ("SamplingParams(output_kind='deltas')", "(did you mean 'delta'?)"),
    ("PoolingParams(capture={})", "fields of SamplingParams"),
    ("PoolingParams(steering_vector={})", "fields of SamplingParams"),
    ("PoolingParams(dimension=5)", "(did you mean 'dimensions'?)"),
    (BEAMS + "steering=[])", "not supported with beam search"),
    (BEAMS + "captures={})", "not supported with beam search"),
    ("llm.generate('a', capture={})", "generate(..., SamplingParams(capture=...))"),
    ("llm.generate('a', steering_vector={})", "SamplingParams(steering_vectors=...))"),
    ("llm.chat('a', hooks={})", "chat(..., SamplingParams(capture=...))"),
    ("llm.embed('a', capture={})", "fields of SamplingParams"),
    ("llm.beam_search('a', None, steering=[])", "not supported with beam search"),
]
"""Call with a wrong keyword or word, and a part of the error's text."""

END = "<!-- end of mistakes -->"


def filled(asked: Any) -> Any:
    """What is asked, with the values of expressions."""
    if isinstance(asked, Said):
        return VALUES[asked]
    if isinstance(asked, dict):
        return {key: filled(value) for key, value in asked.items()}
    return [filled(value) for value in asked] if isinstance(asked, list) else asked


def message(asked: dict[str, Any]) -> str:
    """The error's text.

    Raises:
        AssertionError: nothing is refused.
    """
    points = list(CAPTURE_POINTS)
    config = config_of(MODEL, capture_points=points, steering_families=list(FAMILIES))
    named = {"vectors": {"post_block": {1: VECTOR}}}
    modules = {"happy": parse_module(named, "m", MODEL, config.steering_config)}
    try:
        plan_of(config=config, modules=modules, **filled(asked))
    except ValueError as error:
        return str(error)
    raise AssertionError(f"not refused: {asked}")


def call_message(call: str) -> str:
    """The text of a call's error.

    Raises:
        AssertionError: nothing is refused.
    """
    names = {"llm": object.__new__(LLM), "SamplingParams": SamplingParams}
    names |= {"PoolingParams": PoolingParams, "BeamSearchParams": BeamSearchParams}
    try:
        eval(call, names)
    except (TypeError, ValueError) as error:
        return str(error)
    raise AssertionError(f"not refused: {call}")


def table() -> str:
    """The table of the page."""
    rows = [f"| `{asked}` | `{message(asked)}` |" for asked, _ in MISTAKES]
    rows += [f"| `{call}` | `{call_message(call)}` |" for call, _ in CALLS]
    return "\n".join([BEGIN, "", "| fields, or call | error |", "|---|---|", *rows, "", END])


def main() -> None:
    """Write the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + table() + rest.partition(END)[2])


if __name__ == "__main__":
    main()
