# SPDX-License-Identifier: Apache-2.0
"""The package behind `vllm-pilot apply`: it puts our files into an installed, pinned vLLM.

It needs the standard library only. `tools` builds its wheel, and uses its patches and its changes.
"""


class BuildError(Exception):
    """Raised when the work cannot go on. The message names the file and the remedy."""
