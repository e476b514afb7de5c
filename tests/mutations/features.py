# SPDX-License-Identifier: Apache-2.0
"""Mistakes in activations, in what features write, and in gates that latch, each a change of a
module's source text."""

from __future__ import annotations

from tests.mutations.rules import Mistake
from vllm.model_executor.layers import steering_terms
from vllm.v1.features import autoencoder

_SHIFT = """    read = rows.clone() if terms.encodes else rows
    if shift is not None and len(shift):
        rows = rows + shift[tokens]
"""
_LATE = """    if shift is not None and len(shift):
        rows = rows + shift[tokens]
    read = rows.clone() if terms.encodes else rows
"""

_OF_FILES = {
    "b_dec is added": ("bias = bias - gain * moved", "bias = bias + gain * moved"),
    "b_dec is subtracted before the gain": ("bias = bias - gain * moved", "bias = bias - moved"),
    "b_dec stays": ("if made.subtracts:", "if False:"),
    "the gain is of the bias, too": (
        "torch.addcmul(self.bias, products, self.gain)",
        "(self.bias + products) * self.gain",
    ),
    "active at the threshold": ("before > self.threshold", "before >= self.threshold"),
    "one more stays of TopK": ("activations.topk(self.k)", "activations.topk(self.k + 1)"),
    "a decoder of length 1": (
        "return self.decoder[number].float() * self.decoder_gain[number]",
        "return torch.nn.functional.normalize(self.decoder[number].float(), dim=0)",
    ),
    "another feature's decoder": ("return self.decoder[number]", "return self.decoder[number - 1]"),
    "decodes without b_dec": ("decoded += self.decoder_bias", "pass"),
    "decodes without its gain": ("(activations.float() * self.decoder_gain) @", "activations @"),
    "reconstructs without b_dec": (
        "self.products(activations) + self.decoder_bias",
        "self.products(activations)",
    ),
    "reconstructs without its gain": (
        "weights = (activations * self.decoder_gain)",
        "weights = activations",
    ),
    "reconstructs in units of the encoder": (
        "return self.unscaled(self.products(",
        "return (lambda made, scaled: made)(self.products(",
    ),
}
_OF_TERMS = {
    "active at the threshold": ('active = before > at["above"]', 'active = before >= at["above"]'),
    "one feature after the other": (
        "_apply_term(rows[acting], read[acting],",
        "_apply_term(rows[acting], rows[acting],",
    ),
    "no bias": ('.sum(dim=1) + at["bias"]', ".sum(dim=1)"),
    "also where it is not active": ('(at["active"] != 0) & ~active', "active & ~active"),
    "features read what is reconstructed": (_SHIFT, _LATE),
    "each row for itself": ("value[mine] = value[mine].cummax(0).values", "pass"),
    "nothing from the step before": ('if not at["begins"][mine[0]]:', "if False:"),
    "what it knew before it began": ('if not at["begins"][mine[0]]:', "if True:"),
    "a rejected draft's": ("kept[own[0] - 1]", "kept[own[0] - 2]"),
}

OF_FILES = [Mistake(name, autoencoder, *change) for name, change in _OF_FILES.items()]
OF_TERMS = [Mistake(name, steering_terms, *change) for name, change in _OF_TERMS.items()]
