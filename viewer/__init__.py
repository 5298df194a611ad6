"""Shows runs in a browser: a process of its own that reads run folders, and writes nothing."""
