# SPDX-License-Identifier: Apache-2.0
"""Modules that run in the frontend: they check requests and raise every user error.

request/  requests in: from `SamplingParams` to a `Plan`
results/  results out: from captured rows to outputs
control/  `llm.steering`, and refusals that need no loaded model
"""
