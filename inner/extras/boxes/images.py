"""Build the images of Harbor tasks at a provider that builds Dockerfiles, each once.

    recipe.build, a tar ─┐
    recipe.base, FROM ───┴─▶ a folder with a Dockerfile ──▶ build(folder, name)     name: "diloco-DIGEST" of the content

    python -m inner.extras.boxes.images PROVIDER FOLDER [PATTERN …] [--size N] [--seed S]
        builds those images before a run starts; the arguments are the run's task_options.without, task_size
        and task_seed

The provider keeps what it has built, so a later process gets the same image within seconds. A start waits for its
image for as long as the build takes, at most BUILD_S, beyond the start's own budget. A failed build is not tried again
in this process; only its own task has no boxes.

Not promised: an end of a provider's build that has taken longer; a removal of images.
"""

import argparse
import io
import tarfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inner.errors import InnerError
from inner.extras.boxes.box import BoxRecipe, BuildFailed, ProviderFailed
from inner.extras.boxes.episode import box_recipes
from inner.extras.boxes.starting import open_provider
from inner.tasks.harbor import BUILDERS, HarborTask, in_order, read_tasks
from inner.tasks.harbor_files import placed

BUILD_S = 3600.0  # seconds for one image
AT_ONCE = 8  # builds
LINES = 15  # of a failed build's log


class BuiltImages:
    """The images of one process.   build(folder, name): build the Dockerfile in `folder`; return the SDK's image."""

    def __init__(self, build: Callable[[Path, str], Any]) -> None:
        self._build = build
        self._lock, self._locks = threading.Lock(), defaultdict[str, threading.Lock](threading.Lock)
        self._images = dict[str, Any]()

    def image_of(self, recipe: BoxRecipe) -> Any:
        """Return the image of a recipe, built at the first call; other calls wait.   Raises as `build`."""
        name = f"diloco-{sha256(recipe.build or recipe.base.encode()).hexdigest()[:24]}"
        with self._lock:
            own = self._locks[name]
        with own:
            if name not in self._images:
                with TemporaryDirectory() as folder:
                    _unpack(recipe, Path(folder))
                    try:
                        self._images[name] = self._build(Path(folder), name)
                    except BuildFailed as error:
                        self._images[name] = error
            if isinstance(found := self._images[name], BuildFailed):
                raise BuildFailed(str(found))
            return found


def _unpack(recipe: BoxRecipe, folder: Path) -> None:
    if recipe.build:
        with tarfile.open(fileobj=io.BytesIO(recipe.build)) as archive:
            for member in archive:  # by hand, because Python 3.11.2 has no `filter` for extractall
                if data := archive.extractfile(member):
                    path = folder / placed("/", member.name)[1:]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data.read())
                    path.chmod(member.mode & 0o777)
    else:
        (folder / "Dockerfile").write_text(f"FROM {recipe.base}\n")


def build_failed(why: str, lines: Iterable[str] = ()) -> BuildFailed:
    """Return the error of a Dockerfile that cannot be built.   lines: the end of the build's log."""
    last = "".join(f"\n    {line}" for line in list(lines)[-LINES:])
    return BuildFailed(
        f"the image of its Dockerfile cannot be built: {why}. Correct it, or leave the task out (task_options.without)."
        f"{last}"
    )


def build_all(provider: Any, tasks: Iterable[HarborTask], say: Callable[[str], None]) -> bool:
    """Build the images of these tasks; return whether all were built.   say: prints a line per image."""

    def build(name: str, recipe: BoxRecipe) -> bool:
        try:
            provider.image_of(recipe)
        except (InnerError, ProviderFailed) as error:
            say(f"{name}: {error}")
            return False
        say(f"{name}: built")
        return True

    recipes = [(task.name, recipe) for task in tasks for recipe in box_recipes(task) if recipe.build]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return all(list(pool.map(lambda one: build(*one), recipes)))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m inner.extras.boxes.images", description="Build the images of a folder of Harbor tasks."
    )
    parser.add_argument("provider", choices=BUILDERS)
    parser.add_argument("folder", type=Path, help="the folder of tasks")
    parser.add_argument("without", nargs="*", help="patterns of names of tasks that are left out")
    parser.add_argument("--size", type=int, help="the number of tasks (inner.data.task_size); default: all")
    parser.add_argument("--seed", type=int, default=0, help="the seed of their order (inner.data.task_seed)")
    asked = parser.parse_args()
    try:
        tasks = in_order(read_tasks(asked.folder, {"without": asked.without}), asked.seed)[: asked.size]
        built = build_all(open_provider(asked.provider), tasks, lambda line: print(f"{line}\n", end="", flush=True))
    except (InnerError, ProviderFailed) as error:
        raise SystemExit(str(error)) from error
    raise SystemExit(0 if built else 1)


if __name__ == "__main__":
    main()
