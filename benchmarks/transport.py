# SPDX-License-Identifier: Apache-2.0
"""How fast a step's captured rows reach the frontend's process: by shared memory, and
by the socket alone. No model and no GPU: one process sends messages as an engine core does, this
one decodes them and copies the rows out.

    python -m benchmarks.transport [--megabytes 64 256] [--steps 20] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

from benchmarks.results import Row, Run, add_arguments, publish, setup

WARM = 1200
"""Megabytes sent before, so that the memory is not fresh."""


def send(path: str, shared: bool, num_bytes: int, steps: int) -> None:
    """In a process of its own: what the output thread of an engine core does."""
    import numpy as np
    import torch
    import zmq

    from vllm.v1.capture.transport.shared_rows import SHARED_BYTES, SharedRows
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.interventions.messages import CapturedChunk
    from vllm.v1.serial_utils import MsgpackEncoder

    torch.set_num_threads(1)  # as in an engine
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(path)
    encoder = MsgpackEncoder(oob_tensor_consumer=SharedRows(SHARED_BYTES) if shared else None)
    rows = torch.randn(num_bytes // 8192, 1, 4096).bfloat16()
    chunk = CapturedChunk(np.arange(len(rows)), [rows], 0, [("all", len(rows))])
    for _ in range(steps):
        message = EngineCoreOutputs(outputs=[EngineCoreOutput("", [], captured=[chunk])])
        socket.send_multipart(encoder.encode(message), copy=False)
    socket.close(linger=-1)
    context.term()


def rate(shared: bool, num_bytes: int, steps: int) -> float:
    """GB/s."""
    import torch
    import zmq

    from vllm.v1.capture.transport.copies import CopyThreads
    from vllm.v1.capture.transport.shared_rows import RowsOfOthers
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder

    warm = 1 + (WARM << 20) // num_bytes
    decoder = MsgpackDecoder(EngineCoreOutputs, oob_tensor_provider=RowsOfOthers())
    into = torch.empty(num_bytes // 8192, 1, 4096, dtype=torch.bfloat16)
    threads = CopyThreads("benchmark")
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        path = f"ipc://{Path(folder) / 'rows'}"
        socket = context.socket(zmq.PULL)
        socket.bind(path)
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=send, args=(path, shared, num_bytes, warm + steps))
        process.start()
        for step in range(warm + steps):
            if step == warm:
                started = time.perf_counter()
            outputs = decoder.decode(socket.recv_multipart(copy=False)).outputs
            threads.run(([into], [outputs[0].captured[0].values[0]]))
            del outputs  # and with it the place
        seconds = time.perf_counter() - started
        process.join()
        socket.close()
    return num_bytes * steps / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256], help="of a step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    add_arguments(parser)
    args = parser.parse_args()
    rows = []
    for megabytes in args.megabytes:
        found: dict[str, list[float]] = {"socket": [], "shared memory": []}
        for _ in range(args.rounds):
            for case, values in found.items():
                values.append(rate(case == "shared memory", megabytes << 20, args.steps))
        at = {"MB": megabytes}
        rows += [Row(case, "rows", "GB/s", values, at) for case, values in found.items()]
    publish(Run("transport", setup(args), rows), args.json)


if __name__ == "__main__":
    main()
