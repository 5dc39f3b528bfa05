"""Boxes of any server that speaks E2B's API, through E2B's own SDK (`pip install e2b`).

    E2bBoxes()                                         E2B itself; the key is in E2B_API_KEY
    E2bBoxes(domain="boxes.example.org")               another server: https://api.DOMAIN
    E2bBoxes(api_url="http://…", sandbox_url="http://…")

A create request has the owner's labels as metadata. The request's Idempotency-Key is the owner's key and the number of
the owner's boxes that this process stopped. `timeout` is the box's time to live. recipe.image is a template's name.
Without it, recipe.build or recipe.base is built as a template. Without these, a box has the server's own template.
A box without a network has `allow_internet_access = False`.

Not promised: Dockerfiles of several stages, which E2B does not build; a price, which depends on the account and the
template. Tested with e2b 2.63 and a server of the tests, not with E2B.
"""

import os
import posixpath
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    fitting_words,
    read_output,
    wrapped_command,
)
from inner.extras.boxes.images import BUILD_S, BuiltImages, build_failed
from inner.optional import optional

ASK_S = 1.0  # seconds between looks at a build


class E2bBoxes:
    """The provider.   api_key, domain, api_url, sandbox_url: as in E2B's SDK; if left out, it reads E2B_… variables."""

    price_per_hour = None

    def __init__(self, **opts: Any) -> None:
        self._sdk = optional("e2b", "boxes of E2B need its SDK, which cannot be imported here ({}). `pip install e2b`")
        if not (opts.get("api_key") or os.environ.get("E2B_API_KEY")):
            raise InnerError("boxes of E2B need a key, and E2B_API_KEY is not set. Set it, or give api_key.")
        self._opts = opts
        self._images = BuiltImages(self._build)
        self._stopped = Counter[str]()  # owner's key -> number of its stopped boxes, as part of a new box's key

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> "E2bBox":
        key, template = f"{owner.key}-{self._stopped[owner.key]}", self.image_of(recipe)
        with _as_ours(self._sdk, ProviderFailed):
            made = self._sdk.Sandbox.create(
                template=template or None, timeout=int(recipe.ttl_s), idempotency_key=key,
                metadata={**MADE_BY, **owner.labels, "folder": recipe.folder},
                allow_internet_access=False if recipe.offline else None,
                request_timeout=max(1.0, min(timeout_s, 120.0)), **self._opts,
            )  # fmt: skip
        return E2bBox(self._sdk, made, recipe.folder, lambda: self._stopped.update([owner.key]))

    def image_of(self, recipe: BoxRecipe) -> str:
        """Return a recipe's template; "": the server's own.   Raises BuildFailed and ProviderFailed."""
        if recipe.image or not (recipe.build or recipe.base):
            return recipe.image
        return self._images.image_of(recipe)

    def _build(self, folder: Path, name: str) -> str:
        try:
            template = self._sdk.Template(folder).from_dockerfile(str(folder / "Dockerfile"))
        except Exception as error:
            raise build_failed(f"E2B's SDK does not read it ({error})") from error
        states, end = self._sdk.TemplateBuildStatus, time.monotonic() + BUILD_S
        with _as_ours(self._sdk, ProviderFailed):
            try:
                building = self._sdk.Template.build_in_background(template, name, **self._opts)
            except self._sdk.BuildException as error:
                if _is_forbidden(error):
                    raise
                raise ProviderFailed(
                    f"the server does not build a template: {error}. If it never does, name a template that it has: "
                    'inner.data.task_options.image = "NAME"'
                ) from error
            while (now := self._sdk.Template.get_build_status(building, **self._opts)).status in (
                states.BUILDING, states.WAITING,
            ):  # fmt: skip
                if time.monotonic() > end:
                    raise ProviderFailed(f"the template {name} is not built after {BUILD_S:g} s. See E2B's dashboard")
                time.sleep(ASK_S)
            if now.status == states.ERROR:
                why = now.reason.message if now.reason else "E2B gives no reason"
                raise build_failed(why.rstrip("."), [entry.message for entry in now.log_entries])
        return building.template_id

    def find(self, labels: Mapping[str, str]) -> Sequence["E2bBox"]:
        with _as_ours(self._sdk, ProviderFailed):
            pages = self._sdk.Sandbox.list(query=self._sdk.SandboxQuery(metadata={**MADE_BY, **labels}), **self._opts)
            found = list[Any]()
            while pages.has_next:
                found += pages.next_items()
            return [_Listed(self._sdk, one, self._opts, self._stopped) for one in found]


class E2bBox:
    """One sandbox.   made: the SDK's object.   folder: where commands begin.   on_stop: called before each stop."""

    def __init__(self, sdk: Any, made: Any, folder: str, on_stop: Callable[[], None]) -> None:
        self._sdk, self._made, self._folder, self._on_stop = sdk, made, folder, on_stop

    def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
        (words,) = fitting_words([shlex.join(wrapped_command(command, timeout_s, self._folder))])
        with _as_ours(self._sdk, BoxGone):
            try:
                limit = timeout_s + KILL_AFTER_S + ANSWER_S
                ended = self._made.commands.run(words, user=user, timeout=limit)
            except self._sdk.CommandExitException as error:
                ended = error
            except (self._sdk.SandboxNotRunningException, self._sdk.SandboxUnreachableException):
                raise  # subclasses of TimeoutException that mean something else
            except self._sdk.TimeoutException:  # if the box still runs, only the command hangs
                if not self._made.is_running(request_timeout=ANSWER_S):
                    raise
                return Ran(137, "")
            return Ran(ended.exit_code, read_output(ended.stdout))

    def read(self, path: str) -> bytes:
        with _as_ours(self._sdk, BoxGone):
            return bytes(self._made.files.read(posixpath.join(self._folder, path), format="bytes", user="root"))

    def write(self, path: str, data: bytes) -> None:
        with _as_ours(self._sdk, BoxGone):
            self._made.files.write(posixpath.join(self._folder, path), data, user="root")

    def stop(self) -> None:
        self._on_stop()
        with _as_ours(self._sdk, ProviderFailed):
            self._made.kill()


class _Listed(E2bBox):
    """A sandbox of the server's list. We connect to the box at its first use; to stop it, we need only its id."""

    def __init__(self, sdk: Any, told: Any, opts: Mapping[str, Any], stopped: Counter[str]) -> None:
        self._sdk, self._id, self._opts, self._stopped = sdk, told.sandbox_id, opts, stopped
        of = told.metadata
        self._folder = of["folder"]
        self._key = BoxOwner(of["run"], of["slot"], int(of["generation"]), of["place"]).key

    def __getattr__(self, name: str) -> Any:
        if name != "_made":
            raise AttributeError(name)
        self._made = self._sdk.Sandbox.connect(self._id, **self._opts)
        return self._made

    def stop(self) -> None:
        self._stopped.update([self._key])
        with _as_ours(self._sdk, ProviderFailed):
            self._sdk.Sandbox.kill(self._id, **self._opts)


@contextmanager
def _as_ours(sdk: Any, kind: type[ProviderFailed] | type[BoxGone]) -> Iterator[None]:
    """Raise the SDK's errors as ours: FileNotFoundError, InnerError for a refused key, else `kind`.

    Any other error becomes `kind`, too, because the SDK does not wrap errors of transport, JSON and HTTP 503."""
    try:
        yield
    except (InnerError, ProviderFailed, BoxGone):
        raise
    except sdk.AuthenticationException as error:
        raise _refused_key(error) from error
    except sdk.FileNotFoundException as error:
        raise FileNotFoundError(str(error)) from error
    except sdk.RateLimitException as error:
        raise kind(f"the quota of boxes is reached: {error}. Use fewer rollouts at once, or ask for more") from error
    except Exception as error:
        if kind is ProviderFailed and _is_forbidden(error):
            raise _refused_key(error) from error
        raise kind(f"{type(error).__name__}: {error}") from error


def _is_forbidden(error: Exception) -> bool:
    """Whether the API answered 403. Only some of the SDK's errors have the status; the text of all begins with it."""
    return str(error).startswith("403: ")


def _refused_key(error: Exception) -> InnerError:
    return InnerError(f"the server of boxes refuses the key: {error}. Set E2B_API_KEY to one that may make boxes.")
