# SPDX-License-Identifier: Apache-2.0
"""Request bodies that ask for steering or capture over HTTP, which is not served yet.

Upstream ignores unknown fields of a body. Ignoring these would answer 200 with unsteered text.
"""

from collections.abc import Set

UNSERVED = frozenset(
    {
        "steering_vectors",
        "prefill_steering_vectors",
        "decode_steering_vectors",
        "steering_modules",
        "steering",
        "steering_inherit_global",
        "capture",
    }
)


def refuse_unserved(extra_fields: Set[str]) -> None:
    """Raises ValueError (a 400) naming the first field that would be ignored."""
    unserved = sorted(UNSERVED & extra_fields)
    if unserved:
        raise ValueError(
            f"{unserved[0]}: steering and capture are not served over HTTP by this version; "
            "use LLM.generate or AsyncLLM.generate"
        )
