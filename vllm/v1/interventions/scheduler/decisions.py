# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: who gets which slot, which rows a step captures, what is sent to the workers."""

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.interventions.calls import SteeringCall
from vllm.v1.interventions.global_state import startup_state
from vllm.v1.interventions.messages import GlobalTiers, StepInterventions, WorkerRequest
from vllm.v1.interventions.plan import Plan
from vllm.v1.interventions.scheduler.changes import Changes
from vllm.v1.interventions.scheduler.consumers import CaptureSessions
from vllm.v1.interventions.scheduler.feature_room import AskWorkers, FeatureRoom
from vllm.v1.interventions.scheduler.kept_rows import KeptRows
from vllm.v1.interventions.scheduler.module_sets import ModuleSets
from vllm.v1.interventions.scheduler.pools import Pool
from vllm.v1.interventions.scheduler.relay import RowRelay
from vllm.v1.interventions.scheduler.row_budget import RowBudget
from vllm.v1.interventions.scheduler.stale_blocks import StaleBlocks
from vllm.v1.interventions.scheduler.state import GlobalState
from vllm.v1.interventions.scheduler.tables import Tables
from vllm.v1.interventions.scheduler.turns import Turns
from vllm.v1.interventions.shape import TapShape
from vllm.v1.metrics.steering_stats import SteeringStats
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.request_queue import RequestQueue

NO_SHAPE = TapShape(hidden_size=0, dtype="float32", layers={})
"""The shape in an engine with neither steering nor capture."""


class SchedulerInterventions:
    """All decisions about steering and capture; the workers only copy.

    A request's life: `arrive`, `admit` each time it joins the running ones, `preempt`, `finish`.
    A step's order: `wake`, `rows.cap_tokens` and `can_admit` while requests are chosen, `admit`,
    `preempt`, `park`, `message` when the step is complete. When its results are there:
    `relay.accept` of each request that captures and cannot wait, `relay.join` with the others.
    """

    def __init__(self, config: "VllmConfig", hash_block_size: int) -> None:
        steering, shape = config.steering_config, config.tap_shape or NO_SHAPE
        self.tables = Tables(steering, shape.hidden_size)
        self.rows = RowBudget(config)
        self.captures = CaptureSessions(config)
        keep = config.capture_config.capture_keep_bytes
        self.kept = KeptRows(keep, hash_block_size) if keep else None
        """Rows of cached blocks; None if none are kept."""
        self.relay = RowRelay(self.captures, self.kept)
        self.state = GlobalState(shape, startup_state(config))
        self.stale_blocks = StaleBlocks(config.cache_config.num_gpu_blocks or 0, shape.reads_masked)
        self._loads_blocks = config.kv_transfer_config is not None
        self.modules = ModuleSets(self.state.contents.modules.values())
        usage: dict[str, Pool[Any]] = {"slots": self.tables.sums, "rows": self.tables.terms}
        self._room = FeatureRoom(steering.features_memory_bytes)
        self.changes = Changes(self.modules, self._room, usage, lambda: self.state, self.set_state)
        self._hash_block_size = hash_block_size
        self._speculates = config.speculative_config is not None
        by_priority = config.scheduler_config.policy == "priority"
        self._turns = Turns(self._fits, _need, by_priority)
        self._row_turns = Turns(lambda _: True, lambda request: request.request_id, by_priority)
        self._waits = (self._turns, self._row_turns, *self.captures.turns.values())
        self._parked = [turns.parked for turns in self._waits]
        self._reserved: set[str] = set()
        self._admitted: dict[str, WorkerRequest] = {}
        self._changed_tiers: GlobalTiers | None = None

    # -- a request's life -------------------------------------------------------------------

    def fill(self, plan: Plan | None) -> Plan | None:
        """`ModuleSets.fill`, for a request that comes: whatever becomes of names, what the plan
        refers to is there until the request ends. Raises ValueError if it is gone."""
        self._room.use(plan)
        return self.modules.fill(plan)

    def arrive(self, request: Request) -> bool:
        """Take in a new request: its blocks were hashed before its global tiers were known.

        Returns:
            Whether it goes before all that wait: it ran, and goes on from a part of its answer.
        """
        begun = request.interventions.plan.begun
        if begun is not None:
            request.append_output_token_ids(begun.output_token_ids)
            # To upstream's statistics it is as one that was preempted: its prompt was counted.
            request.num_preemptions = 1
            request.take_prefill_stats()
        self._restart(request)
        self.captures.arrive(request)
        if self.kept is not None:
            request.interventions.use(self.kept)
        return begun is not None

    def can_admit(self, request: Request) -> bool:
        """Tell whether a waiting request may start now: all it will ever need is free."""
        if request.request_id in self._reserved:
            return True
        steering, capture = request.interventions.plan.steering, request.interventions.plan.capture
        steers = steering is not None and bool(
            steering.sums or steering.programs or steering.focus_programs
        )
        projects = capture is not None and bool(capture.projections)
        if (steers or projects) and not self._turns.try_admit(request):
            return False
        return self.captures.can_admit(request)

    def _fits(self, request: Request) -> bool:
        return self.tables.fits(request.request_id, request.interventions.plan)

    def wake(self, queue: "RequestQueue") -> None:
        """Put parked requests that have room now in front of the waiting ones, one at a time: room
        is taken when they are admitted."""
        if queue and queue.peek_request().status == RequestStatus.PREEMPTED:
            return  # it goes first, and holds all it needs but KV blocks
        for turns in self._waits:
            request = turns.wake() if turns.parked else None
            if request is not None:
                queue.prepend_request(request)

    def park(self, skipped: Iterable[Request]) -> list[Request]:
        """Keep those of a step's skipped requests that were refused here, so that the next steps
        need not ask about each; returns the others."""
        skipped = list(skipped)
        for request in skipped:
            if self.rows.has_refused(request):
                self._row_turns.refuse(request)
        return [r for r in skipped if not any([turns.park(r) for turns in self._waits])]

    @property
    def num_parked(self) -> int:
        """Waiting requests that are in none of the scheduler's queues."""
        return sum(map(len, self._parked))

    def admit(self, request: Request, num_cached: int = 0) -> None:
        """Admit a request to the running ones, for the first time or after a preemption.

        Args:
            num_cached: number of its positions that were found in the prefix cache.
        """
        plan = request.interventions.plan
        asks = plan.steering is not None or plan.capture is not None
        if asks and (self._turns.waiting or self._row_turns.waiting):
            self._turns.leave(request.request_id)
            self._row_turns.leave(request.request_id)
        if asks and request.request_id not in self._reserved:
            self._reserved.add(request.request_id)
            self.tables.reserve(request.request_id, plan)
            if plan.capture is not None:
                self.captures.admit(request)
        if plan.steering is not None or self.state.tiers.active:
            self.stale_blocks.writers.add(request.request_id)
        if asks or self.state.tiers.active:
            self._admitted[request.request_id] = self._worker_request(request)
        self.relay.deliver_kept(request, num_cached, self.state.version)

    def _worker_request(self, request: Request) -> WorkerRequest:
        return self.tables.worker_request(
            request.request_id,
            request.interventions.plan,
            request.num_prompt_tokens,
            tiers=self.state.tiers.active,
        )

    def preempt(self, request: Request) -> None:
        """Take a request out of this step; it will be computed from its start."""
        self.rows.withdraw(request)
        if self.kept is not None:
            self.kept.leave(request.request_id)
        self._restart(request)

    def finish(self, request: Request) -> None:
        """Release all that an ended request holds, whether or not it was ever admitted."""
        for turns in self._waits:
            turns.leave(request.request_id)
        steered = request.interventions.plan.steering is not None or self.state.tiers.active
        never_ran = request.request_id not in self.stale_blocks.writers
        if steered and never_ran and self._loads_blocks:
            self.stale_blocks.suspect_all()  # some may have been loaded for it
        self.stale_blocks.writers.discard(request.request_id)
        self._reserved.discard(request.request_id)
        self.tables.release(request.request_id)
        self._room.left(request.interventions.plan)
        self.rows.withdraw(request)
        if self.kept is not None:
            self.kept.leave(request.request_id)
        self._admitted.pop(request.request_id, None)

    def _restart(self, request: Request) -> None:
        """Have all of a request run under the tiers of now: nothing of it is computed."""
        if request.interventions.blocks.restart(self.state.era(0)):
            _rehash(request, 0)

    # -- changes from outside ---------------------------------------------------------------

    def call(
        self, call: SteeringCall, requests: Mapping[str, Request], ask: AskWorkers
    ) -> dict[str, Any]:
        """`Changes.call`, with all of the scheduler's requests."""
        return self.changes.call(call, requests.values(), ask)

    def set_state(self, state: GlobalState, requests: Iterable[Request]) -> None:
        """Make `state` the global state: its tiers from the next scheduled step on.

        Positions computed before keep their identity; blocks of later ones get another, so no
        block computed under one version is found under another. Nothing is reset or preempted.

        Args:
            requests: all of the scheduler's.
        """
        before, self.state = self.state, state
        if state.version == before.version:
            return
        if state.tiers.active and not before.tiers.active:
            self.stale_blocks.suspect_all()  # what runs now writes under it to blocks that it has
        self._changed_tiers = state.tiers
        for request in requests:
            computed = request.num_computed_tokens
            if not computed:
                self._restart(request)
                continue
            eras = [state.era(computed)]
            if self._speculates and request.num_in_flight_tokens:
                # Drafts in flight may be rejected, and their positions computed again after the
                # change: which ones is not known yet.
                first = max(computed - request.num_in_flight_tokens, 0)
                nonce = f"{request.request_id}@{state.version}"
                eras = [state.era(first, nonce), *eras]
            if request.interventions.blocks.change(eras):
                _rehash(request, eras[0].first // self._hash_block_size)
            if request.status == RequestStatus.RUNNING:
                if state.tiers.active:
                    self.stale_blocks.writers.add(request.request_id)
                self._admitted[request.request_id] = self._worker_request(request)

    def restore(self) -> None:
        """Send everything again: the workers' tables were lost in sleep."""
        self._changed_tiers = self.state.tiers
        self.tables.restore()

    def stats(self) -> SteeringStats:
        """Slots and rows in use, and the version of the global tiers."""
        slots, rows = self.tables.sums.in_use, self.tables.terms.in_use
        return SteeringStats(slots, rows, self.state.version)

    def forget_rows(self) -> None:
        """Forget the rows of blocks that the prefix cache forgets."""
        if self.kept is not None:
            self.kept.clear()

    # -- a step -----------------------------------------------------------------------------

    def message(self, num_scheduled_tokens: dict[str, int]) -> StepInterventions | None:
        """This step's decisions, or None if there are none; starts the next step."""
        step = StepInterventions(
            version=self.state.version,
            tiers=self._changed_tiers,
            admitted=self._admitted,
            split=self.rows.split,
            rows=self.rows.pop_offsets(num_scheduled_tokens),
        )
        self.tables.put_new(step)
        for turns in self._waits:
            if turns.waiting:
                turns.next_step()
        self._changed_tiers, self._admitted = None, {}
        return None if step.empty else step


def _need(request: Request) -> Hashable:
    """Return what a request needs of the pools: of requests with equal need all fit, or none."""
    steering, capture = request.interventions.plan.steering, request.interventions.plan.capture
    steers = steering and (
        steering.inherit,
        tuple(vector_sum.digest for vector_sum in steering.sums),
        tuple(term.digest for term in steering.terms),
        len(steering.programs),
        len(steering.focus_programs),
    )
    return steers, tuple(capture.projections) if capture else ()


def _rehash(request: Request, first_block: int) -> None:
    del request.block_hashes[first_block:]
    request.update_block_hashes()
