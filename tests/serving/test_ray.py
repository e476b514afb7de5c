# SPDX-License-Identifier: Apache-2.0
"""Two workers under the Ray executor, each on a Ray node of its own: split by width (V1) or by
depth (V2), with rows in memory and in files. The reference is Hugging Face.

Upstream's CPUs have no Ray: what says which accelerator a worker got is replaced here, and nothing
else. Ray is no dependency: it is fetched for this test, which is skipped where it cannot be had.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import ROOT
from tests.conformance import models
from tests.conformance import runner as check
from tests.conformance.engine import Runner, make_llm, shut_down
from tests.peers.packages import folder_of
from tests.support.serving import Ask, Judge, capture, prompt_of, serve, vector
from vllm import LLM
from vllm.platforms import current_platform
from vllm.v1.capture import reader
from vllm.v1.executor import ray_utils

if TYPE_CHECKING:
    from tests.conftest import TinyModels

pytestmark = [pytest.mark.long, pytest.mark.v2]

STEERED = {"steering_vectors": {"post_attn": {1: vector(70)}}}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray with two nodes on this machine, each for one worker."""
    folder = str(folder_of("ray"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        # Of the workers, which are processes of their own.
        paths = [os.environ.get("PYTHONPATH", ""), str(ROOT), folder]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray = importlib.import_module("ray")
        nodes = importlib.import_module("ray.cluster_utils").Cluster()
        for _ in range(2):
            nodes.add_node(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20)
        ray.init(nodes.address, log_to_driver=False)
        yield ray
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture(scope="module")
def pair(
    ray: Any, tiny_models: TinyModels, runner: Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Judge, Path]]:
    importlib.reload(ray_utils)  # it looked for Ray when it was imported
    executors: Any = importlib.import_module("vllm.v1.executor.ray_executor_v2")

    class OnCPU(executors.RayWorkerProc):
        def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
            return ray.get_runtime_context().get_node_id(), [0]

    class Ray:
        """Ray, but for the class of the workers."""

        def __getattr__(self, name: str) -> Any:
            return getattr(ray, name)

        def remote(self, _: type) -> Any:
            return ray.remote(OnCPU)

    path, row = tiny_models.path("llama"), tiny_models.row("llama")
    root = tmp_path_factory.mktemp("files")
    split = "tensor_parallel_size" if runner == "v1" else "pipeline_parallel_size"
    options: dict[str, Any] = {split: 2, "capture_points": ["q", "z", "pre_attn", "post_block"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(current_platform), "ray_device_key", "CPU")
        patch.setattr(executors, "ray", Ray())
        on_any: Any = staticmethod(dict)
        patch.setattr(executors.RayExecutorV2, "_get_actor_resource_kwargs", on_any)
        llm = make_llm(
            path,
            enable_steering=True,
            capture_consumers=["inline", f"filesystem:root={root}"],
            distributed_executor_backend="ray",
            max_num_batched_tokens=24,
            **options,
        )
        yield llm, Judge(check.Reference(row, models.load(row, path))), root
        shut_down(llm)


def test_workers_on_two_nodes(pair: tuple[Any, Judge, Path]) -> None:
    """Steered and plain requests in one batch, a prompt in chunks; files are what memory has."""
    llm, judge, root = pair
    workers = llm.llm_engine.engine_core.engine_core.model_executor.ray_worker_handles
    assert len({worker.node_id for worker in workers}) == 2
    points = ("pre_attn", "post_block")
    asks = [
        Ask(prompt_of(41, 100), capture("all", points)),
        Ask(prompt_of(30, 101), {**STEERED, **capture("all", points)}),
        Ask(prompt_of(5, 102), {**STEERED, **capture("last_generated", ("post_block",), "all")}),
        Ask(prompt_of(12, 103), {**STEERED, **capture("all", ("q", "z"))}),
        Ask(prompt_of(5, 104)),
    ]
    for ask in asks[:3]:
        ask.fields["capture"]["filesystem"] = ask.fields["capture"]["inline"]
    outputs = serve(llm, asks)
    for ask, output in zip(asks, outputs, strict=True):
        judge.check(ask, output)
    for output in outputs[:3]:
        rows, written = (output.capture_results[name] for name in ("inline", "filesystem"))
        stored = reader.open(str(root)).find(written.payload["request_id"])
        assert list(stored.sites) == list(rows.payload)
        for site, kept in rows.payload.items():
            assert torch.equal(stored.rows(*site).values, kept.values)
    results = check.write_errors(llm, judge.reference, check.prompts(lengths=(17, 5)))
    assert not [r for r in results if r.error > check.WRITE_TOLERANCE]
    assert not [r for r in results if r.moved is not None and r.moved < check.LEAST_MOVE]
