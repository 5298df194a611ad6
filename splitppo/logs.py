"""Arguments of log calls that controller and services share."""

# As `extra` of a log call: the line goes to the log file alone, because the user is told in another way.
FILE_ONLY = {"file_only": True}
