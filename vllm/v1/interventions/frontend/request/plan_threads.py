# SPDX-License-Identifier: Apache-2.0
"""Frontend: work on what requests ask for, off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.plan import PLAN_FIELDS

MAX_THREADS = 2
"""Requests whose fields are worked on at once: they share a processor with the event loop."""

T = TypeVar("T")


class PlanThreads:
    """Threads of their own, so that nobody's prompt waits for a tokenizer behind them.

    Args:
        process_inputs: `InputProcessor.process_inputs`, which resolves what a request asks for.
        modules: those that requests may name.
        is_asked: whether parameters say anything in another tool's words, which is read, too.
    """

    def __init__(
        self,
        process_inputs: Callable[..., T],
        modules: ModuleCatalog,
        is_asked: Callable[[SamplingParams], bool],
    ) -> None:
        self._process_inputs, self._modules, self._is_asked = process_inputs, modules, is_asked
        self._threads = ThreadPoolExecutor(MAX_THREADS, "plan")

    async def run(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `work` in one of the threads, and return or raise what it does."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(work, *args, **kwargs))

    async def process_inputs(
        self, request_id: str, prompt: Any, params: SamplingParams | PoolingParams, **kwargs: Any
    ) -> Any:
        """`InputProcessor.process_inputs`, in a thread if the request steers or captures."""
        if self._modules.asks_others:
            await self._modules.refresh()
        work = partial(self._process_inputs, request_id, prompt, params, **kwargs)
        if isinstance(params, SamplingParams):
            steers = any(getattr(params, field) is not None for field in PLAN_FIELDS)
            if steers or self._is_asked(params):
                return await self.run(work)
        return work()
