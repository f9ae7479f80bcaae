"""A process that runs commands, each in a fork with a fault, so that imports happen once.

A request is a line of JSON on stdin: `command`, `arguments`, `root` (the folder that the command writes to) and
`fault`. A reply on stdout has the exit code and the output of the command.
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
NEW_MOUNTS, PRIVATE, RECURSIVE, READ_ONLY = 0x20000, 1 << 18, 1 << 14, 1  # constants of sched.h and mount.h
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "os.link")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def main() -> None:
    """Run the requested commands until stdin ends."""
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=replies, flush=True)


def run(command: str, arguments: list[str], root: str, fault: dict[str, Any]) -> dict[str, Any]:
    """Run a command, and return its exit code (a signal's as a negative number) and its output."""
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
    except BaseException as error:  # a fork must not go on as a second host
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _call(command: str, arguments: list[str]) -> Any:
    """Run the command, and return its exit code.

    Training saves its state every other step, so that a run after a fault has something to resume.
    """
    training.SAVE_SECONDS = 0.0
    made = train.make_settings
    train.make_settings = lambda *given: replace(made(*given), save_every=2)  # type: ignore[attr-defined]
    try:
        COMMANDS[command].main(arguments, prog_name=command)
    except SystemExit as end:
        return end.code or 0
    return 0


def _on_a_disk(command: str, arguments: list[str], root: str, fault: dict[str, Any]) -> Any:
    """Run the command with a new disk at `root`, and then move the disk's files to `root` itself.

    The disk has `fault["disk"]` bytes free, or is read-only if that is 0.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(status: int) -> None:
        if status:
            raise PermissionError(ctypes.get_errno(), "no disk can be mounted")

    kept = Path(tempfile.mkdtemp(dir=Path(root).parent))
    shutil.copytree(root, kept, dirs_exist_ok=True)
    check(libc.unshare(NEW_MOUNTS))
    check(libc.mount(b"none", b"/", None, PRIVATE | RECURSIVE, None))
    used = sum(file.stat().st_size + 4096 for file in kept.rglob("*"))
    check(libc.mount(b"none", root.encode(), b"tmpfs", 0, f"size={used + (fault['disk'] or 2**24)}".encode()))
    shutil.copytree(kept, root, dirs_exist_ok=True)
    if not fault["disk"]:
        check(libc.mount(b"none", root.encode(), None, READ_ONLY | 32, None))  # 32: mount the disk again
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
    check(libc.umount2(root.encode(), 2))  # 2: even if a file is open on the disk
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
