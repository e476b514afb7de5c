# SPDX-License-Identifier: Apache-2.0
"""Engine options of activation steering."""

from pydantic import Field

from vllm.config.utils import config

POINTS = ("pre_attn", "post_attn", "post_block")
"""The points of a decoder block, in the order the stream passes them."""

SCHEMA = 1
"""Part of the compile-cache key: raise it when traced tap code or an op's meaning changes."""


@config
class SteeringConfig:
    """Activation steering: add vectors to the residual stream, per request."""

    enable_steering: bool = False
    """Accept `steering_vectors` and its kin in requests."""

    max_steering_configs: int = Field(default=32, ge=1, le=65536)
    """Distinct contents (what prompt or generated positions of a request get) in use at once.
    Further requests wait for a slot. Costs one row per point and layer each."""

    steering_points: list[str] = Field(default_factory=lambda: list(POINTS), min_length=1)
    """The points that can be steered, of pre_attn, post_attn and post_block. Fewer cost less.
    Does not limit capture."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.steering_points) - set(POINTS))
        if unknown:
            raise ValueError(f"steering_points: unknown {unknown}, allowed are {list(POINTS)}")

    def compute_hash(self) -> str:
        """Everything that changes the traced code or the shapes in it."""
        from vllm.config.utils import hash_factors

        if not self.enable_steering:
            return "off"
        return hash_factors(
            {
                "schema": SCHEMA,
                "slots": self.max_steering_configs,
                "points": sorted(self.steering_points),
            }
        )
