"""A real forward proxy on loopback: it forwards plain requests, opens tunnels, and alone knows where some hosts are."""

from __future__ import annotations

import http.client
import select
import socket
import threading
from base64 import b64encode
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class ForwardProxy:
    """Attributes: ``hosts`` are looked up before the network; ``password`` is wanted where it is given."""

    url: str
    hosts: dict[str, tuple[str, int]] = field(default_factory=dict)
    password: str = ""
    asked: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def forward(self):
        proxy: ForwardProxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        proxy.asked.append(f"{self.command} {self.path.partition('?')[0]}")
        if not self._is_allowed(proxy):
            return
        parts = urlsplit(self.path)
        host, port = proxy.hosts.get(parts.netloc, (parts.hostname, parts.port))
        link = http.client.HTTPConnection(host, port, timeout=10)
        skipped = ("proxy-authorization", "connection", "expect")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in skipped}
        link.request(self.command, f"{parts.path}?{parts.query}".rstrip("?"), body or None, headers)
        answer = link.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("server", "date", "connection", "transfer-encoding"):
                self.send_header(name, value)
        if not answer.getheader("Content-Length"):
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        link.close()

    def do_CONNECT(self):
        proxy: ForwardProxy = self.server.proxy
        proxy.asked.append(f"CONNECT {self.path}")
        if not self._is_allowed(proxy):
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection(proxy.hosts.get(self.path, (host, int(port))), timeout=10) as further:
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: further, further: self.connection}
            while True:
                ready, _, _ = select.select(list(ends), [], [], 10)
                for end in ready:
                    if not (data := end.recv(65536)):
                        self.close_connection = True
                        return
                    ends[end].sendall(data)
                if not ready:
                    return

    def _is_allowed(self, proxy):
        wanted = f"Basic {b64encode(proxy.password.encode()).decode()}"
        if not proxy.password or self.headers.get("Proxy-Authorization") == wanted:
            return True
        self.send_response(407)
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def log_message(self, *_):
        pass


for _method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
    setattr(_Handler, f"do_{_method}", _Handler.forward)


@contextmanager
def forward_proxy(hosts=None, password=""):
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as listening:
        listening.daemon_threads = True
        proxy = ForwardProxy(f"http://127.0.0.1:{listening.server_address[1]}", hosts or {}, password)
        listening.proxy = proxy
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            listening.shutdown()
            thread.join()
