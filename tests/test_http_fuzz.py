# SPDX-License-Identifier: Apache-2.0
"""Malformed bodies: a short run of `make fuzz`."""

from __future__ import annotations

import asyncio

from tests import http_fuzz

BODIES = 500


def test_malformed_bodies_are_refused_by_name() -> None:
    async def run() -> None:
        async with http_fuzz.server() as client:
            for path, fields in http_fuzz.bodies():  # the twin: right, but for the malformation
                answer = await http_fuzz.send(client, path, fields)
                assert answer.status_code == 200, answer.text
            await client.post("/v1/steering/clear", json={})
            refused = await http_fuzz.fuzz(client, BODIES, seed=1)
            assert refused.total() == BODIES
            assert {kind.split()[0] for kind in refused} == {p for p, _ in http_fuzz.bodies()}

    asyncio.run(run())
