# SPDX-License-Identifier: Apache-2.0
"""Check that the doses a request is asked for are those of vectors alone."""

from collections.abc import Iterator

from vllm.v1.interventions.errors import reject
from vllm.v1.interventions.plan import CapturePlan, Site


def need_known_doses(capture: CapturePlan, op_sites: list[tuple[Site, list[int]]]) -> None:
    """Check a request whose doses are captured, or judged by rules.

    An operation changes a row by what it reads there, and the row before it is kept nowhere.

    Args:
        op_sites: those of the request's operations, as in `SteeringPlan`.

    Raises:
        ValueError: an operation acts where a dose is asked for.
    """
    if not op_sites:
        return
    acting = {site for site, _ in op_sites}
    for path, sites in _dosed(capture):
        if met := acting.intersection(sites):
            point, layer = min(met)
            reject(
                path,
                f"is of vectors, and an operation acts at {point} of layer {layer}, from the "
                "request, a module or the operator: leave that out, or ask for other layers",
            )


def _dosed(capture: CapturePlan) -> Iterator[tuple[str, list[Site]]]:
    """Path of what asks for doses, and its sites."""
    for name, selection in capture.consumers.items():
        if selection.making.of_vectors:
            yield f"capture.{name}.{selection.making.field}", selection.sites
    for rule in capture.rules:
        if capture.streams[rule.stream].making.of_vectors:
            yield f"rules ({rule.name})", rule.sites
