# SPDX-License-Identifier: Apache-2.0
"""Running requests, whose steering may be changed by who sent them."""

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from secrets import compare_digest
from typing import TYPE_CHECKING, Any

import msgspec

from vllm.v1.interventions.errors import reject, show_key, unknown_keys
from vllm.v1.interventions.frontend.request.budget import Unit, Work
from vllm.v1.interventions.frontend.request.catalog import ModuleCatalog
from vllm.v1.interventions.frontend.request.doses import need_known_doses
from vllm.v1.interventions.frontend.request.joined import Joined
from vllm.v1.interventions.frontend.request.prompt import Prompt
from vllm.v1.interventions.frontend.request.resolve import need_steering
from vllm.v1.interventions.frontend.request.rules import sent_once
from vllm.v1.interventions.frontend.request.steering import steering_plan
from vllm.v1.interventions.frontend.results.going_on import CLIENT, NewSteering, SentRequest
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.plan import INHERIT, STEERING_FIELDS, plain_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState

ID = "request_id"
"""The field that errors about a running request name."""

COMPLETIONS = "cmpl-"
"""Start of the ids of answers that may be to several prompts: the number of each follows."""


def not_running(*request_ids: str) -> LookupError:
    """Make the error of a client that has no running request of these ids."""
    ids = ", ".join(map(show_key, request_ids))
    return LookupError(
        f"no request of yours is running under the id {ids}: it ended, or was sent with another "
        "Authorization header"
    )


class Running:
    """One completion of a running request."""

    def __init__(self, state: "RequestState", sent: SentRequest) -> None:
        self.sent, self.sample, self.parent = sent, state.request_index, state.parent_req
        self.prompt: list[int] = state.prompt_token_ids or []  # nothing changes it: no copy
        self.steering = sent.plan.steering
        """Steering that it has, with which a change is joined."""


class RunningRequests:
    """The running requests of one frontend.

    Args:
        modules: those that requests may name.
        processor: has the requests.
    """

    def __init__(
        self, config: "VllmConfig", modules: ModuleCatalog, processor: "OutputProcessor"
    ) -> None:
        self._config, self._modules, self._processor = config, modules, processor

    def ids(self, known: str) -> list[str]:
        """The ids of the requests of an answer, which is one or several prompts of a body.

        Args:
            known: the answer's id, as its client has it.
        """
        others = self._processor.external_req_ids
        if not known.startswith(COMPLETIONS):
            return [known]
        start = f"{known}-"
        return [each for each in others if each.startswith(start) and each[len(start) :].isdigit()]

    def find(self, request_ids: Sequence[str]) -> dict[str, list[Running]]:
        """Return the completions of requests that are running, of those that their own client asks
        for, by id.

        Raises:
            LookupError: there are none.
            ValueError: nothing can be changed of one, or another change of it is under way.
        """
        need_steering(self._config, ID)
        found = {one: each for one in request_ids if (each := self._of(one))}
        if not found:
            raise not_running(*request_ids)
        return found

    def _of(self, request_id: str) -> list[Running]:
        ids = self._processor.external_req_ids.get(request_id, [])
        states = [self._processor.request_states.get(each) for each in ids]
        found = [
            Running(state, state.sent)
            for state in states
            if state is not None
            and state.sent is not None
            and compare_digest(state.sent.client, CLIENT.get())
        ]
        if len(found) > 1 and (found[0].parent is None or len({r.parent for r in found}) > 1):
            reject(ID, "is the id of several running requests; give each an id of its own")
        for running in found:
            sent = running.sent
            refused = sent_once(sent.plan.capture, sent.params, sent.has_media, self._config)
            for path, is_given, why in refused:
                if is_given:
                    reject(path, f"of a running request is in the way of a change: {why}")
            if sent.asked is not None:
                reject(ID, "is being changed already; wait for the answer to that")
        return found

    def joined(
        self, requests: list[list[Running]], fields: Mapping[str, Any]
    ) -> list[list[Joined]]:
        """Read what completions of requests are to have from now on, and join it with what they
        have; in a thread, as it may take long. The requests have the limits of one together.

        Args:
            fields: fields of `SamplingParams` that steer, by name.

        Raises:
            ValueError: with the path of the field, see docs/errors.md.
        """
        Given(fields, "body").mapping()
        if unknown := unknown_keys(fields, STEERING_FIELDS):
            reject(unknown[0], f"cannot be changed; what can is {', '.join(STEERING_FIELDS)}")
        path = next((name for name in STEERING_FIELDS if fields.get(name) is not None), ID)
        limit, made = self._config.steering_config.max_request_work, list[list[Joined]]()
        for found in requests:
            work, known = Work(limit, len(found), len(requests)), dict[int, Joined]()
            for running in found:
                if id(running.steering) not in known:
                    known[id(running.steering)] = self._joined(running, fields, path, work)
            made.append([known[id(running.steering)] for running in found])
        return made

    def _joined(self, running: Running, fields: Mapping[str, Any], path: str, work: Work) -> Joined:
        sent, prompt = running.sent, running.prompt
        before = running.steering or plain_plan(len(prompt))
        params = copy.copy(sent.params)
        for name in STEERING_FIELDS:
            setattr(params, name, fields.get(name))
        setattr(params, INHERIT, before.inherit)
        assert params.max_tokens is not None
        seen = Prompt(prompt, params.max_tokens, self._processor.tokenizer, work)
        shape = need_steering(self._config, path)
        config = self._config.steering_config
        after = steering_plan(params, seen, config, shape, self._modules, len(prompt))
        if any(program.decides for program in after.programs):
            reject(
                path,
                "has a gate that is decided at the last token of the prompt, which was computed "
                'before; have it decided at each row, with "when": "row"',
            )
        if any(program.begins for program in after.programs):
            reject(
                path,
                "has a gate that latches, which does not know of rows that were computed before; "
                "leave out latch, or begin the answer with it",
            )
        num_bytes = sum(len(msgspec.msgpack.encode(plan)) for plan in (before, after))
        work.charge(work.n * num_bytes >> 10, Unit.KILOBYTE, path)
        joined = Joined(before, after, self._modules.sets_of(after), path, work)
        if sent.plan.capture is not None:
            need_known_doses(sent.plan.capture, joined.op_sites)
        return joined

    def ask(
        self, requests: list[list[Running]], joined: list[list[Joined]]
    ) -> list[Future[dict[int, int]]]:
        """Steer the completions of requests otherwise, from their next outputs on.

        Returns:
            For each request, its completions' positions from which the change acts, those left out
            that ended before.

        Raises:
            ValueError: another change came in between; then none is changed.
        """
        for running in (one for found in requests for one in found):
            if running.sent.asked is not None or running.sent.plan.steering is not running.steering:
                reject(ID, "is being changed already; wait for the answer to that")
        changes = [NewSteering({running.sample for running in found}) for found in requests]
        for change, found, plans in zip(changes, requests, joined, strict=True):
            for running, each in zip(found, plans, strict=True):
                running.sent.ask(each, change, running.sample)
        return [change.future for change in changes]
