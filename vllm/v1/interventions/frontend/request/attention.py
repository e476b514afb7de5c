# SPDX-License-Identifier: Apache-2.0
"""Parser of a request's fields about attention weights: it checks them and finds their
positions."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from vllm.config.points import QUERIES
from vllm.v1.interventions.errors import need_mapping, refuse_unknown_keys, reject, show, show_key
from vllm.v1.interventions.frontend.request.budget import Unit
from vllm.v1.interventions.frontend.request.selectors import Prompt, Selector
from vllm.v1.interventions.makings import GIVES, AttentionRead
from vllm.v1.interventions.plan import Selection
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_heads, site_order
from vllm.v1.interventions.values import plain, plain_list

MAX_RANGES = 64
"""The most key ranges that one capture may name."""
MAX_NAME = 64
"""The most characters of a range's name."""
MAX_TOP = 64
"""The most of the largest weights that may be asked for."""

_KEYS = ("heads", "queries", "keys", "give", "top", "sum")
_SUMS = ("heads", "all")


def attention_selection(
    value: Any, path: str, shape: TapShape, prompt: Prompt, fields: dict[str, Any]
) -> Selection:
    """Parse `{"heads": ..., "queries": ..., "keys": {name: selector}, "give": [...]}`.

    Args:
        value: the user's mapping.
        path: its own, for errors.
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
    asked = {plain(key): entry for key, entry in need_mapping(value, path).items()}
    refuse_unknown_keys(asked, _KEYS, path)
    if "heads" not in asked:
        reject(f"{path}.heads", "is missing: give {layers: heads}, layers or 'all'")
    if not any(QUERIES in layer.heads for layer in shape.layers.values()):
        reject(path, "no layer of this model has queries")
    heads = need_heads(_of_pairs(asked["heads"], f"{path}.heads"), QUERIES, f"{path}.heads", shape)
    for layer in heads:
        if why := shape.layers[layer].unread:
            reject(f"{path}.heads", f"attention weights of layer {layer} cannot be read: {why}")
    selector = Selector(prompt)
    runs = selector.resolve(asked.get("queries", "last_prompt"), f"{path}.queries")
    give = _give(asked, path)
    read = AttentionRead(
        give,
        *_ranges(asked, give, path, prompt),
        _top(asked, give, path),
        _sum(asked, give, path),
        runs.stop,
    )
    sites = sorted(((QUERIES, layer) for layer in heads), key=site_order)
    return Selection(
        sites=sites,
        runs=runs.flat(),
        named=selector.named.flat(),
        last_generated=selector.only_last_generated,
        heads={(QUERIES, layer): chosen for layer, chosen in heads.items()},
        reads=read,
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
        if isinstance(selection.reads, AttentionRead):
            each = selection.reads.passes * sum(map(len, selection.heads.values()))
            number = int(queries * length * each) * prompt.work.n
            prompt.work.charge(number >> 10, Unit.WEIGHTS, f"{path}.{name}.attention")
            together += each
    return ceil(together)


def _of_pairs(value: Any, path: str) -> Any:
    """Heads given as pairs [layer, head], by layer; anything else as it is."""
    entries = plain_list(value) or ()
    pairs = [plain_list(entry) for entry in entries]
    if not pairs or None in pairs:
        return value
    by_layer: dict[Any, list[Any]] = {}
    for i, pair in enumerate(pairs):
        layer = plain(pair[0]) if pair is not None and len(pair) == 2 else None
        if pair is None or not isinstance(layer, int) or isinstance(layer, bool):
            reject(f"{path}[{i}]", f"must be [layer, head], got {show(entries[i])}")
        by_layer.setdefault(layer, []).append(pair[1])
    return by_layer


def _give(asked: Mapping[str, Any], path: str) -> tuple[str, ...]:
    names = [plain(name) for name in plain_list(asked.get("give", ())) or ()]
    if not names or any(name not in GIVES for name in names):
        reject(
            f"{path}.give", f"must be a list of {', '.join(GIVES)}, got {show(asked.get('give'))}"
        )
    return tuple(name for name in GIVES if name in names)


def _ranges(
    asked: Mapping[str, Any], give: tuple[str, ...], path: str, prompt: Prompt
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """The names of the key ranges, and the positions of each."""
    ranges = need_mapping(asked.get("keys", {}), f"{path}.keys")
    needed = "mass" in give or "peak" in give
    if bool(ranges) != needed:
        reject(f"{path}.keys", "go with 'mass' and 'peak' in give: name ranges of keys, or neither")
    if len(ranges) > MAX_RANGES:
        reject(f"{path}.keys", f"has {len(ranges)} ranges, allowed are 1-{MAX_RANGES}")
    found: dict[str, tuple[int, ...]] = {}
    for key, value in ranges.items():
        name, at = plain(key), f"{path}.keys.{show_key(key)}"
        if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
            reject(
                at, f"a range's name must be 1-{MAX_NAME} printable characters, got {show(name)}"
            )
        selector = Selector(prompt)
        runs = selector.resolve(value, at)
        if selector.wants_last_generated:
            reject(at, "which position is the last generated one is known only when it is over")
        found[name] = tuple(runs.flat())
        if not found[name]:
            reject(at, "selects no key")
    return tuple(found), tuple(found.values())


def _top(asked: Mapping[str, Any], give: tuple[str, ...], path: str) -> int:
    top = plain(asked.get("top"))
    if "top" not in give and top is None:
        return 0
    if (
        "top" not in give
        or not isinstance(top, int)
        or isinstance(top, bool)
        or not 1 <= top <= MAX_TOP
    ):
        reject(f"{path}.top", f"goes with 'top' in give, and must be 1-{MAX_TOP}, got {show(top)}")
    return top


def _sum(asked: Mapping[str, Any], give: tuple[str, ...], path: str) -> str:
    over = plain(asked.get("sum"))
    if over is None:
        return ""
    if over not in _SUMS or give != ("weights",):
        reject(f"{path}.sum", "must be 'heads' or 'all', with ['weights'] alone in give")
    return str(over)
