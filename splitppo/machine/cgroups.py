"""Finds and reads the files of the Linux cgroups of this process, versions 2 and 1."""

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yields the cgroup folders of this process, and of all cgroups above, for `controller` ("cpu", "memory").

    In a container some of these folders do not exist. `root` is the folder that holds /proc and /sys.
    """
    mounted = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = Path(path.strip("/"))
        for hierarchy in [mounted / controllers, mounted / controller] if controllers else [mounted]:
            yield from (hierarchy / name for name in dict.fromkeys((group, *group.parents)))


def text_of(file: Path) -> str:
    """Reads a text file and returns its content; "" if the file cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
