# SPDX-License-Identifier: Apache-2.0
"""Specifications of EasySteer as fields of `SamplingParams`, without `--compat easysteer`.

    from examples.peers.easysteer import fields

    spec = {"vectors": [{"data": {12: vector}, "scale": 2.0, "apply": {"prompt": "none"}}]}
    llm.generate(prompts, SamplingParams(max_tokens=8, **fields(spec)))

Its own `SteeringSpec` is taken as it is, where its vectors are given as `data`. What cannot be done
exactly is a ValueError that names the field.
"""

from __future__ import annotations

from vllm.v1.interventions.frontend.compat.easysteer import fields_of as fields

__all__ = ["fields"]
