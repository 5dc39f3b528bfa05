"""Writes the words for obstore's errors, with the next thing to do.

    obstore's error                               our error
    AlreadyExists                                 KeyExists      (a 409 does not prove that an object is there:
                                                                 put_once reads the key)
    403, expired, no such bucket, quota full,     StoreRefused   with advice; the next request makes a new client
    a certificate, a page of HTML, …
    an error for which we have no advice          StoreUnclear   the request may have succeeded

A text has the status, the code and our own words, and a server's message only about a checksum: other texts of a server
may quote keys or signed requests.

Not promised: the cause of a server's refusal that the status and the code do not tell.
"""

import os
import re

from obstore.exceptions import AlreadyExistsError

from rendezvous.errors import KeyExists, StoreError, StoreFull, StoreReadOnly, StoreRefused, StoreUnclear
from rendezvous.stores.cloud.address import Address
from rendezvous.stores.cloud.credentials import keys_of

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "InvalidAuthenticationInfo"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_LATER = {"408", "425", "429"}  # statuses that ask for a later request
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"}
_CERTIFICATE = {  # rustls's word -> what is wrong, and what you can do
    "UnknownIssuer": "no authority that is known here has signed it. Name a file with your organisation's authority in "
    "SSL_CERT_FILE, or a folder in SSL_CERT_DIR (AWS_CA_BUNDLE and REQUESTS_CA_BUNDLE are not read)",
    "CaUsedAsEndEntity": "it is an authority's own certificate. Give the server a certificate with CA:FALSE that this "
    "authority has signed, and name the authority's certificate in SSL_CERT_FILE",
    "Expired": "it has expired. Renew it on the server, or set this machine's clock",
    "NotValidForName": "it is another host's. Write the host's name that stands in it into the endpoint",
}
_NO_CONNECTION = {"dns error": "there is no host of that name", "TunnelUnsuccessful": "the proxy refuses it"}
_METADATA = ("169.254.169.254", "metadata.google.internal")  # clients try them last, if they find no credentials


def explain_error(address: Address, verb: str, key: str, error: Exception, missing: bool = False) -> StoreError | None:
    """Return our error for an error of obstore; None for a missing object, if `missing` allows it."""
    text = str(error)
    status = _first_match(r"status code: (\d{3})", text)
    code = _first_match(r"<Code>(\w+)</Code>", text)
    place = f"{address.url.partition('?')[0]}/{key}"
    where = f"cannot {verb} {place}: {' '.join(s for s in (status, code) if s) or in_words(error)}"
    past_the_end = status == "416" or "Wanted range starting at" in text  # the latter is obstore's own text
    if missing and code not in _NO_BUCKET and (isinstance(error, FileNotFoundError) or past_the_end):
        return None
    if isinstance(error, AlreadyExistsError) and verb == "create":  # for a plain write a 409 means: try again
        return KeyExists(f"{place} exists: {status} {code}")
    if code in _FULL or status == "507":
        return StoreFull(f"{where}. Free some space, or raise the bucket's quota")
    advice = _next_thing_to_do(address, verb, status, code, text)
    if advice and code == "AccessDenied" and verb in ("write", "create", "delete"):
        return StoreReadOnly(f"{where}. {advice}")
    return StoreRefused(f"{where}. {advice}") if advice else StoreUnclear(where)


def _next_thing_to_do(address: Address, verb: str, status: str, code: str, text: str) -> str:
    """Return advice on the next thing to do; "" if a retry may help."""
    if any(host in text for host in _METADATA):
        export = (
            '; `eval "$(aws configure export-credentials --format env)"` sets the keys of a login, a role or a command'
        )
        return f"No credentials were found. {keys_of(address.scheme)}{export if address.scheme == 's3' else ''}"
    if bad := "".join(_first_match(r"InvalidCertificate\(([\w(\s]+)", text).split()):
        why = next((said for word, said in _CERTIFICATE.items() if word in bad), f"it is not valid ({bad})")
        return f"The server's certificate is refused: {why}"
    if status == "407":
        return "The proxy wants a name and a password: set HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT (or HTTP_PROXY)"
    is_page = not code and re.search(r"(?i)<html|<!doctype html", text)
    if is_page and (status[:1] in ("3", "4") or status == "511") and status not in _LATER:
        return not_a_store()
    if "Failed to read token file" in text:
        return "AWS_WEB_IDENTITY_TOKEN_FILE must name a file that this process can read"
    if code in _NO_BUCKET:
        return f"There is no bucket {address.bucket!r}: create it ({_how_to_create(address)}) or correct the URL"
    if code in _EXPIRED:
        return f"The token has expired or is not valid: renew it; the run continues. {_how_to_renew(address.scheme)}"
    if code == "RequestTimeTooSkewed":
        return "This machine's clock is wrong: set it (`timedatectl set-ntp true`)"
    if status == "301" or code in _WRONG_REGION:
        return "The bucket is in another region: set AWS_REGION to it"
    if "checksum" in text or "Content-MD5" in text:
        said = _first_match(r"<Message>([^<]{1,200})</Message>", text)
        return f"Set AWS_CHECKSUM_ALGORITHM=sha256: this bucket demands a checksum with each write. It said: {said!r}"
    if status == "501" and verb == "create":
        return "This store has no create-if-absent (If-None-Match), which every run needs: use another store"
    if status == "501":
        return "This store lacks the request; `diloco doctor URL` shows what it can do"
    if status in ("401", "403") or code in _WRONG_KEYS or text.startswith("The operation lacked "):
        return f"The store does not let this key {verb} there. {keys_of(address.scheme)}"
    return ""


def not_a_store() -> str:
    return (
        f"A page of HTML answered, and no store: the endpoint is another server's address, or a proxy, a firewall or a "
        f"login page is in between{_proxy()}. Open the endpoint in a browser on this machine, or name it in NO_PROXY"
    )


def _how_to_renew(scheme: str) -> str:
    if scheme in ("s3", "hf"):
        return "Write the new keys to ~/.aws/credentials: a running replica reads it again at every try"
    return keys_of(scheme)


def _how_to_create(address: Address) -> str:
    if address.scheme == "gs":
        return f"`gcloud storage buckets create gs://{address.bucket}`"
    if address.scheme == "az":
        return f"`az storage container create -n {address.bucket}`"
    return "on huggingface.co" if address.scheme == "hf" else f"`aws s3 mb s3://{address.bucket}`"


def _proxy() -> str:
    """Return " (HTTPS_PROXY is set)" if the environment names a proxy; else "".   Its value may hold a password."""
    names = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    found = [name for name in names if os.environ.get(name)]
    return f" ({', '.join(found)} {'is' if len(found) == 1 else 'are'} set)" if found else ""


def in_words(error: Exception) -> str:
    """Return a text for an error that has no status, without URLs (but the server's) and without possible keys."""
    text = str(error)
    if kind := _first_match(r"kind: (Connect|Timeout|Interrupted)", text):
        server = _first_match(r"Error performing \w+ (https?://[^/?@\s]+)[/?]", text)
        why = next((f": {said}" for word, said in _NO_CONNECTION.items() if word in text), "")
        words = {"Connect": "no connection", "Timeout": "no answer in time"}.get(kind, "the connection broke")
        return f"{words}{f' ({server})' if server else ''}{why}{_proxy()}"
    if "HTTP error" in text:
        return "the connection broke"
    line = re.split(r"\n|<\?xml|Server returned", text)[0][:200]
    line = re.sub(r"\S*://\S+", "…", line)
    return re.sub(r"[\w+/=-]{16,}", "…", line).strip() or type(error).__name__


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
