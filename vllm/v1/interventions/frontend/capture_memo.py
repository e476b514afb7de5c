# SPDX-License-Identifier: Apache-2.0
"""Frontend: what many requests ask of `inline` alike is parsed once."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any

from vllm.v1.capture.registry import INLINE
from vllm.v1.interventions.frontend.selectors import Prompt
from vllm.v1.interventions.plan import CapturePlan

KEPT = 256
"""The most plans that are kept."""
LONGEST = 1024
"""The most entries that a capture which is kept may have: three for a point, and its layers."""


class CaptureMemo:
    """The plans of captures that came lately.

    A plan depends on what the capture says and on how long the prompt and the answer may be. Only
    captures are kept that say nothing but points, layers and one name of positions: what texts,
    matrices and consumers' own fields mean is not seen from the capture alone.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, CapturePlan] = {}
        """The oldest first."""
        self._lock = Lock()
        """Held while a plan is added; several threads parse."""

    def plan(
        self, value: Any, prompt: Prompt, make: Callable[[], CapturePlan | None]
    ) -> CapturePlan | None:
        """The plan of a capture; of one that is known, without parsing it.

        Args:
            value: as `SamplingParams.capture`.
            make: parses and checks it; what it raises is raised.
        """
        said = _said(value)
        if said is None or prompt.media.items:
            return make()
        key = (*said, len(prompt.token_ids), prompt.max_tokens, prompt.work.completions)
        plan = self._kept.get(key)
        if plan is None and (plan := make()) is not None:
            with self._lock:
                self._kept[key] = plan
                if len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]
        return plan


def _said(value: Any) -> list[Hashable] | None:
    """All that a capture says; None if that is more than points, layers and a name."""
    if not isinstance(value, dict) or value.keys() != {INLINE}:
        return None
    asked = value[INLINE]
    if type(asked) is not dict or asked.keys() - {"hooks", "positions"}:
        return None
    hooks, positions = asked.get("hooks"), asked.get("positions", "last_prompt")
    if type(hooks) is not dict or type(positions) is not str:
        return None
    said: list[Hashable] = [positions]
    for point, layers in hooks.items():
        is_list = type(layers) is list
        listed = layers if is_list else [layers]
        if len(said) + len(listed) > LONGEST:
            return None
        # Of these types only: True is 1, too, and no layer.
        if not {type(point), *map(type, listed)} <= {str, int}:
            return None
        said += point, is_list, len(listed), *listed
    return said
