# SPDX-License-Identifier: Apache-2.0
"""Places on the device for autoencoders that rows are reconstructed by, and that get a name while
the engine serves."""

from collections.abc import Collection

import torch

from vllm.config.steering import FeatureFile, FeaturePlace
from vllm.v1.features.autoencoder import Autoencoder
from vllm.v1.features.places import Place
from vllm.v1.interventions.plan import Site
from vllm.v1.interventions.shape import TapShape
from vllm.v1.interventions.worker.making.features import matrix_dtype


class PlaceTable:
    """The places of `features_reconstruct` on one worker.

    Args:
        places: of the option.
        sites: those of this worker that may be steered.
    """

    def __init__(
        self,
        places: list[FeaturePlace],
        sites: Collection[Site],
        shape: TapShape,
        device: torch.device,
    ) -> None:
        dtype = matrix_dtype(device, shape.torch_dtype)
        self.at: dict[Site, list[Place]] = {}
        """Site -> its places, in the option's order."""
        for each in places:
            site = each.point, each.layer
            if site in sites:
                made = Place.empty(shape.hidden_size, each.features, each.k, device, dtype)
                self.at.setdefault(site, []).append(made)

    def wants(self, file: FeatureFile) -> bool:
        """Tell whether this worker has places of a file's site."""
        return (file.point, file.layer) in self.at

    def take(self, name: str, file: FeatureFile, autoencoder: Autoencoder) -> None:
        """Put an autoencoder in its place, if it has one: between two steps, as every step with
        taps reads it."""
        if file.place:
            self.at[file.point, file.layer][file.place - 1].put(autoencoder)

    def drop(self, stamp: str) -> None:
        """Let an autoencoder stay until another takes its place: no program names it any more."""
