# SPDX-License-Identifier: Apache-2.0
"""Shape of a loaded model: the points, heads and widths it offers, a `LayerShape` a layer."""

from collections import Counter
from collections.abc import Iterable
from math import ceil

import msgspec
import torch

from vllm.config.points import EMBED, FINAL
from vllm.config.steering import FeatureFile
from vllm.v1.interventions.makings import AttentionRule
from vllm.v1.interventions.plan import Site, dtype_of


class LayerShape(msgspec.Struct, frozen=True):
    """Points, heads and branches of a decoder layer."""

    points: tuple[str, ...]
    """Its points of the residual stream."""
    heads: dict[str, tuple[int, int]] = {}
    """Point of its attention -> (heads, width of one), of all tensor-parallel ranks."""
    branches: tuple[str, ...] = ()
    """Its branches that are exactly the difference of two of its points."""
    inputs: tuple[str, ...] = ()
    """Its points of what its branches read."""
    widths: dict[str, int] = {}
    """Point of a module within a branch -> width of its rows, of all tensor-parallel ranks."""
    final: bool = False
    """True if it is the last and the head reads what the model returns, as it is."""
    unread: str = ""
    """Reason why its attention weights cannot be read; empty if they can, or there are none."""
    latent: bool = False
    """True if its attention is over a latent cache (MLA), whose weights cannot be focused."""
    rule: AttentionRule | None = None
    """Rule of its attention, if its weights can be read and queries and keys are captured."""

    def joined(self, other: "LayerShape") -> "LayerShape":
        """The layer as two tensor-parallel ranks report it, each of which has heads of its own."""
        rule: AttentionRule | None = None
        if self.rule is not None and other.rule is not None:
            rule = {**self.rule}
            if "slopes" in rule:
                rule["slopes"] = rule["slopes"] + other.rule["slopes"]
            if "sinks" in rule:
                rule["sinks"] = rule["sinks"] + other.rule["sinks"]
        unread = self.unread or other.unread
        return msgspec.structs.replace(self, unread=unread, rule=rule)


_NOTHING = LayerShape(())


class TapShape(msgspec.Struct, frozen=True):
    """Layers, points and widths that the loaded model offers, reported by the workers at
    start-up."""

    hidden_size: int
    dtype: str
    """Model dtype, torch's name without the prefix: "bfloat16"."""
    layers: dict[int, LayerShape]
    """The layers that have taps, in their order."""
    lenses: dict[str, list[Site]] = {}
    """Lens -> the sites whose rows it can read."""
    features: dict[str, FeatureFile] = {}
    """Name -> sparse autoencoder, of those that can be read."""
    vocab_size: int = 0
    """Number of logits of the head, where there are lenses."""
    token_ids: int = 0
    """Number of token ids that the model can read."""
    lens_rows: int = 0
    """Number of more rows of hidden_size that a row under a lens takes of a step's budget."""
    fuses_focus: bool = False
    """True if kernels focus, which keep no weights; else torch does."""
    lanes: int = 1
    """Number of lanes of hidden_size in the stream."""
    senders: int = 1
    """Number of workers of a pipeline stage that share the rows of a step of many."""
    reads_masked: bool = False
    """True if attention may multiply what it masks, so that a NaN in a block reaches who has it."""
    stop: int | None = None
    """Number of the layer after which the loaded model ends, if it ends early."""
    depth: int = 0
    """Number of layers of the whole model."""
    whole_prompts: bool = False
    """True if a prompt's tokens see each other both ways, so that one step has all of them."""

    def layer(self, number: int) -> LayerShape:
        """Return a layer, or one that offers nothing, if it has no taps."""
        return self.layers.get(number, _NOTHING)

    def offers(self, number: int) -> tuple[str, ...]:
        """Names of the points that can be captured at a layer; the first has what it reads, and the
        last what the head reads."""
        layer = self.layer(number)
        return (
            *(EMBED,) * (number == 0 and self.lanes == 1),
            *layer.points,
            *layer.inputs,
            *layer.heads,
            *layer.widths,
            *layer.branches,
            *(FINAL,) * layer.final,
        )

    def focus_passes(self, runs: int) -> float:
        """Number of times that weights are made or gone through where a span of so many runs is
        focused. A kernel goes through the runs for some keys at a time."""
        return (1 + runs / 8) / 128 if self.fuses_focus else 4

    def parts(self, site: Site) -> tuple[int, int]:
        """Number of heads or lanes of a token's row at a site, and the width of one."""
        point, layer = site[0], self.layer(site[1])
        if point in layer.heads:
            return layer.heads[point]
        if point in layer.widths:
            return 1, layer.widths[point]
        return self.lanes if point in layer.points else 1, self.hidden_size

    def row_width(self, site: Site) -> int:
        """Width of a token's row at a site; of all heads or lanes together."""
        count, width = self.parts(site)
        return count * width

    def arena_rows(self, site: Site) -> int:
        """Rows of hidden_size that a token takes on the device at a site."""
        count, width = self.parts(site)
        return -(-count * width // self.hidden_size)

    def arena_places(self, sites: Iterable[Site]) -> tuple[dict[Site, int], int]:
        """Return the row at which each site of one token begins on the device, site after site, and
        the number of rows of all sites."""
        places, rows = {}, 0
        for site in sites:
            places[site] = rows
            rows += self.arena_rows(site)
        return places, rows

    def share_rows(self, sites: Iterable[Site]) -> int:
        """The most rows of hidden_size that a token takes on one device, of those whose workers
        share these sites by layers."""
        if self.senders == 1:
            return sum(map(self.arena_rows, sites))
        rows: Counter[int] = Counter()
        for site in sites:
            rows[site[1]] += self.arena_rows(site)
        of_layers = ceil(len(rows) / self.senders) * max(rows.values(), default=0)
        return min(of_layers, rows.total())

    @property
    def torch_dtype(self) -> torch.dtype:
        """The model's dtype."""
        return dtype_of(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row at one site."""
        return self.hidden_size * self.torch_dtype.itemsize
