# SPDX-License-Identifier: Apache-2.0
"""Autoencoders that a worker holds on its device: those of the start, and those that get a name
while the engine serves.

A file is read in a thread, beside steps; the device's memory is taken between two steps, as a step
may record a graph, which no other thread may disturb.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from vllm.config.steering import FeatureFile
from vllm.v1.features.autoencoder import Autoencoder, opened
from vllm.v1.interventions.calls import FeaturePhase
from vllm.v1.interventions.worker.making.features import device_bytes, on_device
from vllm.v1.interventions.worker.making.shards import Shards


class HeldFeatures:
    """Autoencoders by `Features.key`.

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
        self._reading: dict[str, Future[Autoencoder]] = {}
        self._thread = ThreadPoolExecutor(1, "features")
        self._reserved: torch.Tensor | None = None
        self._reserve()

    def answer(self, phase: FeaturePhase, name: str, file: FeatureFile) -> str | None:
        """Begin to load an autoencoder; look whether it is here; or drop it.

        Returns:
            None while it is being read; "" if all is well; the reason why it cannot be held.
        """
        match phase:
            case "load":
                if file.layer in self._layers:
                    self._reading[file.stamp] = self._thread.submit(_read, file)
            case "loaded":
                return self._loaded(name, file)
            case "unload":
                if (reading := self._reading.pop(file.stamp, None)) is not None:
                    reading.cancel()
                self.by_key.pop(file.stamp, None)
                self._late.pop(file.stamp, None)
                self._reserve()
        return ""

    def _loaded(self, name: str, file: FeatureFile) -> str | None:
        reading = self._reading.get(file.stamp)
        if reading is None:
            return ""
        if not reading.done():
            return None
        del self._reading[file.stamp]
        self._reserved = None
        try:
            part = self._shards.part(reading.result())
            made = on_device(name, part, self._device, self._dtype, copy=True)
        except torch.OutOfMemoryError:
            return f"{file.path} finds no memory on the device"
        except ValueError as error:
            return str(error)
        self.by_key[file.stamp], self._late[file.stamp] = made, device_bytes(made)
        self._reserve()
        return ""

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
