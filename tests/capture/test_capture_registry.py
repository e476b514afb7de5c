# SPDX-License-Identifier: Apache-2.0
"""From `capture_consumers` to consumers: every way to name one, and every way to get it wrong."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests import ROOT
from tests.errors.page import PATTERNS
from tests.support.consumers import Recorder, Running, batch_of, request_of
from vllm.config.capture import CaptureConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.api_utils import log_non_default_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.capture.consumer import CaptureConsumer, RequestEnd
from vllm.v1.capture.consumers.callback import CallbackConsumer
from vllm.v1.capture.consumers.logging import LoggingConsumer
from vllm.v1.capture.registry import (
    BUILT_IN,
    GROUP,
    INLINE,
    ConsumerSpec,
    HostLimits,
    parse_consumers,
    shown,
)

pytestmark = pytest.mark.quick


class Engine(Recorder):
    """A consumer with options, that runs in the engine core."""

    location = "engine"
    capture = {"hooks": {"post_block": "all"}}  # noqa: RUF012

    def __init__(self, root: str, depth: str = "1") -> None:
        super().__init__()
        if root == "nowhere":
            raise OSError("no such place")
        self.root, self.depth = root, depth


class Unfinished(CaptureConsumer):
    """Has no `open`."""


class Misplaced(Recorder):
    location = "worker"  # type: ignore[assignment]


def look(request: Any, rows: Any) -> None:
    pass


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution with entry points, good and bad."""
    points = {
        "engine": "tests.capture.test_capture_registry:Engine",
        "logging": "tests.capture.test_capture_registry:Engine",  # a built-in one wins
        "broken": "tests.no_such_module:Thing",
        "absent": "tests.capture.test_capture_registry:NoSuch",
        "alien": "pathlib:Path",
        "twice": "tests.support.consumers:Recorder",
    }
    for package, entries in (("plugin", points), ("other", {"twice": "pathlib:Path"})):
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[{GROUP}]", *(f"{name} = {target}" for name, target in entries.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def one(value: Any) -> ConsumerSpec:
    (spec,) = parse_consumers([value]).values()
    return spec


# -- ways to name one ---------------------------------------------------------------------------


def test_a_name() -> None:
    assert one("inline") == ConsumerSpec(INLINE)
    assert one("logging") == ConsumerSpec("logging", cls=LoggingConsumer)
    assert list(parse_consumers(["logging", "inline"])) == ["logging", "inline"]
    assert one("inline").in_frontend
    assert not one("logging").in_frontend


def test_a_plugin_by_name(plugins: None) -> None:
    spec = one("engine:root=s3://bucket/a=b:c,depth=3")
    assert spec.cls is Engine
    assert spec.options == {"root": "s3://bucket/a=b:c", "depth": "3"}
    assert spec.capture == Engine.capture
    made = spec.make()
    assert isinstance(made, Engine)
    assert (made.root, made.depth) == ("s3://bucket/a=b:c", "3")
    assert one("logging").cls is LoggingConsumer


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("root=/a b/c", "/a b/c"),
        ('root="/a,b"', "/a,b"),
        ("root='/a,b'", "/a,b"),
        ('root=/x"a,b"y', "/xa,by"),
        ('root="it\'s"', "it's"),
        ("root='\"'", '"'),
        ("root=C:\\x#y", "C:\\x#y"),
        ("root=", ""),
        ("root=é", "é"),
    ],
)
def test_values_of_a_spec_string(plugins: None, text: str, root: str) -> None:
    spec = one(f"engine:{text},depth=2")
    assert spec.options == {"root": root, "depth": "2"}


@given(st.text(st.characters(exclude_characters='"', exclude_categories=["Cs"])))
def test_any_value_can_be_quoted(value: str) -> None:
    spec = one(f'callback:function=os.path:join,instance_name=x,timeout="{3}"')
    assert spec.name == "x"
    from vllm.v1.capture.registry import _fields_of

    assert _fields_of(f'engine:root="{value}",depth=2') == {
        "name": "engine",
        "root": value,
        "depth": "2",
    }


def test_a_dict_and_json(plugins: None) -> None:
    capture = {"hooks": {"post_block": [1]}, "positions": "all"}
    fields = {"name": "engine", "instance_name": "mine", "capture": capture, "root": "r"}
    for value in (fields, json.dumps(fields)):
        spec = one(value)
        assert (spec.name, spec.cls, spec.options) == ("mine", Engine, {"root": "r"})
        assert spec.capture == capture  # its own, not the class's
    assert fields["capture"] is capture  # nothing was taken out of the user's dict
    assert one({"name": "inline", "capture": capture}).capture == capture
    assert list(parse_consumers(["engine:root=1", "engine:root=2,instance_name=two"])) == [
        "engine",
        "two",
    ]


def test_made_in_python() -> None:
    recorder = Recorder()
    spec = one(recorder)
    assert (spec.name, spec.instance, spec.cls) == ("Recorder", recorder, Recorder)
    assert spec.make() is recorder
    assert spec.in_frontend
    assert one(Engine("r")).in_frontend  # an instance cannot travel
    assert not one({"consumer": Engine, "root": "r"}).in_frontend
    assert one(look).name == "look"
    made = one(look).make()
    assert isinstance(made, CallbackConsumer)
    assert one(look).in_frontend
    spec = one({"consumer": look, "instance_name": "eye", "capture": {"hooks": {}}, "threads": 1})
    assert (spec.name, spec.capture, spec.limits.threads) == ("eye", {"hooks": {}}, 1)
    assert one({"consumer": Recorder, "instance_name": "r"}).cls is Recorder


def test_limits() -> None:
    assert one("logging").limits == HostLimits()
    text = "logging:pending_bytes=4096,max_request_bytes=1024,timeout=0.5,threads=2"
    assert one(text).limits == HostLimits(4096, 1024, 0.5, 2)
    # A request cannot reserve more than there is.
    assert one("logging:pending_bytes=4096").limits.max_request_bytes == 4096
    assert one({"consumer": Recorder(), "timeout": 7}).limits.timeout == 7.0


# -- ways to get it wrong -----------------------------------------------------------------------

WRONG: list[tuple[list[Any], str]] = [
    (["disk"], "unknown 'disk', known are ['absent', 'alien', 'broken', 'callback', 'engine'"),
    ([""], "unknown ''"),
    (["logging", "logging"], "two are named 'logging'"),
    ([{}], "dict needs a 'name', or in its place a 'consumer'"),
    ([{"name": "logging", "consumer": look}], "dict needs a 'name'"),
    ([{"name": 7}], "the name 7 must be a string"),
    ([{"name": "logging", 7: 7}], "the keys of 'logging' must be strings"),
    ([{"name": "logging", "instance_name": "a/b"}], "'a/b' cannot be a consumer's name"),
    ([{"name": "logging", "instance_name": "x" * 65}], "cannot be a consumer's name"),
    ([{"name": "logging", "instance_name": 7}], "7 cannot be a consumer's name"),
    ([lambda request, rows: None], "'<lambda>' cannot be a consumer's name"),
    (["logging:instance_name=inline"], "the name 'inline' is taken"),
    ([{"name": "logging", "capture": "all"}], "'logging': capture must be a capture request"),
    (["inline:threads=2,root=3"], "'inline' takes no options, got ['root']"),
    (
        [{"consumer": Recorder(), "root": 1}],
        "'Recorder': an instance is made already, got options ['root']",
    ),
    (["{nonsense"], "is not JSON"),
    (["engine:root='a"], "has a quote that is not closed"),
    (["engine:root"], "entry 1 of 'engine' is not key=value"),
    (["engine:root=a,b"], "entry 2 of 'engine' is not key=value"),
    (["engine:capture=all"], "'capture' cannot be given in this form"),
    (["engine:root=a,root=b"], "gives 'root' twice"),
    (["engine:name=a"], "gives 'name' twice"),
    (
        ["twice"],
        "'twice' is in several distributions: ['pathlib:Path', 'tests.support.consumers:Recorder']",
    ),
    (["broken"], "'broken' (tests.no_such_module:Thing) cannot be imported: ModuleNotFoundError"),
    (
        ["absent"],
        "'absent' (tests.capture.test_capture_registry:NoSuch) cannot be imported: AttributeError",
    ),
    (["alien"], "'alien' is type, not a subclass of vllm.v1.capture.consumer.CaptureConsumer"),
    ([7], "'int' is 7, not a subclass"),
    ([Unfinished], "'Unfinished': Unfinished lacks ['open']"),
    ([Misplaced], "'Misplaced': location 'worker' is not one of ('engine', 'frontend')"),
    (["engine"], "'engine': missing a required argument: 'root'; options are"),
    (["engine:rot=a"], "'engine': missing a required argument: 'root'"),
    (["engine:root=a,deep=2"], "'engine': got an unexpected keyword argument 'deep'; options are"),
    (["logging:threads=two"], "'logging': threads must be a number above 0, got 'two'"),
    (["logging:threads=0"], "'logging': threads must be a number above 0, got '0'"),
    (["logging:timeout=nan"], "'logging': timeout must be a number above 0, got 'nan'"),
    (["logging:timeout=inf"], "'logging': timeout must be a number above 0, got 'inf'"),
    ([{"name": "logging", "threads": True}], "threads must be a number above 0, got True"),
    (["logging:pending_bytes=10,max_request_bytes=11"], "max_request_bytes is more than pending"),
]


@pytest.mark.parametrize(("values", "says"), WRONG, ids=[says[:40] for _, says in WRONG])
def test_a_wrong_spec_is_an_error_at_start_up(plugins: None, values: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        parse_consumers(values)
    message = str(caught.value)
    assert message.startswith("capture_consumers: ")
    assert any(pattern.fullmatch(message) for pattern in PATTERNS.values()), message
    with pytest.raises(ValueError, match=re.escape(says)):
        CaptureConfig(capture_consumers=values)


def test_a_constructor_that_fails_names_its_consumer(plugins: None) -> None:
    spec = one("engine:root=nowhere")
    with pytest.raises(ValueError, match="'engine' cannot be made: OSError: no such place"):
        spec.make()
    with pytest.raises(ValueError, match="'callback' cannot be made: ValueError: function must"):
        one({"name": "callback", "function": 7}).make()


# -- across processes ---------------------------------------------------------------------------


def test_what_was_made_in_python_does_not_travel() -> None:
    """A local class and a closure cannot be pickled; the engine core needs neither."""

    class Local(Recorder):
        pass

    local = Local()
    config = CaptureConfig(
        capture_consumers=[
            "inline",
            {"consumer": local, "threads": 7, "capture": {"hooks": {"post_block": [1]}}},
            {"consumer": lambda request, rows: None, "instance_name": "closure"},
            {"consumer": Engine, "root": "r", "timeout": 3},
        ]
    )
    there: CaptureConfig = pickle.loads(pickle.dumps(config))
    assert list(there.consumers) == list(config.consumers)
    assert [s.in_frontend for s in there.consumers.values()] == [True, True, True, False]
    assert there.enabled and there.captures_all
    assert there.consumers["Local"].limits.threads == 7
    assert there.consumers["Engine"] == config.consumers["Engine"]
    assert there.compute_hash() == config.compute_hash()
    assert pickle.loads(pickle.dumps(there)).consumers == there.consumers
    # Here nothing was lost, nor in a copy.
    for here in (config, copy.copy(config), copy.deepcopy(config)):
        assert here.consumers["Local"].make() is local


def test_entry_points_are_those_of_the_registry() -> None:
    pins = tomllib.loads((ROOT / "upstream.toml").read_text())
    assert pins["entry_points"][GROUP] == BUILT_IN


# -- logging and callback -----------------------------------------------------------------------


def test_logging_says_what_came(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm")
    with Running(LoggingConsumer(), cls=LoggingConsumer) as running:
        result = running.run("a", batch_of(0, 1), batch_of(2, 3), error="aborted")
        running.host.open(request_of("bad\nid"))
        running.host.end("bad\nid", RequestEnd(num_tokens=1))
        running.result("bad\nid")
    # |(p, p, p)| = p sqrt 3; the mean of p is 1.5.
    said = "4 rows of post_block 0 |h|=2.598, post_block 2 |h|=2.598: aborted"
    assert result.payload == said
    assert f"captured 'a'.0: {said}" in caplog.text
    assert "captured 'bad\\nid'.0: 0 rows of" in caplog.text


def test_a_callback_gets_the_rows_by_site() -> None:
    got: list[tuple[Any, Any]] = []
    with Running(one(lambda_named := _named(got)).make()) as running:
        result = running.run("a", batch_of(0, 1), batch_of(4))
    assert lambda_named.__name__ == "collect"
    assert result.payload == 6
    assert [request.request_id for request, _ in got] == ["a", "a"]
    assert [list(rows) for _, rows in got] == [[("post_block", 0), ("post_block", 2)]] * 2
    last = got[1][1]["post_block", 2]
    assert last.at(4).tolist() == [4.0, 4.0, 4.0]
    assert (last.token_ids.tolist(), len(last)) == ([104], 1)


def _named(got: list[tuple[Any, Any]]) -> Any:
    def collect(request: Any, rows: Any) -> None:
        got.append((request, rows))

    return collect


def test_a_callback_may_be_named() -> None:
    made = one("callback:function=tests.capture.test_capture_registry:look").make()
    with Running(made) as running:
        assert running.run("a", batch_of(0)).status == "ok"
    with pytest.raises(ValueError, match="'callback' cannot be made: ModuleNotFoundError"):
        one("callback:function=no_such:thing").make()


def test_what_a_callback_raises_is_the_result() -> None:
    def look(request: Any, rows: Any) -> None:
        raise KeyError("surprise")

    with Running(one(look).make()) as running:
        assert running.run("a", batch_of(0)).error == "KeyError: 'surprise'"


SECRET = "AKIA-planted"
OPTIONS = {"root": "memory://acts", "storage_options": {"secret": SECRET}}


def as_text(**more: Any) -> str:
    return json.dumps({"name": "filesystem", "instance_name": "far", **OPTIONS, **more})


def test_no_log_and_no_dump_has_the_options_of_a_consumer(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The twin, which has them: what makes the consumer."""
    parser = make_arg_parser(FlexibleArgumentParser())
    namespace = parser.parse_args(["--model", "m", "--capture-consumers", as_text(), "inline"])
    offline = EngineArgs(model=str(tmp_path), capture_consumers=[{"name": "filesystem", **OPTIONS}])
    config = CaptureConfig(namespace.capture_consumers)
    # The logger's own level: that of all of vLLM is another after an engine has started.
    with caplog.at_level("INFO", logger=log_non_default_args.__module__):
        logging.getLogger("vllm").addHandler(caplog.handler)
        log_non_default_args(namespace)
        log_non_default_args(offline)
        logging.getLogger("vllm").removeHandler(caplog.handler)
    dumped = TypeAdapter(CaptureConfig).dump_python(config, mode="json", fallback=str)
    for text in (repr(namespace), caplog.text, repr(config), str(dumped), repr(config.consumers)):
        assert SECRET not in text
    for text in (repr(namespace), caplog.text):
        assert "filesystem(" in text and "root, storage_options" in text
    assert config.consumers["far"].options == OPTIONS
    assert offline.capture_consumers[0]["storage_options"] == {"secret": SECRET}
    assert pickle.loads(pickle.dumps(namespace)).capture_consumers == [as_text(), "inline"]


@pytest.mark.parametrize(
    "value",
    [
        as_text() + "}",
        as_text(bad=1),
        as_text(threads=0),
        as_text(storage_options=SECRET),
        f"filesystem:root=a,{SECRET}",
        f"filesystem:root=a,token={SECRET},token=b",
        f"filesystem:root=a,token='{SECRET}",
        f"filesystem:root=a,capture={SECRET}",
    ],
)
def test_no_error_has_the_options_of_a_consumer(value: str) -> None:
    with pytest.raises(ValueError, match="capture_consumers: ") as refused:
        for spec in parse_consumers([value]).values():
            spec.check()
    assert SECRET not in str(refused.value)
    assert SECRET not in shown(value)
