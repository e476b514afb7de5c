# SPDX-License-Identifier: Apache-2.0
"""Modules in files: what is written is read again bit by bit, and whatever else is said so."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import write_repeng
from tests.support.disks import largest_file
from tests.support.module_files import GOOD, rows, tensors
from tests.support.plans import HIDDEN, PARALLEL_ONLY, SHAPE
from vllm.config.points import STREAM_POINTS
from vllm.config.steering import SteeringConfig
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.interventions.shape import LayerShape, TapShape
from vllm.v1.interventions.vectors import vectors_of
from vllm.v1.steering.files import export_gguf, load, save
from vllm.v1.steering.modules import Module, make_module, parse_module
from vllm.v1.steering.unshaped import ANY_FAMILY

pytestmark = pytest.mark.quick

Tiers = dict[str, dict[tuple[str, int], np.ndarray]]
REPENG_SHAPE = TapShape(
    hidden_size=write_repeng.HIDDEN,
    dtype="float32",
    layers=dict.fromkeys(range(5), LayerShape(STREAM_POINTS)),
)


def tiers_of(module: Module) -> Tiers:
    return {tier: vectors_of(part) for tier, part in module.tiers.items()}


def same(one: Tiers, other: Tiers) -> bool:
    """Bit by bit, -0.0 and 0.0 told apart."""
    return [*one] == [*other] and all(
        [*one[t]] == [*other[t]]
        and all(one[t][s].tobytes() == other[t][s].tobytes() for s in one[t])
        for t in one
    )


def module_of(tiers: dict[str, dict[tuple[str, int], Any]]) -> Module:
    wide = {t: {s: np.asarray(v, np.float64) for s, v in d.items()} for t, d in tiers.items()}
    return make_module(wide, [], "test", SHAPE)


FULL = {
    "base": {("post_block", 3): rows(1)[0], ("pre_attn", 0): np.array([-0.0, 1e-45, 3e38, 1.0])},
    "prefill": {("post_attn", 1): rows(2)[0]},
    "decode": {("post_attn", 1): rows(3)[0], ("post_block", 2): rows(4)[0]},
}

SITES = [(point, n) for n, layer in SHAPE.layers.items() for point in layer.points]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
VECTORS = st.lists(FLOATS, min_size=HIDDEN, max_size=HIDDEN)
TIERS = st.dictionaries(
    st.sampled_from(["base", "prefill", "decode"]),
    st.dictionaries(st.sampled_from(SITES), VECTORS, min_size=1, max_size=4),
    min_size=1,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TIERS)
def test_saved_is_loaded(tmp_path: Path, tiers: Any) -> None:
    try:
        module = module_of(tiers)
    except ValueError:
        return  # a sum of tiers overflows
    save(tmp_path / "module.safetensors", module)
    again = load(tmp_path / "module.safetensors", SHAPE)
    assert again == module
    assert same(tiers_of(again), tiers_of(module))


def test_what_is_saved_is_what_was_given(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", module_of(FULL), "meta-llama/Llama-3.1-8B")
    data = (tmp_path / "m.safetensors").read_bytes()
    tensors = safetensors.numpy.load(data)
    assert {k: v.tolist() for k, v in tensors.items()} == {
        f"{tier}.{point}.{layer}": np.asarray(vector, np.float32).tolist()
        for tier, vectors in FULL.items()
        for (point, layer), vector in vectors.items()
    }
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["__metadata__"] == {
        "steering_format": "1",
        "hidden_size": "4",
        "model_hint": "meta-llama/Llama-3.1-8B",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_another_vector_is_another_module(tmp_path: Path) -> None:
    save(tmp_path / "m.safetensors", module_of(FULL))
    moved = {**FULL, "prefill": {("post_attn", 1): np.nextafter(rows(2)[0], np.float32(9))}}
    tiers = {**FULL, "decode": FULL["prefill"], "prefill": FULL["decode"]}
    for other in (moved, tiers):
        assert load(tmp_path / "m.safetensors", SHAPE).digest != module_of(other).digest
        assert load(tmp_path / "m.safetensors", SHAPE) != module_of(other)


def named(tiers: dict[str, dict[tuple[str, int], Any]]) -> dict[str, np.ndarray]:
    return {
        f"{tier}.{point}.{layer}": np.asarray(vector)
        for tier, vectors in tiers.items()
        for (point, layer), vector in vectors.items()
    }


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ">f4"])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, write: Callable[..., None], dtype: Any) -> None:
    vectors = {n: v.astype(dtype) for n, v in named(FULL).items() if np.abs(v).max() < 1e4}
    write(tmp_path / "m.npz", **vectors)
    loaded = tiers_of(load(tmp_path / "m.npz", SHAPE))
    got = {n: v.tolist() for n, v in named(loaded).items()}
    assert got == {n: v.astype(np.float32).tolist() for n, v in vectors.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_safetensors_of_others(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without our metadata, in any float type."""
    vector = torch.from_numpy(rows(5)[0]).to(dtype)
    safetensors.torch.save_file({"base.post_block.2": vector}, tmp_path / "m.SafeTensors")
    (loaded,) = tiers_of(load(tmp_path / "m.SafeTensors", SHAPE))["base"].values()
    assert loaded.tolist() == vector.float().tolist()


def test_a_large_file_of_small_tensors_is_read(tmp_path: Path) -> None:
    """All that a model can have, in the widest type."""
    full = {tier: dict.fromkeys(SITES, rows()[0].astype(np.float64)) for tier in FULL}
    vectors: dict[str, Any] = named(full)
    np.savez(tmp_path / "m.npz", **vectors)
    assert same(tiers_of(load(tmp_path / "m.npz", SHAPE)), tiers_of(module_of(full)))


# -- GGUF ---------------------------------------------------------------------------------------


def test_a_file_that_repeng_wrote() -> None:
    """Direction i is of the output of block i, counted from 0; write_repeng.py asserted that of
    repeng itself when it wrote the file."""
    module = load(write_repeng.FILE, REPENG_SHAPE)
    expected = {("post_block", i): v for i, v in write_repeng.directions().items()}
    assert same(tiers_of(module), {"base": {s: v.astype(np.float64) for s, v in expected.items()}})
    assert [*tiers_of(module)["base"]] == [("post_block", 1), ("post_block", 2), ("post_block", 3)]


def test_what_we_export_is_what_repeng_wrote(tmp_path: Path) -> None:
    """Byte for byte: nothing is left for repeng to read in another way."""
    export_gguf(tmp_path / "v.gguf", load(write_repeng.FILE, REPENG_SHAPE), "llama")
    assert (tmp_path / "v.gguf").read_bytes() == write_repeng.FILE.read_bytes()


@pytest.mark.parametrize("model_hint", ["llama", ""])
def test_an_export_has_all_that_repeng_asks_for(tmp_path: Path, model_hint: str) -> None:
    """The keys, by the library that repeng reads with; and repeng itself, where it is installed
    (it pins an old numpy, so not by our requirements; write_repeng.py says how)."""
    source = {"post_block": {2: GOOD, 3: rows(9)[0]}}
    export_gguf(tmp_path / "v.gguf", source, model_hint)
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    found = reader.get_field("controlvector.model_hint")
    assert found is not None and found.contents() == model_hint
    kind = reader.get_field("general.architecture")
    assert kind is not None and kind.contents() == "controlvector"
    assert {t.name for t in reader.tensors} == {"direction.2", "direction.3"}
    if importlib.util.find_spec("repeng") is None:
        pytest.skip("repeng is not installed")
    read = write_repeng.repeng().ControlVector.import_gguf(str(tmp_path / "v.gguf"))
    assert read.model_type == model_hint
    assert {n: v.tolist() for n, v in read.directions.items()} == {
        layer: np.asarray(vector).tolist() for layer, vector in source["post_block"].items()
    }


def test_a_file_that_the_gguf_library_wrote(tmp_path: Path) -> None:
    """As llama.cpp's generator: float32, no block 0, keys we do not read."""
    writer = gguf.GGUFWriter(tmp_path / "v.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", 3)
    writer.add_array("some.words", ["a", "bc"])
    writer.add_array("some.numbers", [1, 2, 3])
    writer.add_float64("some.number", 0.5)
    writer.add_bool("some.flag", True)
    vectors = {layer: rows(layer)[0] for layer in (1, 2, 3)}
    for layer, vector in vectors.items():
        kind = np.float16 if layer == 2 else np.float32
        writer.add_tensor(f"direction.{layer}", vector.astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = tiers_of(load(tmp_path / "v.gguf", SHAPE))["base"]
    assert [*loaded] == [("post_block", layer) for layer in vectors]
    assert loaded["post_block", 1].tolist() == vectors[1].tolist()
    assert loaded["post_block", 2].tolist() == vectors[2].astype(np.float16).tolist()


def test_the_gguf_library_reads_what_we_export(tmp_path: Path) -> None:
    module = module_of({"base": {("post_block", 0): rows(1)[0], ("post_block", 3): rows(2)[0]}})
    export_gguf(tmp_path / "v.gguf", module, "qwen3")
    reader = gguf.GGUFReader(tmp_path / "v.gguf")
    assert {t.name: t.data.tolist() for t in reader.tensors} == {
        "direction.0": rows(1)[0].tolist(),
        "direction.3": rows(2)[0].tolist(),
    }
    fields = {
        name: reader.fields[name].contents()
        for name in reader.fields
        if not name.startswith("GGUF.")
    }
    assert fields == {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "qwen3",
        "controlvector.layer_count": 2,
    }


def test_a_model_without_the_point(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(tensors(("base.post_attn.0", GOOD)))
    with pytest.raises(InterventionError, match="this model has no point 'post_attn'"):
        load(tmp_path / "m.safetensors", PARALLEL_ONLY)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"calm\.safetensors"):
        load(tmp_path / "calm.safetensors", SHAPE)


CLAMP = {"op": "clamp", "point": "pre_attn", "layers": 0, "direction": [1.0] * HIDDEN, "lo": 0.0}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"prefill_vectors": {"post_block": {1: GOOD}}}, "has no prefill tier"),
        ({"post_block": {1: GOOD}, "pre_attn": {1: GOOD}}, "has no pre_attn, only post_block"),
        ({"vectors": {"post_block": {1: GOOD}}, "ops": [CLAMP]}, "has no operations, such as c"),
    ],
)
def test_what_gguf_cannot_say_is_not_left_out(tmp_path: Path, source: Any, message: str) -> None:
    config = SteeringConfig(enable_steering=True, steering_families=["add", "clamp"])
    module = parse_module(source, "source", SHAPE, config)
    with pytest.raises(InterventionError, match=message):
        export_gguf(tmp_path / "v.gguf", module)
    assert not list(tmp_path.iterdir())


def test_an_operation_on_one_lane_is_not_saved_as_one_on_all(tmp_path: Path) -> None:
    of_lanes = msgspec.structs.replace(SHAPE, lanes=3)
    module = parse_module({"ops": [{**CLAMP, "lane": 1}]}, "source", of_lanes, ANY_FAMILY)
    with pytest.raises(InterventionError, match="has no lanes, and clamp acts on one"):
        save(tmp_path / "v.safetensors", module)
    assert not list(tmp_path.iterdir())


AT_1: dict[str, Any] = {"point": "post_block", "layers": [1, 3]}
GATE = {"probe": rows(7)[0], "threshold": 0.1, "sharpness": 3.3}
ALL_OPS: list[dict[str, Any]] = [
    {"op": "add", "vector": rows(1)[0], "scale": 0.1},
    {"op": "norm_match", "direction": rows(2)[0], "scale": 0.3},
    {"op": "ablate", "direction": rows(3)[0], "strength": 0.7, "gate": {**GATE, "when": "row"}},
    {"op": "clamp", "direction": rows(4)[0], "lo": -0.1},
    {"op": "clamp", "direction": rows(4)[0], "lo": -0.1, "hi": 1.7},
    {
        "op": "pin",
        "direction": rows(5)[0],
        "value": 2.3,
        "strength": 0.7,
        "gate": {**GATE, "when": "last_prompt"},
    },
    {"op": "normalize"},
    {"op": "swap", "direction": rows(8)[0], "other": rows(9)[0] * 7},
    {"op": "feature", "encoder": rows(10)[0], "decoder": rows(11)[0], "bias": -0.3, "value": 2.5},
    {
        "op": "feature",
        "encoder": rows(10)[0],
        "decoder": rows(11)[0],
        "threshold": 0.2,
        "value": 0.0,
        "strength": 0.5,
        "add": 1.5,
        "only_if_active": True,
        "gate": {**GATE, "when": "row"},
    },
    {"op": "pin", "direction": rows(8)[0], "value": 2.0, "gate": {**GATE, "latch": True}},
    {"op": "low_rank", "A": rows(12, 2), "B": rows(13, 2).T, "strength": 0.3},
    {"op": "low_rank", "A": rows(14), "B": rows(15).T, "c": np.array([0.1], np.float32)},
    {
        "op": "low_rank",
        "A": rows(12, 2),
        "B": rows(13, 2).T,
        "c": np.array([-0.1, 0.0], np.float32),
        "gate": {**GATE, "when": "last_prompt", "cosine": True},
    },
    {"op": "normalize", "point": "all", "layers": [1, 2]},
    {"op": "normalize", "point": ["pre_attn", "post_block"], "layers": [0, 2]},
]


@pytest.mark.parametrize("seed", range(20))
def test_operations_are_saved(tmp_path: Path, seed: int) -> None:
    """Bit by bit, so that requests with either share cached blocks; another one is another."""
    ops = [{**AT_1, **op} for op in ALL_OPS]
    ops[0]["vector"], ops[2]["direction"] = rows(10 + seed)[0], rows(30 + seed)[0] * 1e-3
    module = parse_module({"ops": ops, "vectors": {"pre_attn": {0: GOOD}}}, "m", SHAPE, ANY_FAMILY)
    save(tmp_path / "m.safetensors", module)
    again = load(tmp_path / "m.safetensors", SHAPE)
    assert again == module and again.digest == module.digest
    ops[3]["lo"] = -0.2
    other = parse_module({"ops": ops, "vectors": {"pre_attn": {0: GOOD}}}, "m", SHAPE, ANY_FAMILY)
    save(tmp_path / "m.safetensors", other)
    assert load(tmp_path / "m.safetensors", SHAPE).digest != module.digest


def test_operations_of_a_file_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save(path, {"ops": [{**ALL_OPS[3], **AT_1}]})
    only_add = SteeringConfig(enable_steering=True)
    with pytest.raises(InterventionError, match=r"\[ops\]\[0\].op: the engine was started without"):
        load(path, SHAPE, only_add)
    header = {"steering_format": "2", "ops": json.dumps([{"op": "ablate", **AT_1}])}
    for metadata, message in (
        (header, "ablate needs 'direction'"),
        ({**header, "ops": "{}"}, "its ops are no list of operations"),
        ({"steering_format": "2"}, "cannot be read as .safetensors: 'ops'"),
        ({"steering_format": "1"}, "has neither vectors nor operations"),
    ):
        safetensors.numpy.save_file({}, path, metadata)
        with pytest.raises(InterventionError, match=re.escape(message)):
            load(path, SHAPE)
    safetensors.numpy.save_file({"ops.1.direction": GOOD}, path, {**header, "ops": "[]"})
    with pytest.raises(InterventionError, match="is not named"):
        load(path, SHAPE)


@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf"])
def test_a_full_disk_leaves_what_was_there(name: str, tmp_path: Path) -> None:
    write = save if name == "m.safetensors" else export_gguf
    vectors = {"post_block": dict(enumerate(rows(count=16, width=4096)))}
    write(tmp_path / name, {"post_block": {0: rows()[0]}})
    before = (tmp_path / name).read_bytes()
    with largest_file(1 << 16), pytest.raises(OSError):  # numpy, for GGUF, has words of its own
        write(tmp_path / name, vectors)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before
    write(tmp_path / name, vectors)
    assert (tmp_path / name).read_bytes() != before


def test_saving_needs_no_engine(tmp_path: Path) -> None:
    source = {"post_block": {3: {"vector": GOOD, "scale": 2.0}, "0-1": GOOD.tolist()}}
    save(tmp_path / "m.safetensors", source)
    loaded = load(tmp_path / "m.safetensors", SHAPE)
    assert loaded == parse_module(source, "source", SHAPE, ANY_FAMILY)
    assert loaded != parse_module({"post_block": {3: GOOD}}, "source", SHAPE, ANY_FAMILY)
    for op in ALL_OPS[:-2]:  # each alone says how wide a row is, but for normalize
        if op["op"] == "normalize":
            continue
        alone = {"ops": [{**op, **AT_1}]}
        save(tmp_path / "m.safetensors", alone)
        wanted = parse_module(alone, "source", SHAPE, ANY_FAMILY)
        assert load(tmp_path / "m.safetensors", SHAPE).digest == wanted.digest
    for layers in ("all", -1, "-2", [0, -1]):
        bad = {"ops": [{"op": "normalize", "point": "post_block", "layers": layers}]}
        with pytest.raises(InterventionError, match=r"^source\.ops\[0\]\.layers: only a model"):
            save(tmp_path / "n.safetensors", bad)
    bad = {"ops": [{"op": "normalize", "point": "all", "layers": 0}]}
    with pytest.raises(InterventionError, match=r"^source\.ops\[0\]\.point: only a model can tell"):
        save(tmp_path / "n.safetensors", bad)
    for wrong, message in (
        ({"post_block": {"all": GOOD}}, r"^source\.vectors\.post_block\.all: only a model can"),
        ({"post_block": {0: GOOD, 1: GOOD[:3]}}, "has shape"),
        ({"middle": {0: GOOD}}, "unknown point 'middle'"),
        ({}, "has neither vectors nor operations"),
    ):
        with pytest.raises(InterventionError, match=message):
            save(tmp_path / "n.safetensors", wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_only_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "m.npz").mkdir()
    with pytest.raises(InterventionError, match=r"m\.npz: is not a regular file"):
        load(tmp_path / "m.npz", SHAPE)
