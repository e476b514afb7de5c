# SPDX-License-Identifier: Apache-2.0
"""Captures that come again are not parsed again, and mean what they would mean alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import SHAPE, config_of, plan_of
from vllm import SamplingParams
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.interventions.frontend.request import memo as capture_memo
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.frontend.request.capture import numbered, parse_capture
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.media import Media
from vllm.v1.interventions.frontend.request.memo import CaptureMemo
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.plan import CapturePlan

pytestmark = pytest.mark.quick

SPECS = config_of().capture_config.consumers
HOOKS = {"post_block": [0, 1]}


def prompt_of(
    length: int = 5, max_tokens: int = 4, n: int = 1, media: Media | None = None
) -> Prompt:
    prompt = Prompt(list(range(length)), max_tokens, None, Work(1 << 23, n))
    prompt.media = media or prompt.media
    return prompt


def asked(**fields: Any) -> dict[str, Any]:
    return {"inline": {"hooks": HOOKS, **fields}}


class Parser:
    """Parses with a memo, and counts."""

    def __init__(self) -> None:
        self.memo, self.parsed = CaptureMemo(), 0

    def alone(self, value: Any, prompt: Prompt) -> CapturePlan | None:
        self.parsed += 1
        return parse_capture(value, "capture", SHAPE, prompt, SPECS)

    def __call__(self, value: Any, prompt: Prompt) -> CapturePlan | None:
        return self.memo.plan(value, prompt, partial(self.alone, value, prompt))


def test_equal_captures_are_parsed_once() -> None:
    parse = Parser()
    first = parse(asked(), prompt_of())
    assert parse(asked(positions="last_prompt"), prompt_of()) is first  # what is meant without
    assert parse.parsed == 1


OTHERS: list[tuple[Any, Prompt]] = [
    (asked(), prompt_of(length=6)),
    (asked(), prompt_of(max_tokens=5)),
    (asked(), prompt_of(n=2)),
    (asked(positions="all_prompt"), prompt_of()),
    ({"inline": {"hooks": {"post_block": [0]}}}, prompt_of()),
    ({"inline": {"hooks": {"post_block": 0}}}, prompt_of()),
    ({"inline": {"hooks": {"post_block": "0-1"}}}, prompt_of()),
    ({"inline": {"hooks": {"pre_attn": [0, 1]}}}, prompt_of()),
    ({"inline": {"hooks": {"post_block": [0], "pre_attn": [1]}}}, prompt_of()),
    (asked(tokens=False), prompt_of()),
    (asked(positions=[4]), prompt_of()),
    ({"inline": [{"hooks": HOOKS}]}, prompt_of()),
    (asked(), prompt_of(media=Media({"image": [PlaceholderRange(1, 2)]}))),
]


@pytest.mark.parametrize(("value", "prompt"), OTHERS)
def test_others_are_parsed_anew(value: Any, prompt: Prompt) -> None:
    parse = Parser()
    parse(asked(), prompt_of())
    assert parse(value, prompt) == Parser().alone(value, prompt)
    assert parse.parsed == 2


BOTH = {"pre_attn": [0], "post_block": [1]}


@pytest.mark.parametrize(
    "fields",
    [
        {"hooks": {"pre_attn": [0, "post_block", 1]}},
        {"hooks": {"post_block": [False, True]}},
        {"hooks": {"post_block": {0, 1}}},
        {"hooks": {"post_block": [0.0, 1.0]}},
        {"positions": None},
    ],
)
def test_what_looks_like_a_known_one_is_still_refused(fields: dict[str, Any]) -> None:
    parse = Parser()
    value = {"inline": {"hooks": HOOKS} | fields}
    parse(asked(), prompt_of())
    parse({"inline": {"hooks": BOTH}}, prompt_of())
    with pytest.raises(ValueError, match=r"capture\.inline\."):
        parse(value, prompt_of())


_LAYERS = st.one_of(
    st.integers(-1, 4),
    st.sampled_from(["all", "0-1", "2"]),
    st.lists(st.integers(0, 3), max_size=3),
)
_CAPTURES = st.dictionaries(st.sampled_from(["pre_attn", "post_block", "embed", "no"]), _LAYERS)
_NAMES = st.sampled_from(["last_prompt", "all_prompt", "all_generated", "all", "no"])


@given(st.lists(st.tuples(_CAPTURES, _NAMES, st.integers(1, 3), st.integers(1, 3)), max_size=12))
def test_a_plan_is_that_of_a_capture_alone(
    requests: list[tuple[dict[str, Any], str, int, int]],
) -> None:
    parse = Parser()
    for hooks, positions, length, max_tokens in requests:
        value = {"inline": {"hooks": hooks, "positions": positions}}
        got, needed = (
            _outcome(one, value, prompt_of(length, max_tokens)) for one in (parse, Parser().alone)
        )
        assert got == needed


def _outcome(parse: Any, value: Any, prompt: Prompt) -> Any:
    try:
        return parse(value, prompt)
    except ValueError as error:
        return str(error)


def test_the_oldest_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_memo, "KEPT", 2)
    parse = Parser()
    for length in (1, 2, 3, 3, 2, 1):
        parse(asked(), prompt_of(length))
    assert parse.parsed == 4  # 1, 2, 3, and 1 once more


@pytest.mark.parametrize(
    ("hooks", "kept"),
    [
        ({"post_block": list(range(900))}, True),
        ({"post_block": list(range(1100))}, False),
        ({str(point): 0 for point in range(400)}, False),
    ],
)
def test_long_ones_are_not_kept(hooks: dict[str, Any], kept: bool) -> None:
    memo, plan = CaptureMemo(), Parser().alone(asked(), prompt_of())
    made: list[int] = []

    def make() -> CapturePlan | None:
        made.append(1)
        return plan

    for _ in range(2):
        memo.plan({"inline": {"hooks": hooks}}, prompt_of(), make)
    assert len(made) == (1 if kept else 2)


def test_prompts_of_a_body_keep_their_numbers() -> None:
    config = config_of()
    catalog = ModuleCatalog(config)
    params = numbered(SamplingParams(max_tokens=4, capture=asked()), 3)
    plans = [plan_of(config=config, catalog=catalog, capture=each.capture) for each in params]
    captures = [plan.capture for plan in plans if plan is not None and plan.capture is not None]
    assert [capture.prompt for capture in captures] == [0, 1, 2]
    assert captures[0].sites is captures[2].sites


def test_what_the_engine_has_no_room_for_is_refused_each_time() -> None:
    config = config_of(capture_inline_max_bytes=1)
    catalog = ModuleCatalog(config)
    for _ in range(2):
        with pytest.raises(ValueError, match="capture_inline_max_bytes"):
            plan_of(config=config, catalog=catalog, capture=asked())
