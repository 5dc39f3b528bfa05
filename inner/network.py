"""Say why a server cannot be reached: the client's words, and a proxy or certificate that may be the cause.

    Connection refused                    ──▶ … (HTTPS_PROXY is set)
    407 Proxy Authentication Required     ──▶ … The proxy wants a name and a password: set …
    CERTIFICATE_VERIFY_FAILED             ──▶ … Name your organisation's authority in SSL_CERT_FILE
    Invalid port: 'part of a password'    ──▶ HTTPS_PROXY cannot be read …

The value of a proxy's variable may have a password, and no text here contains a part of it.

Not promised: which of several servers in between has refused.
"""

import os
import re

from inner.printable import first_line

PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


def network_words(error: BaseException) -> str:
    """Return the first line of a client's error, with advice if a proxy or a certificate is the likely cause."""
    said = str(getattr(error, "strerror", None) or first_line(error))[:160]
    names = [name for name in PROXIES if os.environ.get(name)]
    listed = " and ".join(names)
    logins = [os.environ[name].rpartition("@")[0].partition("://")[2] for name in names]
    if any(len(part) > 1 and part in said for login in logins for part in (login, *re.split(r"[:@/?#]", login))):
        return (
            f"the proxy of {listed} cannot be used. Write http://NAME:PASSWORD@HOST:PORT, with %23 for # and %40 for @"
        )
    if "407" in said and names:
        return f"{said}. The proxy wants a name and a password: set {names[0]}=http://NAME:PASSWORD@HOST:PORT"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return f"{said}. Name a file with your organisation's authority in SSL_CERT_FILE"
    lost = [name for name in AUTHORITIES if (path := os.environ.get(name)) and not os.path.exists(path)]
    if lost:
        return f"{said}. {lost[0]} names no file: correct it"
    return said + (f" ({listed} {'is' if len(names) == 1 else 'are'} set)" if names else "")
