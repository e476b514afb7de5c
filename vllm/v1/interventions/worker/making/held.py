# SPDX-License-Identifier: Apache-2.0
"""Autoencoders that a worker holds on its device: those of the start, and those that get a name
while the engine serves.

A file is read in a thread, beside steps; the device's memory is taken between two steps, as a step
may record a graph, which no other thread may disturb.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from vllm.config.steering import FeatureFile
from vllm.v1.features.autoencoder import Autoencoder, opened
from vllm.v1.interventions.calls import FeaturePhase
from vllm.v1.interventions.worker.making.features import device_bytes, on_device
from vllm.v1.interventions.worker.making.shards import Shards


class Holder(Protocol):
    """One use of autoencoders that a worker holds."""

    def wants(self, file: FeatureFile) -> bool:
        """Tell whether one of this site may be held here."""

    def take(self, name: str, file: FeatureFile, autoencoder: Autoencoder) -> None:
        """Hold one. Raises ValueError or torch.OutOfMemoryError if it cannot be."""

    def drop(self, stamp: str) -> None:
        """Hold one no more, if it is here."""


class FeatureLoads:
    """Reads files for all that holds autoencoders on this worker.

    Args:
        holders: each takes what it wants.
    """

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self._reading: dict[str, Future[Autoencoder]] = {}
        """By stamp."""
        self._thread = ThreadPoolExecutor(1, "features")

    def answer(self, phase: FeaturePhase, name: str, file: FeatureFile) -> str | None:
        """Begin to load an autoencoder; look whether it is here; or drop it.

        Returns:
            None while it is being read; "" if all is well; the reason why it cannot be held.
        """
        match phase:
            case "load":
                if any(holder.wants(file) for holder in self._holders):
                    self._reading[file.stamp] = self._thread.submit(_read, file)
            case "loaded":
                return self._loaded(name, file)
            case "unload":
                if (reading := self._reading.pop(file.stamp, None)) is not None:
                    reading.cancel()
                for holder in self._holders:
                    holder.drop(file.stamp)
        return ""

    def _loaded(self, name: str, file: FeatureFile) -> str | None:
        reading = self._reading.get(file.stamp)
        if reading is None:
            return ""
        if not reading.done():
            return None
        del self._reading[file.stamp]
        try:
            for holder in self._holders:
                if holder.wants(file):
                    holder.take(name, file, reading.result())
        except torch.OutOfMemoryError:
            return f"{file.path} finds no memory on the device"
        except ValueError as error:
            return str(error)
        return ""


class HeldFeatures:
    """Autoencoders that captured rows are read by, by `Features.key`.

    Args:
        files: those of the start, of this worker's layers.
        layers: of this worker.
        dtype: of the model.
        room: bytes of the device for those that come later, reserved from the start; 0 for none.
        shards: which one of each is held here.
    """

    def __init__(
        self,
        files: Mapping[str, FeatureFile],
        layers: Collection[int],
        device: torch.device,
        dtype: torch.dtype,
        room: int,
        shards: Shards,
    ) -> None:
        self._shards = shards
        self._layers, self._device, self._dtype, self._room = layers, device, dtype, room
        self.by_key = {
            name: on_device(name, shards.part(opened(file)), device, dtype)
            for name, file in files.items()
        }
        self._late: dict[str, int] = {}
        """Key -> bytes, of those that came later."""
        self._reserved: torch.Tensor | None = None
        self._reserve()

    def wants(self, file: FeatureFile) -> bool:
        """Tell whether rows of the layer are read here."""
        return file.layer in self._layers

    def take(self, name: str, file: FeatureFile, autoencoder: Autoencoder) -> None:
        """Hold the shard of an autoencoder.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        self._reserved = None
        part = self._shards.part(autoencoder)
        made = on_device(name, part, self._device, self._dtype, copy=True)
        self.by_key[file.stamp], self._late[file.stamp] = made, device_bytes(made)
        self._reserve()

    def drop(self, stamp: str) -> None:
        """Give back the memory of an autoencoder."""
        self.by_key.pop(stamp, None)
        self._late.pop(stamp, None)
        self._reserve()

    def _reserve(self) -> None:
        """Keep what is left of the room from whoever else takes memory of the device."""
        left = self._room - sum(self._late.values())
        if self._device.type != "cuda" or left <= 0:
            return
        self._reserved = None
        try:
            self._reserved = torch.empty(left, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:  # in pieces: what comes finds one, or is refused
            return


def _read(file: FeatureFile) -> Autoencoder:
    return Autoencoder.load(file.path).at(file.point)
