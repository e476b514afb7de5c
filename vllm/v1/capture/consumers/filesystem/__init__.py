# SPDX-License-Identifier: Apache-2.0
"""The filesystem consumer writes captured rows as safetensors files, to a disk or object store."""

from vllm.v1.capture.consumers.filesystem.filesystem_consumer import FilesystemConsumer
from vllm.v1.capture.consumers.filesystem.request_fields import FilesystemCaptureRequest

__all__ = ["FilesystemCaptureRequest", "FilesystemConsumer"]
