# SPDX-License-Identifier: Apache-2.0
"""Parser of a request's fields about attention weights: it checks them and finds their
positions."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from vllm.config.points import QUERIES
from vllm.v1.interventions.errors import reject, show
from vllm.v1.interventions.frontend.request.budget import Unit
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.selectors import Selector
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.makings import GIVES, Attention
from vllm.v1.interventions.plan import Selection
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import site_order
from vllm.v1.interventions.values import plain, plain_list

MAX_RANGES = 64
"""The most key ranges that one capture may name."""
MAX_NAME = 64
"""The most characters of a range's name."""
MAX_TOP = 64
"""The most of the largest weights that may be asked for."""

_RANGE_NAME = f"a range's name must be 1-{MAX_NAME} printable characters, got {{given}}"


def attention_selection(
    given: Given, shape: TapShape, prompt: Prompt, fields: dict[str, Any]
) -> Selection:
    """Parse `{"heads": ..., "queries": ..., "keys": {name: selector}, "give": [...]}`.

    Args:
        given: the user's mapping.
        shape: what the model offers.
        prompt: what selectors are resolved on.
        fields: the consumer's own.

    Returns:
        The queries that are captured, with what is given of their attention.

    Raises:
        ValueError: as `need_heads` and `Selector.resolve`; an unknown key; nothing or something
            else to give; ranges, `top` or `sum` without what they are for; a layer whose weights
            cannot be read.
    """
    asked = given.fields(allowed=("heads", "queries", "keys", "give", "top", "sum"))
    if "heads" not in asked:
        asked["heads"].refuse("is missing: give {layers: heads}, layers or 'all'")
    if not any(QUERIES in layer.heads for layer in shape.layers.values()):
        given.refuse("no layer of this model has queries")
    heads = _by_layer(asked["heads"]).heads(QUERIES, shape)
    for layer in heads:
        if why := shape.layers[layer].unread:
            asked["heads"].refuse(f"attention weights of layer {layer} cannot be read: {why}")
    selector = Selector(prompt)
    runs = asked.get("queries", "last_prompt").positions(selector.resolve)
    give = _give(asked["give"])
    ranges = _ranges(asked.get("keys", {}), give, prompt)
    top, summed = _top(asked["top"], give), _sum(asked["sum"], give)
    read = Attention(give, *ranges, top, summed, runs.stop)
    sites = sorted(((QUERIES, layer) for layer in heads), key=site_order)
    return Selection(
        sites=sites,
        runs=runs.flat(),
        named=selector.named.flat(),
        last_generated=selector.only_last_generated,
        heads={(QUERIES, layer): chosen for layer, chosen in heads.items()},
        making=read,
        fields=fields,
    )


def charge_attention(
    selections: Mapping[str, Selection], runs: list[int], prompt: Prompt, path: str
) -> int:
    """Count the weights of the prompt's queries, over all of the prompt's keys: they are made in
    the steps that all requests share, of every captured position. A generated token has one query a
    step.

    Args:
        selections: by name, of a request.
        runs: all positions that it captures, as `Selection.runs`.

    Returns:
        `CapturePlan.key_weights`.
    """
    length, together = len(prompt.token_ids), 0.0
    queries = len(Positions.from_flat(runs).below(length))
    for name, selection in selections.items():
        if passes := selection.making.passes:
            each = passes * sum(map(len, selection.heads.values()))
            number = int(queries * length * each) * prompt.work.n
            prompt.work.charge(number >> 10, Unit.WEIGHTS, f"{path}.{name}.attention")
            together += each
    return ceil(together)


def _by_layer(given: Given) -> Given:
    """Heads given as pairs [layer, head], by layer; anything else as it is."""
    entries = plain_list(given.value) or ()
    pairs = [plain_list(entry) for entry in entries]
    if not pairs or None in pairs:
        return given
    by_layer: dict[Any, list[Any]] = {}
    for i, pair in enumerate(pairs):
        layer = plain(pair[0]) if pair is not None and len(pair) == 2 else None
        if pair is None or not isinstance(layer, int) or isinstance(layer, bool):
            reject(f"{given.path}[{i}]", f"must be [layer, head], got {show(entries[i])}")
        by_layer.setdefault(layer, []).append(pair[1])
    return Given(by_layer, given.path)


def _give(given: Given) -> tuple[str, ...]:
    names = [plain(name) for name in plain_list(given.value) or ()]
    if not names or any(name not in GIVES for name in names):
        given.refuse(f"must be a list of {', '.join(GIVES)}, got {{given}}")
    return tuple(name for name in GIVES if name in names)


def _ranges(
    given: Given, give: tuple[str, ...], prompt: Prompt
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The names of the key ranges, and the positions of each."""
    count = len(given.mapping())
    if bool(count) != ("mass" in give or "peak" in give):
        given.refuse("go with 'mass' and 'peak' in give: name ranges of keys, or neither")
    if count > MAX_RANGES:
        given.refuse(f"has {count} ranges, allowed are 1-{MAX_RANGES}")
    found: dict[str, tuple[int, ...]] = {}
    for key, value in given.items():
        name = key.text(_RANGE_NAME)
        if not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
            key.refuse(_RANGE_NAME)
        selector = Selector(prompt)
        found[name] = tuple(value.positions(selector.resolve).flat())
        if selector.wants_last_generated:
            value.refuse("which position is the last generated one is known only when it is over")
        if not found[name]:
            value.refuse("selects no key")
    return tuple(found), tuple(found.values())


def _top(given: Given, give: tuple[str, ...]) -> int:
    if "top" not in give and given.value is None:
        return 0
    most = MAX_TOP if "top" in give else 0
    return given.int(1, most, f"goes with 'top' in give, and must be 1-{MAX_TOP}, got {{given}}")


def _sum(given: Given, give: tuple[str, ...]) -> str:
    if given.value is None:
        return ""
    sums = ("heads", "all") if give == ("weights",) else ()
    return given.choice(sums, "must be 'heads' or 'all', with ['weights'] alone in give")
