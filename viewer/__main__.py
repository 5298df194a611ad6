"""python -m viewer RUN...: show runs in a browser, finished ones and those that are being trained.

RUN is a run folder, or a folder that holds some. Nothing in it is changed. The server listens on this machine only;
from another one: ssh -L 8265:localhost:8265 HOST, and the same address there.

python -m viewer export RUN... --out FILE: write one file that shows them without a server.
"""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from splitppo.our_commands import missing_package

try:
    import uvicorn

    from splitppo.machine.standard_streams import open_standard_streams
    from splitppo.run_folder.files import Unreadable
    from viewer.app import make_app
    from viewer.connections import BACKLOG, Connection
    from viewer.one_file import export
    from viewer.run import Run, find_runs
except ModuleNotFoundError as missing:
    sys.stderr.write(f"error: {missing_package(missing.name)}\n")
    sys.exit(1)

PORT = 8265
_USER_ERROR = 2
_WAIT_S = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C; returns the exit status, 2 for a mistake of the user, which is told in one sentence."""
    open_standard_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["export"]:
        return export.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m viewer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder, or one that holds some")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="0: a free one (default %(default)s)")
    parser.add_argument("--wait", action="store_true", help="wait for a run that has not begun")
    parser.add_argument(
        "--allowed-host", metavar="NAME", action="append", default=[], help="a further name by which a browser may ask"
    )
    options = parser.parse_args(arguments)
    try:
        while options.wait and not _found_now(options.runs):
            time.sleep(_WAIT_S)
        runs = [Run(number, path) for number, path in enumerate(find_runs(options.runs))]
        listener = listen(options.host, options.port)
    except (Unreadable, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return _USER_ERROR
    token = secrets.token_urlsafe(24)
    app = make_app(
        runs,
        token=token,
        allowed_hosts=[options.host, *options.allowed_host],
        find=partial(_found_now, options.runs),
        is_ending=lambda: server.should_exit,
    )
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    sys.stdout.write(f"{len(runs)} run{'s' * (len(runs) != 1)}: http://{name}:{port}/#token={token}\n")
    sys.stdout.flush()
    logging.basicConfig(level=logging.WARNING)
    config = uvicorn.Config(
        app,
        http=Connection,
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
    return 0


def _found_now(paths: Sequence[Path]) -> Sequence[Path]:
    with suppress(Unreadable):
        return find_runs(paths)
    return ()


def listen(host: str, port: int) -> socket.socket:
    """Opens the socket of the server; port 0 takes a free one.

    Raises:
        OSError: the address is none of this machine alone, or the port is in use.
    """
    address = {"localhost": "127.0.0.1"}.get(host, host)
    try:
        is_loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise OSError(f"--host {host}: expected a loopback address, 127.0.0.1 or ::1; use ssh -L from elsewhere")
    try:
        return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "expected 0 to 65535"
        raise OSError(f"--port {port}: {reason}; --port 0 takes a free one") from error


if __name__ == "__main__":
    sys.exit(main())
