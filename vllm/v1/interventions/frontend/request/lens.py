# SPDX-License-Identifier: Apache-2.0
"""Parsing and checks of what a request may say about a lens."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.interventions.errors import need_mapping, refuse_unknown_keys, reject, show
from vllm.v1.interventions.frontend.request.budget import Unit
from vllm.v1.interventions.frontend.request.selectors import Prompt
from vllm.v1.interventions.makings import LensRead
from vllm.v1.interventions.plan import Selection, Site
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.values import plain, plain_list

MAX_TOP = 128
"""The most of the likeliest tokens that may be asked for."""
MAX_TOKENS = 32
"""The most tokens that may be named."""
MAX_TEXT = 256
"""The most characters of one that is given as text."""

_RANK = 128
"""Number of products that take as long as one number that is read from memory."""
_KEYS = ("name", "top_k", "tokens", "entropy")


def lens_read(
    value: Any, path: str, sites: Sequence[Site], shape: TapShape, prompt: Prompt
) -> LensRead:
    """Parse `{"name": ..., "top_k": ..., "tokens": [...], "entropy": ...}`.

    Args:
        value: the user's mapping.
        path: its own, for errors.
        sites: whose rows are read.
        shape: what the model offers.
        prompt: has the tokenizer that makes tokens of texts.

    Raises:
        ValueError: an unknown key or lens, a site that the lens does not read, nothing asked for, a
            number out of range, a token that is none, or a text that is not one token.
    """
    asked = {plain(key): plain(entry) for key, entry in need_mapping(value, path).items()}
    refuse_unknown_keys(asked, _KEYS, path)
    if not shape.lenses:
        reject(path, "needs an engine started with capture_lens (--capture-lens logit)")
    name = asked.get("name")
    if not isinstance(name, str) or name not in shape.lenses:
        reject(f"{path}.name", f"unknown lens {show(name)}; known are {', '.join(shape.lenses)}")
    for point, layer in sites:
        if (point, layer) not in shape.lenses[name]:
            reject(f"{path}.name", f"lens {name} does not read {point} of layer {layer}")
    top_k, entropy = asked.get("top_k", 0), asked.get("entropy", False)
    most = min(MAX_TOP, shape.vocab_size)
    if not isinstance(top_k, int) or isinstance(top_k, bool) or not 0 <= top_k <= most:
        reject(f"{path}.top_k", f"must be an int from 0 to {most}, got {show(top_k)}")
    if not isinstance(entropy, bool):
        reject(f"{path}.entropy", f"must be true or false, got {show(entropy)}")
    listed = plain_list(asked.get("tokens", ()))
    # A slice, because a `range` may be longer than len() can say.
    if listed is None or len(listed[: MAX_TOKENS + 1]) > MAX_TOKENS:
        reject(f"{path}.tokens", f"must be a list of at most {MAX_TOKENS} ids or texts of a token")
    tokens = tuple(
        _token(plain(one), f"{path}.tokens[{i}]", shape, prompt) for i, one in enumerate(listed)
    )
    if not (top_k or tokens or entropy):
        reject(path, "asks for nothing: give top_k, tokens or entropy")
    return LensRead(name, top_k, tokens, entropy)


def _token(value: Any, path: str, shape: TapShape, prompt: Prompt) -> int:
    """The id of a token."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value < shape.vocab_size:
            reject(path, f"token {show(value)} is out of range, there are 0-{shape.vocab_size - 1}")
        return value
    surrogates = isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value[:MAX_TEXT])
    if not isinstance(value, str) or len(value) > MAX_TEXT or surrogates:
        reject(path, f"must be an id or a text of at most {MAX_TEXT} characters, got {show(value)}")
    if prompt.tokenizer is None:
        reject(
            path,
            "needs a tokenizer, and the engine was started with skip_tokenizer_init; give ids",
        )
    ids = prompt.tokenizer.encode(value, add_special_tokens=False)
    if len(ids) != 1:
        reject(
            path,
            f"{show(value)} is {len(ids)} tokens, not one: a space before a word belongs to it; or "
            "give an id",
        )
    return ids[0]


def charge_lenses(
    selections: Mapping[str, Selection], runs: list[int], shape: TapShape, prompt: Prompt, path: str
) -> None:
    """Count what heads multiply for the prompt's rows, which are made in steps that all requests
    share. A generated token is one in each step, and the step's budget has room for so many.

    Args:
        selections: by name, of a request.
        runs: all positions that it captures, as `Selection.runs`.
    """
    rows = len(Positions.from_flat(runs).below(len(prompt.token_ids)))
    hidden, vocab = shape.hidden_size, shape.vocab_size
    for name, selection in selections.items():
        if isinstance(selection.reads, LensRead):
            # The head, a matrix of the lens before it, and one look at all logits for each rank.
            each = hidden * (hidden + vocab) + _RANK * len(selection.reads.tokens) * vocab
            number = rows * len(selection.sites) * each * prompt.work.n
            prompt.work.charge(number >> 24, Unit.PRODUCTS, f"{path}.{name}.lens")
