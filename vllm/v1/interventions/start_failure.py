# SPDX-License-Identifier: Apache-2.0
"""Reason why a worker did not start, told to its engine core, and why an engine core did not, told
to the frontend that waits for the core.

Upstream sees a process end, and refers to a traceback far above in the log.
"""

import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from vllm.utils.network_utils import make_zmq_socket
from vllm.v1.interventions.errors import describe

_KEY = "start_failed"


def tell(arguments: Mapping[str, Any], error: BaseException) -> None:
    """Send the frontend the exception that ended the start.

    Args:
        arguments: the keywords of `EngineCoreProc.run_engine_core`.
    """
    with zmq.Context() as context:
        address = arguments["handshake_address"]
        socket = make_zmq_socket(context, address, zmq.DEALER, bind=False, linger=1000)
        socket.send(msgspec.msgpack.encode({_KEY: describe(error)}))
        socket.close()


def raise_if_told(message: bytes) -> None:
    """Raise RuntimeError with the cause if a message of the handshake is a `tell`."""
    cause = msgspec.msgpack.decode(message).get(_KEY)
    if cause is not None:
        raise RuntimeError(f"Engine core initialization failed: {cause}")


def tell_executor(ready: Connection) -> None:
    """Send the executor of a worker the exception that is being handled, which ended the start.

    Args:
        ready: the pipe on which the executor waits for the worker.
    """
    error = sys.exc_info()[1]
    assert error is not None
    with suppress(OSError):  # the executor is gone
        ready.send({"status": _KEY, _KEY: describe(error)})


def raise_of_worker(response: Mapping[str, Any]) -> None:
    """Raise RuntimeError with the cause if what a worker sent is of `tell_executor`."""
    if _KEY in response:
        raise RuntimeError(f"worker did not start: {response[_KEY]}")
