# SPDX-License-Identifier: Apache-2.0
"""Malformed bodies: a short run of `make fuzz`."""

from __future__ import annotations

import asyncio

import pytest

from tests.http import fuzz

pytestmark = pytest.mark.full

BODIES = 500


def test_malformed_bodies_are_refused_by_name() -> None:
    async def run() -> None:
        async with fuzz.server() as client:
            for path, fields in fuzz.bodies():  # the twin: right, but for the malformation
                answer = await fuzz.send(client, path, fields)
                assert answer.status_code == 200, answer.text
            await client.post("/v1/steering/clear", json={})
            refused = await fuzz.fuzz(client, BODIES, seed=1)
            assert refused.total() == BODIES
            assert {kind.split()[0] for kind in refused} == {p for p, _ in fuzz.bodies()}

    asyncio.run(run())
