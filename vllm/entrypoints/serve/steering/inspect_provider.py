# SPDX-License-Identifier: Apache-2.0
"""Inspect AI's provider `vllm-steer/MODEL`: its own provider of vLLM servers, whose requests steer
and capture (docs/coming-from.md#inspect-ai).

`GenerateConfig(extra_body=...)` has our fields, with numpy arrays in them. Rows
go to files named by what is in them, and the log has where they are; arrays never.
"""

import hashlib
import json
import os
import tempfile
from collections import UserList
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio.to_thread
import numpy as np
import safetensors.numpy
from inspect_ai.hooks import BeforeModelGenerate, Hooks, hooks
from inspect_ai.log import EvalLog
from inspect_ai.model import GenerateConfig, ModelOutput, modelapi
from inspect_ai.model._providers.vllm import VLLMAPI
from typing_extensions import override

from vllm.v1.capture import reader
from vllm.v1.interventions.plan import PLAN_FIELDS

from .client import Rows, packed_fields, read_rows

NAME = "vllm-steer"
"""Name of this provider, which stands before a model's name: `vllm-steer/MODEL`."""

Site = tuple[str, int]
_LABELS = ("positions", "token_ids", "versions")
_MORE = ("heads", "tokens", "form")
"""Fields of `Rows` that only the rows of some captures have, besides `_LABELS`."""


class HeldRows(UserList[dict[str, dict[Site, Rows]]]):
    """The rows of each choice, by consumer: `output.metadata["rows"][0]["inline"][point, layer]`.

    No list or dict, and no dataclass: Inspect leaves what it cannot write out of its logs.
    """


@dataclass
class _Request:
    """One call, as it is sent and as it came back."""

    body: dict[str, Any]
    capture: list[dict[str, Any]] = field(default_factory=list)
    """Results of each choice by consumer, which `ModelOutput.metadata` has as "capture"."""
    rows: HeldRows = field(default_factory=HeldRows)


_CURRENT: ContextVar[_Request] = ContextVar("vllm_steer_request")


class SteeringAPI(VLLMAPI):
    """A vLLM server that steers and captures, started here or attached to.

    Args:
        model_name: as of Inspect's `vllm/` provider, `base:adapter` for a LoRA adapter.
        capture_dir: where rows are kept; None is `captures` in `INSPECT_LOG_DIR`, or in `logs`.
        steering_key: sent as `X-Steering-Key`.
        rows: "refs" keeps them in files here; "memory" has them in `output.metadata["rows"]`, too,
            as `HeldRows`, and never in a log; "server" asks the server's consumer `filesystem` for
            what a request asks of `inline`, and keeps the paths that it answers.
        more: as of Inspect's provider; the rest is `vllm serve`'s.
    """

    def __init__(
        self,
        model_name: str,
        capture_dir: str | None = None,
        steering_key: str | None = None,
        rows: str = "refs",
        **more: Any,
    ) -> None:
        if rows not in ("refs", "memory", "server"):
            raise ValueError(f"rows: must be 'refs', 'memory' or 'server', got {rows!r}")
        self._rows = rows
        logs = os.environ.get("INSPECT_LOG_DIR", "logs")
        self.capture_dir = Path(capture_dir or os.path.join(logs, "captures"))
        self._steering_key = steering_key
        super().__init__(model_name, **more)

    @override
    async def generate(
        self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig
    ) -> Any:
        """Generate as Inspect's provider does, with what a request says of arrays in its log.

        Returns:
            What that returns, the output with `capture` and `steering_digest` in its metadata.
        """
        body = config.extra_body or {}
        if isinstance(asked := body.get("capture"), Mapping):
            body = {**body, "capture": _kept(asked, self._rows == "server")}
        sent = {key: packed_fields(v, key) for key, v in body.items() if key in PLAN_FIELDS}
        request = _Request(sent)
        logged = {**body, **{key: _described(body[key]) for key in sent}}
        headers = dict(config.extra_headers or {})
        if self._steering_key is not None:
            headers["X-Steering-Key"] = self._steering_key
        said = config.model_copy(
            update={"extra_body": logged or None, "extra_headers": headers or None}
        )
        token = _CURRENT.set(request)
        try:
            result = await super().generate(input, tools, tool_choice, said)
        finally:
            _CURRENT.reset(token)
        output = result[0] if isinstance(result, tuple) else result
        if isinstance(output, ModelOutput) and sent:
            steering = {key: logged[key] for key in sent if key != "capture"}
            found: dict[str, Any] = {"capture": request.capture} if request.capture else {}
            if self._rows == "memory" and request.capture:
                found["rows"] = request.rows
            if steering:
                found["steering_digest"] = hashlib.sha256(repr(steering).encode()).hexdigest()
            output.metadata = {**(output.metadata or {}), **found}
        return result

    @override
    async def _generate_completion(self, request: dict[str, Any], config: GenerateConfig) -> Any:
        """Send what was meant in place of what is logged, and keep what comes back out of it."""
        current = _CURRENT.get()
        extra = {**(request.get("extra_body") or {}), **current.body}
        completion = await super()._generate_completion({**request, "extra_body": extra}, config)
        for choice in completion.choices:
            results = cast("dict[str, Any]", (choice.model_extra or {}).get("capture_results"))
            if not results:
                continue
            shown = {}
            held: dict[str, dict[Site, Rows]] = {}
            for name, result in results.items():
                rows = result["payload"] if name.partition("[")[0] == "inline" else None
                shown[name] = result
                if isinstance(rows, list):
                    held[name] = read_rows(rows)
                    stored = await anyio.to_thread.run_sync(store, held[name], self.capture_dir)
                    shown[name] = {k: v for k, v in result.items() if k != "payload"} | stored
            assert choice.model_extra is not None
            choice.model_extra["capture_results"] = shown
            current.capture.append(shown)
            if self._rows == "memory":
                current.rows.append(held)
        return completion


def _kept(capture: Mapping[str, Any], on_server: bool) -> Mapping[str, Any]:
    """Return what is to be captured, by the consumer that keeps it.

    Raises:
        ValueError: what is asked of `inline` is not kept.
    """
    if on_server and {"inline", "filesystem"} <= capture.keys():
        raise ValueError(
            "extra_body.capture: rows=server asks filesystem for what is asked of inline; "
            "name one of them"
        )
    if on_server:
        return {"filesystem" if name == "inline" else name: v for name, v in capture.items()}
    inline = capture.get("inline")
    for asked in inline if isinstance(inline, list) else [inline]:
        for key in ("attention", "lens"):
            if isinstance(asked, Mapping) and key in asked:
                raise ValueError(
                    f"extra_body.capture.inline.{key}: vllm-steer keeps rows alone; ask "
                    "vllm.entrypoints.serve.steering.client, or for attention -M rows=server"
                )
    return capture


class _Array(np.ndarray):
    """An array whose text says all that is in it: keys of Inspect's cache are texts, and numpy's
    leaves out the middle of long arrays."""

    @override
    def __repr__(self) -> str:
        digest = hashlib.sha256(np.ascontiguousarray(self).tobytes()).hexdigest()
        return f"array({self.shape}, {self.dtype}, sha256={digest})"

    __str__ = __repr__


def _keyed(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return value.view(_Array)  # a masked one is refused where it is packed
    if isinstance(value, Mapping):
        return {key: _keyed(entry) for key, entry in value.items()}
    return [_keyed(entry) for entry in value] if isinstance(value, list | tuple) else value


@hooks(name="vllm_steer_cache", description="Tells arrays apart in the cache of outputs.")
class CacheKeys(Hooks):
    """Hook that Inspect calls before it looks into its cache."""

    @override
    async def on_before_model_generate(self, data: BeforeModelGenerate) -> None:
        """Have the arrays of a request stand in its key by what is in them."""
        body = data.config.extra_body
        if data.cache is not None and body and data.model_name.startswith(f"{NAME}/"):
            data.config.extra_body = _keyed(body)


@modelapi(name=NAME)
def vllm_steer() -> type[SteeringAPI]:
    """Return the provider's class to Inspect, which finds this by its entry point."""
    return SteeringAPI


def store(rows: Mapping[Site, Rows], folder: Path) -> dict[str, Any]:
    """Write rows to a file named by its digest, once.

    Returns:
        `{"path", "sha256", "sites"}`: the path below the folder of `folder`, and points with their
        layers, as "0-31", and the shape of the rows of each.
    """
    tensors: dict[str, np.ndarray] = {}
    for (point, layer), site in rows.items():
        name = f"{point}.{layer}"
        tensors[name] = np.ascontiguousarray(site.values)
        tensors |= {f"{name}.{label}": vars(site)[label] for label in _LABELS}
        if more := {key: vars(site)[key] for key in _MORE if vars(site)[key]}:
            tensors[f"{name}.more"] = np.frombuffer(json.dumps(more).encode(), np.uint8)
    content = safetensors.numpy.save(tensors)
    digest = hashlib.sha256(content).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.safetensors"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as unfinished:
            unfinished.write(content)
        os.replace(unfinished.name, path)
    return {"path": f"{folder.name}/{path.name}", "sha256": digest, "sites": _sites(rows)}


def _sites(rows: Mapping[Site, Rows]) -> list[Any]:
    """[point, layers, shape] of what was captured; a log has it several times a sample, so runs of
    layers are one entry."""
    made: list[Any] = []
    last = -1
    for (point, layer), site in sorted(rows.items()):
        shape = list(site.values.shape)
        if made and made[-1][::2] == [point, shape] and layer == last + 1:
            made[-1][1] = f"{made[-1][1].partition('-')[0]}-{layer}"
        else:
            made.append([point, str(layer), shape])
        last = layer
    return made


def load_rows(
    output: ModelOutput,
    where: EvalLog | str | os.PathLike[str],
    choice: int = 0,
    capture: str = "inline",
) -> dict[Site, Rows]:
    """Return the rows of an output, also of one that was read from a log.

    Args:
        where: the log, or the folder in which `capture_dir` lies. Of what the server keeps the
            `root` of its consumer, a path or URL as it is reached from here.
        capture: `inline`, or `inline[0]` and so on where a list was asked for; `filesystem` of what
            the server keeps.

    Returns:
        Rows by (point, layer), float16 or float32.

    Raises:
        KeyError: the output has none.
        ValueError: the file is not the one that was written, or is on a server, and `where` is not.
        CaptureFileError: a file of the server's is damaged.
    """
    stored = (output.metadata or {})["capture"][choice][capture]
    if "sha256" not in stored:
        if (payload := stored["payload"]) is None:
            raise KeyError(f"{capture}: {stored['error']}")
        if isinstance(where, EvalLog):
            raise ValueError(f"where: {capture} is kept by the server; name its consumer's root")
        kept = reader.open(os.fspath(where)).find(payload["request_id"], payload["tag"])
        rows = {site: kept.rows(*site) for site in sorted(kept.sites)}
        return {
            site: Rows(each.positions, each.token_ids, each.numpy(), each.versions, each.heads)
            for site, each in rows.items()
        }
    folder = Path(where.location).parent if isinstance(where, EvalLog) else Path(where)
    content = (folder / stored["path"]).read_bytes()
    if hashlib.sha256(content).hexdigest() != stored["sha256"]:
        raise ValueError(f"{stored['path']}: is not what was written")
    tensors = safetensors.numpy.load(content)
    found = {}
    for name in tensors:
        point, layer, *label = name.split(".")
        if not label:
            positions, token_ids, versions = (tensors[f"{name}.{each}"] for each in _LABELS)
            more = json.loads(tensors.get(f"{name}.more", np.frombuffer(b"{}", np.uint8)).tobytes())
            found[point, int(layer)] = Rows(
                positions, token_ids, tensors[name], versions, tuple(more.get("heads", ())),
                tuple(more.get("tokens", ())), more.get("form"),
            )  # fmt: skip
    return dict(sorted(found.items()))


def _described(value: Any) -> Any:
    """Return fields with arrays, and long lists of numbers, as the log has them."""
    is_long = isinstance(value, list) and len(value) > 16 and isinstance(value[0], int | float)
    if isinstance(value, np.ndarray) or is_long:
        array = np.asarray(value)
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        norm = float(np.linalg.norm(array.astype(np.float64)))
        return {"shape": list(array.shape), "sha256": digest, "norm": norm}
    if isinstance(value, Mapping):
        return {str(key): _described(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_described(entry) for entry in value]
    return value
