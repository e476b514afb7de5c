# SPDX-License-Identifier: Apache-2.0
"""Doors for the users of other tools (docs/coming-from.md).

* `peers.py`: what other tools' requests say, and which of our fields does it; always on.
* `doors.py`: requests that it lets in.
* `lens.py`: requests and answers of vLLM-Lens.
* `wire.py`: tensors as it sends them.
* `easysteer.py`: specifications of EasySteer.
* `hotwire.py`: vectors of hotwire, by their names.
* `interp_engine.py`, `addresses.py`: specifications of interp-engine, and its names of points.
"""
