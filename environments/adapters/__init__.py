"""Adapters: environments and tools of other projects, as this one's."""
