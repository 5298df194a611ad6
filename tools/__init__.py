"""Tools that make calls: the installer, the locks, the stubs, certificates."""
