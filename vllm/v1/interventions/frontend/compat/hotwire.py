# SPDX-License-Identifier: Apache-2.0
"""The requests of hotwire, with `--compat hotwire` (docs/coming-from.md#hotwire).

hotwire adds `scale` times a vector that the operator has to what a layer returns. The vector `id`
of a layer is our module `id.layer`; where `decode_only` is true, `id.layer.decode`, whose vectors
are of the decode tier. Where hotwire would serve a request unsteered, or drop a vector, this is an
error.
"""

from collections.abc import Mapping
from typing import Any

from vllm.config.steering import MAX_MODULES
from vllm.v1.interventions.frontend.compat.lens import read_json, read_layer
from vllm.v1.interventions.frontend.request.budget import Work
from vllm.v1.interventions.given import Given
from vllm.v1.interventions.shape import TapShape

STEER = "hotwire"
"""The key that is read here."""

_NEEDED, _FLAG = ("id", "layer", "scale"), "decode_only"

READS = (
    f"vllm_xargs.{STEER}",
    *(f"vllm_xargs.{STEER}[].{key}" for key in (*_NEEDED, _FLAG)),
)
"""The paths of all fields of a body that are read here; `[]` is each entry of a list."""

_SHAPE = f"must be an object, or a list of 1-{MAX_MODULES}, with id, layer and scale, got {{given}}"


def fields_of(args: Mapping[str, Any], path: str, shape: TapShape, work: Work) -> dict[str, Any]:
    """Return the fields of `SamplingParams` for a request's key: `steering_modules`.

    Args:
        args: its `extra_args`.
        path: what stands before the key in errors, with a dot.
        shape: what the model offers.
        work: counts what is made of the key's text, before it is read.

    Raises:
        ValueError: a value is wrong, or two vectors are of one layer; the message has its path.
    """
    path += STEER
    given = Given(read_json(args[STEER], path, work), path)
    is_one = isinstance(given.value, Mapping)
    modules: dict[int, tuple[str, float]] = {}
    for entry in [given] if is_one else given.entries(_SHAPE, 1, MAX_MODULES):
        fields = entry.fields(_NEEDED, (_FLAG,))
        layer = read_layer(fields["layer"].value, fields["layer"].path, shape)
        if layer in modules:
            entry.refuse(
                f"hotwire keeps the last vector of layer {layer} alone; leave the others out, or "
                "name both in 'steering_modules', which adds them up"
            )
        name = fields["id"].text("must be a text, got {given}")
        tier = ".decode" if fields.get(_FLAG, False).flag() else ""
        modules[layer] = f"{name}.{layer}{tier}", fields["scale"].number()
    return {"steering_modules": [*modules.values()]}
