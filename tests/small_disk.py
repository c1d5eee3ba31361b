"""Programs on a small file system of their own, which they may fill up or make read-only: no other process sees it."""

import subprocess
import sys
from functools import cache

import pytest

_ENTER = 'mount -t tmpfs -o "size=$1" tmpfs "$2" && shift 2 && exec "$@"'
_WAYS = ("-Urm", "-m")  # as anybody, where the kernel lets everybody have namespaces; as root
_PREAMBLE = """
import os, subprocess, sys
disk = sys.argv[1]

def fill():
    '''Take all that is left; gives the file.'''
    path = os.path.join(disk, ".filler")
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass
    assert free() == 0
    return path

def free():
    about = os.statvfs(disk)
    return about.f_bavail * about.f_frsize

def remount(how):
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)
"""


@cache
def _way():
    for way in _WAYS:
        command = ["unshare", way, "sh", "-c", _ENTER, "sh", "1m", "/mnt", "true"]
        try:
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                return way
        except FileNotFoundError:
            return None
    return None


def on_small_disk(program, folder, *words, size="48m"):
    """Run a program that knows ``disk``, ``fill()``, ``free()`` and ``remount("ro")``; gives what it prints.

    program: Python.
    folder: an empty folder, in whose place the file system is.
    words: the program's further arguments, from ``sys.argv[2]`` on.
    size: of the file system.
    """
    if _way() is None:
        pytest.skip("this machine lets nobody mount a file system in a namespace of its own (unshare -Urm)")
    command = ["unshare", _way(), "sh", "-c", _ENTER, "sh", size]
    python = [sys.executable, "-c", _PREAMBLE + program, str(folder), *map(str, words)]
    done = subprocess.run([*command, str(folder), *python], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
