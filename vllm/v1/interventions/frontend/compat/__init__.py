# SPDX-License-Identifier: Apache-2.0
"""Doors for the users of other tools (docs/coming-from.md).

* `peers.py`: what other tools' requests say, and which of our fields does it; always on.
* `opening.py`: the engine arguments that `--compat` turns on.
* `doors.py`: requests that it lets in.
* `lens.py`: requests and answers of vLLM-Lens.
* `lens_routes.py`: endpoints of its that are refused.
* `wire.py`: tensors as it sends them.
* `easysteer.py`: specifications of EasySteer.
"""
