"""The store for a URL.  This module knows every kind of store, and imports only the store that a URL needs.

    runs/demo, file:///abs   folders            s3:// gs:// az:// hf://   buckets, through obstore
    memory://name            this process       modal://name              Modal's dict and volume
    fsspec+scheme://         any file system of fsspec

Not promised: that the store can carry a run; rendezvous/engine/probe.py tests that.
"""

from pathlib import Path

from rendezvous.store import Store


def open_store(url: str, *, make: bool = True) -> Store:
    """Return a store for `url`: a path, file://…, memory://name, a bucket in the cloud, or a URL for fsspec.

    make: whether the first write creates a missing folder; False if a run must already exist there.
    `fsspec+s3://…` uses s3fs instead of our own client.  memory:// is our store, and `fsspec+memory://` is fsspec's.
    Raise ValueError for an unknown kind of URL.
    """
    scheme, colon, rest = url.partition("://")
    if (not scheme.islower() or (scheme == "file" and rest[:1] != "/")) if colon else (":" in url or "//" in url):
        from rendezvous.stores.urls import plain_spelling

        scheme, colon, rest = plain_spelling(url).partition("://")
    if not colon:
        scheme, rest = "file", url
    if scheme == "file":
        from rendezvous.stores.files import FileStore

        return FileStore(rest, make=make)
    if scheme == "memory":
        from rendezvous.stores.memory import MemoryStore

        return MemoryStore.named(rest)
    if scheme in ("s3", "gs", "az", "hf"):
        from rendezvous.stores.cloud.store import CloudStore

        return CloudStore(url)
    if scheme == "modal":
        from rendezvous.stores.modal.store import ModalStore

        return ModalStore(url)
    from rendezvous.stores.adapter import OWN, AdapterStore, is_served

    if scheme.startswith(OWN) or is_served(scheme):
        return AdapterStore(url)
    raise ValueError(
        f"no store for {scheme}://{rest.rpartition('@')[2].partition('?')[0]}: use a folder (runs/demo or "
        "file:///abs/path), s3://, gs://, az://, hf://buckets/…, modal://name, memory://name or, for "
        "files alone, a scheme of fsspec"
    )


def folder_of(url: str) -> Path | None:
    """Return the folder of this machine that the URL names; None for any other URL."""
    scheme, colon, rest = url.partition("://")
    return Path(rest if colon else url) if not colon or scheme == "file" else None


def stays_here(url: str) -> bool:
    """Whether no other machine can reach the store: a folder of this machine, or the memory of a process."""
    return folder_of(url) is not None or url.startswith("memory://")


def urls_above(url: str) -> list[str]:
    """Return the URLs of the folders or prefixes that contain `url`, nearest first; no URL for memory://.

    "s3://b/x/y?region=r" -> ["s3://b/x?region=r", "s3://b?region=r"]
    """
    if (folder := folder_of(url)) is not None:
        return [str(above) for above in folder.absolute().parents][:-1]
    scheme, _, rest = url.partition("://")
    path, mark, query = rest.partition("?")
    first = {"memory": len(path), "hf": 3}.get(scheme, 1)  # parts that name the bucket itself
    parts = path.rstrip("/").split("/")
    return [f"{scheme}://{'/'.join(parts[:n])}{mark}{query}" for n in range(len(parts) - 1, first - 1, -1)]
