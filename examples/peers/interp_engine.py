# SPDX-License-Identifier: Apache-2.0
"""Specifications and addresses of interp-engine as fields of `SamplingParams`, without
`--compat interp-engine`.

    from examples.peers.interp_engine import capture, fields

    spec = {"layers": {10: {"operations": [{"vector": vector, "scale": 4.0}]}}}
    params = SamplingParams(max_tokens=8, capture=capture(["resid_post.10"]), **fields(spec))

Its own `SteeringSpec` is taken as it is, and `dataclasses.asdict` of it. What cannot be done
exactly is a ValueError that names the field.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from vllm.v1.interventions.frontend.compat.addresses import capture_of
from vllm.v1.interventions.frontend.compat.interp_engine import fields_of as fields
from vllm.v1.interventions.frontend.request.budget import Work

__all__ = ["capture", "fields"]


def capture(addresses: Sequence[str], positions: Any = "all") -> dict[str, Any]:
    """Return a capture of interp-engine's addresses, such as "resid_post.10".

    Args:
        addresses: its names of points, with their layers.
        positions: selectors of ours; its own captures are of all positions.

    Raises:
        ValueError: an address is of no point of ours; the message names it.
    """
    asked = {"inline": {"hooks": list(addresses), "positions": positions}}
    made: dict[str, Any] = capture_of(asked, "capture", Work(sys.maxsize))
    return made
