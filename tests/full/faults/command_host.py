"""Runs commands, each in a fork of this process, which has imported what they need, and harms them as it is told.

Requests are lines of JSON on stdin: `command`, `arguments`, `root` (the folder that it writes to) and a `fault`; the
replies on stdout have its exit code and what it printed.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click
import onnxruntime  # noqa: F401 - for the forks
import onnxscript  # noqa: F401
import torch
import transformers  # noqa: F401

from sharp.exporter.adapt import training
from sharp.exporter.adapt.cli import adapt
from sharp.exporter.cli import export
from sharp.models import train

COMMANDS: dict[str, click.Command] = {"export": export, "adapt": adapt, "train": train.main}
SECONDS = 120.0
NEW_MOUNTS, PRIVATE, RECURSIVE, READ_ONLY = 0x20000, 1 << 18, 1 << 14, 1  # of sched.h and mount.h
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.link")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def main() -> None:
    """Reply until stdin ends."""
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=replies, flush=True)


def run(command: str, arguments: list[str], root: str, fault: dict[str, Any]) -> dict[str, Any]:
    """Exit code (negative: the signal) and output of a command."""
    with tempfile.TemporaryFile() as output:
        began, child = time.monotonic(), os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            _inside(command, arguments, root, fault)
        killed = fault.get("kill_after", SECONDS)
        while not (found := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() - began > killed:
                os.kill(child, signal.SIGKILL)
                killed = SECONDS
            time.sleep(0.002)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"code": os.waitstatus_to_exitcode(found[1]), "output": text, "seconds": time.monotonic() - began}


def _inside(command: str, arguments: list[str], root: str, fault: dict[str, Any]) -> NoReturn:
    code: Any = 3
    try:
        if "disk" in fault:
            code = _on_a_disk(command, arguments, root, fault)
        else:
            _harm(root, fault)
            code = _call(command, arguments)
    except BaseException as error:  # a fork must not go on as its parent
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(command: str, arguments: list[str]) -> Any:
    """The command's exit code. Its state is saved at every step, so that there is something to resume."""
    training.SAVE_SECONDS = 0.0
    made = train.make_settings
    train.make_settings = lambda *given: replace(made(*given), save_every=2)  # type: ignore[attr-defined]
    try:
        COMMANDS[command].main(arguments, prog_name=command)
    except SystemExit as end:
        return end.code or 0
    return 0


def _on_a_disk(command: str, arguments: list[str], root: str, fault: dict[str, Any]) -> Any:
    """Run the command with a disk at `root` that has so many bytes free, or is read-only; then `root` has its files."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(status: int) -> None:
        if status:
            raise PermissionError(ctypes.get_errno(), "no disk can be mounted")

    kept = Path(tempfile.mkdtemp(dir=Path(root).parent))
    shutil.copytree(root, kept, dirs_exist_ok=True)
    check(libc.unshare(NEW_MOUNTS))
    check(libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None))
    used = sum(one.stat().st_size + 4096 for one in kept.rglob("*"))
    check(libc.mount(b"none", root.encode(), b"tmpfs", 0, f"size={used + (fault['disk'] or 2**24)}".encode()))
    shutil.copytree(kept, root, dirs_exist_ok=True)
    if not fault["disk"]:
        check(libc.mount(b"none", root.encode(), None, READ_ONLY | 32, None))  # 32: mounted anew
    child = os.fork()
    if not child:
        code = 3
        try:
            code = _call(command, arguments)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    shutil.rmtree(kept)
    shutil.copytree(root, kept)
    check(libc.umount2(root.encode(), 2))  # 2: even if something is open there
    shutil.rmtree(root)
    kept.rename(root)
    return status


def _harm(root: str, fault: dict[str, Any]) -> None:
    if "file_size" in fault:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault["file_size"],) * 2)
    if "change" not in fault and "pause" not in fault:
        return
    number = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal number
        if not (event in CHANGES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING)):
            return
        if not isinstance(arguments[0], str | os.PathLike) or root not in os.path.abspath(arguments[0]):
            return
        time.sleep(fault.get("pause", 0))
        number += 1
        if number != fault.get("change") and not (fault.get("ever") and number > fault["change"]):
            return
        if "errno" in fault:
            raise OSError(fault["errno"], os.strerror(fault["errno"]), str(arguments[0]))
        os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
