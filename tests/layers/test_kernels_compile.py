# SPDX-License-Identifier: Apache-2.0
"""Kernels compile for a GPU that is not here.

Triton's interpreter, under which they are tested, accepts what its compiler does not. Here each
variant in bfloat16, and the largest in float32; in the tier long every one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

_PROGRAM = """
import json
import sys
from tests.conformance.triton_cpu.sitecustomize import register_cpu_backend

register_cpu_backend()  # else vLLM turns Triton off: there is no device
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from vllm.model_executor.layers import steering_terms
from vllm.v1.interventions.worker.attention import products
from vllm.v1.interventions.worker.focus import kernel as focus_kernel
from vllm.v1.interventions.worker.focus import triton as focus_triton

del triton.backends.backends["cpu"]
every = sys.argv[1:] == ["every"]
DTYPES = ("bf16", "fp16", "fp32") if every else ("bf16", "fp32")
kernel = steering_terms._steer_rows_kernel
INTS = ("slots", "program", "runs", "programs", "probes", "encoders", "gate_owners")
FLOATS = ("vectors", "scalars", "gates", "shift")
for dtype in DTYPES:
    for block in (512, 16384):
        kinds = ((0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (1, 1, 0, 1), (1, 1, 1, 1))
        kinds = kinds if every or dtype == "bf16" else kinds[-1:]
        for norms, gated, deciding, encodes in kinds:
            constants = {"BLOCK": block, "NORMS": norms, "GATED": gated, "DECIDING": deciding}
            constants |= {"ENCODES": encodes, "SHIFTS": encodes}
            types = {"h": "*" + dtype, "table": "*" + dtype}
            types |= dict.fromkeys(INTS, "*i32") | dict.fromkeys(FLOATS, "*fp32")
            types |= dict.fromkeys(constants, "constexpr")
            signature = {name: types.get(name, "i32") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constants)
            warps = {"num_warps": steering_terms.num_warps(block)}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=warps)
            print(json.dumps([dtype, constants, len(compiled.asm["cubin"])]))
kernel = products._products_kernel
same = [(dtype, width, dtype) for dtype in DTYPES for width in (64, 256)]
# Absorbed queries, of MLA, are float32 beside a cache of the model's dtype.
absorbed = [(dtype, 576, "fp32") for dtype in DTYPES if dtype != "fp32"]
for dtype, width, queries in (*same, *absorbed):
    keys, padded = products.block_sizes(width)
    constants = {"TOKENS": 16, "WIDTH": padded, "KEYS": keys}
    types = {"queries": "*" + queries, "pages": "*" + dtype}
    types |= dict.fromkeys(("key_heads", "table", "requests"), "*i32")
    types |= {"positions": "*i64", "scale": "fp32", "out": "*fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(json.dumps([dtype, constants, len(compiled.asm["cubin"])]))
kernel, join = focus_triton.sum_kernel, focus_triton.join_kernel
FLOATS = ("numbers", "slopes", "sinks", "lse", "sums", "stats")
INTS = ("block_table", "focus", "requests", "forms", "runs")
for dtype in DTYPES:
    size = 4 if dtype == "fp32" else 2
    shapes = ((64, 1, 32, 0, 0), (128, 4, 1, 0, 1), (128, 4, 8, 1, 0), (256, 8, 4, 1, 1))
    shapes = shapes if every or dtype == "bf16" else shapes[-1:]
    for width, group, at_once, capped, lse in shapes:
        constants = {"PAGE": 16, "GROUP": group, "MEMBERS": group, "AT_ONCE": at_once}
        keys = min(128, focus_kernel.TILE_BYTES // (width * size))
        constants |= {"ROWS": max(16, at_once * group), "KEYS": keys}
        constants |= {"WIDTH": width, "WIDTH_V": width, "CAPPED": capped, "SLOPES": capped}
        constants |= {"RUNS": 64, "PLACES": 4, "SPLITS": 16, "SINKS": capped, "LSE": lse}
        for each in (kernel, join):
            own = {k: v for k, v in constants.items() if k in each.arg_names}
            types = dict.fromkeys(("query", "keys", "values", "output"), "*" + dtype)
            types |= dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(INTS, "*i32")
            types |= {"positions": "*i64", "scale": "fp32", "cap": "fp32"}
            types |= dict.fromkeys(own, "constexpr")
            signature = {name: types.get(name, "i32") for name in each.arg_names}
            source = ASTSource(each, signature, constexprs=own)
            options = {"num_stages": 2} if each is kernel else {}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert compiled.metadata.shared < 220 << 10, (own, compiled.metadata.shared)
            print(json.dumps([dtype, own, len(compiled.asm["cubin"])]))
"""


@pytest.mark.parametrize(
    ("chosen", "number"),
    [((), 12 + 5 + 10), pytest.param(("every",), 30 + 8 + 24, marks=pytest.mark.long)],
)
def test_kernels_compile_for_hopper(chosen: tuple[str, ...], number: int, tmp_path: Path) -> None:
    """The general update's, then products with keys, then those of focus."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *chosen], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-4000:]
    variants = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert len(variants) == number
    assert all(size > 1000 for *_, size in variants), variants
