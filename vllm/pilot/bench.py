# SPDX-License-Identifier: Apache-2.0
"""A model to experiment on: an engine of this process or a running server, asked alike."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import numpy as np
import torch
from tqdm import tqdm

from vllm.entrypoints.serve.steering.client import SteeringClient
from vllm.pilot.pairs import Text
from vllm.v1.capture.rules import RuleResult

if TYPE_CHECKING:
    from vllm import LLM

Fields = Mapping[str, Any]
"""Fields of `SamplingParams`, which are those of a body too."""

_AT_ONCE = 64
"""Requests that a server is sent at once."""
_QUIET_SECONDS = 2.0


class LateBar(tqdm):
    """A progress bar of what takes longer than two seconds, gone when it is done."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more, leave=False, delay=_QUIET_SECONDS)

    def refresh(self, *given: Any, **more: Any) -> None:
        """Draw it, but not before its time: `LLM.generate` ends with this."""
        if self.format_dict["elapsed"] > _QUIET_SECONDS:
            super().refresh(*given, **more)


@dataclass(frozen=True)
class Steering:
    """`scale * vector` added at one point of one layer, at all positions of prompt and answer."""

    layer: int
    vector: torch.Tensor
    """float32 [hidden], in the units of the stream."""
    scale: float
    point: str = "post_block"

    def fields(self) -> dict[str, Any]:
        """The fields of a request.

        Scale 0 is sent as v, minus v for the prompt and minus v for the answer: a sum of zero that
        passes through a slot of the steering table like any other content.
        """
        vector = self.vector.float().numpy()

        def at_layer(scale: float) -> dict[str, Any]:
            return {self.point: {self.layer: {"vector": vector, "scale": scale}}}

        if self.scale:
            return {"steering_vectors": at_layer(self.scale)}
        return {
            "steering_vectors": at_layer(1.0),
            "prefill_steering_vectors": at_layer(-1.0),
            "decode_steering_vectors": at_layer(-1.0),
        }


@dataclass(frozen=True)
class Reply:
    """Answer of a model to one prompt."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finished: bool
    """True if it ended the text itself."""
    logprobs: list[dict[int, float]]
    """log P of every prompt token given those before it, by its id, and of as many others as were
    asked for; nothing for the first token, and an empty list where none was asked for."""
    rows: Mapping[tuple[str, int], torch.Tensor]
    """Captured rows by point and layer, float32 [n, hidden]."""
    tokens: tuple[str, ...] = ()
    """The text of each captured row's token, where the capture says `"tokens": True`."""
    rules: Mapping[str, RuleResult] = field(default_factory=dict)
    """The result of each of the request's rules, by name."""


class Coder(Protocol):
    """A model's layers and its tokenizer, which an engine and a checkpoint both have."""

    layers: dict[int, tuple[str, ...]]
    """Layer -> the points at which it can be steered."""

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        """Return the tokens of a text, or of a chat by the model's template.

        Args:
            special: whether special tokens go around a text; a chat has those of its template.
            answer: whether a chat ends with what comes before an answer.
        """


class Bench(Coder, Protocol):
    """Interface to a model, as experiments need it."""

    name: str
    hidden: int

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        """Answer prompts, each with its own fields, in one batch.

        Raises:
            ValueError: a request cannot be honoured; over HTTP a `SteeringError`.
        """


class EngineBench:
    """An `LLM` of this process, with `enable_steering` and the consumer `inline`."""

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        config = llm.llm_engine.model_config
        self.name: str = config.model
        self.hidden: int = config.get_hidden_size()
        self.layers = llm.steering.layers()

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        """Return the tokens of a text, or of a chat; see `Coder.encode`."""
        return encode_with(self.tokenizer, text, special, answer)

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        """Answer prompts in one `generate` call; see `Bench.ask`."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=list(ids)) for ids in prompts],
            [SamplingParams(**each) for each in fields],
            use_tqdm=LateBar,
        )
        return [_reply(output) for output in outputs]


class ServerBench:
    """A running `vllm serve --enable-steering --capture-consumers inline`."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        """Ask the server what its model offers.

        Args:
            url: its address, with or without `/v1`.
            api_key: the server's key.
            model: the model's name; a server with one model needs none.

        Raises:
            SteeringError: it refuses; ValueError: it does not steer; httpx's errors: no answer.
        """
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(headers=headers, timeout=600.0)
        self._client = SteeringClient(url, api_key=api_key, model=model)
        self._model = {"model": model} if model else {}
        offered = self._client.layers()
        self.name = model or url
        self.hidden = int(offered["hidden_size"])
        steered = offered["steering_points"]
        self.layers = {
            int(layer): tuple(point for point in points if point in steered)
            for layer, points in offered["layers"].items()
        }

    def encode(self, text: Text, special: bool = True, answer: bool = False) -> list[int]:
        """Return the tokens of a text, or of a chat; see `Coder.encode`."""
        body: dict[str, Any] = {"prompt": text, "add_special_tokens": special}
        if not isinstance(text, str):
            messages = list(map(dict, text))
            body = {"messages": messages, "add_generation_prompt": answer}
        response = self._http.post(f"{self._url}/tokenize", json={**self._model, **body})
        response.raise_for_status()
        return list(response.json()["tokens"])

    def ask(self, prompts: Sequence[Sequence[int]], fields: Sequence[Fields]) -> list[Reply]:
        """Answer prompts, `_AT_ONCE` requests at a time; see `Bench.ask`."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = pool.map(self._one, prompts, fields)
            return list(LateBar(answers, "asking", len(prompts), unit="request"))

    def _one(self, prompt: Sequence[int], fields: Fields) -> Reply:
        answer = self._client.complete(list(prompt), return_token_ids=True, **fields)
        raw = answer.raw["choices"][0]
        choice = answer.choices[0]
        for name, status in choice.capture_status.items():
            if status != "ok":
                raise ValueError(f"capture {name}: {choice.capture_results[name]['error']}")
        logprobs = [
            {int(token): one["logprob"] for token, one in (entry or {}).items()}
            for entry in raw.get("prompt_logprobs") or ()
        ]
        return Reply(
            tuple(prompt),
            tuple(raw["token_ids"]),
            choice.text,
            choice.finish_reason == "stop",
            logprobs,
            {site: torch.tensor(rows.values).float() for site, rows in choice.rows.items()},
            next((rows.tokens for rows in choice.rows.values()), ()),
            {name: RuleResult(**result) for name, result in choice.rules.items() if result},
        )


def encode_with(tokenizer: Any, text: Text, special: bool, answer: bool) -> list[int]:
    """The tokens of a text or a chat, by a tokenizer of transformers; see `Coder.encode`."""
    if isinstance(text, str):
        return list(tokenizer.encode(text, add_special_tokens=special))
    whole = tokenizer.apply_chat_template(
        list(map(dict, text)), tokenize=False, add_generation_prompt=answer
    )
    return list(tokenizer.encode(str(whole), add_special_tokens=False))


def bench_of(llm: "LLM | Bench | str") -> Bench:
    """The bench of an `LLM`, of a server's URL, or the bench itself."""
    if isinstance(llm, str):
        return ServerBench(llm)
    if isinstance(llm, EngineBench | ServerBench):
        return llm
    from vllm import LLM

    return EngineBench(llm) if isinstance(llm, LLM) else llm


def surprise(
    bench: Bench, texts: Sequence[tuple[Sequence[int], int]], steerings: Sequence[Steering | None]
) -> np.ndarray:
    """Surprise of the model at texts, under each steering.

    Args:
        texts: tokens, and the index from which on they count.

    Returns:
        float64 [steerings, texts]: nats, the sum over the counted tokens.
    """
    found = [
        [surprise_of(ids[start:], listed) for (ids, start), listed in zip(texts, of, strict=True)]
        for of in likelihoods(bench, texts, steerings)
    ]
    return np.array(found, dtype=np.float64).reshape(len(steerings), len(texts))


def surprise_of(ids: Sequence[int], listed: Sequence[Mapping[int, float]]) -> float:
    """The sum of -log P of tokens, in nats, by what `likelihoods` has of each."""
    return -sum(entry[token] for token, entry in zip(ids, listed, strict=True) if entry)


def likelihoods(
    bench: Bench,
    texts: Sequence[tuple[Sequence[int], int]],
    steerings: Sequence[Steering | None],
    others: int = 0,
) -> list[list[list[dict[int, float]]]]:
    """Log-probabilities of the tokens of texts, under each steering.

    Args:
        texts: tokens, and the index from which on they count.
        others: how many of the likeliest tokens are listed at each place beside the text's own.

    Returns:
        For each steering, for each text, as `Reply.logprobs`, of the counted tokens.
    """
    common = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": others}
    asked = [{**common, **(s.fields() if s else {})} for s in steerings for _ in texts]
    replies = bench.ask([ids for ids, _ in texts] * len(steerings), asked)
    listed = [r.logprobs[texts[i % len(texts)][1] :] for i, r in enumerate(replies)]
    return [listed[i : i + len(texts)] for i in range(0, len(listed), len(texts))]


def _reply(output: Any) -> Reply:
    answer = output.outputs[0]
    for name, result in (answer.capture_results or {}).items():
        if result.status != "ok":
            raise ValueError(f"capture {name}: {result.error}")
    inline = (answer.capture_results or {}).get("inline")
    rows = inline.payload if inline else {}
    ids = tuple(output.prompt_token_ids or ())
    return Reply(
        ids,
        tuple(answer.token_ids),
        answer.text,
        answer.finish_reason == "stop",
        [
            {token: one.logprob for token, one in (entry or {}).items()}
            for entry in output.prompt_logprobs or ()
        ],
        {site: of_site.values.float() for site, of_site in rows.items()},
        next((tuple(of_site.tokens or ()) for of_site in rows.values()), ()),
        {name: result for name, result in (answer.rules or {}).items() if result},
    )
