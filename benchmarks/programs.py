# SPDX-License-Identifier: Apache-2.0
"""What a request with a thousand programs costs the frontend, the message and the engine core.

    python -m benchmarks.programs

Twelve ablations, each at other positions of 1,024, at every site of a model of 16 layers: the
objects of an engine, without a model.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch

from tests.support.plans import config_of, plan_of
from vllm.config.points import STREAM_POINTS
from vllm.v1.interventions.messages import StepInterventions
from vllm.v1.interventions.plan import Plan
from vllm.v1.interventions.scheduler.tables import Tables
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.worker.tables.terms import ProgramTable, TermTable
from vllm.v1.interventions.worker.token_map import TokenMap
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

LAYERS, HIDDEN, PROMPT, ROWS = 16, 2048, 1024, 4096


def timed(what: str, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `work` returns; prints how long it took."""
    started = time.perf_counter()
    made = work(*args, **kwargs)
    print(f"{what:12}{1e3 * (time.perf_counter() - started):8.1f} ms")
    return made


def main() -> None:
    config = config_of(steering_families=["add", "ablate", "replace"], max_steering_rows=ROWS)
    shape = TapShape(HIDDEN, "bfloat16", dict.fromkeys(range(LAYERS), LayerShape(STREAM_POINTS)))
    config.tap_shape = shape
    bits = [[p for p in range(PROMPT) if p >> bit & 1] for bit in range(10)]
    ops = [
        {
            "op": "ablate",
            "point": STREAM_POINTS[i % 3],
            "layers": "all",
            "direction": [i + 2.0, *[1.0] * (HIDDEN - 1)],
            "positions": bits[i % 10],
        }
        for i in range(12)
    ]
    sites = [(point, layer) for layer in range(LAYERS) for point in STREAM_POINTS]
    for _ in range(2):  # the first warms up
        plan = timed("resolve", plan_of, config=config, prompt=PROMPT, steering=ops)
        message = timed("encode", MsgpackEncoder().encode, plan)
        print(f"{'message':12}{sum(map(len, message)) / 1e6:8.2f} MB")
        got = timed("decode", MsgpackDecoder(Plan).decode, message)
        tables, step = Tables(config.steering_config, HIDDEN), StepInterventions(1)
        timed("reserve", tables.reserve, "request", got)
        timed("put_new", tables.put_new, step)
        sent = timed("pickle", pickle.dumps, step)
        print(f"{'message':12}{len(sent) / 1e6:8.2f} MB")
        placed = timed("unpickle", pickle.loads, sent).placed
        tokens = TokenMap(2048, torch.device("cpu"))
        terms = TermTable(config.steering_config, shape, tokens.program.device)
        timed("TermTable", terms.write, placed["terms"])
        table = ProgramTable(sites, config.steering_config, shape, terms, tokens, {})
        timed("ProgramTable", table.write, placed["programs"])
        print(f"{len(got.steering.programs)} programs\n")


if __name__ == "__main__":
    main()
