# SPDX-License-Identifier: Apache-2.0
"""The command `vllm capture run`."""
