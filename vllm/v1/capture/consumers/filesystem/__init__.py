# SPDX-License-Identifier: Apache-2.0
"""Captured rows as safetensors files, on a disk or in an object store."""

from vllm.v1.capture.consumers.filesystem.filesystem_consumer import FilesystemConsumer
from vllm.v1.capture.consumers.filesystem.request_fields import FilesystemCaptureRequest

__all__ = ["FilesystemCaptureRequest", "FilesystemConsumer"]
