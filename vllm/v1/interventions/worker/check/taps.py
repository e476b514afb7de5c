# SPDX-License-Identifier: Apache-2.0
"""Start-up check: every bound site moves a row, through the code that will serve.

A stale compile artifact, or a class whose forward lost its calls, makes taps silent no-ops while
everything else looks right. So dummy tokens are driven through the model, compiled and in graphs
as configured, each steered at one site, and each must come out moved.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from vllm.config.points import QUERIES
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.worker.attention.layers import key_tables
from vllm.v1.interventions.worker.attention.pages import rule_of
from vllm.v1.interventions.worker.check.attention import Fill, prove_attention
from vllm.v1.interventions.worker.check.lens import prove_lenses

if TYPE_CHECKING:
    from vllm.v1.interventions.worker.runner import WorkerInterventions
    from vllm.v1.worker.block_table import BlockTable
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.utils import AttentionGroup

logger = init_logger(__name__)

NUM_TOKENS = 2
"""Tokens of a dummy run: should it be the first forward, 1 would be compiled as a constant."""

DummyRun = Callable[[int], Sequence[Any]]
"""Runs dummy tokens of a draw; its first result is the last stage's hidden states, [>= NUM_TOKENS,
hidden]."""


def check_worker(worker: Any) -> TapShape | None:
    """Check the taps of one worker, in its process, after warm-up and graph capture.

    Returns:
        What its layers offer; None if they have no taps.

    Raises:
        RuntimeError: a site does not act.
    """
    runner = worker.worker.model_runner
    interventions: WorkerInterventions = runner.interventions
    if interventions.shape is None:
        return None

    if torch.cpu._is_amx_tile_supported():
        # A process has to ask for AMX. Upstream's attention leaves that to the first large product
        # of oneDNN, and a step of few tokens before it, as the first one here, would end us.
        torch.cpu._init_amx()

    def check(**options: Any) -> None:
        def dummy_run(draw: int) -> Any:
            return _drawn(runner, draw, **options)

        check_sites(interventions, dummy_run)
        if runner.vllm_config.capture_config.capture_lens:
            config, model = runner.vllm_config.capture_config, runner.get_model()
            prove_lenses(interventions, config, model, lambda draw: dummy_run(draw)[0])

    with torch.inference_mode():
        if runner.vllm_config.use_v2_model_runner:
            with _lent_by(runner.block_tables):
                check()

            def run(context: int, fill: Fill) -> None:
                with _lent_by(runner.block_tables, fill), _as_served(runner.attn_groups):
                    _drawn(runner, context_len=context)
        else:
            in_v1 = runner.input_batch.block_table.block_tables
            with _lent_blocks(in_v1):
                # V1 leaves out attention by default, and its output uninitialised.
                check(force_attention=True)

            def run(context: int, fill: Fill) -> None:
                with _lent_blocks(in_v1, fill), _as_served(runner.attn_groups):
                    _drawn(runner, force_attention=True, profile_seq_lens=context + 1)

        shape = interventions.shape
        most_keys = max(runner.max_model_len - NUM_TOKENS, 1)
        tables = key_tables(runner, interventions.attention)
        unread = prove_attention(interventions, tables, run, most_keys)
        interventions.started()
    points = runner.vllm_config.capture_config.capture_points
    layers = dict(shape.layers)
    for layer, module in interventions.attention.items():
        why, heads, rule = unread.get(layer, ""), layers[layer].heads, None
        if isinstance(module, Attention) and not why and "k" in heads and "k" in points:
            rule = rule_of(module, heads[QUERIES][0] // heads["k"][0])
        latent = not isinstance(module, Attention)
        layers[layer] = msgspec.structs.replace(layers[layer], unread=why, latent=latent, rule=rule)
    return msgspec.structs.replace(shape, layers=layers)


def _drawn(runner: Any, draw: int = 0, **options: Any) -> Any:
    """Run dummy tokens that are drawn, alike in each run of a draw and on all ranks.

    Those of upstream are all token 0, whose embedding may be zero (of padding), and where a model
    gets embeddings, none: a stream of zeros would prove nothing.
    """
    embeds = None
    if not runner.vllm_config.use_v2_model_runner:
        embeds = runner.inputs_embeds.gpu[:NUM_TOKENS]
    elif runner.uses_inputs_embeds and runner.is_first_pp_rank:
        embeds = runner.model_state.dummy_inputs_embeds(NUM_TOKENS)
    devices = [] if runner.device.type == "cpu" else [runner.device]
    with torch.random.fork_rng(devices, device_type=runner.device.type):
        torch.manual_seed(draw)
        if embeds is not None:
            embeds.normal_()
        made = runner._dummy_run(NUM_TOKENS, randomize_inputs=True, **options)
    if embeds is not None:
        embeds.zero_()
    return made


def assign_dummy_blocks(tables: Sequence[torch.Tensor]) -> None:
    """Give dummy requests blocks of their own, one each.

    Without, a mixer with a state (Mamba) does nothing and leaves its output uninitialised; of the
    blocks of a request it takes the one of its last token. No two groups get the same: they share
    memory, and attention would read a mixer's state as keys.

    Args:
        tables: one per group, [requests, blocks], changed in place.
    """
    for group, table in enumerate(tables):
        own = table[:NUM_TOKENS]
        own.copy_(torch.arange(1, len(own) + 1).unsqueeze(1) + group * NUM_TOKENS)


@contextmanager
def _as_served(groups: "Sequence[Sequence[AttentionGroup]]") -> Iterator[None]:
    """Within, dummy runs in full graphs attend as steps do: in the metadata of a recording some
    backends let each request have one key, whatever its context."""
    every = [group for of_cache in groups for group in of_cache]
    for group in every:
        group.build_metadata_for_cudagraph_capture = group.build_metadata  # type: ignore[method-assign]
    try:
        yield
    finally:
        for group in every:
            del group.build_metadata_for_cudagraph_capture


@contextmanager
def _lent_blocks(
    block_tables: "list[BlockTable]", fill: Fill = lambda tables: None
) -> Iterator[None]:
    """Within, the dummy requests of V1 have blocks, and those that `fill` gives them."""
    buffers = [table.block_table for table in block_tables]
    # A dummy run may copy the one to the other.
    both = [buffer.cpu for buffer in buffers], [buffer.gpu for buffer in buffers]
    for tables in both:
        assign_dummy_blocks(tables)
        fill([table[:NUM_TOKENS] for table in tables])
    try:
        yield
    finally:
        for table in (*both[0], *both[1]):
            table[:NUM_TOKENS].zero_()


@contextmanager
def _lent_by(block_tables: "BlockTables", fill: Fill = lambda tables: None) -> Iterator[None]:
    """Within, the dummy requests of V2 have blocks, which it takes from here for each run. (Its own
    way to give them some gives all groups the same.)"""
    take, sizes = block_tables.get_dummy_block_tables, block_tables.block_sizes

    def lent(num_reqs: int) -> tuple[torch.Tensor, ...]:
        tables = take(num_reqs)
        assign_dummy_blocks(tables)
        fill([table[:NUM_TOKENS] for table in tables])
        return tables

    block_tables.get_dummy_block_tables = lent  # type: ignore[method-assign]
    # By these, and for nothing else, a dummy run with context writes over the tables it got.
    block_tables.block_sizes = []
    try:
        yield
    finally:
        block_tables.get_dummy_block_tables = take  # type: ignore[method-assign]
        block_tables.block_sizes = sizes


def check_sites(interventions: "WorkerInterventions", dummy_run: DummyRun) -> None:
    """Raise RuntimeError naming the sites that do not act, if there are any."""
    # One site is steered at a time: attention would carry one token's vector into another's row.
    silent = [
        site
        for sites in _parts(interventions)
        for site, row in _unsteered(interventions, sites, dummy_run).items()
        if not _acts(interventions, site, row, dummy_run)
    ]
    if silent:
        raise RuntimeError(
            f"these taps do not act although they are bound: {silent}. The compiled code does not "
            "match the wired model: clear the compile cache (VLLM_CACHE_ROOT) and start again, "
            "or report this model"
        )


def _parts(interventions: "WorkerInterventions") -> Iterator[list[Site]]:
    """All sites, in parts of which a token's rows fit into the arena; alike on all ranks, of those
    too that capture nothing."""
    shape, capture = interventions.shape, interventions.capture
    assert shape is not None
    part: list[Site] = []
    rows = 0
    for site in interventions.sites:
        if capture is not None and site in capture.sites:
            rows += shape.arena_rows(site)
            if part and rows > capture.most_rows:
                yield part
                part, rows = [], shape.arena_rows(site)
        part.append(site)
    if part:
        yield part


def _unsteered(
    interventions: "WorkerInterventions", sites: list[Site], dummy_run: DummyRun
) -> dict[Site, torch.Tensor | None]:
    """The row of a dummy token at each site or, where this worker captures none, the model's output
    of it: [width], None if it has neither or if what was captured is wrong.

    A forward captures those sites whose number, counted from 1, has a certain bit. No two are in
    the same forwards: a site that writes to another's rows is seen, too.
    """
    shape = interventions.shape
    assert shape is not None
    places, size = shape.arena_places(filter(interventions.captures, sites))
    rows: dict[Site, torch.Tensor | None] = {}
    wrong = set()
    # Forwards are collective: all ranks run as many, whatever each of them sees.
    for bit in range(len(sites).bit_length()):
        numbered = {site for number, site in enumerate(sites, 1) if number >> bit & 1}
        wanted = {site: place for site, place in places.items() if site in numbered}
        with interventions.capturing(wanted, size):
            output = _run(interventions, dummy_run)
            found = _arena(interventions, size)
        rows |= {site: output for site in sites if site not in places}
        finite = found.isfinite().sum(dim=1).tolist()
        for site, place in places.items():
            row = _first_row(interventions, site, found[place])
            if finite[place] != (len(row) if site in wanted else 0):
                wrong.add(site)
            elif site in wanted:
                rows[site] = row
    return {site: None if site in wrong else rows[site] for site in sites}


def _acts(
    interventions: "WorkerInterventions",
    site: Site,
    before: torch.Tensor | None,
    dummy_run: DummyRun,
) -> bool:
    """Tell whether a site acts: a row is captured, and steering there moves it, as far as this
    worker does either.

    Args:
        before: the row unsteered.
    """
    captures = interventions.captures(site)
    if interventions.table is None or site not in interventions.table.at:
        return before is not None or not captures
    vector = probe_vector(interventions, site, before)
    with interventions.probing(site, vector):
        after = _run(interventions, dummy_run)
        if captures:
            after = _first_row(interventions, site, _arena(interventions, 1)[0])
    if captures and before is None:
        return False
    if before is None or after is None:
        logger.warning_once(
            "This worker does not capture where it steers and gets no hidden states from a dummy "
            "run of its pipeline stage: those steering taps are not checked at start-up."
        )
        return True
    moved = after.float() - before.float()
    if not captures:
        return bool(moved.any())  # seen through the layers above
    # Of heads, this rank's come first, and as much was read as lies in one row.
    here = min(len(moved), len(vector))
    moved, vector = moved[:here], vector[:here].float()
    return bool((moved - vector).norm() <= 0.1 * vector.norm())


def _run(interventions: "WorkerInterventions", dummy_run: DummyRun) -> torch.Tensor | None:
    """Run dummy tokens; the model's output of the first, [hidden], None at other stages."""
    hidden = dummy_run(0)[0]
    interventions.capture_final(hidden)
    return hidden[0].clone() if isinstance(hidden, torch.Tensor) else None


def _arena(interventions: "WorkerInterventions", size: int) -> torch.Tensor:
    """A copy of the arena's first rows, [size, hidden]; of none where nothing is captured."""
    if interventions.capture is None:
        return torch.empty(0, 0)
    return interventions.capture.arena[:size].clone()


def _first_row(interventions: "WorkerInterventions", site: Site, row: torch.Tensor) -> torch.Tensor:
    """Return what a site has in its first row of the arena: of many heads, those that lie there."""
    assert interventions.shape is not None
    return row[: interventions.shape.row_width(site)]


def _arrived(row: torch.Tensor | None) -> bool:
    """Tell whether something was captured: the poison is gone."""
    return row is not None and bool(torch.isfinite(row).all())


def probe_vector(
    interventions: "WorkerInterventions", site: Site, row: torch.Tensor | None
) -> torch.Tensor:
    """A vector to steer with at a site, in the model's dtype, on the device.

    Signs alternate: a norm would remove a constant shift. It is far larger than the stream, which
    differs between two dummy runs where a mixer's state moved on.

    Args:
        row: [hidden], an unsteered one; None if unknown.
    """
    shape, table = interventions.shape, interventions.table
    assert shape is not None and table is not None
    rms = _rms(row) if row is not None and _arrived(row) else 1.0
    size = min(100 * max(rms, 1.0), torch.finfo(shape.torch_dtype).max / 8)
    vector = torch.full((table.at[site].shape[1],), size, dtype=shape.torch_dtype)
    vector[::2] *= -1
    return vector.to(interventions.tokens.slots.device)


def _rms(row: torch.Tensor) -> float:
    return float(row.float().square().mean().sqrt())
