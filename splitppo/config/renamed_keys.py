"""Keys that have moved since a run folder may have been written: only there the old names are still read."""

from typing import Any

# (section, old key) -> (section inside of it, new key)
_MOVED = {("actor", "loss_mode"): ("policy_loss", "loss_mode")}


def with_renamed_keys(tree: Any) -> Any:
    """A stored configuration under today's keys; a new tree where something has moved."""
    for (section, old), (inner, new) in _MOVED.items():
        stored = tree.get(section) if isinstance(tree, dict) else None
        if isinstance(stored, dict) and old in stored and inner not in stored:
            kept = {key: value for key, value in stored.items() if key != old}
            tree = {**tree, section: {**kept, inner: {new: stored[old]}}}
    return tree
