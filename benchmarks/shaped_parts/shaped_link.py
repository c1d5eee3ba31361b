"""A real link on one machine: an HTTP server in a network namespace, behind a veth pair that the kernel shapes.

Bytes from the server pass a token bucket (tc's tbf) whose rate can follow a schedule. Not every kernel has netem, so a
round trip is made of what all have: packets to the server, requests and acknowledgements alike, go through a pair of
tun devices whose carrier holds each for the time. TCP sees that round trip in full: connecting and slow start pay it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.transport import RateSchedule

_FAR_SIDE = Path(__file__).with_name("far_side.py")
_PREFIX = "kvwire-shaped-"
_MTU = 1500
_WIRE_SHARE = 1448 / 1514  # payload of a full packet: 14 bytes of Ethernet, 20 of IPv4, 32 of TCP with timestamps
_LEAST_BURST = 1600  # a full packet; tbf fills its stock at every change of the rate, so more would add up
_NEED = "a shaped link needs Linux, root with CAP_NET_ADMIN and CAP_SYS_ADMIN, and the programs ip and tc (iproute2)"


@dataclass(frozen=True)
class ShapingSettings:
    """How the token bucket is set.

    burst_s: stock of tokens, in seconds of the rate, within burst_bytes (least and most). queue_s: longest wait in the
    queue before packets are dropped, in seconds of the rate; at least queue_bytes. congestion: the server's TCP, whose
    connections begin with a window of initial_packets and, with slow_restart, fall back to it when they were idle.

    A stock of less than 1 ms loses rate at 1 Gbit/s, for the timer that refills it is not that regular.
    """

    burst_s: float = 0.002
    burst_bytes: tuple[int, int] = (_LEAST_BURST, 1 << 20)
    queue_s: float = 0.1
    queue_bytes: int = 64 * 1024
    congestion: str = "cubic"
    initial_packets: int = 10
    slow_restart: bool = True

    def tbf(self, rate: float) -> str:
        """Words for tc that ask for so many bytes of payload a second; at 0 a packet passes, then one in 25 minutes."""
        if not rate:
            return f"root tbf rate 8bit burst {_LEAST_BURST} limit {self.queue_bytes}"
        least, most = self.burst_bytes
        burst = min(most, max(least, int(rate * self.burst_s)))
        limit = max(self.queue_bytes, int(rate * self.queue_s)) + burst
        return f"root tbf rate {round(rate * 8 / _WIRE_SHARE)}bit burst {burst} limit {limit}"


@dataclass(frozen=True)
class ShapedLink:
    """A link that runs. url, token: of the server. set_rate and follow change its rate while bytes flow."""

    url: str
    token: str
    settings: ShapingSettings
    namespace: str
    _shaper: subprocess.Popen[str] = field(repr=False)

    def set_rate(self, rate: float) -> None:
        """Bytes per second of payload from now on; 0 is an outage."""
        self._tell([(0.0, self.settings.tbf(rate))])

    def follow(self, schedule: RateSchedule, seconds: float = 600.0) -> float:
        """Start a schedule now and follow it for so long, at least once; returns its beginning, as time.monotonic()."""
        period = schedule.period_s or math.inf
        rounds = 1 if period == math.inf else math.ceil(seconds / period)
        starts = [(round_ * period if round_ else 0.0) + after for round_ in range(rounds) for after in schedule.times]
        rates = schedule.rates * rounds
        return self._tell([(start, self.settings.tbf(rate)) for start, rate in zip(starts, rates, strict=True)])

    def _tell(self, changes: list[tuple[float, str]]) -> float:
        """Return when those that are due now are done."""
        assert self._shaper.stdin is not None
        assert self._shaper.stdout is not None
        self._shaper.stdin.write(json.dumps(changes) + "\n")
        self._shaper.stdin.flush()
        answer = self._shaper.stdout.readline()
        if not answer:
            raise StorageError("the process that shapes the link has ended: look at what it printed")
        return float(answer)


@contextmanager
def shaped_link(
    folder: Path, rate: float, rtt_s: float = 0.0, settings: ShapingSettings | None = None
) -> Iterator[ShapedLink]:
    """Serve a folder store over a link while the block runs. rate: bytes of payload per second.

    Raises ArgumentError where this process may not make network namespaces. What crashed processes left is removed
    first, and everything of this link at the end.
    """
    chosen = settings or ShapingSettings()
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
        raise ArgumentError(_NEED)
    remove_leftovers()
    slot = _free_slot()
    namespace, near, far = f"{_PREFIX}{os.getpid()}-{slot}", f"kvw{slot}", f"kvw{slot}s"
    here, there, token = f"198.18.{slot}.1", f"198.18.{slot}.2", secrets.token_urlsafe(24)
    with ExitStack() as stack:
        stack.callback(_remove, namespace)
        _connect(namespace, (near, here), (far, there), chosen, rate)
        if rtt_s:
            _start(stack, ["delay", namespace, f"{near}t", f"{far}t", str(rtt_s)])
            _detour(namespace, near, far, there, chosen)
        shaper = _start(stack, ["shape", far, here], namespace, ready=False)
        server = _start(stack, ["serve", str(folder), there, token], namespace, ready=False)
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise StorageError("the server behind the link did not start: look at what it printed")
        yield ShapedLink(url, token, chosen, namespace, shaper)


def remove_leftovers() -> None:
    """Remove the namespaces of processes that are gone, with their devices and processes."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.partition(" ")[0]
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and pid.isdigit() and not Path("/proc", pid).exists():
            _remove(name)


def _remove(namespace: str) -> None:
    """End what runs in a namespace, and delete it with its devices; all of it may be gone already."""
    for pid in _run("ip", "netns", "pids", namespace, check=False).split():
        subprocess.run(["kill", "-KILL", pid], check=False, stderr=subprocess.DEVNULL)
    # An end here takes its peer along at once; with the namespace alone, it would go some time later.
    _run("ip", "link", "del", "kvw" + namespace.rpartition("-")[2], check=False)
    _run("ip", "netns", "del", namespace, check=False)


def _free_slot() -> int:
    used = _run("ip", "-brief", "link")
    return next(slot for slot in range(256) if f"kvw{slot}@" not in used)


def _connect(
    namespace: str, near: tuple[str, str], far: tuple[str, str], settings: ShapingSettings, rate: float
) -> None:
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", near[0], "type", "veth", "peer", "name", far[0], "netns", namespace)
    inside = ("ip", "-n", namespace)
    for prefix, (device, address) in ((("ip",), near), (inside, far)):
        _run(*prefix, "addr", "add", f"{address}/30", "dev", device)
        _run(*prefix, "link", "set", device, "mtu", str(_MTU), "up")
    _run(*inside, "link", "set", "lo", "up")
    for name, value in (
        ("tcp_no_metrics_save", "1"),  # a connection learns nothing from those before
        ("tcp_slow_start_after_idle", str(int(settings.slow_restart))),
        ("conf.all.rp_filter", "0"),
        ("conf.default.rp_filter", "0"),
    ):
        setting = "net/ipv4/" + name.replace(".", "/")
        _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > /proc/sys/{setting}")
    subnet = f"{far[1].rpartition('.')[0]}.0/30"
    # Namespaces may choose only among unrestricted algorithms; a route may name any.
    route = ("route", "replace", subnet, "dev", far[0], "src", far[1], "congctl", settings.congestion)
    _run(*inside, *route, "initcwnd", str(settings.initial_packets))
    _run("ip", "route", "replace", subnet, "dev", near[0], "src", near[1], "initrwnd", str(settings.initial_packets))
    _run("tc", "-n", namespace, "qdisc", "add", "dev", far[0], *settings.tbf(rate).split())


def _detour(namespace: str, near: str, far: str, there: str, settings: ShapingSettings) -> None:
    """Send what goes to the server through the tun devices; its answers come over the veth pair."""
    _run("ip", "-n", namespace, "link", "set", f"{far}t", "mtu", str(_MTU), "up")
    _run("ip", "link", "set", f"{near}t", "mtu", str(_MTU), "txqueuelen", "10000", "up")
    Path(f"/proc/sys/net/ipv4/conf/{near}/rp_filter").write_text("2", encoding="ascii")
    route = ("route", "add", f"{there}/32", "dev", f"{near}t", "src", f"{there[:-1]}1")
    _run("ip", *route, "initrwnd", str(settings.initial_packets))


def _start(
    stack: ExitStack, words: list[str], namespace: str | None = None, *, ready: bool = True
) -> subprocess.Popen[str]:
    """A process of the far side, ended at the end of ``stack``; waits for its first line where it says it is ready."""
    within = ["ip", "netns", "exec", namespace] if namespace else []
    command = [*within, sys.executable, str(_FAR_SIDE), *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(_stop, process)
    if ready and process.stdout is not None and not process.stdout.readline():
        raise StorageError(f"a part of the link did not start ({' '.join(words)}): look at what it printed; {_NEED}")
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise ArgumentError(f"{' '.join(words)}: {done.stderr.strip() or 'failed'}; {_NEED}")
    return done.stdout
