# SPDX-License-Identifier: Apache-2.0
"""The operation that puts what an autoencoder reconstructs of a row in the row's place.

{"op": "reconstruct", "features": "mood", "positions": "all_generated"}
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from vllm.v1.features.autoencoder import opened
from vllm.v1.interventions.errors import need_family, reject
from vllm.v1.interventions.given import Given, Select
from vllm.v1.interventions.named_features import need_features
from vllm.v1.interventions.operations import Op
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.sites import need_one_lane
from vllm.v1.interventions.terms import make_term
from vllm.v1.interventions.values import says
from vllm.v1.steering_formula import Scalars

RECONSTRUCT = "reconstruct"


def is_reconstruct(entry: Any) -> bool:
    """Tell whether an entry of `steering` is this operation."""
    return isinstance(entry, Mapping) and says(entry.get("op"), RECONSTRUCT)


def parse_reconstruct(
    entry: Any, path: str, shape: TapShape, families: frozenset[str], select: Select
) -> Op:
    """Parse an entry.

    Raises:
        ValueError: unknown keys or features, a family that the engine does not have, a transcoder.
    """
    asked = Given(entry, path)
    need_family(RECONSTRUCT, families, f"{path}.op")
    given = asked.fields(("op", "features"), ("positions",), RECONSTRUCT)
    need_one_lane(path, shape)
    file = need_features(given["features"], shape)
    if file.stamp and not file.place:
        given["features"].refuse(
            "{given} got its name while the engine served, to be read: register it anew with "
            "reconstruct true, or start the engine with it (--features)"
        )
    site = file.point, file.layer
    autoencoder = opened(file)
    if autoencoder.transcodes:
        given["features"].refuse(
            "{given} is a transcoder, which writes another site than it reads: nothing stands in "
            "place of the row"
        )
    positions = given["positions"].positions(select) if "positions" in given else None
    name = given["features"].plain()
    # As workers have them: first those of the start, then the places.
    of_start = [n for n, f in shape.features.items() if (f.point, f.layer) == site and not f.stamp]
    number = len(of_start) + file.place if file.place else 1 + of_start.index(name)
    # The term itself changes nothing, and with an encoder it parts no features.
    nothing = bytes(4 * shape.hidden_size)
    term = make_term(Scalars(reconstructs=float(number)), nothing, encoder=nothing)
    # The stamp tells files of one path apart; the digest has not all numbers of one.
    term = msgspec.structs.replace(
        term,
        digest=f"{term.digest}/{autoencoder.digest}/{file.stamp}",
        features=(name, file.stamp) if file.stamp else None,
    )
    return Op(RECONSTRUCT, [site], positions, [term], frozen=False)


def need_first(op: Op, before: Iterable[Op], path: str) -> None:
    """Raise ValueError if an operation acts before this one at its site."""
    [(point, layer)] = op.sites
    if any((point, layer) in each.sites for each in before):
        reject(
            path, f"must come before other operations at {point} {layer}: it reads the row as it is"
        )
