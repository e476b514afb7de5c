# SPDX-License-Identifier: Apache-2.0
"""Mistakes in how rules are judged and held for all, each a change of a module's source text."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

from vllm.v1.interventions.frontend.request import resolve
from vllm.v1.interventions.frontend.request import rules as rule_request
from vllm.v1.interventions.frontend.results import watch as rule_watch


@dataclass(frozen=True)
class Mistake:
    """One change of a module."""

    name: str
    module: ModuleType
    right: str
    wrong: str

    def made(self) -> ModuleType:
        """The module with the mistake."""
        text = inspect.getsource(self.module)
        assert text.count(self.right) == 1, f"{self.name}: {text.count(self.right)} places"
        mutant = ModuleType(self.module.__name__)
        exec(compile(text.replace(self.right, self.wrong), self.name, "exec"), vars(mutant))
        return mutant


_CROSSES = "scores < rule.threshold if rule.below else scores > rule.threshold"
_REVERSED = "scores > rule.threshold if rule.below else scores < rule.threshold"
_ONE_CROSSES, _ONE_REVERSED = (text.replace("scores", "score") for text in (_CROSSES, _REVERSED))
_ENDS = "self._stop[0] + 1 - self._num_tokens"
_LARGEST = "np.fmax.reduce(rows[:, self._sites, column], axis=1)"
_LAST = "stop = num_tokens - 1 if"

_OF_WATCH = {
    "ends a token early": (_ENDS, "self._stop[0] - self._num_tokens"),
    "ends a token late": (_ENDS, "self._stop[0] + 2 - self._num_tokens"),
    "says the next position": ("[self._at[i] for i in", "[self._at[i] + 1 for i in"),
    "threshold reversed": (_CROSSES, _REVERSED),
    "below ignored": (_CROSSES, "scores > rule.threshold"),
    "need ignored": ("crossed[rule.need - 1 :]", "crossed"),
    "of ignored": ("< rule.of]", "< 1 << 40]"),
    "forgets the step before": ("[self._crossed, rows]", "[rows]"),
    "a flag stops": ("if j.rule.stops and j.fired", "if j.fired"),
    "counts rows past the end": (_LAST, "stop = num_tokens + 9 if"),
    "positions ignored": ("self._wanted.mask(positions)", "positions >= 0"),
    "threshold of one row reversed": (_ONE_CROSSES, _ONE_REVERSED),
    "below ignored of one row": (_ONE_CROSSES, "score > rule.threshold"),
    "one of several layers": (_LARGEST, "rows[:, self._sites[0], column]"),
    "the smallest dose": (_LARGEST, _LARGEST.replace("fmax", "fmin")),
    "what is no number hides a dose": (_LARGEST, _LARGEST.replace("fmax", "maximum")),
    "position of one row ignored": ("if position in self._wanted:", "if True:"),
}
_OF_REQUEST = {
    "none of the operator's": ("for rule in of_all:", "for rule in of_all[:0]:"),
    "only the first": ("for rule in of_all:", "for rule in of_all[:1]:"),
    "as a request's own": ("runs, True, path", "runs, False, path"),
}
_OF_RESOLVE = {
    "not of streams": (
        "or bool(modules.rules)",
        "or bool(modules.rules and params.output_kind.name != 'DELTA')",
    ),
    "not of requests that say nothing": (
        "if field is None and modules.rules:",
        "if False and modules.rules:",
    ),
}

JUDGED = [Mistake(name, rule_watch, *change) for name, change in _OF_WATCH.items()]
FOR_ALL = [Mistake(name, rule_request, *change) for name, change in _OF_REQUEST.items()]
FOR_ALL += [Mistake(name, resolve, *change) for name, change in _OF_RESOLVE.items()]
