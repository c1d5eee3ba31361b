"""Processes of a shaped link's far side; each ends when its standard input does, so that none outlives its parent.

far_side.py serve FOLDER ADDRESS TOKEN    in the namespace: a folder's objects; prints the URL
far_side.py delay NAMESPACE NEAR FAR S    outside: carries packets from one tun device to the other, S seconds late
far_side.py shape DEVICE ADDRESS          in the namespace: changes the rate in time; packets to ADDRESS follow
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from itertools import islice
from pathlib import Path
from urllib.request import Request, urlopen

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 65536
_DISCARD_PORT = 9
_WARM_UP = 8
_TC_S = 0.002  # for tc to make a change


def serve_folder(folder: str, address: str, token: str) -> None:
    """Serve until the standard input ends."""
    from kvwire.store import FolderStore
    from kvwire.transport import serve

    logging.getLogger("kvwire").setLevel(logging.ERROR)  # nobody else is in the namespace: TLS is not missed
    store = FolderStore(folder)

    def warm_up(url: str) -> None:
        """The first requests are slow, here over the namespace's own loopback: code and files are read."""
        for key in islice(store.keys(""), _WARM_UP):
            headers = {"Authorization": f"Bearer {token}", "Range": "bytes=0-0"}
            asked = Request(f"{url}/{key}", headers=headers)  # noqa: S310 - the server of this process
            with urlopen(asked) as answer:  # noqa: S310
                answer.read()

    async def run() -> None:
        async with serve(store, address, token=token) as url:
            await asyncio.to_thread(warm_up, url)
            print(url, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(run())


def delay(namespace: str, near: str, far: str, seconds: float) -> None:
    """Carry packets from ``near``, a tun device here, to ``far``, one in the namespace; the first line out is ready."""
    source = _tun(near)
    with Path("/run/netns", namespace).open() as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    target = _tun(far)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a wire does not wait for a processor
    print("ready", flush=True)
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable = select.select([source, sys.stdin], [], [], patience)[0]
        if sys.stdin in readable:
            return
        if readable:
            _take(source, waiting, seconds)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            os.write(target, waiting.popleft()[1])


def _take(source: int, waiting: deque[tuple[float, bytes]], seconds: float) -> None:
    try:
        while True:
            packet = os.read(source, _PACKET_BYTES)
            waiting.append((time.monotonic() + seconds, packet))
    except BlockingIOError:
        return


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def shape(device: str, address: str) -> None:
    """Read ``[[seconds from now, tc's arguments], ...]`` lines, each replacing the one before.

    Each is answered with the instant that was "now", on the monotonic clock, once the changes due then are made. A
    queue that waits for tokens at the old rate sleeps until these would be there: a packet sent after each change wakes
    it.
    """
    tc = subprocess.Popen(["tc", "-force", "-batch", "-"], stdin=subprocess.PIPE, text=True)
    assert tc.stdin is not None
    waker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    changes: deque[tuple[float, str]] = deque()
    while True:
        patience = max(0.0, changes[0][0] - time.monotonic()) if changes else None
        answer = None
        if select.select([sys.stdin], [], [], patience)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            answer = time.monotonic()
            changes = deque((answer + after, command) for after, command in json.loads(line))
        while changes and changes[0][0] <= time.monotonic():
            tc.stdin.write(f"qdisc change dev {device} {changes.popleft()[1]}\n")
            tc.stdin.flush()
            time.sleep(_TC_S)
            waker.sendto(b"", (address, _DISCARD_PORT))
        if answer is not None:
            print(answer, flush=True)
    tc.stdin.close()
    tc.wait()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", folder, address, token]:
            serve_folder(folder, address, token)
        case ["delay", namespace, near, far, seconds]:
            delay(namespace, near, far, float(seconds))
        case ["shape", device, address]:
            shape(device, address)
        case _:
            sys.exit(__doc__)
