# SPDX-License-Identifier: Apache-2.0
"""What the fork server of `tests/support/warm.py` imports before it forks: what servers, engine
cores and their workers import on a CPU."""

from __future__ import annotations

import vllm.entrypoints.cli.serve
import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.llama
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
from tests.conformance.engine import start_cheaply

start_cheaply()
