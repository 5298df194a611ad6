"""Keeps the parquet files of a run's steps, and images: adds, cuts back, removes the tokens of older steps."""

from pathlib import Path
from typing import Any

from splitppo.atomic_write import write_atomically
from splitppo.plain_file import read_plain
from splitppo.run_folder.images import FOLDER, is_name

_NUM_RECENT = 50
_MAX_THINNED = 4  # in one go, for a limit that was lowered
_IMAGE_SHARE = 1 / 4  # of the limit


class RolloutStore:
    """The files rollouts/{train,val}/{step}.parquet and rollouts/images/* of a run folder, and their size.

    `max_bytes` is the size over which older steps lose their lists of tokens: the odd steps first, then those that are
    divisible by 2 once, and so on. The first step, the last 50 and those with a validation keep them. Images take a
    quarter of it at most; later ones are not kept. They stay when the run goes back: their names are their content.
    """

    def __init__(self, folder: Path, max_bytes: float) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: dict[Path, int] | None = None
        self._thinned: set[int] = set()
        self._images: dict[str, int] | None = None  # bytes by name

    def put(self, split: str, step: int, content: Any) -> None:
        """Writes the file of a step or a validation, and makes room if the limit is exceeded."""
        sizes = self._known()
        self._write(self._folder / split / f"{step}.parquet", content)
        for _ in range(_MAX_THINNED):
            if sum(sizes.values()) + sum(self._known_images().values()) <= self._max_bytes or not self._thin():
                break

    def put_image(self, name: str, content: bytes | memoryview) -> bool:
        """Keeps an image if it is not there yet and has room; returns whether it is there."""
        images = self._known_images()
        if name not in images:
            if sum(images.values()) + len(content) > self._max_bytes * _IMAGE_SHARE:
                return False
            write_atomically(self._folder / FOLDER / name, bytes(content))
            images[name] = len(content)
        return True

    def cut_back(self, restored_step: int) -> None:
        """Removes the files of steps after the restored step."""
        for path in [path for path in self._known() if int(path.stem) > restored_step]:
            path.unlink(missing_ok=True)
        self._sizes = None
        self._thinned.clear()

    def _known(self) -> dict[Path, int]:
        """Returns the size of each file in bytes, by path; the folder is read when this is asked first.

        What is no file, such as a folder of that name, is not of this store.
        """
        if self._sizes is None:
            paths = (path for path in self._folder.glob("*/*.parquet") if path.stem.isdigit() and path.is_file())
            self._sizes = {path: path.stat().st_size for path in paths}
        return self._sizes

    def _known_images(self) -> dict[str, int]:
        """Returns the size of each image in bytes, by name; the folder is read when this is asked first."""
        if self._images is None:
            files = (path for path in (self._folder / FOLDER).glob("*") if is_name(path.name) and path.is_file())
            self._images = {path.name: path.stat().st_size for path in files}
        return self._images

    def _thin(self) -> bool:
        """Removes the tokens of one step; returns False if no step may lose any. A start finds some without them.

        The first step, the latest ones and those with a validation keep theirs. Of the others odd steps lose them
        first, then those that 2 divides but not 4, and so on: what is left is spread evenly over the run.
        """
        from splitppo.run_folder.rollout_writer import has_tokens, without_tokens

        sizes = self._known()
        validated = {int(path.stem) for path in sizes if path.parent.name != "train"}
        steps = sorted(int(path.stem) for path in sizes if path.parent.name == "train")
        older = [step for step in steps[1:-_NUM_RECENT] if step not in validated | self._thinned]
        for step in sorted(older, key=lambda step: (step & -step, step)):
            path = self._folder / "train" / f"{step}.parquet"
            self._thinned.add(step)
            if has_tokens(path):
                self._write(path, without_tokens(read_plain(path)))
                return True
        return False

    def _write(self, path: Path, content: Any) -> None:
        write_atomically(path, memoryview(content).tobytes())
        self._known()[path] = len(content)
