# SPDX-License-Identifier: Apache-2.0
"""Guesses for errors: the name or key that a user probably meant."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any

from vllm.v1.interventions.values import plain

_MOST_LOOKED_AT = 100
_MOST_COMPARED = 40
_ALIKE = 0.7
"""Likeness, as `difflib` measures it, from which on a name is taken for a misspelt one."""
_NONE: Mapping[str, str] = {}
_KEYS = {
    "activations": ("vector", "direction"),
    "action": ("then",),
    "coefficient": ("scale", "strength"),
    "coeff": ("scale", "strength"),
    "direction": ("vector", "values", "probe"),
    "end": ("stop",),
    "hook": ("hooks", "point"),
    "hook_point": ("point", "hooks"),
    "layer": ("layers",),
    "layer_indices": ("layers",),
    "layers": ("layer", "hooks", "heads"),
    "max": ("hi",),
    "method": ("op",),
    "min": ("lo",),
    "multiplier": ("scale", "strength"),
    "operation": ("op",),
    "point": ("hooks",),
    "points": ("point", "hooks"),
    "position_indices": ("positions",),
    "scale": ("strength", "value"),
    "steering_vector": ("vector", "direction"),
    "string": ("text",),
    "token": ("token_ids", "tokens"),
    "tokens": ("token_ids",),
    "type": ("op",),
    "value": ("vector", "values"),
    "values": ("vector", "value"),
    "vec": ("vector", "direction"),
    "vector": ("direction", "values"),
}
"""Key of another tool, or a common one -> the keys that say the same here; the first one that is
allowed is meant."""

FIELDS = {
    "activations": "capture",
    "control_vector": "steering_vectors",
    "control_vectors": "steering_vectors",
    "hook": "capture",
    "hooks": "capture",
    "inline": "capture",
    "modules": "steering_modules",
    "operations": "steering",
    "ops": "steering",
    "steer": "steering",
    "steering_config": "steering",
    "steering_ops": "steering",
    "vector": "steering_vectors",
    "vectors": "steering_vectors",
}
"""Name that stands where a field of a request belongs -> the field."""


def likely(said: Any, options: Iterable[str], also: Mapping[str, str] = _NONE) -> str:
    """Name the option that was probably meant, to stand behind what was said; "" for no idea.

    Args:
        options: names that are allowed here; so many are compared, the first ones.
        also: a name of another tool, or a common one -> the option it means.
    """
    found = nearest(said, options, also)
    return f" (did you mean {found!r}?)" if found is not None else ""


def nearest(said: Any, options: Iterable[str], also: Mapping[str, str] = _NONE) -> str | None:
    """Find the option that was probably meant; the arguments are those of `likely`."""
    said = plain(said)
    if not isinstance(said, str):
        return None
    word = _bare(said)
    known = {_bare(option): option for option in islice(options, _MOST_LOOKED_AT)}
    elsewhere = [option for option in known.values() if option == also.get(word)]
    alike = [] if word in also else get_close_matches(word, known, 1, _ALIKE)
    found = elsewhere or [known[one] for one in alike]
    return found[0] if found else None


def _bare(name: str) -> str:
    """A name without what people mix up, and not longer than is compared."""
    return name[:_MOST_COMPARED].lower().replace("-", "_")


def likely_key(said: str, given: Iterable[Any], allowed: Sequence[str]) -> str:
    """Name the key that was probably meant, as `likely` does: one that is not given."""
    there = {key for key in islice(given, _MOST_LOOKED_AT) if isinstance(key, str)}
    free = [key for key in allowed if key not in there]
    also = {name: key for name, keys in _KEYS.items() for key in reversed(keys) if key in free}
    return likely(said, free, also)


def first_likely(given: Iterable[Any], needed: str) -> str:
    """Show the first key that was probably meant for one that is needed; "" if there is none."""
    for key in islice(given, _MOST_LOOKED_AT):
        if isinstance(key, str) and needed in _KEYS.get(key, ()):
            return repr(key)
    return ""
