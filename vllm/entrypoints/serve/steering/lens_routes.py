# SPDX-License-Identifier: Apache-2.0
"""Endpoints of vLLM-Lens that are not here: with `--compat lens` they say so."""

from http import HTTPStatus

from fastapi import APIRouter, HTTPException

from vllm.v1.interventions.frontend.compat.peers import ARGS, LENS

router = APIRouter(include_in_schema=False)


@router.api_route("/v1/hooks/{name}", methods=["GET", "POST", "DELETE"])
async def hooks(name: str) -> None:
    """Refuse whatever is asked of hooks.

    Raises:
        HTTPException: always, 501.
    """
    detail = (
        f"/v1/hooks: is not served; use {ARGS['apply_hooks'].ours} "
        f"(docs/coming-from.md#{LENS.anchor})"
    )
    raise HTTPException(HTTPStatus.NOT_IMPLEMENTED.value, detail=detail)
