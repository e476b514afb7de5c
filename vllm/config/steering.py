# SPDX-License-Identifier: Apache-2.0
"""Engine options of activation steering."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from vllm.config.operations import OPERATIONS
from vllm.config.points import RESIDUAL_POINTS, RETURNED, STEERING_POINTS, STREAM_POINTS
from vllm.config.utils import config

FAMILIES = (*OPERATIONS, "focus", "reconstruct", "gate")
"""Families that an engine can be started with: the operations, and gates on them."""

ASKED = ("focus", "reconstruct")
"""Families that must be named: they cost in steps that do not use them, or need other options."""

SCHEMA = 10
"""Part of the compile-cache key: raise it when traced tap code or an op's meaning changes."""


MAX_MODULES = 64
"""Most modules that a request may name: a name is a few bytes, what it adds to every run of
positions a megabyte."""


ALL = "all"
"""Name of all families but those that must be named."""


FEATURES_NAME = r"[\w.-]{1,64}"
"""Pattern of a name of an autoencoder."""

_FEATURES = re.compile(
    rf"(?P<name>{FEATURES_NAME})=(?P<path>.+)@(?P<point>\w+)\.(?P<layer>\d{{1,9}})"
)

_PLACE = re.compile(
    r"(?P<point>\w+)\.(?P<layer>\d{1,9})=(?P<features>[1-9]\d{0,8})(,k=(?P<k>[1-9]\d{0,8}))?"
)


class FeaturePlace(NamedTuple):
    """Memory of `features_reconstruct` for an autoencoder of one site."""

    point: str
    layer: int
    features: int
    """The most features that it may have."""
    k: int
    """The most of them that TopK may leave; 0 if no TopK autoencoder fits."""


class FeatureFile(NamedTuple):
    """Sparse autoencoder of `features`: its file or folder, and the site of its rows."""

    path: str
    point: str
    layer: int
    stamp: str = ""
    """Text that tells it from others of this path that had a name while the engine served; "" for
    one of the start."""
    place: int = 0
    """Number of the place of its site, from 1, that has it for `reconstruct`; 0 for none."""


def _written(path: str) -> list[tuple[str, int, int]]:
    """Return name, bytes and time of the last change of a file, or of each file in a folder."""
    files = sorted(Path(path).iterdir()) if Path(path).is_dir() else [Path(path)]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]


def refuse_unknown(option: str, given: Iterable[str], allowed: Sequence[str]) -> None:
    """Raise a ValueError for entries of the list `option` that are not allowed."""
    if unknown := sorted(set(given) - set(allowed)):
        raise ValueError(f"{option}: unknown {unknown}, allowed are {list(allowed)}")


@config
class SteeringConfig:
    """Activation steering: change a request's residual stream by vectors, other ops and gates."""

    enable_steering: bool = False
    """Accept `steering_vectors`, `steering` and their kin in requests."""

    max_steering_configs: int = Field(default=32, ge=1, le=65536)
    """Distinct sums of vectors (what prompt or generated positions of a request get) in use at
    once, and as many programs of focus. Further requests wait for a slot. Costs two rows per point
    and layer each."""

    steering_points: list[str] = Field(default_factory=lambda: list(STREAM_POINTS), min_length=1)
    """The points that can be steered, of pre_attn, post_attn and post_block, of z, the heads of
    attention, and of mlp_in, which the MLP reads. Fewer cost less. Does not limit capture."""

    steering_families: list[str] = Field(default_factory=lambda: ["add"], min_length=1)
    """Families that requests may use in `steering`, of add, norm_match, ablate, clamp, pin,
    replace, normalize, swap, feature, low_rank, gate (any of these times a sigmoid of a probe),
    scale, of heads at z, reconstruct, by the autoencoders of features, and focus, of weights of
    attention, which needs q and z among capture_points; "all" is all but the last two. Any family
    other than add, scale and focus puts an op at every steered site, and focus puts one in every
    layer.
    """

    max_steering_rows: int = Field(default=1024, ge=1, le=1 << 20)
    """Rows in use at once for the vectors of ops: one per op, per replaced position and per gate's
    probe. Further requests wait. Costs nothing unless there are families beside add."""

    max_steering_ops: int = Field(default=4, ge=1, le=64)
    """Most ops of one request at one point of one layer; low_rank is as many as its rank."""

    max_request_work: int = Field(default=1 << 23, ge=1 << 10)
    """Work that the fields of one request may come to, those of capture included, in units of about
    0.1 us: an entry of `positions` is 16, a segment 256, a searched character 1, an entry of a list
    of operations 8, a kilobyte of vectors that are added up 32, and one of what is sent to the
    engine 32, times `n`. Prompts of one body share it."""

    single_variant: bool = False
    """Run all steps by the variant of the model with taps, of those that nobody steers or captures
    in, too. The model is compiled once, so a first start takes about as long as without steering
    and capture; an idle step costs what one that captures does, and is no longer upstream's
    code."""

    steering_modules: list[str] = Field(default_factory=list)
    """Named vectors and operations to load at start-up, as `name=path` (.safetensors, .gguf, .npz
    or .json, or a folder that `vllm steering train` wrote) or as JSON with `name` and `path`."""

    default_steering_modules: list[str] = Field(default_factory=list, max_length=MAX_MODULES)
    """Names of modules that act on every request while they are registered, unless it names them
    itself or has `steering_inherit_global=False`."""
    features: list[str] = Field(default_factory=list)
    """Sparse autoencoders that requests read and steer by, as `NAME=PATH@POINT.LAYER`, such as
    `mood=saes/layer_12@post_block.12`: a folder of SAELens, sparsify, dictionary_learning, Gemma
    Scope or Llama Scope. Each is held on the device if rows are captured. See docs/features.md."""

    features_root: str | None = None
    """Folder from which sparse autoencoders may get a name while the engine serves:
    `POST /v1/steering/features`, `llm.steering.register_features`."""

    features_reconstruct: list[str] = Field(default_factory=list)
    """Memory that is kept on each device so that `reconstruct` may name autoencoders from
    features_root, as `POINT.LAYER=FEATURES`, such as `post_block.12=16384`, or with `,k=64` for
    TopK of at most 64, too: each entry holds one autoencoder of the site, of at most so many
    features, and costs whether or not it has one. See docs/features.md."""

    features_memory_bytes: int = Field(default=1 << 30, ge=1)
    """Memory that autoencoders from features_root may take: on each device, where it is reserved if
    rows are captured, and in a server's process."""

    compat: list[str] = Field(default_factory=list)
    """Tools whose requests are answered as well, with what they need turned on: lens (vLLM-Lens),
    easysteer (EasySteer), hotwire (hotwire-vllm) and interp-engine. See docs/coming-from.md."""

    def __post_init__(self) -> None:
        refuse_unknown("steering_points", self.steering_points, STEERING_POINTS)
        refuse_unknown("steering_families", self.steering_families, (*FAMILIES, ALL))
        if ALL in self.steering_families:
            named = {*self.steering_families}
            self.steering_families = [f for f in FAMILIES if f not in ASKED or f in named]
        _ = self.feature_files
        if self.feature_places and not (self.reconstructs and self.features_root):
            raise ValueError(
                "features_reconstruct: needs enable_steering (--enable-steering), 'reconstruct' "
                "among steering_families and features_root (--features-root FOLDER)"
            )
        for option in ("steering_modules", "default_steering_modules"):
            if getattr(self, option) and not self.enable_steering:
                raise ValueError(f"{option}: needs enable_steering (--enable-steering)")

    @cached_property
    def feature_files(self) -> "dict[str, FeatureFile]":
        """Name -> file, of `features`."""
        files: dict[str, FeatureFile] = {}
        for entry in self.features:
            match = _FEATURES.fullmatch(entry)
            if match is None or match["name"] in files:
                raise ValueError(
                    f"features: {entry!r} is not NAME=PATH@POINT.LAYER, with another name each"
                )
            path, point, layer = match["path"], match["point"], int(match["layer"])
            refuse_unknown("features", [point], RESIDUAL_POINTS)
            files[match["name"]] = FeatureFile(path, point, layer)
        return files

    @cached_property
    def feature_places(self) -> list[FeaturePlace]:
        """Places of `features_reconstruct`, in its order."""
        places = []
        for entry in self.features_reconstruct:
            match = _PLACE.fullmatch(entry)
            made = match and FeaturePlace(
                match["point"], int(match["layer"]), int(match["features"]), int(match["k"] or 0)
            )
            if not made or made.k > made.features:
                raise ValueError(
                    f"features_reconstruct: {entry!r} is not POINT.LAYER=FEATURES, or "
                    "POINT.LAYER=FEATURES,k=K with a K of at most FEATURES"
                )
            steered = [p for p in self.steering_points if p in RESIDUAL_POINTS]
            refuse_unknown("features_reconstruct", [made.point], steered)
            places.append(made)
        return places

    @property
    def has_ops(self) -> bool:
        """True if the residual stream has more than addition."""
        return not {"add", "scale", "focus"}.issuperset(self.steering_families)

    @property
    def reconstructs(self) -> bool:
        """True if rows can be made what autoencoders reconstruct of them."""
        return self.enable_steering and "reconstruct" in self.steering_families

    @property
    def focuses(self) -> bool:
        """True if weights of attention can be changed."""
        return self.enable_steering and "focus" in self.steering_families

    @property
    def steers_heads(self) -> bool:
        """True if the heads of attention can be steered."""
        return self.enable_steering and RETURNED in self.steering_points

    def compute_hash(self) -> str:
        """Hash of everything that changes the traced code or the shapes in it."""
        from vllm.config.utils import hash_factors

        if not self.enable_steering:
            return "off"
        return hash_factors(
            {
                "schema": SCHEMA,
                "slots": self.max_steering_configs,
                "points": sorted(self.steering_points),
                "families": sorted(set(self.steering_families)),
                "rows": self.max_steering_rows if self.has_ops else 0,
                "ops": self.max_steering_ops if self.has_ops else 0,
                "features": self.features if self.reconstructs else [],
                "written": [_written(f.path) for f in self.feature_files.values()]
                if self.reconstructs
                else [],
                "places": self.features_reconstruct,
            }
        )
