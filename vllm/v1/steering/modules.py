# SPDX-License-Identifier: Apache-2.0
"""stub"""
from functools import cached_property
from typing import Any
import msgspec
from vllm.v1.interventions import Part, Site, TIERS
from vllm.v1.steering.plan import add_up, part_of, rows_of
from vllm.v1.steering.spec import parse_vectors
from vllm.v1.steering.terms import Term


class ModuleOp(msgspec.Struct, frozen=True):
    name: str
    sites: list[Site]
    terms: list[Term]

class Module(msgspec.Struct, frozen=True, dict=True):
    digest: str
    tiers: dict[str, Part]
    ops: list[ModuleOp] = []

    def _phase(self, tier):
        named = [dict(zip(p.sites, rows_of(p).astype("float64"))) for t in ("base", tier) if (p := self.tiers.get(t))]
        total = add_up(named)
        return part_of(total, len(next(iter(total.values())))) if total else None

    @cached_property
    def prefill(self): return self._phase("prefill")
    @cached_property
    def decode(self): return self._phase("decode")

def parse_module_args(args): return dict(a.split("=", 1) for a in args)
def need_module_name(name, path): return name
def parse_module(value, path, shape, config):
    [(v, _)] = parse_vectors(value, path, shape, None)
    p = part_of(v, shape.hidden_size)
    return Module(p.digest, {"base": p})
