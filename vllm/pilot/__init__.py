# SPDX-License-Identifier: Apache-2.0
"""What researchers do all day on top of the engine, as functions on its public interface.

Nothing of the engine imports this, and it imports nothing of the engine that users do not have:
`LLM`, `SamplingParams`, `vllm.v1.capture`, `vllm.v1.steering.files`, the HTTP client.
"""
