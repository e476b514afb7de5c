# SPDX-License-Identifier: Apache-2.0
"""Frontend: plans of requests that name modules and ask for nothing else, made once for all prompts
of a length."""

from collections.abc import Callable, Hashable, Iterable
from threading import Lock
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.frontend.request.memo import KEPT
from vllm.v1.interventions.plan import INHERIT, PLAN_FIELDS, Plan

MOST_NAMES = 64
"""The most modules of a request whose plan is kept."""
_OTHERS = tuple(f for f in PLAN_FIELDS if f not in ("steering_modules", INHERIT))
"""Fields of which a plan depends on more than is in its key."""


class _Known(NamedTuple):
    state: object
    """The global state that they were looked up in last."""
    acting: list[str | None]
    """The digests of the modules that the plan is made of."""
    plan: Plan


class ModulePlans:
    """The plans of requests that came lately.

    Such a plan says by digests which vectors act from which position on: it depends on the names,
    and on how long the prompt and the answer may be. What a name means is looked up for each
    request, as it may have been changed. Plans with operations are not kept: these bring vectors.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Known] = {}
        """The oldest first."""
        self._lock = Lock()
        """Held while a plan is added; several threads make plans."""

    def plan(
        self,
        params: SamplingParams,
        given: dict[str, Any],
        max_tokens: int | None,
        num_prompts: int,
        state: object,
        acting: Callable[[Iterable[Any]], list[str | None]],
        make: Callable[[], Plan | None],
    ) -> Plan | None:
        """The plan of a request; of one that is known, without making it.

        Args:
            params: as the user gave them.
            given: the prompt, as of `resolve`.
            max_tokens: those of the engine's copy.
            num_prompts: how many prompts came in the same body.
            state: the global state, another object when anything in it changes.
            acting: returns the digests of the modules that some names mean now, and of those that
                act by default.
            make: makes and checks the plan; what it raises is raised.
        """
        names = _names(params.steering_modules)
        token_ids = given.get("prompt_token_ids")
        if names is None or token_ids is None or given.get("prompt_embeds") is not None:
            return make()
        for field in _OTHERS:
            if getattr(params, field) is not None:
                return make()
        inherit = params.steering_inherit_global
        if inherit is not None and type(inherit) is not bool:
            return make()
        key = (names, inherit, len(token_ids), max_tokens, params.n, num_prompts)
        known = self._kept.get(key)
        if known is not None and known.state is state:
            return known.plan
        digests = acting(names)
        plan = known.plan if known is not None and known.acting == digests else make()
        steering = None if plan is None else plan.steering
        if plan is not None and steering is not None and not (steering.sets or steering.terms):
            with self._lock:
                self._kept.pop(key, None)
                self._kept[key] = _Known(state, digests, plan)
                if len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]
        return plan


def _names(value: Any) -> tuple[Any, ...] | None:
    """The names of `steering_modules`, each with its scale if it has one; None for anything else
    than a short list of them."""
    if value is None:
        return ()
    if type(value) not in (list, tuple) or len(value) > MOST_NAMES:
        return None
    names: list[Any] = []
    for entry in value:
        if type(entry) is str:
            names.append(entry)
            continue
        if type(entry) not in (list, tuple) or len(entry) != 2:
            return None
        name, scale = entry
        # Of these types only: True is 1, too, and no scale. As text, for there are two zeros.
        if type(name) is not str or type(scale) not in (int, float):
            return None
        names.append((name, repr(scale)))
    return tuple(names)
