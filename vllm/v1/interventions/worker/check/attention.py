# SPDX-License-Identifier: Apache-2.0
"""Start-up proof of attention weights: with them, values give what attention returns.

Which keys a layer sees, in which order a backend has them and what it does with their products is
nowhere promised. So a token attends to blocks of random numbers, in the code and graphs that will
serve, and for each layer the sum of its weights times values has to be its captured z. It holds for
any keys, so no prompt has to run. Layers where it fails are refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.config.points import ATTENTION_POINTS
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.interventions.focus import FACTOR, SHARE
from vllm.v1.interventions.worker.attention.keys import LayerReader, Queriers
from vllm.v1.interventions.worker.attention.latent import LatentReader
from vllm.v1.interventions.worker.attention.layers import KeyTable
from vllm.v1.interventions.worker.attention.pages import unreadable
from vllm.v1.interventions.worker.attention.reader import AttentionReader

if TYPE_CHECKING:
    from vllm.v1.interventions.worker.runner import WorkerInterventions

logger = init_logger(__name__)

TOLERANCE = {torch.float32: 1e-4}
"""Distance that a head of z may be off, relative to its norm; ROUNDED where the dtype is not
here."""
ROUNDED = 1e-2

_FOCUSED: tuple[tuple[int, float], ...] = (FACTOR, 4.0), (SHARE, 0.9)
"""Rule and number of each focus that is proved of layers that may be focused."""

Fill = Callable[[Sequence[torch.Tensor]], None]
"""Writes to block tables of the runner, one a group."""
AttendingRun = Callable[[int, Fill], Any]
"""Runs dummy tokens whose last key is at a position, with block tables as written."""


def prove_attention(
    interventions: "WorkerInterventions",
    tables: Mapping[int, KeyTable],
    run: AttendingRun,
    most_keys: int,
) -> dict[int, str]:
    """Find out of which layers weights can be read, and have those read.

    Args:
        tables: of each layer with attention.
        most_keys: with how many a dummy token may run; it would get fewer than asked for.

    Returns:
        Why, of each other layer with queries and z.
    """
    shape, capture = interventions.shape, interventions.capture
    if shape is None or capture is None or not capture.reads_attention:
        why = "its start-up proof needs q and z among capture_points"
        return dict.fromkeys(interventions.attention, why)
    unread: dict[int, str] = {}
    tp = get_tp_group()
    focused = {} if interventions.focus is None else interventions.focus.table.at
    layers: dict[int, LayerReader] = {}
    for layer, module in interventions.attention.items():
        why = unreadable(module)
        if why:
            unread[layer] = why
            continue
        table, rank = tables[layer].pages, tp.rank_in_group
        if isinstance(module, MLAAttention):
            layers[layer] = LatentReader(module, table, rank)
        else:
            layers[layer] = LayerReader(module, table, rank, focused.get(layer))
    needed = sum(shape.arena_rows((p, layer)) for layer in layers for p in ATTENTION_POINTS)
    if needed > len(capture.arena):
        why = f"its start-up proof needs capture_buffer_bytes={needed * shape.row_bytes} or more"
        unread |= dict.fromkeys(layers, why)
        layers.clear()
    for layer, error in _errors(interventions, layers, tables, run, most_keys).items():
        limit = TOLERANCE.get(shape.torch_dtype, ROUNDED)
        if not error <= limit:
            backend = interventions.attention[layer].attn_backend.get_name()
            unread[layer] = (
                f"on backend {backend} the start-up proof is off by {error:.1e}, allowed is "
                f"{limit:g}"
            )
            del layers[layer]
    if unread:
        logger.warning("attention weights cannot be read of layers %s", unread)
    ranks = tp.device_group if tp.world_size > 1 else None
    capture.read_attention(AttentionReader(layers, capture.arena.device, ranks))
    return unread


def _errors(
    interventions: "WorkerInterventions",
    layers: Mapping[int, LayerReader],
    tables: Mapping[int, KeyTable],
    run: AttendingRun,
    most_keys: int,
) -> dict[int, float]:
    """Distance that z is off in each layer, the worst head."""
    if not layers:
        return {}
    shape, capture = interventions.shape, interventions.capture
    assert shape is not None and capture is not None
    arena = capture.arena
    rows, needed = shape.arena_places((p, layer) for layer in layers for p in ATTENTION_POINTS)
    blocks, keys = _lend(layers, tables, most_keys)
    lent = {layer: tables[layer].pages_of(blocks[tables[layer].group]) for layer in layers}
    generator = torch.Generator(arena.device).manual_seed(0)
    for layer, reader in layers.items():
        for pages in reader.pages:
            shape_of = (len(lent[layer]), *pages.shape[1:])
            noise = torch.randn(shape_of, generator=generator, device=arena.device)
            pages[lent[layer].long()] = noise.to(pages.dtype)

    def fill(of_groups: Sequence[torch.Tensor]) -> None:
        for group, numbers in blocks.items():
            of_groups[group][:, : len(numbers)] = numbers.to(of_groups[group].device)

    errors = dict.fromkeys(layers, 0.0)
    focus = interventions.focus
    for wanted in (None, *(() if focus is None else _FOCUSED)):
        program = 0
        if focus is not None and wanted is not None:
            program = focus.probe(*wanted, keys)
        with interventions.capturing(rows, needed, focused=(program, keys - 1)):
            run(keys - 1, fill)
            for layer, reader in layers.items():
                q, z = (
                    arena[rows[site] : rows[site] + shape.arena_rows(site)]
                    .flatten()[: shape.row_width(site)]
                    .view(*shape.parts(site))[reader.heads.start : reader.heads.stop]
                    for site in ((p, layer) for p in ATTENTION_POINTS)
                )
                made, z = attended(reader, q, lent[layer], keys, program), z.float()
                off = (made - z).norm(dim=-1) / z.norm(dim=-1).clamp_min(1e-6)
                # NaN, too, is an error.
                errors[layer] = float(torch.maximum(off.max(), off.new_tensor(errors[layer])))
    if focus is not None:
        focus.table.forget()
        focus.warm()
    for layer, reader in layers.items():
        for pages in reader.pages:
            pages[lent[layer].long()] = 0
    return errors


def _lend(
    layers: Mapping[int, LayerReader], tables: Mapping[int, KeyTable], most_keys: int
) -> tuple[dict[int, torch.Tensor], int]:
    """Blocks of each group, of its own since groups share memory, and how many keys they have: more
    than a window or chunk where there is room."""
    first = {tables[layer].group: layer for layer in layers}
    sights = [reader.sight for reader in layers.values()]
    # Of a block, which may have several pages.
    tokens = {n: r.pages.tokens * tables[n].pages_a_block for n, r in layers.items()}
    number = {n: len(layers[n].pages.keys) // tables[n].apart for n in first.values()}
    keys = max(max(sight.window, sight.chunk) for sight in sights)
    keys += 2 * max(tokens.values()) + 1
    keys = min(keys, most_keys)
    for n in first.values():
        keys = min(keys, tokens[n] * (number[n] // (max(first) + 2)))
        keys = min(keys, layers[n].pages.tokens * tables[n].pages.shape[1])
    blocks = {}
    for group, n in first.items():
        # From the end: what other mixers of a dummy run write to are the first ones.
        size = -(-keys // tokens[n])
        stop = number[n] - group * size
        blocks[group] = torch.arange(
            stop - size, stop, dtype=torch.int32, device=tables[n].pages.device
        ).flip(0)
    return blocks, keys


def attended(
    reader: LayerReader, q: torch.Tensor, pages: torch.Tensor, keys: int, program: int
) -> torch.Tensor:
    """The sum of weights times values of a query at the last key, [heads, E], by the reader; under
    a focus program, 0 for none. The query is of the model's dtype, as those that requests capture
    are, so that no request waits for a kernel."""
    [sites] = AttentionReader({0: reader}, q.device).sites([(0, tuple(reader.heads))])
    kept = reader.table[0].clone()
    reader.table[0, : len(pages)] = pages
    at = torch.tensor([keys - 1], device=q.device)
    programs = torch.tensor([program], device=q.device) if program else None
    queriers = Queriers.of([0], [1], [()], q.device)._replace(programs=programs)
    weights, _ = sites.weights(q.view(1, -1), at, queriers, keys)
    [made] = reader.attended(weights[:, 0], 0, range(weights.shape[2]))
    reader.table[0] = kept
    return made
