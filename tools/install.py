# SPDX-License-Identifier: Apache-2.0
"""Runs `make install`: a .venv with pinned requirements and the fork live in it.

It needs the standard library only. There are two steps, each behind a stamp that is written last
and names what the step was made from: the environment (made from scratch when its requirements
change or it was interrupted), then the distribution (dist-info, console script, and a .pth to
build/tree). build/tree has its own stamp.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

from tools.assemble import locked
from tools.pins import ROOT, BuildError, Pin, load_pin, read_toml

VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
DIST_INPUTS = ("upstream.toml", "pyproject.toml", "tools/backend.py", "tools/pins.py")


def check_platform() -> None:
    """Raise BuildError where upstream.toml does not support this system, machine or Python."""
    supported = read_toml()["supported"]
    version = ".".join(platform.python_version_tuple()[:2])
    for what, found in (
        ("system", platform.system()),
        ("machine", platform.machine()),
        ("python", version),
    ):
        if found != supported[what]:
            raise BuildError(
                f"{what} is {found}, upstream.toml supports {supported[what]}; "
                f"run `make install PYTHON=/path/to/python{supported['python']}` on such a machine"
            )


def requirements(pin: Pin) -> list[Path]:
    """Return the files of requirements.

    CPU is pinned exactly; on CUDA the wheel's own ranges hold, for the driver decides.
    """
    files = [ROOT / "requirements" / f"{pin.target}.txt", ROOT / "requirements" / "dev.txt"]
    return [path for path in files if path.exists()]


def digest(*paths: Path) -> str:
    """Hash the contents of files, with this Python and repository."""
    python = Path(sys.executable).resolve()  # the same where .venv is activated
    joined = hashlib.sha256(f"{python} {platform.python_version()} {ROOT}\n".encode())
    for path in paths:
        joined.update(path.read_bytes())
    return joined.hexdigest()


def run(*command: str | Path) -> None:
    """Run a command in the repository; raises BuildError where it fails."""
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise BuildError(
            f"`{' '.join(map(str, command))}` failed, see above; correct it and run `make install` "
            f"again, it takes up where it can"
        )


def install() -> None:
    """Make .venv, build/tree and the distribution, as far as they are not up to date."""
    check_platform()
    pin = load_pin()
    files = requirements(pin)
    with locked(ROOT / "build" / "install"):
        stamp, wanted = VENV / "requirements.stamp", f"{pin.target} {digest(*files)}"
        if not stamp.exists() or stamp.read_text() != wanted:
            print(f"making {VENV} (a minute or two)", file=sys.stderr)
            for old in (stamp, VENV / "vllm.stamp"):
                old.unlink(missing_ok=True)
            run(sys.executable, "-m", "venv", "--clear", VENV)
            pip_flags = [flag for path in files for flag in ("-r", path)]
            run(PYTHON, "-m", "pip", "install", "-qq", "--no-compile", *pip_flags)
            stamp.write_text(wanted)
        run(PYTHON, "-m", "tools", "assemble")
        stamp, wanted = VENV / "vllm.stamp", digest(*(ROOT / name for name in DIST_INPUTS))
        if not stamp.exists() or stamp.read_text() != wanted:
            stamp.unlink(missing_ok=True)
            flags = ["-qq", "--no-build-isolation", "--force-reinstall"]
            flags += ["--no-deps"] if pin.target == "cpu" else []
            run(PYTHON, "-m", "pip", "install", *flags, "-e", ROOT)
            stamp.write_text(wanted)


if __name__ == "__main__":
    try:
        install()
    except BuildError as error:
        sys.exit(f"error: {error}")
