# SPDX-License-Identifier: Apache-2.0
"""Frontend side of capture: rows become results, and a last output waits for all of them.

`OutputProcessor.captures` is a `CaptureOutputs`. It gives every request that captures a
`CompletionCapture`, which gathers inline rows and feeds the consumers of this process, and puts an
`OutputHold` between a request with consumers and whoever waits for its outputs.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.capture.consumer import ConsumerResult
from vllm.v1.capture.registry import INLINE, is_inline
from vllm.v1.capture.results import NO_TOKEN, CaptureResult
from vllm.v1.capture.transport.feed import prompt_tokens
from vllm.v1.capture.transport.host import Report
from vllm.v1.capture.transport.hosted import Feeds, HostedConsumers
from vllm.v1.capture.transport.selected import Selected
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.interventions.calls import CaptureCall, CaptureEnd
from vllm.v1.interventions.frontend.request.capture import check_global
from vllm.v1.interventions.frontend.results.collector import ALL_ROWS, RowCollector
from vllm.v1.interventions.frontend.results.going_on import SentRequests
from vllm.v1.interventions.frontend.results.hold import OutputHold
from vllm.v1.interventions.frontend.results.inbox import RowInbox
from vllm.v1.interventions.frontend.results.watch import RuleWatches
from vllm.v1.interventions.frontend.results.webhook import Webhook, texts_of
from vllm.v1.interventions.messages import CapturedChunk
from vllm.v1.interventions.plan import CapturePlan, Plan
from vllm.v1.metrics.capture_stats import CaptureStats
from vllm.v1.steering.rule_files import read_webhook

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.interventions.frontend.results.link import CaptureLink
    from vllm.v1.metrics.stats import IterationStats


class CompletionCapture:
    """The capture of one completion, from its first rows to its last result."""

    def __init__(
        self,
        outputs: "CaptureOutputs",
        request: EngineCoreRequest,
        plan: CapturePlan,
        hold: OutputHold,
    ) -> None:
        self._outputs = outputs
        self._request_id = request.request_id
        self._plan = plan
        self.unanswered = outputs.unanswered
        """True if the answer is dropped: the engine has no head, and generates nothing."""
        self._prompt = prompt_tokens(
            request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids
        )
        inline = self._inline = [name for name in plan.consumers if is_inline(name)]
        self._collector = None
        if inline:
            copied = outputs.hosted.threads, outputs.inbox.memory
            texts = partial(outputs.texts.of, {NO_TOKEN: ""})
            self._collector = RowCollector(
                plan, self._prompt, inline, outputs.layers, *copied, texts
            )
            outputs.inbox.open(self._request_id, self._collector)
        self.feeds = Feeds(outputs.hosted, self._request_id, plan, self._prompt)
        """Feeds of the consumers of this process."""
        self.ahead: list[CapturedChunk] = []
        """Rows for the feeds that came ahead of their tokens."""
        self._dropped: set[str] = set()
        self.pending_consumers = [name for name in plan.consumers if not is_inline(name)]
        """Consumers whose results are still to come."""
        self._results: dict[str, CaptureResult] = {}
        self.hold = hold
        self.ended = False

    def go_on(self, new: str, rows: int) -> None:
        """Go on under another id, from the rows before position `rows`."""
        if self._collector is not None:
            self._collector.cut(rows)
            self._outputs.inbox.open(new, self._collector)
            self._outputs.inbox.close(self._request_id)
        self._request_id = new

    @property
    def waits(self) -> bool:
        """True if results are still to come."""
        return bool(self.pending_consumers)

    def add(self, rows: CapturedChunk) -> None:
        """Take rows for the consumers of this process. Those of generated tokens wait for the
        output that brings the tokens."""
        if self.feeds:
            self.ahead.append(rows)
            if not len(rows.positions) or rows.positions[-1] < len(self._prompt):
                self.deliver(())

    def deliver(self, output_token_ids: Sequence[int]) -> None:
        """Give the consumers of this process the rows that came ahead of an output.

        Args:
            output_token_ids: the generated tokens, those past a stop string removed.
        """
        rows, self.ahead = self.ahead, []
        for chunk in rows:
            self.feeds.deliver(chunk, output_token_ids)

    def results(
        self, state: "RequestState", finish_reason: FinishReason | None
    ) -> dict[str, CaptureResult]:
        """The results that go into the completion output that is being made.

        With the last one it is a mapping that the other consumers' results still join, until
        `waits` turns false.

        Args:
            state: of the completion.
            finish_reason: None while there are more to come.
        """
        assert state.detokenizer is not None
        output_token_ids = state.detokenizer.output_token_ids
        most_rows = ALL_ROWS if state.rules is None else state.rules.most_rows
        only_new = state.output_kind == RequestOutputKind.DELTA
        finished = finish_reason is not None
        if self._collector is not None and not (finished or only_new):
            return self._collector.so_far(output_token_ids, most_rows)
        aborted = finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
        inline: dict[str, CaptureResult] = {}
        if self._collector is not None:
            if finished:
                self._outputs.inbox.finish(self._collector)
            inline = self._collector.results(
                output_token_ids,
                finished=finished,
                aborted=aborted,
                only_new=only_new,
                most_rows=most_rows,
            )
        if not finished:
            # A mapping of its own: this output may still be in a queue when results are there.
            return inline
        self._results = self._results | inline
        if not self.ended:
            self.ended = True
            self._end(len(self._prompt) + len(output_token_ids), finish_reason, aborted)
        return self._results

    def _end(self, num_tokens: int, reason: FinishReason | None, aborted: bool) -> None:
        self._outputs.count(map(self._inline_result, self._inline))
        failed = "the engine failed the request" if reason == FinishReason.ERROR else ""
        if self.pending_consumers:
            end = CaptureEnd(num_tokens, aborted, failed)
            self._outputs.link.send(CaptureCall(self._request_id, end))
        self.feeds.finish(num_tokens, aborted, failed)
        for name in self._dropped:
            self._settle(self._dropped_result(name, num_tokens))
        if failed:
            # The engine may never have had the request, so its word is not waited for.
            for name in list(self.pending_consumers):
                self._settle(ConsumerResult(name, "error", failed))
        if not self.pending_consumers:
            self._outputs.close(self._request_id)

    def _inline_result(self, name: str) -> ConsumerResult:
        result = self._results[name]
        assert result.status is not None
        assert self._collector is not None
        of_site = self._collector.num_rows[name]
        rows, num_bytes = of_site * len(result.payload), of_site * self._plan.row_bytes(name)
        return ConsumerResult(INLINE, result.status, rows=rows, num_bytes=num_bytes)

    def _dropped_result(self, name: str, num_tokens: int) -> ConsumerResult:
        selected = Selected(self._plan.consumers[name], len(self._prompt))
        rows = len(selected.all(selected.num_rows(num_tokens)))
        rows *= len(self._plan.consumers[name].sites)
        return ConsumerResult(
            name,
            "error",
            f"{rows} rows were dropped: other requests held all of the consumer's pending_bytes "
            "when this one started (capture_overload_policy=drop)",
        )

    def handle_result(self, result: ConsumerResult) -> None:
        """Take a consumer's result, or word that it had no room for the request."""
        if result.dropped and not self.ended:
            self._dropped.add(result.consumer)
            self.feeds.drop(result.consumer)
        elif result.consumer in self.pending_consumers:
            self._settle(result)
            if not self.pending_consumers:
                self._outputs.close(self._request_id)

    def _settle(self, result: ConsumerResult) -> None:
        self.pending_consumers.remove(result.consumer)
        self._outputs.count([result])
        self._results[result.consumer] = CaptureResult(result.status, result.error, result.payload)
        if self._plan.num_samples == 1 and isinstance(result.payload, Mapping):
            keys = self._outputs.transfer_keys[result.consumer]
            self.hold.transfer |= {
                key: result.payload[key] for key in keys if key in result.payload
            }


class _Texts:
    """Says what tokens are, to one thread at a time: a tokenizer that several use copies itself."""

    def __init__(self, tokenizer: TokenizerLike | None) -> None:
        self._tokenizer, self._lock = tokenizer, Lock()

    def of(self, known: dict[int, str], token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token.

        Args:
            known: token id -> text, which gets those that are new.
        """
        assert self._tokenizer is not None  # or the request was refused
        with self._lock:
            new = [one for one in dict.fromkeys(token_ids) if one not in known]
            known |= zip(new, convert_ids_list_to_tokens(self._tokenizer, new), strict=True)
        return [known[one] for one in token_ids]


class CaptureOutputs:
    """All captures of one frontend.

    Args:
        link: to the engine core, and back into this frontend's stream of outputs.
        inputs: of the frontend, with its tokenizer and the modules that requests may name.
    """

    def __init__(self, config: "VllmConfig", link: "CaptureLink", inputs: "InputProcessor") -> None:
        self.link, self.texts = link, _Texts(inputs.tokenizer)
        self._model_config = config.model_config
        self.sent = SentRequests(link, inputs.modules, config.steering_config)
        self.hosted = HostedConsumers("capture-rows")
        # When the engine is collected or the program ends: hosts hold nothing that holds this.
        self._finalizer = weakref.finalize(self, self.hosted.shutdown)
        self.transfer_keys = {
            name: () if spec.cls is None else spec.cls.transfer_keys
            for name, spec in config.capture_config.consumers.items()
        }
        """Name of a consumer -> keys of its payloads that `kv_transfer_params` get."""
        self.unanswered = config.capture_config.capture_stop_after is not None
        self._counts = False
        """True if anybody takes statistics."""
        self.finished = CaptureStats()
        """Results since the statistics were last taken."""
        self.rows = self.num_bytes = 0
        """All rows that results had, and their bytes."""
        frontends = config.parallel_config._api_process_count
        self.inbox = RowInbox(link, frontends)
        rules = config.capture_config.rules
        settings = None if rules is None else read_webhook(rules)
        self.webhook = None if settings is None else Webhook(settings)
        self.rules = RuleWatches(self.webhook)
        self.layers = {} if config.tap_shape is None else config.tap_shape.layers
        self._open: dict[str, CompletionCapture] = {}
        """Captures with consumers whose results are not all in, by request."""
        self._ready: list[RequestOutput] = []
        self._holds: weakref.WeakKeyDictionary[ParentRequest, OutputHold] = (
            weakref.WeakKeyDictionary()
        )
        if config.tap_shape is None:
            return
        check_global(config.capture_config, config.tap_shape)
        self.hosted.start(config, _weakly(link.post), in_frontend=True)

    def open(self, state: "RequestState", request: EngineCoreRequest) -> None:
        """Give a completion that is about to start its capture and rules, if it has some; with
        consumers, its outputs go by way of an `OutputHold`."""
        if request.plan is not None and request.plan.capture is not None:
            self._open_capture(state, request, request.plan.capture)
        self.sent.open(state, request)

    def _open_capture(
        self, state: "RequestState", request: EngineCoreRequest, plan: CapturePlan
    ) -> None:
        assert request.plan is not None
        parent = state.parent_req
        plan = msgspec.structs.replace(
            plan,
            num_samples=parent.n if parent is not None else 1,
            sample=state.request_index,
            external_id=parent.external_req_id if parent is not None else state.external_req_id,
        )
        request.plan = Plan(request.plan.steering, plan)
        self._counts = state.stats is not None
        state.rules = self.rules.open(
            request.request_id,
            plan,
            state.prompt_len,
            min(state.max_tokens_param or 0, self._model_config.max_model_len - state.prompt_len),
            partial(texts_of, weakref.ref(state)),
        )
        if not plan.consumers:
            return
        hold = self._hold(state)
        state.capture = capture = CompletionCapture(self, request, plan, hold)
        if capture.waits:
            hold.waits[state.request_index] = lambda: capture.waits
            self._open[request.request_id] = capture
            self.link.opened()
            state.queue = hold

    def _hold(self, state: "RequestState") -> OutputHold:
        """The hold that a request's completions share: its very last output waits for all."""
        parent, queue = state.parent_req, state.queue
        if parent is not None and parent in self._holds:
            return self._holds[parent]
        hold = OutputHold(self._ready_unless_aborted if queue is None else queue.put)
        if parent is not None:
            self._holds[parent] = hold
        return hold

    def _ready_unless_aborted(self, output: RequestOutput) -> None:
        """Deliver where there are no queues: who aborts a request is not told of it."""
        if not any(c.finish_reason == str(FinishReason.ABORT) for c in output.outputs):
            self._ready.append(output)

    def handle_output(self, output: EngineCoreOutput) -> bool:
        """Take rows of several requests, or results of consumers. Whether `output` is only that."""
        if output.events is not None:
            self.sent.came(output)
        if output.captured:
            self.inbox.add(output.captured)
            self.rules.add(output.captured)
            for chunk in output.captured if self.hosted.hosts else ():
                for rows in chunk.by_owner():
                    capture = self._open.get(rows.owners[0][0])
                    if capture is not None:
                        capture.add(rows)
            return True
        if output.capture_results is None:
            return False
        for result in output.capture_results:
            capture = self._open.get(output.request_id)
            if capture is not None:
                capture.handle_result(result)
            if result.consumer in self.hosted.hosts and not result.dropped:
                call = CaptureCall(output.request_id, released=result.consumer)
                self.link.send(call)
        return True

    def goes_on(self, processor: "OutputProcessor", state: "RequestState") -> bool:
        """Tell whether an answer was cut or is steered otherwise, and goes on; if so, send its
        request anew."""
        old, rows = state.request_id, self.sent.goes_on(processor, state)
        if rows is None:
            return False
        if state.rules is not None:
            self.rules.rename(old, state.request_id)
        if state.capture is not None:
            state.capture.go_on(state.request_id, rows)
        return True

    def count(self, results: Iterable[ConsumerResult]) -> None:
        """Count results of a completion."""
        results = list(results)
        self.finished.add(results)
        self.rows += sum(result.rows for result in results)
        self.num_bytes += sum(result.num_bytes for result in results)

    def close(self, request_id: str) -> None:
        """Release what waited for a completion: its results are all there."""
        capture = self._open.pop(request_id, None)
        if capture is not None:
            capture.hold.release()

    @property
    def num_held(self) -> int:
        """Completions that have ended and wait for results."""
        return sum(capture.ended for capture in self._open.values())

    def pop_ready(self, stats: "IterationStats | None") -> list[RequestOutput]:
        """Outputs that nobody's queue takes and that are complete by now; after a step's outputs.

        Args:
            stats: gets what happened since the last call; None if nobody takes statistics.
        """
        self.inbox.step()
        if stats is not None:
            stats.capture.results += self.finished.results
            stats.capture.rules = self.rules.stats.take()
            if self.webhook is not None:
                stats.capture.rules.told = self.webhook.take()
            stats.capture.pending = Counter(
                name
                for capture in self._open.values()
                if capture.ended
                for name in capture.pending_consumers
            )
        if stats is not None or not self._counts:
            self.finished = CaptureStats()
            self.rules.stats.take()
        ready, self._ready = self._ready, []
        return ready

    def fail(self, error: Exception) -> None:
        """Tell those who wait for held outputs, or for changes, that the engine is gone."""
        self.sent.fail(error)
        for capture in self._open.values():
            if capture.ended:
                capture.hold.put(error)

    def shutdown(self) -> None:
        """Let the consumers of this process, and the webhook, finish what they have."""
        self._finalizer()
        if self.webhook is not None:
            self.webhook.shutdown()


def _weakly(report: Report) -> Report:
    """Wrap `report`, a method, so that threads which call it do not keep the engine alive."""
    method = weakref.WeakMethod(report)

    def call(request_id: str, result: ConsumerResult) -> None:
        bound = method()
        if bound is not None:
            bound(request_id, result)

    return call
