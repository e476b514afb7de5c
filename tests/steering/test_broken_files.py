# SPDX-License-Identifier: Apache-2.0
"""Files that are no modules: each is an error that names the file, whatever the bytes."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.module_files import GOOD, archive, directions, npy, rows, tensors
from tests.support.plans import HIDDEN, SHAPE
from vllm.v1.interventions.errors import InterventionError
from vllm.v1.steering.files import load

pytestmark = pytest.mark.quick


class Exploding:
    """A pickle that runs code when it is read."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


NAN = np.array([0.0, 1.0, np.nan, 0.0], np.float32)
PICKLE = npy(np.array([Exploding()] * HIDDEN, dtype=object), allow_pickle=True)
AT = "base.post_block.3"
BOMB = archive({f"{AT}.npy": bytes(1 << 30)}, compression=zipfile.ZIP_DEFLATED)
LIAR = archive({f"{AT}.npy": npy(GOOD) + bytes(1 << 28)}, compression=zipfile.ZIP_DEFLATED)
LIAR = LIAR.replace(
    struct.pack("<I", len(npy(GOOD)) + (1 << 28)), struct.pack("<I", len(npy(GOOD)))
)
"""Its directory says that its member has as many bytes as a vector; 256 MiB come out of it."""
TWICE = b'{"__metadata__":{},"NAME":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},'
TWICE += TWICE[len(b'{"__metadata__":{},') : -1] + b"}"
TWICE = TWICE.replace(b"NAME", AT.encode())
TWICE = struct.pack("<Q", len(TWICE)) + TWICE + bytes(16)
INTS = torch.ones(HIDDEN, dtype=torch.int32)

HEAD = b"GGUF"
# A key that is an array of 2**60 bytes, at the end of the file.
ENDLESS = HEAD + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"x", 9, 0, 2**60)

IN_SAFETENSORS: list[tuple[str, Any, str]] = [
    ("base.mlp.0", GOOD, "PATH: unknown point 'mlp'"),
    ("base.post_attn.2", GOOD, "PATH: layer 2 has no point"),
    ("base.post_block.4", GOOD, "PATH: layer 4 is out of range, the model has 0-3"),
    ("all.post_block.3", GOOD, "PATH: unknown tier 'all'; tiers are base, prefill, decode"),
    ("post_block.3", GOOD, "PATH: is not named {tier}.{point}.{layer}, as base.post_block.12"),
    ("base.post_block.all", GOOD, "PATH: is not named"),
    ("base.post_block.03", GOOD, "PATH: is not named"),
    ("base.post_block.-1", GOOD, "PATH: is not named"),
    ("base.post_block.3.x", GOOD, "PATH: is not named"),
    (AT, GOOD[:3].copy(), "PATH: has shape [3], the model needs [4]"),
    (AT, rows(0, 1), "PATH: has shape [1, 4], the model needs [4]"),
    (AT, NAN, "PATH: is not finite at index 2"),
    (AT, INTS, f"FILE: cannot be read as .safetensors: {AT} is of dtype I32; F64, F32, F16, BF16"),
    (AT, np.full(HIDDEN, 1e300), "FILE: overflows float32"),
]
IN_NPZ: list[tuple[str, bytes, str]] = [
    (f"{AT}.npy", npy(np.arange(HIDDEN)), "PATH: must be of a float dtype, got int64"),
    (f"{AT}.npy", npy(np.zeros((2, 2))), "PATH: has shape [2, 2]"),
    (f"{AT}.npy", npy(GOOD)[:-1], "FILE: cannot be read as .npz"),
    (f"{AT}.npy", b"", "FILE: cannot be read as .npz"),
    (f"{AT}.npy", PICKLE, f"FILE: cannot be read as .npz: {AT} holds pickled objects"),
    ("x.npy", npy(GOOD), "FILE[x]: is not named"),
]
IN_GGUF: list[tuple[str, Any, str]] = [
    ("direction.4", GOOD, "PATH: layer 4 is out of range"),
    ("direction.-1", GOOD, "PATH: is not named direction.{layer}"),
    ("direction.x", GOOD, "PATH: is not named direction.{layer}"),
    ("blk.1.weight", GOOD, "PATH: is not named direction.{layer}"),
    ("direction.1", GOOD[:3], "PATH: has shape [3], the model needs [4]"),
    ("direction.1", NAN, "PATH: is not finite at index 2"),
    ("direction.1", rows(0, 1), "PATH: has shape [1, 4], the model needs [4]"),
    ("direction.1", INTS.numpy(), "direction.1 is of type I32; F32 and F16 are read"),
]
WHOLE: list[tuple[str, bytes, str]] = [
    ("m.bin", b"", "FILE: is not a module: .safetensors, .gguf, .npz, .json are read"),
    ("m", b"", "FILE: is not a module"),
    ("m.pt", pickle.dumps(Exploding()), "FILE: is not a module"),
    ("m.safetensors", b"", "FILE: cannot be read as .safetensors: "),
    ("m.safetensors", tensors((AT, GOOD))[:-1], "FILE: cannot be read as .safetensors: "),
    ("m.safetensors", tensors((AT, GOOD), steering_format="3"), "is of format '3', 1 and 2 are"),
    ("m.safetensors", tensors((AT, GOOD), hidden_size="5"), "for hidden size '5', the model has 4"),
    ("m.safetensors", tensors(), "FILE: has neither vectors nor operations"),
    (
        "m.safetensors",
        bytes(1 << 21),
        "FILE: has 2097152 bytes, a module of this",
    ),
    ("m.npz", pickle.dumps(Exploding()), "FILE: cannot be read as .npz: "),
    ("m.npz", archive({f"{AT}.npy": npy(GOOD), AT: npy(GOOD)}), f"it has {AT} twice"),
    ("m.npz", archive({}), "FILE: has neither vectors nor operations"),
    ("m.npz", BOMB, "its arrays have more than 10"),
    ("m.npz", LIAR, "FILE: cannot be read as .npz: Bad CRC-32"),
    ("m.safetensors", TWICE, f"FILE: cannot be read as .safetensors: it has {AT} twice"),
    ("m.gguf", b"GGML" + bytes(20), "FILE: cannot be read as .gguf: GGUF magic invalid"),
    ("m.gguf", HEAD + struct.pack("<IQQ", 1, 0, 0), "FILE: cannot be read as .gguf: "),
    ("m.gguf", HEAD + struct.pack("<IQQ", 3, 2**63, 0), "FILE: cannot be read as .gguf: "),
    ("m.gguf", HEAD + struct.pack("<IQQ", 3, 0, 2**63), "FILE: cannot be read as .gguf: "),
    ("m.gguf", ENDLESS, "FILE: cannot be read as .gguf: it is truncated"),
    ("m.gguf", directions(x=[1] * 100_000), "cannot be read as .gguf: it has more than 100000 v"),
    ("m.gguf", directions(("direction.1", GOOD))[:-17], "FILE: cannot be read as .gguf: it is tr"),
    ("m.gguf", directions(kind="llama"), "it is of architecture llama, not controlvector"),
    ("m.gguf", HEAD + struct.pack("<IQQ", 3, 0, 0), "it is of architecture None"),
]
BROKEN = [
    *WHOLE,
    *(
        ("m.safetensors", tensors((name, vector)), message.replace("PATH", f"FILE[{name}]"))
        for name, vector, message in IN_SAFETENSORS
    ),
    *(
        ("m.npz", archive({name: data}), message.replace("PATH", f"FILE[{AT}]"))
        for name, data, message in IN_NPZ
    ),
    *(
        ("m.gguf", directions((name, vector)), message.replace("PATH", f"FILE[{name}]"))
        for name, vector, message in IN_GGUF
    ),
]


@pytest.mark.parametrize(("name", "data", "message"), BROKEN)
def test_errors_name_the_file_and_the_tensor(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InterventionError) as caught:
        load(tmp_path / name, SHAPE)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert message.replace("FILE", str(tmp_path / name)) in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 400


@pytest.mark.parametrize(
    ("data", "refused"), [(LIAR, True), (archive({f"{AT}.npy": npy(GOOD)}), False)]
)
def test_an_archive_costs_what_its_directory_says(
    tmp_path: Path, data: bytes, refused: bool
) -> None:
    (tmp_path / "m.npz").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(InterventionError) if refused else nullcontext():
        load(tmp_path / "m.npz", SHAPE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


GOOD_FILES = {
    ".safetensors": tensors((AT, GOOD), ("decode.pre_attn.0", rows(1)[0]), hidden_size="4"),
    ".npz": archive({"base.post_block.3.npy": npy(GOOD), "decode.pre_attn.0.npy": npy(GOOD)}),
    ".gguf": directions(("direction.3", GOOD), ("direction.0", GOOD)),
}


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*GOOD_FILES]),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.one_of(st.none(), st.integers(0, 2000)),
    st.binary(max_size=4),
)
def test_whatever_the_bytes_an_error_or_a_module(
    tmp_path: Path, suffix: str, changes: list[tuple[int, int]], end: int | None, more: bytes
) -> None:
    data = bytearray(GOOD_FILES[suffix])
    for place, value in changes:
        data[place % len(data)] = value
    path = tmp_path / f"m{suffix}"
    path.write_bytes(bytes(data[:end]) + more)
    try:
        module = load(path, SHAPE)
    except InterventionError as error:
        assert str(error).startswith(str(path))
        assert len(str(error)) < len(str(path)) + 400
    else:
        assert module.phases


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 3))
def test_whatever_follows_the_first_bytes_of_a_gguf_file(
    tmp_path: Path, data: bytes, num_tensors: int, num_keys: int
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(HEAD + struct.pack("<IQQ", 3, num_tensors, num_keys) + data)
    with pytest.raises(InterventionError):
        load(path, SHAPE)
