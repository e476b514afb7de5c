# SPDX-License-Identifier: Apache-2.0
"""The tests of rules fail where rules are judged wrongly, or not for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import Phase, given, settings

from tests.interventions.frontend import test_forcing as forcing
from tests.interventions.frontend import test_operator_rules as for_all
from tests.interventions.frontend import test_rule_watch as judged
from tests.mutations.rules import FOR_ALL, JUDGED, OF_HEADS, Mistake
from tests.support import plans
from vllm.sampling_params import RequestOutputKind
from vllm.v1.interventions.frontend.request import resolve
from vllm.v1.interventions.frontend.results import watch
from vllm.v1.probes import heads

pytestmark = pytest.mark.quick


# The same steps each time, and no smaller ones looked for when one fails.
SAME = settings(max_examples=100, phases=[Phase.generate], database=None, derandomize=True)
STEPS = SAME(given(*judged.STEPS)(judged.test_steps_of_any_size.hypothesis.inner_test))
FORCED = SAME(given(*forcing.STEPS)(forcing.test_steps_of_any_size.hypothesis.inner_test))


def fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except (AssertionError, ValueError, ExceptionGroup):
        return True
    return False


@pytest.mark.parametrize("mistake", JUDGED, ids=lambda mistake: mistake.name)
def test_a_wrong_watch_is_noticed(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mistake.made()
    if mistake.module is watch:
        monkeypatch.setattr(judged, "RuleWatches", mutant.RuleWatches)
        monkeypatch.setattr(forcing, "RuleWatches", mutant.RuleWatches)
    else:
        monkeypatch.setattr(watch, "Alone", mutant.Alone)
        monkeypatch.setattr(watch, "Judges", mutant.Judges)
        monkeypatch.setattr(watch, "Panel", mutant.Panel)
    checks = (
        STEPS,
        FORCED,
        forcing.test_a_stop_string_in_what_is_kept_or_forced_ends_the_answer,
        forcing.test_a_rule_that_stops_goes_before_one_that_forces,
        forcing.test_what_fired_before_a_cut_forces_nothing_after_it,
        partial(forcing.test_what_is_forced_has_room_for_a_token_more, 0, False),
        judged.test_a_window_reaches_over_steps,
        judged.test_probes_of_several_layers,
    )
    assert any(map(fails, checks))


@pytest.mark.parametrize("mistake", OF_HEADS, ids=lambda mistake: mistake.name)
def test_a_wrong_head_is_noticed(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = mistake.made()
    for kind in ("Largest", "Linear", "Mlp"):
        for method in ("joined", "numbers"):
            wrong = getattr(mutant, kind).__dict__.get(method, getattr(mutant.Head, method))
            monkeypatch.setattr(getattr(heads, kind), method, wrong)
    checks = (
        judged.test_of_several_layers_the_largest_dose_counts,
        judged.test_probes_of_several_layers,
    )
    assert any(map(fails, checks))


@pytest.mark.parametrize("mistake", FOR_ALL, ids=lambda mistake: mistake.name)
def test_a_rule_that_is_not_for_all_is_noticed(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> None:
        for kind in RequestOutputKind:
            for_all.test_every_request_has_them(kind, {})
            for_all.test_every_request_has_them(kind, {"rules": [{**for_all.RULE, "name": "own"}]})

    check()
    mutant = mistake.made()
    if mistake.module is resolve:
        monkeypatch.setattr(plans, "resolve", mutant.resolve)
    else:
        monkeypatch.setattr(resolve, "parse_rules", mutant.parse_rules)
    assert fails(check)
