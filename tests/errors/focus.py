# SPDX-License-Identifier: Apache-2.0
"""What is refused of focus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.errors.case import Case, path
from tests.support.plans import HEADS, config_of, with_layers
from vllm.config.intervention_refusals import refuse_unsupported
from vllm.config.steering import FAMILIES
from vllm.v1.interventions.shape import TapShape
from vllm.v1.steering.modules import parse_module

CONFIG = config_of(HEADS, steering_families=["add", "focus"])
UNREAD = with_layers(HEADS, [1], unread="backend ODD")
LATENT = with_layers(HEADS, [1], latent=True)


def focus(*more: dict[str, Any], shape: TapShape = HEADS, **fields: Any) -> dict[str, Any]:
    """A request that focuses keys 1 and 2 of 5 in layer 1; a field given as None is left out."""
    given = {"op": "focus", "layers": 1, "span": [1, 2], "factor": 2.0, **fields}
    entry = {key: value for key, value in given.items() if value is not None}
    config = config_of(shape, steering_families=["add", "focus"])
    return {"steering": [entry, *more], "config": config}


def entry(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = focus(**fields)["steering"][0]
    return found


def share(value: Any, **fields: Any) -> dict[str, Any]:
    return focus(factor=None, share=value, **fields)


def module() -> object:
    config = config_of(HEADS, steering_families=list(FAMILIES)).steering_config
    return parse_module({"ops": [entry()]}, "source", HEADS, config)


def started(**options: Any) -> None:
    config: Any = config_of(HEADS, steering_families=["focus"], **options)
    config.model_config = SimpleNamespace(
        runner_type="generate", is_encoder_decoder=False, is_diffusion=False, dtype=None
    )
    refuse_unsupported(config)


MANY = [
    entry(layers=0, span=[i % 2], positions={"start": 2 + i // 2, "stop": 4 + i // 2})
    for i in range(2)
]

FOCUS = [
    Case(
        path("steering[0].op", allowed="add"),
        focus() | {"config": config_of(HEADS, steering_families=["add"])},
    ),
    Case(path("steering[0]", "['point']", "op, layers, span, factor, positions"), focus(point="z")),
    Case(path("steering[0]", "['gate']", "op, layers, span, factor, positions"), focus(gate={})),
    Case(
        path("steering[0]", "['rule']", "op, layers, span, factor, positions"), focus(rule="ratio")
    ),
    Case(
        path("steering[0]", "['factor']", "op, layers, span, share, positions, rule"),
        share(0.5) | focus(share=0.5),
    ),
    Case(path("steering[0]", allowed="span"), focus(span=None)),
    Case(path("steering[0]", allowed="factor"), focus(factor=None)),
    Case(path("steering[0]", allowed="layers"), focus(layers=None)),
    Case(
        path("steering[0]", "['layers']", "op, heads, span, factor, positions"),
        focus(heads={1: [0]}),
    ),
    Case(path("steering[0].heads.1", "4", "0-3"), focus(layers=None, heads={1: [4]})),
    Case(path("steering[0].layers"), focus(layers=2)),
    Case(path("steering[0].layers"), focus(layers=[])),
    Case(path("steering[0].layers", "backend ODD", layer="1"), focus(shape=UNREAD)),
    Case(path("steering[0].layers", "backend ODD", layer="1"), focus(layers="all", shape=UNREAD)),
    Case(
        path("steering[0].layers", "attention over a latent cache (MLA)", layer="1"),
        focus(shape=LATENT),
    ),
    Case(path("steering[0].factor", "-1.0"), focus(factor=-1.0)),
    Case(path("steering[0].factor"), focus(factor=float("nan"))),
    Case(path("steering[0].share", "1.0"), share(1)),
    Case(path("steering[0].share", "0.0"), share(0.0)),
    Case(path("steering[0].rule", "'prompt'"), share(0.5, rule="prompt")),
    Case(path("steering[0].span[0]", "9"), focus(span=[9])),
    Case(path("steering[0].span"), focus(span="last_generated")),
    Case(path("steering[0].span"), focus(span="all_generated") | {"max_tokens": 1}),
    Case(path("steering[0].positions", "3"), focus(span=[3, 4], positions=[0, 2])),
    Case(path("steering[1].span", layer="1"), focus(entry(span=[2, 3]))),
    Case(path("steering[1]", allowed="4", layer="1"), focus(entry(factor=None, share=0.5))),
    Case(
        path("steering[4]", allowed="4", layer="1"),
        focus(*[entry(span=[i]) for i in (0, 3, 4, 5)], max_tokens=None) | {"max_tokens": 9},
    ),
    Case(
        path("steering[0].span", "65", "64", layer="1"),
        focus(span={"start": 0, "step": 2}) | {"prompt": 130, "max_tokens": 1},
    ),
    Case(
        path("steering", "1", "1"),
        focus(*MANY)
        | {"config": config_of(HEADS, steering_families=["focus"], max_steering_configs=1)},
    ),
    Case(path("source.ops[0].op"), do=module),
    Case({}, do=lambda: started(capture_points=["q", "post_block"])),
    Case({}, do=lambda: started(capture=False, capture_points=["q", "z"])),
]
