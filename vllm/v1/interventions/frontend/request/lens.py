# SPDX-License-Identifier: Apache-2.0
"""Parsing and checks of what a request may say about a lens."""

from collections.abc import Mapping, Sequence

from vllm.v1.interventions.frontend.request.budget import Unit
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.makings import Lens
from vllm.v1.interventions.plan import Selection, Site
from vllm.v1.interventions.positions import Positions
from vllm.v1.interventions.shape import TapShape

MAX_TOP = 128
"""The most of the likeliest tokens that may be asked for."""
MAX_TOKENS = 32
"""The most tokens that may be named."""
MAX_TEXT = 256
"""The most characters of one that is given as text."""


def lens_making(given: Given, sites: Sequence[Site], shape: TapShape, prompt: Prompt) -> Lens:
    """Parse `{"name": ..., "top_k": ..., "tokens": [...], "entropy": ...}`.

    Args:
        given: the user's mapping.
        sites: whose rows are read.
        shape: what the model offers.
        prompt: has the tokenizer that makes tokens of texts.

    Raises:
        ValueError: an unknown key or lens, a site that the lens does not read, nothing asked for, a
            number out of range, a token that is none, or a text that is not one token.
    """
    asked = given.fields(allowed=("name", "top_k", "tokens", "entropy"))
    if not shape.lenses:
        asked.refuse("needs an engine started with capture_lens (--capture-lens logit)")
    known = ", ".join(shape.lenses)
    name = asked["name"].choice(shape.lenses, f"unknown lens {{given}}; known are {known}")
    for point, layer in sites:
        if (point, layer) not in shape.lenses[name]:
            asked["name"].refuse(f"lens {name} does not read {point} of layer {layer}")
    most = min(MAX_TOP, shape.vocab_size)
    top_k = asked.get("top_k", 0).int(0, most, f"must be an int from 0 to {most}, got {{given}}")
    entropy = asked.get("entropy", False).flag()
    message = f"must be a list of at most {MAX_TOKENS} ids or texts of a token"
    listed = asked.get("tokens", ()).entries(message, most=MAX_TOKENS)
    tokens = tuple(_token(one, shape, prompt) for one in listed)
    if not (top_k or tokens or entropy):
        asked.refuse("asks for nothing: give top_k, tokens or entropy")
    return Lens(name, top_k, tokens, entropy)


def _token(given: Given, shape: TapShape, prompt: Prompt) -> int:
    """The id of a token."""
    value = given.plain()
    if isinstance(value, int) and not isinstance(value, bool):
        most = shape.vocab_size - 1
        return given.int(0, most, f"token {{given}} is out of range, there are 0-{most}")
    surrogates = isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value[:MAX_TEXT])
    if not isinstance(value, str) or len(value) > MAX_TEXT or surrogates:
        given.refuse(f"must be an id or a text of at most {MAX_TEXT} characters, got {{given}}")
    if prompt.tokenizer is None:
        given.refuse(
            "needs a tokenizer, and the engine was started with skip_tokenizer_init; give ids"
        )
    ids = prompt.tokenizer.encode(value, add_special_tokens=False)
    if len(ids) != 1:
        given.refuse(
            f"{{given}} is {len(ids)} tokens, not one: a space before a word belongs to it; or "
            "give an id"
        )
    return ids[0]


def charge_products(
    selections: Mapping[str, Selection], runs: list[int], shape: TapShape, prompt: Prompt, path: str
) -> None:
    """Count what heads and autoencoders multiply for the prompt's rows, which are made in steps
    that all requests share. A generated token is one in each step, and the step's budget has room
    for so many.

    Args:
        selections: by name, of a request.
        runs: all positions that it captures, as `Selection.runs`.
    """
    rows = len(Positions.from_flat(runs).below(len(prompt.token_ids)))
    hidden, vocab = shape.hidden_size, shape.vocab_size
    for name, selection in selections.items():
        if each := selection.making.products(hidden, vocab):
            number = rows * len(selection.sites) * each * prompt.work.n
            prompt.work.charge(
                number >> 24, Unit.PRODUCTS, f"{path}.{name}.{selection.making.field}"
            )
