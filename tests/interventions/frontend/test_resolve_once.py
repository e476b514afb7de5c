# SPDX-License-Identifier: Apache-2.0
"""A body that the server checks is not resolved again by the engine, unless something changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.plans import VECTOR, config_of
from vllm import SamplingParams
from vllm.v1.interventions.frontend.request import resolve as resolving
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.resolve import checked, resolve, without_plan_fields
from vllm.v1.interventions.global_state import Change, Globals
from vllm.v1.interventions.plan import Plan

pytestmark = pytest.mark.quick

CONFIG = config_of()
VECTORS = {"post_block": {1: VECTOR}}
HOOKS = {"inline": {"hooks": {"post_block": [1]}, "positions": "all"}}


class Engine:
    """The input processor, as far as it makes plans."""

    def __init__(self) -> None:
        self.modules = ModuleCatalog(CONFIG)
        self.params = SamplingParams(max_tokens=4, steering_vectors=VECTORS, capture=HOOKS)
        self.prompt: dict[str, Any] = {"prompt_token_ids": [5, 6, 7]}

    def check(self) -> Plan | None:
        return checked(self.params, self.prompt, CONFIG, None, self.modules, 2)

    def resolve(self, params: SamplingParams | None = None, max_tokens: int = 4) -> Plan | None:
        params = params or self.params
        final = without_plan_fields(params)
        final.max_tokens = max_tokens
        return resolve(params, final, self.prompt, False, CONFIG, None, self.modules)

    def change(self) -> None:
        """Another client forgets a module."""
        self.modules.made(Change(Globals(), [("modules", "gone")]), 1)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine()


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was parsed, in order."""
    seen: list[str] = []
    for name in ("steering_plan", "parse_capture"):
        parse = getattr(resolving, name)

        def noted(*args: Any, _name: str = name, _parse: Callable[..., Any] = parse) -> Any:
            seen.append(_name)
            return _parse(*args)

        monkeypatch.setattr(resolving, name, noted)
    return seen


def test_what_was_checked_is_not_parsed_again(engine: Engine, parses: list[str]) -> None:
    plan = engine.check()
    assert plan is not None and plan.steering is not None and plan.capture is not None
    assert parses == ["steering_plan", "parse_capture"]
    assert engine.resolve() is plan
    assert len(parses) == 2
    assert engine.prompt[resolving.RESOLVED] is None
    assert engine.resolve() is not plan


@pytest.mark.parametrize(
    "again",
    [
        lambda engine: engine.resolve(engine.params.clone()),
        lambda engine: engine.resolve(max_tokens=5),
        lambda engine: (engine.change(), engine.resolve())[1],
    ],
    ids=["other parameters", "more tokens", "modules changed"],
)
def test_what_changed_is_parsed_again(
    engine: Engine, parses: list[str], again: Callable[[Engine], Plan | None]
) -> None:
    plan = engine.check()
    assert again(engine) is not plan
    assert parses.count("steering_plan") == 2


def test_what_is_refused_is_not_kept(engine: Engine) -> None:
    engine.params.steering_vectors = {"post_block": {99: VECTOR}}
    for _ in range(2):
        with pytest.raises(ValueError, match="layer 99 is out of range"):
            engine.check()
    assert resolving.RESOLVED not in engine.prompt
