"""Boxes that are Modal's sandboxes, through Modal's own SDK.

    ModalBoxes()                 app "diloco-boxes"; the credentials are the SDK's: MODAL_TOKEN_… or ~/.modal.toml
    owner.key ─▶ name            Modal keeps names unique in an app: a second create fails, and the box is looked up
    owner.labels ─▶ tags         ttl_s ─▶ the sandbox's timeout     image, base ─▶ a registry's name, or im-…
    recipe.build ─▶ Image.from_dockerfile, built in the app; Modal keeps it for later processes
    user "root" ─▶ root          any other ─▶ uid 1000, by setpriv             offline ─▶ block_network

Files go through commands, so that a box needs nothing but bash, coreutils and util-linux.

Not promised: a price, which depends on a box's use; a quick notice of a lost box, because the SDK tries again for
five minutes. Tested with modal 1.6.4 and a server of the tests, not with Modal.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.extras.boxes.box import (
    ANSWER_S,
    KILL_AFTER_S,
    MADE_BY,
    BoxGone,
    BoxOwner,
    BoxRecipe,
    ProviderFailed,
    Ran,
    as_user,
    fitting_words,
    read_output,
    wrapped_command,
)
from inner.extras.boxes.images import BUILD_S, LINES, BuiltImages, build_failed
from inner.optional import optional

IMAGE = "python:3.12-slim"
PIECE = 1 << 20  # bytes of a file per request
READ = '[ -f "$0" ] && exec cat -- "$0"'
WRITE = '{ [ -f "$0" ] || [ ! -e "$0" ]; } && mkdir -p -- "$(dirname -- "$0")" && exec cat > "$0"'


class ModalBoxes:
    """The provider.   app: the account's app.   more: keywords of modal.Sandbox.create, such as cpu, memory, region."""

    price_per_hour = None

    def __init__(self, app: str = "diloco-boxes", **more: Any) -> None:
        self._sdk, self._more = optional("modal", "boxes of Modal need its SDK ({}). `pip install modal`"), more
        self._images = BuiltImages(self._build)
        with _as_ours(self._sdk, ProviderFailed):
            self._app = self._sdk.App.lookup(app, create_if_missing=True)

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> "ModalBox":
        image = self.image_of(recipe)
        more = self._more | ({"block_network": True} if recipe.offline else {})
        with _as_ours(self._sdk, ProviderFailed):
            coming = self._sdk.Sandbox.create.aio(
                app=self._app, image=image, name=f"box-{sha256(owner.key.encode()).hexdigest()[:32]}",
                tags={**MADE_BY, **owner.labels, "folder": recipe.folder}, timeout=int(recipe.ttl_s), **more,
            )  # fmt: skip
            made = asyncio.run(asyncio.wait_for(coming, timeout_s))
        return ModalBox(self._sdk, made, recipe.folder)

    def image_of(self, recipe: BoxRecipe) -> Any:
        """Return the SDK's image of a recipe.   Raises BuildFailed and ProviderFailed."""
        if recipe.build:
            return self._images.image_of(recipe)
        images, name = self._sdk.Image, recipe.image or recipe.base or IMAGE
        return images.from_id(name) if name.startswith("im-") else images.from_registry(name)

    def _build(self, folder: Path, name: str) -> Any:
        image = self._sdk.Image.from_dockerfile(folder / "Dockerfile", context_dir=folder)
        with _as_ours(self._sdk, ProviderFailed):
            try:
                asyncio.run(asyncio.wait_for(image.build.aio(self._app), BUILD_S))
            except self._sdk.exception.ImageBuildError as error:
                said = list[str]()
                with suppress(Exception):  # a log that cannot be read is no reason to try the build again
                    said = "".join(str(entry.message) for entry in image.logs.tail(LINES)).splitlines()
                raise build_failed(f"all its lines: `modal image logs {error.image_id}`", said) from error
            except TimeoutError as error:
                raise ProviderFailed(f"the image is not built after {BUILD_S:g} s. See Modal's dashboard") from error
        return image

    def find(self, labels: Mapping[str, str]) -> Sequence["ModalBox"]:
        with _as_ours(self._sdk, ProviderFailed):
            found = list(self._sdk.Sandbox.list(app_id=self._app.app_id, tags={**MADE_BY, **labels}))
        return [ModalBox(self._sdk, one) for one in found]


class ModalBox:
    """One sandbox.   made: the SDK's object.   folder: where commands begin; "": read it from the sandbox's tags."""

    def __init__(self, sdk: Any, made: Any, folder: str = "") -> None:
        self._sdk, self._made, self._folder = sdk, made, folder

    def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
        with _as_ours(self._sdk, BoxGone):
            root = self._root()
        words = fitting_words([*as_user(user), *wrapped_command(command, timeout_s, root)])
        with _as_ours(self._sdk, BoxGone):
            limit = int(timeout_s + KILL_AFTER_S + ANSWER_S)
            code, raw = self._run(words, limit)
            return Ran(137 if code < 0 else code, read_output(raw))

    def read(self, path: str) -> bytes:
        with _as_ours(self._sdk, BoxGone):
            code, raw = self._run(["bash", "-c", READ, self._place(path)], int(ANSWER_S))
        if code:
            raise FileNotFoundError(f"{path!r} is not a file in the box.")
        return raw

    def write(self, path: str, data: bytes) -> None:
        with _as_ours(self._sdk, BoxGone):
            code, _ = self._run(["bash", "-c", WRITE, self._place(path)], int(3 * ANSWER_S), data)
        if code:
            raise FileExistsError(f"{path!r} is not a regular file in the box, or cannot become one. Remove it.")

    def stop(self) -> None:
        with _as_ours(self._sdk, ProviderFailed):
            self._made.terminate()

    def _run(self, words: Sequence[str], limit_s: int, stdin: bytes = b"") -> tuple[int, bytes]:
        """Return a command's exit code, -1 if it did not end in time, and its output."""
        ran = self._made.exec(*words, timeout=limit_s, text=False)
        for at in range(0, len(stdin), PIECE):
            ran.stdin.write(stdin[at : at + PIECE])
            ran.stdin.drain()
        ran.stdin.write_eof()
        ran.stdin.drain()
        raw = ran.stdout.read()
        return ran.wait(), raw

    def _root(self) -> str:
        self._folder = self._folder or self._made.get_tags()["folder"]
        return self._folder

    def _place(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._root()}/{path}"


@contextmanager
def _as_ours(sdk: Any, kind: type[ProviderFailed] | type[BoxGone]) -> Iterator[None]:
    """Raise the SDK's errors as ours: InnerError for refused credentials, else `kind`."""
    errors = sdk.exception
    try:
        yield
    except (InnerError, ProviderFailed, BoxGone):
        raise
    except errors.AuthError as error:
        raise InnerError(
            f"Modal refuses the credentials: {str(error).rstrip('.')}. Run `modal token set`, or set MODAL_TOKEN_ID "
            "and MODAL_TOKEN_SECRET"
        ) from error
    except errors.ResourceExhaustedError as error:
        raise kind(f"the quota of sandboxes is reached: {error}. Use fewer rollouts, or ask for more") from error
    except Exception as error:  # also errors of the SDK's transport
        raise kind(f"{type(error).__name__}: {error}") from error
