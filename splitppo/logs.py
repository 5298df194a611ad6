"""Values for arguments of `logging` calls, shared by controller and services."""

# The value of `extra` in a log call whose line goes to the log file only, because the user sees its content elsewhere.
FILE_ONLY = {"file_only": True}
