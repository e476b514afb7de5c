# SPDX-License-Identifier: Apache-2.0
"""Decides who may change global steering over HTTP."""

import hashlib
import secrets
from http import HTTPStatus
from typing import NoReturn

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm import envs
from vllm.v1.interventions.frontend.results.going_on import CLIENT

HEADER = "X-Steering-Key"
"""The header that a key is sent in."""
VARIABLE = "VLLM_STEERING_API_KEY"
"""The environment variable that holds a key where `--steering-api-key` is not given."""


class SteeringAccess:
    """Lets requests through that show a key, and any request in development mode."""

    def __init__(self, keys: list[str] | None, bearer: bool) -> None:
        """Keep the keys, as digests.

        Args:
            keys: the values of `--steering-api-key`; None for the environment's.
            bearer: whether a key may come as bearer token, which it may where the server has no key
                of its own.
        """
        given = keys or [envs.VLLM_STEERING_API_KEY or ""]
        self._digests = [_digest(key) for key in given if key]
        self._bearer = bearer

    def need(self, request: Request) -> None:
        """Refuse a request that may not change steering.

        Raises:
            HTTPException: a 403 with the reason.
        """
        if envs.VLLM_SERVER_DEV_MODE:
            return
        if not self._digests:
            _forbid(
                "this server lets nobody change steering; start it with --steering-api-key "
                f"({VARIABLE}), or with VLLM_SERVER_DEV_MODE=1"
            )
        shown = request.headers.get(HEADER)
        if shown is None and self._bearer:
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            shown = token if scheme.lower() == "bearer" else None
        if shown is None:
            how = f"{HEADER}, or as bearer token" if self._bearer else HEADER
            _forbid(f"changing steering needs a key, sent as {how}")
        digest = _digest(shown)
        # All of them, so that the time does not say which one was nearly right.
        if not any([secrets.compare_digest(digest, known) for known in self._digests]):
            _forbid("the key is none of those that may change steering")


class ClientDigest:
    """ASGI middleware that says, to all that is done for a request, which client it is of: a digest
    of the key that it shows. One request changes another only if both are of one client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            CLIENT.set(_digest(Headers(scope=scope).get("Authorization", "")))
        await self._app(scope, receive, send)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()


def _forbid(reason: str) -> NoReturn:
    raise HTTPException(status_code=HTTPStatus.FORBIDDEN.value, detail=f"Forbidden: {reason}")
