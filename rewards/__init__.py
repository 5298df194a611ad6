"""Rule-based scorers, the manager that dispatches to them, and the processes they run in."""
