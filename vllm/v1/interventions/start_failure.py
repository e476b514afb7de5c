# SPDX-License-Identifier: Apache-2.0
"""Reason why an engine core did not start, told to the frontend that waits for the core.

Upstream's frontend sees a process end, and refers to a traceback far above in the log.
"""

from collections.abc import Mapping
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
