# SPDX-License-Identifier: Apache-2.0
"""Mistakes in how rules are judged and held for all, each a change of a module's source text."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType

from vllm.v1.interventions.frontend.request import resolve
from vllm.v1.interventions.frontend.request import rules as rule_request
from vllm.v1.interventions.frontend.results import judges
from vllm.v1.interventions.frontend.results import watch as rule_watch
from vllm.v1.probes import heads


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


_SIGNS = "np.where([rule.below for rule in rules], -1.0, 1.0)"
_ENDS = "max(at + 1 - self._num_tokens, 0)"
_LARGEST = "np.fmax.reduce(products, axis=1)"
_SUM = "products[:, 0] if products.shape[1] == 1 else products.sum(1)"
_LAST = "stop = num_tokens - 1 if"
_FINITE = "self._state.add(numbers[finite])"

_OF_WATCH = {
    "ends a token early": (_ENDS, "max(at - self._num_tokens, 0)"),
    "ends a token late": (_ENDS, "max(at + 2 - self._num_tokens, 0)"),
    "a flag stops": ("if rule.then != FLAG and crossings.fired", "if crossings.fired"),
    "counts rows past the end": (_LAST, "stop = num_tokens + 9 if"),
    "another's rows": ("positions[first], first)", "positions[first], 0)"),
    "rows behind a cut count": ("if self._forces:", "if False:"),
    "a forced token is not given out": ("[*tokens, *rule.puts]", "[*tokens, *rule.puts[1:]]"),
    "forces twice": ("and rule.name not in self._forced", ""),
    "forces at what cut before": ("crossings.since(self._rows)[:1]", "crossings.fired[:1]"),
    "a stop after what is forced": ("(rule.then != STOP, i)", "(rule.then == STOP, i)"),
    "goes on without room": ("< self._most_tokens", "<= self._most_tokens"),
    "goes on behind a stop string": ("self._goes_on, self.most_rows = False,", "self.most_rows ="),
    "another's panel": ("key = panel_key(rules, sites)", "key = 0"),
}
_OF_JUDGES = {
    "says the next position": ("at[fires].tolist()", "(at[fires] + 1).tolist()"),
    "threshold reversed": (
        "scores * self.signs > self.limits",
        "scores * self.signs < self.limits",
    ),
    "below ignored": (_SIGNS, "np.ones(len(rules))"),
    "need ignored": ("crossed[need - 1 :]", "crossed"),
    "of ignored": ("< self._rule.of]", "< 1 << 40]"),
    "forgets the step before": ("[self._crossed, rows]", "[rows]"),
    "positions ignored": ("self.wanted.mask(positions)", "positions >= 0"),
    "position of one row ignored": ("if position not in judges.wanted:", "if False:"),
    "the first layers of a stream": ("products[:, self.sites]", "products[:, : len(self.sites)]"),
    "the first rule's products": (
        "slice(rule.column, rule.column + rule.head.units)",
        "slice(0, rule.head.units)",
    ),
    "bias ignored": ("rule.head.bias[0]", "0.0"),
    "threshold of a pool reversed": (
        "self.panel.signs[i] > self.panel.limits[i]",
        "self.panel.signs[i] < self.panel.limits[i]",
    ),
    "what is no number is pooled": ("if finite.any():", "finite[:] = True\n            if True:"),
    "a pool for each step": (
        "pool.run(self.states[i],",
        "pool.run(pool.start(numbers.shape[1]),",
    ),
    "a pool for each row": ("judges.states[i] = state", "pass"),
    "what is no number is pooled, alone": (
        "np.where(finite[:, None], states, before), strict",
        "states, strict",
    ),
    "another's pool": (
        "np.stack([judges.states[i] for judges in waiting])",
        "np.stack([waiting[-1].states[i] for judges in waiting])",
    ),
}
_OF_HEADS = {
    "one of several layers": (_LARGEST, "products[:, 0]"),
    "the smallest dose": (_LARGEST, _LARGEST.replace("fmax", "fmin")),
    "what is no number hides a dose": (_LARGEST, _LARGEST.replace("fmax", "maximum")),
    "one of several layers of a probe": (_SUM, "products[:, 0]"),
    "activation before the bias": ("(joined + bias) @", "(joined) @"),
    "no last bias": ("@ weight + last", "@ weight"),
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
        "if field is None and judged:",
        "if False and judged:",
    ),
}

JUDGED = [Mistake(name, rule_watch, *change) for name, change in _OF_WATCH.items()]
JUDGED += [Mistake(name, judges, *change) for name, change in _OF_JUDGES.items()]
OF_HEADS = [Mistake(name, heads, *change) for name, change in _OF_HEADS.items()]
FOR_ALL = [Mistake(name, rule_request, *change) for name, change in _OF_REQUEST.items()]
FOR_ALL += [Mistake(name, resolve, *change) for name, change in _OF_RESOLVE.items()]
