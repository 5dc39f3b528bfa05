"""A proxy that asks for a name and a password, for `serve` of loopback.py.

Not promised: to pass any request on.
"""

from http.server import BaseHTTPRequestHandler


class WantsLogin(BaseHTTPRequestHandler):
    def do_CONNECT(self) -> None:
        self.send_response(407, "Proxy Authentication Required")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
