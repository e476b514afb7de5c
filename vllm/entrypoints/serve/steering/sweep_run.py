# SPDX-License-Identifier: Apache-2.0
"""Runs the cells of a sweep through a server's engine, a bounded number at a time."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.interventions.errors import InterventionError, reject

from .sweep_places import AnyCell, Rows
from .sweep_plan import Grid, SweepPlan
from .sweep_request import translated

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

MOST_AT_ONCE = 64
"""Cells in flight of all sweeps of a server together, at most."""
MOST_HOLDING = 8
"""Sweeps of a server that hold rows at once, at most: up to `capture_inline_max_bytes` each."""


class SweepSlots:
    """Bounds what all sweeps of a server have in the engine at once, and the rows that they hold.

    Half of what the engine runs at once is left to others, however many sweeps there are.
    """

    def __init__(self, engine: "AsyncLLM") -> None:
        half = engine.vllm_config.scheduler_config.max_num_seqs // 2
        self.size = max(1, min(MOST_AT_ONCE, half))
        self.free = asyncio.Semaphore(self.size)
        self.holding = asyncio.Semaphore(MOST_HOLDING)


class SweepRun:
    """One sweep on its way.

    Args:
        prompt, clean: as the server renders prompts; `clean` is None if there is none.
        lora: the adapter that the model's name is, if it is one.
    """

    def __init__(
        self,
        engine: "AsyncLLM",
        slots: SweepSlots,
        plan: SweepPlan,
        prompt: EngineInput,
        clean: EngineInput | None,
        lora: LoRARequest | None,
    ) -> None:
        self._engine = engine
        self._slots = slots
        self._plan = plan
        self._prompt = prompt
        self._clean = clean
        self._lora = lora
        self._name = f"sweep-{uuid4().hex}"
        self._count = 0
        self._rows: Rows | None = None
        self._holds = False

    async def begin(self) -> Grid:
        """Run both prompts, and the rows that are replaced by themselves. Where rows are held, it
        waits for its turn to hold some, which ends with the cells.

        Raises:
            ValueError: the engine refuses; the message names the field of the sweep.
        """
        if self._clean is not None or self._plan.patches:
            await self._slots.holding.acquire()
            self._holds = True
        try:
            return await self._begin()
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        self._rows = None
        if self._holds:
            self._holds = False
            self._slots.holding.release()

    async def _begin(self) -> Grid:
        plan, clean = self._plan, None
        if self._clean is not None:
            output = await self._ask(self._clean, plan.of_clean())
            clean, self._rows = plan.score(_logprobs(output)), _payload(output)
            await asyncio.to_thread(_read, self._rows)
        output = await self._ask(self._prompt, plan.of_prompt())
        grid = Grid(plan, clean, plan.score(_logprobs(output)))
        if noise := plan.noise_cells():
            rows = _payload(output)
            asked = ((cell, plan.of_noise(cell, rows)) for cell in noise)
            async with aclosing(self._scores(asked)) as scores:
                grid.note_noise([score async for _, score in scores])
        return grid

    async def cells(self) -> AsyncGenerator[tuple[AnyCell, float]]:
        """Yield each cell and its score, as they come; closing it aborts what is in flight.

        Raises:
            ValueError: as `begin`.
        """
        plan = self._plan
        asked = ((cell, plan.of_cell(cell, self._rows)) for cell in plan.cells())
        try:
            async with aclosing(self._scores(asked)) as scores:
                async for one in scores:
                    yield one
        finally:
            self._let_go()

    async def _scores(
        self, asked: Iterable[tuple[AnyCell, dict[str, Any]]]
    ) -> AsyncGenerator[tuple[AnyCell, float]]:
        left = iter(asked)
        running: set[asyncio.Task[tuple[AnyCell, float]]] = set()
        try:
            while True:
                while len(running) < self._slots.size and (one := next(left, None)) is not None:
                    running.add(asyncio.create_task(self._score(*one)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _score(self, cell: AnyCell, fields: dict[str, Any]) -> tuple[AnyCell, float]:
        async with self._slots.free:
            output = await self._ask(self._prompt, fields)
        return cell, self._plan.score(_logprobs(output))

    async def _ask(self, prompt: EngineInput, fields: dict[str, Any]) -> "CompletionOutput":
        self._count += 1
        params = SamplingParams(**self._plan.asks(), **fields)
        name = f"{self._name}-{self._count}"
        # A prompt is used many times; the engine adds to what it is given.
        given: Any = {**prompt}
        answers = self._engine.generate(given, params, name, lora_request=self._lora)
        try:
            async with aclosing(answers):
                # One token is asked for, so the last output is the only one with anything in it.
                outputs = [output.outputs[0] async for output in answers]
        except InterventionError as error:
            translated(error)
        return outputs[-1]


def _logprobs(output: "CompletionOutput") -> Any:
    if not output.logprobs:
        reject("prompt", f"the engine ended a request of the sweep with {output.finish_reason!r}")
    return output.logprobs[0]


def _read(rows: Rows) -> None:
    """Put rows together, up to `capture_inline_max_bytes`; not on the event loop."""
    for each in rows.values():
        each.values  # noqa: B018


def _payload(output: "CompletionOutput") -> Rows:
    result = (output.capture_results or {})["inline"]
    if result.status != "ok":
        reject("clean", f"its rows cannot be captured: {result.error}")
    rows: Rows = result.payload
    return rows
