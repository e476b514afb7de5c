# SPDX-License-Identifier: Apache-2.0
"""Start-up check: every bound site moves a row, through the code that will serve.

A stale compile artifact, or a class whose forward lost its calls, makes taps silent no-ops while
everything else looks right. So dummy tokens are driven through the model, compiled and in graphs
as configured, each steered at one site, and each must come out moved.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.logger import init_logger
from vllm.v1.interventions import Site, TapShape

if TYPE_CHECKING:
    from vllm.v1.executor import Executor
    from vllm.v1.worker.interventions import Interventions

logger = init_logger(__name__)

DummyRun = Callable[[int], Sequence[Any]]
"""Runs n dummy tokens; its first result is the last stage's hidden states [>= n, hidden]."""


def start_taps(executor: "Executor") -> TapShape | None:
    """Check the taps of all workers and merge what they offer (pipeline stages own layers).

    Raises:
        RuntimeError: a site does not move its row.
    """
    shapes = [s for s in executor.collective_rpc(check_worker) if s is not None]
    if not shapes:
        return None
    points = {layer: p for shape in shapes for layer, p in shape.points.items()}
    return TapShape(shapes[0].hidden_size, shapes[0].dtype, dict(sorted(points.items())))


def check_worker(worker: Any) -> TapShape | None:
    """Runs in each worker, after warm-up and graph capture."""
    runner = worker.worker.model_runner
    interventions: Interventions = runner.interventions
    if interventions.shape is not None:
        with torch.inference_mode():
            check_sites(interventions, runner._dummy_run)
    return interventions.shape


def check_sites(interventions: "Interventions", dummy_run: DummyRun) -> None:
    """Raises RuntimeError naming the sites that do not act."""
    sites = list(interventions.sites)
    width = interventions.num_probes
    silent = []
    for start in range(0, len(sites), width):
        silent += _silent(interventions, sites[start : start + width], dummy_run)
    if silent:
        raise RuntimeError(
            f"these taps do not act although they are bound: {silent}. The compiled code does not "
            "match the wired model: clear the compile cache (VLLM_CACHE_ROOT) and start again, "
            "or report this model"
        )


def _silent(
    interventions: "Interventions", probed: list[Site], dummy_run: DummyRun
) -> list[Site]:
    before = _run(interventions, probed, None, dummy_run)
    if before is None:
        logger.warning_once(
            "This pipeline stage captures nothing and returns no hidden states from a dummy run: "
            "its steering taps are not checked at start-up."
        )
        return []
    size = before.float().square().mean(dim=1).sqrt().clamp(min=1.0)
    # Signs, not a constant: a norm would remove a constant shift.
    signs = torch.ones_like(before)
    signs[:, ::2] = -1
    vectors = (signs * size.unsqueeze(1).to(before.dtype)).contiguous()
    after = _run(interventions, probed, vectors, dummy_run)
    assert after is not None
    silent = []
    for i, site in enumerate(probed):
        old, new, vector = before[i].float(), after[i].float(), vectors[i].float()
        if interventions.captures_here and not (torch.isfinite(old).all()):
            silent.append(site)  # the poison is still there: nothing was captured
        elif site in interventions.table:
            moved = new - old
            along = float(moved @ vector / (vector @ vector))
            acts = along > 0.5 if interventions.captures_here else bool(moved.any())
            if not acts:
                silent.append(site)
    return silent


def _run(
    interventions: "Interventions",
    probed: list[Site],
    vectors: torch.Tensor | None,
    dummy_run: DummyRun,
) -> torch.Tensor | None:
    """One row a probed site, [len(probed), hidden]: token i is steered by vectors[i] there."""
    with interventions.probing(probed, vectors):
        hidden = dummy_run(len(probed))[0]
        if interventions.captures_here:
            assert interventions.arena is not None
            return interventions.arena[: len(probed)].clone()
        return hidden[: len(probed)].clone() if isinstance(hidden, torch.Tensor) else None
