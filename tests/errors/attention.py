# SPDX-License-Identifier: Apache-2.0
"""What is refused of a request for attention weights."""

from __future__ import annotations

from typing import Any

from tests.errors.case import Case, path
from tests.errors.requests import HEADED_CONFIG, SELECTORS
from tests.support.plans import HEADS, config_of, with_layers

IN_ATTENTION = "capture.inline.attention"
_ASKED: list[tuple[dict[str, str], Any]] = [
    (path(IN_ATTENTION, "None"), None),
    (path(IN_ATTENTION, "['head']", "heads, queries, keys, give, top, sum"), {"head": 0}),
    (path(f"{IN_ATTENTION}.heads"), {"give": ["weights"]}),
    (path(f"{IN_ATTENTION}.heads", "'q'", "pre_attn, post_block", layer="2"), {"heads": 2}),
    (path(f"{IN_ATTENTION}.heads.1", "4", "0-3", layer="1"), {"heads": {1: 4}}),
    (path(f"{IN_ATTENTION}.heads[1]", "list"), {"heads": [[0, 1], [0]]}),
    (path(f"{IN_ATTENTION}.heads.0"), {"heads": [[0, 1], [0, 1]]}),
    (path(f"{IN_ATTENTION}.give", "None"), {"heads": 0}),
    (path(f"{IN_ATTENTION}.give", "list"), {"heads": 0, "give": ["mas"]}),
    (path(f"{IN_ATTENTION}.queries", "'x'", SELECTORS), {"heads": 0, "queries": "x"}),
    (path(f"{IN_ATTENTION}.keys"), {"heads": 0, "give": ["mass"]}),
    (path(f"{IN_ATTENTION}.keys"), {"heads": 0, "give": ["weights"], "keys": {"a": [0]}}),
    (
        path(f"{IN_ATTENTION}.keys", "65", "1-64"),
        {"heads": 0, "give": ["mass"], "keys": {str(i): [0] for i in range(65)}},
    ),
    (path(f"{IN_ATTENTION}.keys.7", "7", "1-64"), {"heads": 0, "give": ["mass"], "keys": {7: [0]}}),
    (
        path(f"{IN_ATTENTION}.keys.\\ud800", allowed="1-64"),
        {"heads": 0, "give": ["mass"], "keys": {"\ud800": [0]}},
    ),
    (
        path(f"{IN_ATTENTION}.keys.a[0]", "9", "7", prompt="5"),
        {"heads": 0, "give": ["mass"], "keys": {"a": [9]}},
    ),
    (
        path(f"{IN_ATTENTION}.keys.a"),
        {"heads": 0, "give": ["mass"], "keys": {"a": "last_generated"}},
    ),
    (
        path(f"{IN_ATTENTION}.keys.a"),
        {"heads": 0, "give": ["mass"], "keys": {"a": "all_generated"}},
    ),
    (path(f"{IN_ATTENTION}.top", "None", "1-64"), {"heads": 0, "give": ["top"]}),
    (path(f"{IN_ATTENTION}.top", "65", "1-64"), {"heads": 0, "give": ["top"], "top": 65}),
    (path(f"{IN_ATTENTION}.top", "2", "1-64"), {"heads": 0, "give": ["weights"], "top": 2}),
    (path(f"{IN_ATTENTION}.sum"), {"heads": 0, "give": ["weights"], "sum": "layers"}),
    (path(f"{IN_ATTENTION}.sum"), {"heads": 0, "give": ["top"], "top": 2, "sum": "all"}),
]

ATTENTION = [
    *[
        Case(says, {"capture": {"inline": {"attention": asked}}, **more} | HEADED_CONFIG)
        for says, asked in _ASKED
        for more in [{"max_tokens": 1} if "all_generated" in str(asked) else {}]
    ],
    Case(
        path(IN_ATTENTION),
        {"capture": {"inline": {"attention": {"heads": 0}, "positions": "all"}}} | HEADED_CONFIG,
    ),
    Case(
        path("capture.logging.attention"),
        {"capture": {"logging": {"attention": {"heads": 0}}}} | HEADED_CONFIG,
    ),
    Case(
        path(IN_ATTENTION),
        {"capture": {"inline": {"attention": {"heads": 0, "give": ["weights"]}}}},
    ),
    Case(
        path("capture.inline.attention.heads", "a head of stone", layer="1"),
        {"capture": {"inline": {"attention": {"heads": {"0-1": 0}, "give": ["weights"]}}}}
        | {"config": config_of(with_layers(HEADS, [1], unread="a head of stone"))},
    ),
    Case(
        path("capture.inline.attention.z", allowed="['q']"),
        {"capture": {"inline": {"attention": {"heads": 0, "give": ["weights"]}}}}
        | {"config": config_of(HEADS, capture_points=["q"])},
    ),
    Case(
        path("capture.inline.attention.q", allowed="['post_block']", point="'q', 'z'"),
        {"capture": {"inline": {"attention": {"heads": 0, "give": ["weights"]}}}}
        | {"config": config_of(HEADS, capture_points=["post_block"])},
    ),
]
