# SPDX-License-Identifier: Apache-2.0
"""Attention weights of pages, without an engine: the formula in float64 beside the reader's, with
everything that a layer may do to its products, in all orders of pages."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm.v1.interventions.makings import Attention
from vllm.v1.interventions.worker.attention import keys as layer_reader
from vllm.v1.interventions.worker.attention import products as paged_products
from vllm.v1.interventions.worker.attention import reader as attention_reader
from vllm.v1.interventions.worker.attention.keys import LayerReader, Queriers
from vllm.v1.interventions.worker.attention.latent import LatentReader
from vllm.v1.interventions.worker.attention.pages import Pages, Sight, pages_of
from vllm.v1.interventions.worker.attention.reader import AttentionReader

pytestmark = [pytest.mark.quick, pytest.mark.v2]

HEADS, KEY_HEADS, WIDTH, WIDTH_V, BLOCK, KEYS = 6, 2, 8, 5, 4, 23
PLAIN = Sight(0.3, 0.0, 0, 0, None, None)
SLOPES = torch.linspace(0.05, 0.4, HEADS)
SINKS = torch.linspace(-1.0, 2.0, HEADS)
SIGHTS = {
    "plain": PLAIN,
    "cap": PLAIN._replace(cap=0.5),
    "window": PLAIN._replace(window=6),
    "chunk": PLAIN._replace(chunk=8),
    "slopes": PLAIN._replace(slopes=SLOPES),
    "sinks": PLAIN._replace(sinks=SINKS),
    "all": Sight(0.3, 0.7, 9, 16, SLOPES, SINKS),
}


def exact(q: torch.Tensor, k: torch.Tensor, t: int, head: int, sight: Sight) -> torch.Tensor:
    """The weights of one query, key by key, in float64: docs/attention.md."""
    logits, total = {}, 0.0
    for j in range(t + 1):
        if sight.window and j <= t - sight.window:
            continue
        if sight.chunk and j // sight.chunk != t // sight.chunk:
            continue
        s = sight.scale * float(q.double() @ k[j].double())
        s = sight.cap * torch.tensor(s / sight.cap).double().tanh().item() if sight.cap else s
        s += float(sight.slopes[head]) * (j - t) if sight.slopes is not None else 0.0
        logits[j] = torch.tensor(s).double().exp().item()
        total += logits[j]
    if sight.sinks is not None:
        total += sight.sinks[head].double().exp().item()
    return torch.tensor([logits.get(j, 0.0) / total for j in range(KEYS)], dtype=torch.float64)


def layer_of(sight: Sight, monkeypatch: pytest.MonkeyPatch) -> tuple[LayerReader, torch.Tensor]:
    """A layer with 7 blocks, and the keys of the request in row 1 of its table, [KEYS, K, D]."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(9, KEY_HEADS, BLOCK, WIDTH, generator=generator)
    table = torch.zeros(3, 8, dtype=torch.int32)
    table[1, :6] = torch.tensor([7, 2, 8, 1, 5, 3])
    monkeypatch.setattr(layer_reader, "pages_of", lambda module: Pages(keys, keys))
    monkeypatch.setattr(layer_reader, "sight_of", lambda module: sight)
    module: Any = SimpleNamespace(head_size=WIDTH, num_heads=HEADS, num_kv_heads=KEY_HEADS)
    mine = keys[table[1, :6].long()].transpose(1, 2).flatten(0, 1)[:KEYS]
    return LayerReader(module, table), mine


@pytest.mark.parametrize("name", SIGHTS)
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_weights(name: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is given of three queries, however few are read at a time."""
    monkeypatch.setattr(attention_reader, "CHUNK_BYTES", chunk_bytes)
    layer, keys = layer_of(SIGHTS[name], monkeypatch)
    heads, at = (0, 2, 3, 5), torch.tensor([2, 11, KEYS - 1])
    q = torch.randn(3, len(heads), WIDTH, generator=torch.Generator().manual_seed(2))
    want, twin = (
        torch.stack(
            [
                exact(q[i, n], keys[:, head * KEY_HEADS // HEADS], t, head, sight)
                for i, t in enumerate(at.tolist())
                for n, head in enumerate(heads)
            ]
        ).view(3, len(heads), KEYS)
        for sight in (SIGHTS[name], PLAIN._replace(scale=0.33))
    )
    give = ("mass", "peak", "top", "weights")
    read = Attention(give, ("a", "b"), ((0, 3), (5, 6, 8, 100)), 4, "", KEYS)
    reader = AttentionReader({3: layer}, torch.device("cpu"))
    sites, device = reader.sites([(3, heads)]), torch.device("cpu")
    asked = Queriers.of([1], [3], [read.ranges], device)
    made = reader.read(read.grouped(), sites, q.flatten(1), at, asked, KEYS)
    assert made.shape == (3, 1, read.width(len(heads), 0))
    mass, peak, numbers, top, weights = (
        made[:, 0]
        .unflatten(1, (len(heads), -1))
        .split([field.width for field in read.fields], dim=2)
    )
    assert (weights - want).abs().max() < 1e-6
    assert (weights - twin).abs().max() > 1e-3
    b = [5, *range(8, KEYS)]
    assert torch.allclose(
        mass.double(), torch.stack([want[..., :3].sum(-1), want[..., b].sum(-1)], -1), atol=1e-6
    )
    assert torch.allclose(
        peak.double(), torch.stack([want[..., :3].amax(-1), want[..., b].amax(-1)], -1), atol=1e-6
    )
    best = want.topk(4)
    assert torch.allclose(top.double(), best.values, atol=1e-6)
    said = numbers.view(torch.int32)
    assert torch.equal(said, best.indices.to(torch.int32).where(best.values > 0, -1))
    for over, total in (("heads", want.sum(1)), ("all", want.sum(1))):
        summed = Attention(("weights",), (), (), 0, over, KEYS)
        asked = Queriers.of([1], [3], [summed.ranges], device)
        got = reader.read(summed.grouped(), sites, q.flatten(1), at, asked, KEYS)
        assert (got[:, 0] - total).abs().max() < 3e-6


def test_requests_of_a_step_have_their_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind a request's last token may be anything."""
    layer, _ = layer_of(PLAIN, monkeypatch)
    layer.pages.keys[8, :, 1:] = float("nan")  # row 1: keys from 9 on
    q = torch.randn(2, WIDTH)
    read = Attention(("weights",), (), (), 0, "", KEYS)
    reader = AttentionReader({0: layer}, torch.device("cpu"))
    asked = Queriers.of([1, 2], [1, 1], [(), ()], q.device)
    made = reader.read(read, reader.sites([(0, (4,))]), q, torch.tensor([8, 3]), asked, KEYS)
    weights = made[:, 0]
    assert torch.allclose(weights.sum(-1), torch.ones(2)) and not weights[:, 9:].any()
    assert torch.allclose(weights[1, :4], (q[1] @ layer.pages.keys[0, 1].T * 0.3).softmax(-1))


def test_pages() -> None:
    """Of most backends: each token's key and value side by side."""
    keys, values = torch.randn(3, KEY_HEADS, BLOCK, WIDTH), torch.randn(3, KEY_HEADS, BLOCK, WIDTH)
    module: Any = SimpleNamespace(
        kv_cache=torch.cat([keys, values[..., :WIDTH_V]], -1),
        head_size=WIDTH,
        backend=SimpleNamespace(name="TRITON_ATTN"),
    )
    pages = pages_of(module)
    assert torch.equal(pages.keys, keys) and torch.equal(pages.values, values[..., :WIDTH_V])
    assert pages.keys.untyped_storage().data_ptr() == module.kv_cache.untyped_storage().data_ptr()


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_pages_of_a_cpu(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders of CPU_ATTN: what its own op writes is read, each token's at its place."""
    from vllm import _custom_ops as ops

    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("a CPU without AMX")
    tokens, width, number = 64, 96, 150
    cache = torch.zeros(4, KEY_HEADS, tokens, 2 * width, dtype=torch.bfloat16)
    # As upstream's attention takes them apart.
    keys, values = cache.view(4, KEY_HEADS, 2 * tokens, width).chunk(2, dim=2)
    given = torch.randn(2, number, KEY_HEADS, width).bfloat16()
    table = torch.tensor([[0, 0, 0], [3, 1, 2]], dtype=torch.int32)
    slots = torch.arange(number)
    slots = table[1, slots // tokens].long() * tokens + slots % tokens
    ops.cpu_attn_reshape_and_cache(given[0], given[1], keys, values, slots, isa)
    module: Any = SimpleNamespace(
        kv_cache=cache, head_size=width, num_heads=HEADS, num_kv_heads=KEY_HEADS, isa=isa,
        backend=SimpleNamespace(name="CPU_ATTN"),
    )  # fmt: skip
    monkeypatch.setattr(layer_reader, "sight_of", lambda module: PLAIN)
    reader = LayerReader(module, table)
    assert reader.pages.tokens == tokens
    for pages, rows in zip(reader.pages, given, strict=True):
        assert pages.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
        for head in range(KEY_HEADS):
            read = reader.rows(pages, 1, head, number)
            assert torch.equal(read, rows[:, head])
            assert not torch.equal(read, rows[:, head - 1])
    other = {"vec": "amx", "vec16": "amx", "amx": "vec"}[isa]
    module.isa = other
    assert not torch.equal(
        LayerReader(module, table).rows(pages_of(module).keys, 1, 0, number), given[0, :, 0]
    )


def test_requests_read_together_have_their_own_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where few queries are read at a time, and a request has several."""
    layer, _ = layer_of(PLAIN, monkeypatch)
    table = layer.table
    table[0, :6] = torch.tensor([4, 6, 0, 3, 1, 2])
    q, at = torch.randn(4, 2 * WIDTH), torch.tensor([5, 20, 3, KEYS - 1])
    give, heads = ("mass", "peak"), (1, 4)
    reads = [Attention(give, ("a",), (runs,), 0, "", KEYS) for runs in ((0, 2, 4, 6), (1, 20))]
    assert reads[0].grouped() == reads[1].grouped() and reads[0] != reads[1]
    reader = AttentionReader({0: layer}, torch.device("cpu"))
    sites = reader.sites([(0, heads)])
    for chunk_bytes in (1, 200, 1 << 20):
        monkeypatch.setattr(attention_reader, "CHUNK_BYTES", chunk_bytes)
        both = Queriers.of([1, 0], [3, 1], [read.ranges for read in reads], q.device)
        # What a request's ranges take does not grow with its queries, nor with the others' ranges.
        assert both.edges.numel() == 4 + 2 and both.bases.shape == (2, 1)
        got = reader.read(reads[0].grouped(), sites, q, at, both, KEYS)
        for own, place, read in ((slice(0, 3), 1, reads[0]), (slice(3, 4), 0, reads[1])):
            alone = Queriers.of([place], [own.stop - own.start], [read.ranges], q.device)
            want = reader.read(read.grouped(), sites, q[own], at[own], alone, KEYS)
            assert torch.allclose(got[own], want, atol=1e-6)
        other = Queriers.of([1, 0], [3, 1], [reads[1].ranges, reads[0].ranges], q.device)
        assert (reader.read(reads[0].grouped(), sites, q, at, other, KEYS) - got).abs().max() > 0.02


def test_ranges_are_looked_up_once_for_all_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many queries and parts there are: what is looked up is ranges times keys."""
    layer, _ = layer_of(PLAIN, monkeypatch)
    looked_up: list[int] = []
    bucketize = torch.bucketize

    def counted(values: torch.Tensor, edges: torch.Tensor, **how: Any) -> torch.Tensor:
        looked_up.append(values.numel())
        return bucketize(values, edges, **how)

    monkeypatch.setattr(torch, "bucketize", counted)
    ranges = tuple((n % 9, n % 9 + 7, 18, 19 + n % 3) for n in range(64))
    reader, number = AttentionReader({0: layer}, torch.device("cpu")), 40
    sites, at = reader.sites([(0, (4,))]), torch.arange(number) % KEYS
    q = torch.randn(number, WIDTH)
    every = Attention(("weights",), (), (), 0, "", KEYS)
    asked = Queriers.of([1], [number], [()], q.device)
    weights = reader.read(every, sites, q, at, asked, KEYS)[:, 0]
    want = torch.stack(
        [weights[:, [*range(a, b), *range(c, d)]].sum(1) for a, b, c, d in ranges], 1
    )
    read = Attention(("mass",), tuple(map(str, range(64))), ranges, 0, "", KEYS)
    for chunk_bytes in (1, 1 << 20):
        monkeypatch.setattr(attention_reader, "CHUNK_BYTES", chunk_bytes)
        asked = Queriers.of([1], [number], [ranges], q.device)
        mass = reader.read(read.grouped(), sites, q, at, asked, KEYS)[:, 0]
        assert (mass - want).abs().max() < 1e-6
        assert looked_up == [64 * KEYS]
        looked_up.clear()


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton is not interpreted")
@pytest.mark.parametrize("width", [8, 5])
def test_the_kernel_makes_the_same_products(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pages whose keys and values lie side by side, with more keys than one program reads."""
    monkeypatch.setattr(paged_products, "_KEYS", 16)
    cache = torch.randn(9, KEY_HEADS, BLOCK, width + WIDTH_V)
    monkeypatch.setattr(layer_reader, "pages_of", lambda module: Pages(cache[..., :width], cache))
    monkeypatch.setattr(layer_reader, "sight_of", lambda module: PLAIN)
    module: Any = SimpleNamespace(head_size=width, num_heads=HEADS, num_kv_heads=KEY_HEADS)
    table = torch.stack([torch.randperm(9)[:6] for _ in range(3)]).int()
    key_heads = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    check_the_kernel(LayerReader(module, table), key_heads, torch.randn(3, 4, width))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton is not interpreted")
def test_the_kernel_makes_the_same_products_of_a_latent_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Absorbed queries with latents, which are the formula's: each head's keys made of them."""
    monkeypatch.setattr(paged_products, "_KEYS", 16)
    plain, rotated, latent = 6, 3, 7
    weight = torch.randn(HEADS, plain, latent)
    cache = torch.randn(9, 1, BLOCK, latent + rotated)
    monkeypatch.setattr(layer_reader, "pages_of", lambda module: Pages(cache, cache))
    monkeypatch.setattr(layer_reader, "sight_of", lambda module: PLAIN)
    module: Any = SimpleNamespace(
        head_size=latent + rotated, qk_head_dim=plain + rotated, num_heads=HEADS, num_kv_heads=1,
        get_parameter=lambda name: {"W_UK_T": weight}[name],
    )  # fmt: skip
    table = torch.stack([torch.randperm(9)[:6] for _ in range(3)]).int()
    layer, q = LatentReader(module, table), torch.randn(3, 4, plain + rotated)
    made = check_the_kernel(layer, torch.zeros(4, dtype=torch.int32), q)
    for i, place in enumerate(PLACES):
        rows = cache[table[place].long(), 0].flatten(0, 1)[:KEYS]
        for n, head in enumerate(READ_HEADS):
            keys = torch.cat([rows[:, :latent] @ weight[head].T, rows[:, latent:]], 1)
            want, last = PLAIN.scale * keys @ q[i, n], AT[i] + 1
            assert torch.allclose(made[i, n, :last], want[:last], atol=1e-5)
            assert (made[i, n - 1, :last] - want[:last]).abs().max() > 0.1


PLACES, READ_HEADS, AT = (2, 0, 1), (0, 2, 3, 5), (2, 15, KEYS - 1)


def check_the_kernel(layer: LayerReader, key_heads: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Its products, [3, 4, KEYS], are those of the PyTorch road, up to each query's own key."""
    at = torch.tensor(AT)
    queriers = Queriers.of(PLACES, [1, 1, 1], [()] * 3, q.device)
    want = torch.empty(3, 4, KEYS)
    layer.products(q, READ_HEADS, key_heads, at, queriers, want)
    both = torch.full((3, 2, 4, KEYS), float("nan"))
    paged_products.paged_products(
        layer.for_pages(q, READ_HEADS).contiguous(), layer.pages.keys, key_heads, layer.table,
        queriers.requests, at, PLAIN.scale, both[:, 1],
    )  # fmt: skip
    for i, t in enumerate(AT):
        made = both[i, 1, :, : t + 1]
        assert torch.allclose(made, want[i, :, : t + 1], atol=1e-5)
        assert (made - want[(i + 1) % 3, :, : t + 1]).abs().max() > 0.1
        assert both[i, 1, :, t + 1 :].isnan().all() and both[:, 0].isnan().all()
    return both[:, 1]
