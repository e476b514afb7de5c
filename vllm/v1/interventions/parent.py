# SPDX-License-Identifier: Apache-2.0
"""Ends processes with those that started them."""

import multiprocessing
import os
import threading
import time

PARENT_SECONDS = 1.0
"""Seconds between two looks of a process whether the one that started it lives."""


def end_with_parent() -> None:
    """End this process within seconds of the one that started it, whatever that died of.

    Engine cores call it, and their workers: upstream has those wait on a pipe, once they have
    loaded, and then tear down for as long as that takes. So do API servers that are several, which
    would go on to accept what nobody answers, and what else a server starts.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        if os.getppid() != parent.pid:
            parent.join()  # another process made this one in its name
        # Not by its pipe: what else was forked from the parent may hold the other end open.
        while os.getppid() == parent.pid:
            time.sleep(PARENT_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
